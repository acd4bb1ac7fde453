"""Every architecture that llama.cpp knows: off is stock, and what is sparse, or why nothing is.

`make test-archs` runs all of them, for both pins; quick are a few kinds. They are those of the
table in docs/architectures.md, which `make archs-table` writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import suite
from llama import Context, Model, SpecError, bindings, log_text
from run import N_CTX, N_PROMPT, N_STEP, OURS, PLAIN, SPARSE, read, step
from suite import Outcome

from pyorch.attention.cost import layer_costs
from pyorch.attention.placement import Cache
from pyorch.attention.spec import parse_spec
from pyorch.ggml import BY_NAME
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.native import source

# plain, windows, hybrid, latent, two with an index of their own, a learned bias, refused
QUICK = ("llama", "gemma3", "qwen35", "deepseek2", "minimax-m3", "qwen4exp", "t5", "grok")
PIN = source.read_pin().version
ROWS = {name: row[PIN] for name, row in suite.table().items() if PIN in row}
MADE = [name for name, said in ROWS.items() if not said.startswith("not made")]


@pytest.fixture
def make(generator: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes the model of an architecture."""
    return lambda name: suite.make(generator, name, tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in MADE]
)
def test_architecture(name: str, make: Callable[[str], Path]) -> None:
    model = make(name)
    stock, ours = suite.run(model, stock=True), suite.run(model)
    off_is_stock(stock, ours)
    reading_all_is_near_stock(stock, ours)
    sparse_or_says_why(stock, ours)
    a_selection_shows(stock, ours)
    a_restored_state_goes_on(stock, ours)
    a_document_goes_on(stock, ours)
    graphs_are_used_again(stock, ours)
    explain_agrees(model, ours)
    assert suite.cell(ours) == ROWS[name], "docs/architectures.md says otherwise: make archs-table"
    model.unlink()  # all of them would take a gigabyte


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; some models rule out tokens by logits of -inf."""
    return float(np.abs(np.subtract(a, b, where=a != b, out=np.zeros_like(a))).max())


def rounding(stock: Outcome, case: str = "one") -> float:
    """By how much the two settings of llama.cpp differ, -fa 1 and 0: they round differently."""
    return distance(stock.logits[case], stock.logits[f"{case}_no_flash"])


def error(stock: Outcome, logits: np.ndarray, case: str = "one") -> float:
    """How far logits are from the nearer of the two settings."""
    return min(distance(logits, stock.logits[x]) for x in (case, f"{case}_no_flash"))


def off_is_stock(stock: Outcome, ours: Outcome) -> None:
    for case in PLAIN:
        assert bool(ours.refused(case)) == bool(stock.refused(case)), case
        if not stock.refused(case):
            assert same_bits(ours.logits[case], stock.logits[case]), case


def reading_all_is_near_stock(stock: Outcome, ours: Outcome) -> None:
    """With k >= S, in a prompt and after it: as near as the two settings are to each other. A K of
    8 bits may cost no more than in llama.cpp, which rounds q to 8 bits beside it, as we do not."""
    for case in (c for c in OURS if c.startswith("all") and not ours.refused(c)):
        plain = OURS[case][0]
        exact, bound = plain, rounding(stock, plain)
        if plain == "k_q8_0":
            exact, bound = "one", bound + distance(stock.logits[plain], stock.logits["one"])
        assert error(stock, ours.logits[case], exact) <= bound, case


def sparse_or_says_why(stock: Outcome, ours: Outcome) -> None:
    for case in (c for c in OURS if c.startswith("sparse") and not ours.refused(c)):
        info = ours.info(case)
        n_sparse, n_layer = info["counters"]["calls_sparse"], info["layers_sparse"]
        assert info["active"] == (n_sparse > 0) == (n_layer > 0) == (info["shadow_bytes"] > 0), case
        assert info["active"] or info["reason"], case
        assert n_sparse == n_layer * info["counters"]["steps"], case
        assert all(x["reason"] for x in info["layers"] if x["state"] != "sparse"), case
        usable = np.isfinite(stock.logits[OURS[case][0]])
        assert np.array_equal(np.isfinite(ours.logits[case]), usable), case
    assert ours.n_sparse or ours.reasons


def a_selection_shows(stock: Outcome, ours: Outcome) -> None:
    """The weights are such that attention matters: reading few positions gives another output."""
    if ours.n_sparse:
        assert error(stock, ours.logits["few"]) > 2 * error(stock, ours.logits["all"])


def a_restored_state_goes_on(stock: Outcome, ours: Outcome) -> None:
    if ours.refused("sparse"):
        return
    a, b = ours.logits["sparse_restored"], ours.logits["sparse"]
    if same_bits(stock.logits["restored"], stock.logits["one"]):
        assert same_bits(a, b)
    else:  # it lies elsewhere in a cache of windows, and is summed in another order
        assert distance(a, b) <= 2 * rounding(stock)


NO_DOCUMENT = (
    "multi-head latent attention",
    "documents need a model with layers of attention",
    "attention with a learned bias",
    "the cache has no layers",
    "a layer has no K or no V",
)


def a_document_goes_on(stock: Outcome, ours: Outcome) -> None:
    """The logits after a document are those of a prompt that was read in the same batches."""
    if ours.refused("all"):
        return
    if why := ours.refused("all_document"):
        assert any(x in why for x in NO_DOCUMENT), why
    else:
        assert same_bits(ours.logits["all_document"], ours.logits["all"])


def graphs_are_used_again(stock: Outcome, ours: Outcome) -> None:
    for case, (plain, _) in OURS.items():
        if not ours.refused(case) and plain != "restored" and not case.endswith("document"):
            assert ours.facts[case]["reused"] == stock.facts[plain]["reused"], case


LATENT = "multi-head latent attention"


def explain_agrees(model: Path, ours: Outcome) -> None:
    """It predicts what the counters say, and gives the library's own reason."""
    geo, spec = geometry(read_gguf(model)), parse_spec(SPARSE)
    if not geo.kv_layers:  # recurrent: it says that there is nothing to be sparse about
        assert not ours.n_sparse
        return
    if geo.why_dense:
        assert ours.reasons == [geo.why_dense]
    is_latent = geo.why_dense == LATENT  # read exactly, by us
    for case in ("sparse", "sparse_q8_0"):
        if ours.refused(case):
            continue
        info = ours.info(case)
        kind = BY_NAME[PLAIN[OURS[case][0]].get("type_k", "f16")]
        kv = kind.bytes_per_element
        costs = [
            x
            for n_pos in range(N_PROMPT + 1, N_PROMPT + N_STEP + 1)
            for x in layer_costs(geo, spec, n_pos, kv, kv)
            if x.ours or is_latent
        ]
        n_sparse = 0 if is_latent else len(costs)
        assert info["layers_sparse"] * N_STEP == n_sparse, case
        counters = info["counters"]
        assert sum(x.bytes_dense for x in costs) == counters["bytes_dense"], case
        assert sum(x.split.topk * x.n_head_kv for x in costs) == counters["positions_read"], case
        # within the tail that is not sealed
        read = sum(x.bytes_read for x in costs)
        assert read == pytest.approx(counters["bytes_read"], rel=0.01), case
        assert info["shadow_bytes"] == Cache(geo, spec, (kind, kind), N_CTX).shadow_bytes(), case


