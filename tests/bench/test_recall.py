"""The recall sweep: it reads what llama.cpp reads, and models what the library does with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import capture
import recall

from pyorch import engine, paths
from pyorch.attention.bytes import SPREAD_RUNS, layer_costs
from pyorch.attention.spec import parse_spec
from pyorch.bench import records
from pyorch.errors import SparqError
from pyorch.models.geometry import Geometry
from pyorch.native.tensor import Tensor

D = 64
DEMO = paths.data("models") / "demo"


@pytest.fixture(scope="module")
def session() -> Iterator[engine.Session]:
    with engine.load(DEMO / "demo.gguf", n_ctx=256, n_threads=1) as s:
        yield s


@pytest.fixture(scope="module")
def heads(session: engine.Session) -> list[capture.Heads]:
    tokens = engine.tokenize(session, (DEMO / "document.txt").read_text())[:1024]
    taken = capture.Capture(session.model, 1024, 1)
    try:
        return taken.layers(tokens)
    finally:
        taken.session.close()


def test_captured_q_k_v_give_the_result_of_llama_cpp(
    session: engine.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, plain = [], capture._heads

    def keep(t: Tensor) -> capture.Heads:
        results.append(capture._read(t)[0])  # (n_tok, n_head, d)
        return plain(t)

    monkeypatch.setattr(capture, "_heads", keep)
    tokens = engine.tokenize(session, (DEMO / "document.txt").read_text())[:512]
    taken = capture.Capture(session.model, 512, 1)
    layers = taken.layers(tokens)
    taken.session.close()
    assert len(layers) == session.geometry.n_layer
    hidden = np.arange(512) > np.arange(512 - 64, 512)[:, None]
    for layer, result in zip(layers, results, strict=True):
        logits = np.einsum("thgd,hsd->thgs", layer.q, layer.k) * layer.scale
        weights = recall.softmax(np.where(hidden[:, None, None], -np.inf, logits))
        y = np.einsum("thgs,hsd->thgd", weights, layer.v).reshape(result.shape)
        assert np.abs(y - result).max() < 0.01 * np.abs(result).max()  # f16 products


@pytest.mark.parametrize(("kind", "top"), [("q8", 255), ("q4", 15)])
def test_codes_are_per_component_and_run_up_to_what_is_sealed(kind: str, top: int) -> None:
    k = np.random.default_rng(0).standard_normal((700, 3)).astype(np.float32)
    k[600:] *= 100  # not sealed: they must not widen the range of their run
    shadow = recall.shadow_of(k, 600, kind)
    assert np.array_equal(shadow.values[600:], k[600:]) and len(shadow.scales) == 2
    for i, (a, b) in enumerate(((0, 512), (512, 600))):
        scale = np.ptp(k[a:b], axis=0) / top
        assert np.allclose(shadow.scales[i], scale, rtol=1e-5)
        assert (np.abs(shadow.values[a:b] - k[a:b]) <= 0.501 * scale).all()


def test_all_components_are_the_exact_scores() -> None:
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal(s).astype(np.float32) for s in ((3, 2, D), (100, D)))
    k = k.astype(np.float16).astype(np.float32)
    shadow = recall.shadow_of(k, 64, "f16")
    assert np.allclose(recall.approximate(q, shadow, D, 0.125), (q @ k.T) * 0.125, atol=1e-5)
    part = recall.approximate(q, shadow, 8, 0.125)
    chosen = np.argsort(-np.abs(q).sum(1), axis=1)[0, :8]
    share = np.abs(q[0][:, chosen]).sum(1) / np.abs(q[0]).sum(1)
    want = q[0][:, chosen] @ k[:, chosen].T * 0.125 / np.sqrt(share)[:, None]
    assert np.allclose(part[0], want, atol=1e-5)


@pytest.mark.parametrize("kind", ["q8", "q4"])
def test_rounding_of_coefficients_costs_less_than_the_codes(kind: str) -> None:
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal(s).astype(np.float32) for s in ((3, 2, D), (700, D)))
    shadow = recall.shadow_of(k, 640, kind)
    exact, codes = (q @ x.T * 0.125 for x in (k, shadow.values))
    got = recall.approximate(q, shadow, D, 0.125)
    assert np.allclose(got[..., 640:], exact[..., 640:], atol=1e-5)
    rounding, coding = got - codes, codes - exact
    assert np.abs(rounding).max() > 0 and rounding.std() < 0.5 * coding.std()


def test_selection_holds_sinks_and_window_and_nothing_hidden() -> None:
    rng = np.random.default_rng(2)
    n_visible = np.array([90, 100])
    score = rng.random((2, 100))
    score[0, 90:] = 0  # hidden
    for row, n, s in zip(recall.select(score, n_visible, 20), n_visible, score, strict=True):
        assert set(range(4)) | set(range(n - 5, n)) <= set(row)
        assert len(set(row)) == 20 and max(row) < n
        others = sorted(set(range(4, n - 5)), key=lambda i: -s[i])
        assert set(row) - set(range(4)) - set(range(n - 5, n)) == set(others[:11])


def test_budget_is_that_of_the_library() -> None:
    geo = Geometry(
        arch="llama", name="", n_layer=1, n_embd=0, n_head=(4,), n_head_kv=(2,), head_dim_k=D,
        head_dim_v=D, n_ctx_train=0, is_mla=False, n_params=0, weight_bytes=0,
        weight_bytes_per_token=0,
    )  # fmt: skip
    for c in recall.configs(2048, D, recall.RATIOS):
        if c["shadow"] in recall.KINDS:
            line = f"sparq,rank={c['rank']},topk={c['topk']},shadow={c['shadow']},min_ctx=0"
            spec = replace(parse_spec(line), mean_v="off")
            cost = layer_costs(geo, spec, 2048)[0]
            # the ranges that choose the components come on top: a constant, and none for f16
            ranges = 0 if c["shadow"] == "f16" else 2 * SPREAD_RUNS * 8 * D
            share = (cost.bytes_read - ranges) / cost.bytes_dense
            assert c["ratio"] - 1 / 2048 < share <= c["ratio"]


def test_default_rule_is_that_of_the_library() -> None:
    from pyorch.attention.bytes import split

    for kind in recall.KINDS:
        for ratio in recall.RATIOS:
            spec = parse_spec(f"sparq,ratio={ratio},shadow={kind},min_k=1,min_ctx=0")
            s = split(spec, 4096, D)
            rank = recall.rule_rank(ratio, D, kind, recall.RULES[recall.RULE])
            assert s.rank == max(round(rank), 1)
            topk = recall.rows_for(ratio, 4096, D, recall.scan_bytes(4096, s.rank, kind))
            assert abs(s.topk - topk) <= 1


def test_more_bytes_and_better_scores_catch_more(heads: list[capture.Heads]) -> None:
    ratios = (1 / 4, 1 / 8)
    cases = recall.configs(1024, D, ratios)
    mass = np.stack([recall.measure(h, 4, cases) for h in heads]).mean((0, 2))[:, 0]
    by = {(c["shadow"], c["rank"], c["ratio"]): m for c, m in zip(cases, mass, strict=True)}
    for (kind, rank, ratio), m in by.items():
        assert 0 < m <= by["oracle", D, ratio] + 1e-6
        if ratio == 1 / 8:
            assert m < by[kind, rank, 1 / 4]
    assert by["q4", 16, 1 / 8] > by["q8", 8, 1 / 8] > by["f16", 4, 1 / 8]  # equal bytes scanned


def test_all_positions_leave_no_error(heads: list[capture.Heads]) -> None:
    everything = [{"shadow": "oracle", "rank": D, "ratio": 1.0, "topk": 961, "scan": 0.0}]
    for layer in heads:
        got = recall.measure(layer, 1, everything)[:, 0]  # the first of the last 64: sees 961
        assert np.allclose(got[:, 0], 1, atol=1e-5)
        assert (got[:, 1:3] < 1e-9).all()
        assert np.array_equal(got[:, 3], got[:, 4])


def test_run_writes_records_and_goes_on_from_them(tmp_path: Path) -> None:
    file, steps = tmp_path / "recall.jsonl", []

    def again() -> list[records.Record]:
        steps.clear()
        return recall.run(
            DEMO / "demo.gguf",
            [DEMO / "document.txt"],
            file,
            lambda done, total: steps.append((done, total)),
            positions=[256],
            n_context=2,
            n_query=2,
            ratios=(1 / 4,),
        )

    first = again()
    assert [r["case"]["task"] for r in first] == ["prose", "recite"] and steps[-1] == (1024, 1024)
    assert again() == first and not steps
    table = recall.markdown(first)
    assert table.count("\n| 256 |") == 2 and "1/4" in table
    recall.write_csv(first, tmp_path / "recall.csv")
    assert (tmp_path / "recall.csv").read_text().startswith("n_pos,task,ratio,shadow,rank")
    with pytest.raises(SparqError, match="multiple of 64"):
        recall.run(DEMO / "demo.gguf", [], file, print, positions=[1000], n_context=2)
