"""Settings of single sequences: each token of a batch has what its settings give it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny as tiny_models
from llama import Context, Model, SpecError, tokens

N_LAYER, N_PROMPT, N_SEQ, N_CTX, N_STEP = 3, 330, 4, 512, 3
# in a unified cache blocks of few bits hold other sequences too, and round otherwise
COMMON = "sparq,rank=8,topk=40,min_ctx=0,prompt=f32"
OWN = {
    "sparq": (COMMON, ["rank=3,topk=70", "rank=16,topk=24,sinks=2,local=3", "ratio=1/2,min_k=1"]),
    "exact": (COMMON, ["rank=3,topk=70", "dense", "min_ctx=4096"]),
    "off": (COMMON, ["off", "rank=4,topk=70,local=0", "off"]),
    "f16": (COMMON + ",shadow=f16,mean_v=off", ["rank=2,topk=300", "rank=9,topk=41", "dense"]),
    "layers": (COMMON + ",top_p=0.9,cap=2", ["rank_layers=2:4:8,k_layers=20:dense:50%"] * 2),
    "topk": ("topk,k=40,min_ctx=0,prompt=f32", ["k=70", "k=24,sinks=0,local=1", "dense"]),
    "huge": (COMMON, ["sinks=1000000000", "local=1000000000", "ratio=1/8,sinks=200,min_k=1"]),
}
MODES = [pytest.param(True, id="unified"), pytest.param(False, id="split")]


def context(model: Model, spec: str, unified: bool) -> Context:
    ctx = Context(model, n_ctx=N_CTX * N_SEQ, n_seq=N_SEQ, unified=unified)
    ctx.set_sparse(spec)
    return ctx


def replies(ctx: Context) -> np.ndarray:
    """Logits (step, sequence, n_vocab) of steps that decode a token of every sequence."""
    for seq in range(N_SEQ):
        assert ctx.decode(tokens(seq, N_PROMPT)) == 0
    ctx.reset_counters()
    out = []
    for step in range(N_STEP):
        batch = [t for seq in range(N_SEQ) for t in tokens(seq, 1, N_PROMPT + step)]
        assert ctx.decode(batch) == 0
        out.append([ctx.logits(i) for i in range(N_SEQ)])
    return np.array(out)


def whole(common: str, own: str) -> str:
    """`own` as the settings of a context, with what it takes from `common`."""
    method, *rest = common.split(",")
    keys = dict(item.split("=") for item in rest)
    if own in ("dense", "off"):
        return f"{own},prompt=f32" if own == "dense" else own
    shared = ("min_ctx", "shadow", "mean_v", "top_p", "cap", "prompt")
    taken = [f"{k}={v}" for k, v in keys.items() if k in shared and f"{k}=" not in own]
    return ",".join([method, own, *taken])


def settings(common: str, own: Sequence[str]) -> list[str]:
    """Of each sequence; the first has the common ones."""
    return [common, *(whole(common, x) for x in own), *[common] * (N_SEQ - 1 - len(own))]


@pytest.mark.parametrize("unified", MODES)
@pytest.mark.parametrize(("common", "own"), OWN.values(), ids=list(OWN))
def test_each_sequence_has_its_own(
    common: str, own: list[str], unified: bool, model: Model
) -> None:
    """Where its attention is off while that of others is not, it is exact, by our op."""
    method = common.split(",")[0]
    with context(model, common, unified) as ctx:
        for seq, spec in enumerate(own, 1):
            ctx.set_sequence(seq, spec if spec in ("dense", "off") else f"{method},{spec}")
        got = replies(ctx)
        counters, each = ctx.info()["counters"], [ctx.info(seq) for seq in range(N_SEQ)]
    differ = []
    for seq, spec in enumerate(settings(common, own)):
        with context(model, "dense,prompt=f32" if spec == "off" else spec, unified) as ctx:
            want = replies(ctx)
        # an off sequence's prompt is llama.cpp's own; sums are cut by the largest k of a batch
        allowed = 1e-3 if spec == "off" else 1e-5
        assert np.abs(got[:, seq] - want[:, seq]).max() < allowed * want.std(), (seq, spec)
        with context(model, common, unified) as ctx:
            differ.append(np.abs(got[:, seq] - replies(ctx)[:, seq]).max() > 1e-2 * want.std())
    assert differ == [spec != common for spec in settings(common, own)]

    assert [x["steps"] for x in each] == [N_STEP] * N_SEQ
    sums = {name: sum(x[name] for x in each) for name in each[0] if name != "spec"}
    assert sums["calls_sparse"] == counters["calls_sparse"] > 0
    assert sums["calls_dense"] == counters["calls_dense_op"]
    assert sums["positions_visible"] == counters["positions_visible"]
    assert sums["bytes_dense"] == counters["bytes_dense"]
    if "top_p" not in common:
        assert sums["positions_read"] == counters["positions_read"]
        off_by = abs(sums["bytes_read"] / counters["bytes_read"] - 1)
        assert off_by < (0.5 if unified else 0.3), "cells of others lie between"


@pytest.mark.parametrize("unified", MODES)
@pytest.mark.parametrize("own", [None, "sparq,rank=3,topk=70"], ids=["common", "own"])
def test_min_ctx_goes_by_each_sequence(own: str | None, unified: bool, model: Model) -> None:
    """A short one stays exact beside a long one: it replies as if it were alone. With f16, because
    codes in a unified cache share a scale with other sequences."""
    lengths, common = (200, 400), COMMON + ",shadow=f16"
    with context(model, common.replace("min_ctx=0", "min_ctx=256"), unified) as ctx:
        ctx.set_sequence(1, own)
        for seq, n in enumerate(lengths):
            assert ctx.decode(tokens(seq, n)) == 0
        assert ctx.decode([t for seq, n in enumerate(lengths) for t in tokens(seq, 1, n)]) == 0
        got, each = [ctx.logits(i) for i in range(2)], [ctx.info(seq) for seq in range(2)]
    assert [(x["calls_dense"], x["calls_sparse"]) for x in each] == [(N_LAYER, 0), (0, N_LAYER)]
    for seq, spec in enumerate(
        (whole(common, "dense"), whole(common, own.partition(",")[2]) if own else common)
    ):
        with context(model, spec, unified) as ctx:
            assert ctx.decode(tokens(seq, lengths[seq])) == 0
            assert ctx.decode(tokens(seq, 1, lengths[seq])) == 0
            want = ctx.logits()
        assert np.abs(got[seq] - want).max() < 1e-4 * want.std(), (seq, spec)


@pytest.mark.parametrize("unified", MODES)
@pytest.mark.parametrize("arch", ["gemma2", "gpt-oss", "lfm2"])
def test_with_other_kinds_of_cache(arch: str, unified: bool, tmp_path: Path) -> None:
    """Sliding windows, sinks, layers of convolution: each sequence replies as with its settings for
    all, in the layers that are ours."""
    own = ["rank=3,topk=70", "dense", "rank=16,topk=24,sinks=2,local=3"]
    with Model(tiny_models.write(tmp_path / "m.gguf", arch, n_layer=4)) as model:
        with context(model, COMMON, unified) as ctx:
            common = replies(ctx)
        with context(model, COMMON, unified) as ctx:
            for seq, spec in enumerate(own, 1):
                ctx.set_sequence(seq, spec if spec == "dense" else f"sparq,{spec}")
            got, each = replies(ctx), [ctx.info(seq) for seq in range(N_SEQ)]
        for seq, spec in enumerate(settings(COMMON, own)):
            with context(model, spec, unified) as ctx:
                want = replies(ctx)[:, seq]
            assert np.abs(got[:, seq] - want).max() < 1e-5 * want.std(), (seq, spec)
            differs = np.abs(got[:, seq] - common[:, seq]).max() > 1e-3 * want.std()
            assert differs == (seq > 0), (seq, spec)
        assert [x["calls_sparse"] > 0 for x in each] == [True, True, False, True]
        assert [x["calls_dense"] > 0 for x in each] == [False, False, True, False]


@pytest.mark.parametrize("unified", MODES)
def test_off_for_all_is_stock(unified: bool, model: Model) -> None:
    """Prompts and replies have the bits of llama.cpp's own attention, and ours goes on after it."""
    with context(model, "off", unified) as ctx:
        stock = replies(ctx)
    with context(model, COMMON, unified) as ctx:
        want = replies(ctx)
    with context(model, COMMON, unified) as ctx:
        for seq in range(N_SEQ):
            ctx.set_sequence(seq, "off")
        assert np.array_equal(replies(ctx), stock)
        counters = ctx.info()["counters"]
        assert counters["calls_sparse"] == counters["calls_dense_op"] == 0
        assert set(counters["stock_reasons"]) == {"off"}
        for seq in range(N_SEQ):
            ctx.set_sequence(seq, None)
            ctx.seq_rm(seq)
        assert np.array_equal(replies(ctx), want)
        assert ctx.check_shadow() == 0