# ---- the table ----


@pytest.mark.slow
def test_table_has_what_the_source_knows(generator: Path) -> None:
    names = suite.architectures(generator)
    assert {n for n in ROWS if n not in MADE} == {n for n, why in names.items() if why}
    assert ROWS.keys() == names.keys(), "make archs-table"


# ---- what some of them need ----


def test_a_rank_of_a_layer_that_attends_over_the_cache_of_another(
    make: Callable[[str], Path],
) -> None:
    """Gemma 3n: layers from 20 on have no K of their own. Those of even number have a window, so
    their ranks are not used, and neither are they refused."""
    with Model(make("gemma3n")) as model, Context(model, n_ctx=N_CTX) as ctx:

        def wrong_in(layer: int) -> str:
            ranks = ["8"] * model.n_layer
            ranks[layer] = "9999"
            return f"sparq,topk=16,min_ctx=0,rank_layers={':'.join(ranks)}"

        ctx.set_sparse(wrong_in(20))
        for settings in (ctx.set_sparse, lambda text: ctx.set_sequence(0, text)):
            with pytest.raises(SpecError, match="rank is above the head size of the model: 9999"):
                settings(wrong_in(21))
        read(ctx, N_PROMPT)
        assert np.isfinite(step(ctx, N_PROMPT)).all()
        assert ctx.info()["layers_sparse"] == model.n_layer // 2


@pytest.mark.skipif("grok" not in MADE, reason="no Grok in this pin")
def test_grok_is_refused_however_it_is_asked_for(
    make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp switches flash attention off for it, and we may not switch it on again."""
    why = "sparse attention lacks the scale of Grok's logits"
    with Model(make("grok")) as model:
        with Context(model) as ctx, pytest.raises(SpecError, match=why):
            ctx.set_sparse(SPARSE)
        monkeypatch.setenv("SPARQ_ATTN", SPARSE)
        with pytest.raises(RuntimeError):
            Context(model)
        assert f"SPARQ_ATTN: {why}" in log_text()
        monkeypatch.delenv("SPARQ_ATTN")
        default = bindings()._lib.llama_sparse_attn_default  # as --sparse-attn does
        default.argtypes = [ctypes.c_char_p]
        default(SPARSE.encode())
        try:
            with pytest.raises(RuntimeError):
                Context(model)
        finally:
            default(None)
        assert why in log_text()
        Context(model).close()