def test_settings_change_between_tokens(model: Model) -> None:
    """And what was read is counted from then on."""
    with context(model, COMMON, True) as ctx:
        assert ctx.decode(tokens(0, N_PROMPT)) == 0
        reads = []
        for step, spec in enumerate(
            [None, "sparq,rank=2,topk=20", "dense", "sparq,topk=200", None]
        ):
            ctx.set_sequence(0, spec)
            assert ctx.info(0)["steps"] == 0
            assert ctx.decode(tokens(0, 1, N_PROMPT + step)) == 0
            reads.append(ctx.info(0)["positions_read"])
        heads = reads[0] // 40
        n = [r // heads for r in reads]
        assert n == [40, 20, N_PROMPT + 3, 200, 40]
        for spec in (COMMON, "dense"):  # ends the settings of its sequences
            ctx.set_sequence(0, "sparq,topk=200" if spec == COMMON else "off")
            ctx.set_sparse(spec)
            assert ctx.info(0)["spec"] == ctx.info()["spec"]


REFUSED = {
    "topk,k=20": "topk",
    "sparq,shadow=q8": "shadow",
    "sparq,mean_v=off": "mean_v",
    "sparq,top_p=0.5": "top_p",
    "dense,prompt=fast": "prompt",
    "sparq,rank=4000": "rank",
    "sparq,k_layers=1:2": "k_layers",
    "spark": "spark",
}


def test_what_is_refused_changes_nothing(model: Model) -> None:
    with context(model, COMMON, True) as ctx:
        ctx.set_sequence(1, "sparq,topk=50")
        before = ctx.info(1)
        for spec, fault in REFUSED.items():
            with pytest.raises(SpecError, match=f"{fault}.*\n."):  # and a hint
                ctx.set_sequence(1, spec)
            assert ctx.info(1) == before
        with pytest.raises(SpecError, match="no sequence 4"):
            ctx.set_sequence(N_SEQ, None)


def test_a_sequence_may_repeat_what_all_have(model: Model) -> None:
    """Also a setting that means something only beside one that the text leaves to the context."""
    all_of = "sparq,rank=8,topk=40,min_ctx=0,top_p=0.9,cap=4,prompt=f32"
    with context(model, all_of, True) as ctx:
        for text in ("cap=4", "prompt=f32", "top_p=0.9", "cap=4,prompt=f32"):
            ctx.set_sequence(1, f"sparq,{text}")
            assert "top_p=0.9,cap=4" in ctx.info(1)["spec"]
        ctx.set_sequence(1, "sparq,ratio=1")  # which selects nothing
        assert ctx.info(1)["spec"] == "sparq,ratio=1,min_ctx=0,prompt=f32"
        ctx.set_sequence(1, "dense,prompt=f32")
        with pytest.raises(SpecError, match="^cap is the same for all"):
            ctx.set_sequence(1, "sparq,cap=2")


def test_a_context_without_sparse_attention(model: Model) -> None:
    with Context(model, n_seq=2) as ctx:
        ctx.set_sequence(0, "off")
        ctx.set_sequence(0, None)
        with pytest.raises(SpecError, match="settings of all: off"):
            ctx.set_sequence(0, "sparq,ratio=1/8")
        assert ctx.info(1) == {"spec": "off"}


@pytest.mark.parametrize("own", ["sparq,ratio=1", "sparq,ratio=1/4", "dense", "off"])
def test_what_a_sequence_says_can_be_set_again(model: Model, own: str) -> None:
    with context(model, "sparq,top_p=0.9,cap=2,min_ctx=0", True) as ctx:
        ctx.set_sequence(1, own)
        said = ctx.info(1)["spec"]
        ctx.set_sequence(2, said)
        assert ctx.info(2)["spec"] == said
        ctx.set_sparse("off")
        ctx.set_sparse(said)
