"""The comparisons can fail: each known way to be wrong must trip them. No build is needed.

The oracle at f32 stands for an implementation; `break_it` says what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import cases
import numpy as np
import oracle
import pytest
from cases import Block, Case
from tolerances import Errors, check_selection, score_scale

CASE = Case(n_kv=501, heads=(8, 2), mask="causal", batch=(3, 1), extra="sinks")
F32 = np.float32


def compare_scores(implementation: Callable[..., np.ndarray]) -> None:
    errors = Errors("score")
    for b in cases.make(CASE).blocks():
        kept = oracle.select_components(b.q, CASE.rank_value)
        tau = oracle.temperature_factor(b.q, kept)
        factor = CASE.scale / np.where(tau == 0, 1, tau)
        size = score_scale(b.q[:, kept], b.k_score[:, kept], b.bias, factor)
        args = (b.q, b.k_score, b.bias, CASE.scale, CASE.softcap, kept)
        errors.compare(implementation(b, kept), size, oracle.logits_of, *args)
    errors.check()


def f32_scores(b: Block, kept: np.ndarray, **changed) -> np.ndarray:
    now = {"q": b.q, "k": b.k_score, "bias": b.bias} | changed
    return oracle.logits_of(*now.values(), CASE.scale, 0.0, kept, F32)


def tau_of(b: Block, kept: np.ndarray) -> np.ndarray:
    return np.maximum(oracle.temperature_factor(b.q, kept), 0.01)[:, None].astype(F32)


def with_cell(out: np.ndarray, cell: int, value: float) -> np.ndarray:
    out[:, cell] = value
    return out


WRONG_SCORES = {
    "without tau": lambda b, kept: f32_scores(b, kept) * tau_of(b, kept),
    "tau without root": lambda b, kept: f32_scores(b, kept) / tau_of(b, kept),
    "one component less": lambda b, kept: f32_scores(b, kept[1:]),
    "q in f16": lambda b, kept: f32_scores(b, kept, q=cases.to_type(b.q, "f16")),
    "neighbours": lambda b, kept: f32_scores(b, kept, k=np.roll(b.k_score, 1, axis=0)),
    "a hidden position": lambda b, kept: with_cell(f32_scores(b, kept), -1, 0),
    "one missing": lambda b, kept: with_cell(f32_scores(b, kept), 3, -np.inf),
}


@pytest.mark.parametrize("break_it", WRONG_SCORES.values(), ids=WRONG_SCORES)
def test_comparison_trips_on_wrong_scores(break_it) -> None:
    compare_scores(f32_scores)
    with pytest.raises(AssertionError, match=r"score: error|-inf|NaN"), np.errstate(all="ignore"):
        compare_scores(break_it)


LOGITS = np.round(np.random.default_rng(1).standard_normal((1, 200)) * 2).astype(F32)  # heavy ties
GROUP_LOGITS = np.random.default_rng(2).standard_normal((4, 200)).astype(F32) * 3
FORCED = [3, 199]


def right(logits: np.ndarray, k: int, forced: list[int] = FORCED) -> np.ndarray:
    return oracle.select(logits, k, forced, 200)


def better_left_out(x: np.ndarray) -> np.ndarray:
    more = right(x, 21)
    return np.setdiff1d(more, np.setdiff1d(more, FORCED)[0])


WRONG_SELECTIONS = {
    "k+1": lambda x: right(x, 21),
    "k-1": lambda x: right(x, 19),
    "forced left out": lambda x: right(x, 20, []),
    "descending": lambda x: right(x, 20)[::-1],
    "repeated": lambda x: np.sort(np.append(right(x, 19), 3)),
    "smallest": lambda x: right(-x, 20),
    "shifted": lambda x: right(np.roll(x, 1, axis=1), 20),
    "better one left out": better_left_out,
    # the authors' older code ranks by summed logits; the last of equal ones
    "others": lambda x: (
        right(x.sum(axis=0)[None], 20) if len(x) > 1 else 199 - right(x[:, ::-1], 20)
    ),
    "a hidden cell": lambda x: right(np.where(np.arange(200) == 5, 9, x), 20),
}


@pytest.mark.parametrize("logits", [LOGITS, GROUP_LOGITS], ids=["one head", "group"])
@pytest.mark.parametrize("break_it", WRONG_SELECTIONS.values(), ids=WRONG_SELECTIONS)
def test_comparison_trips_on_wrong_selection(logits, break_it) -> None:
    logits = np.where(np.arange(200) == 5, F32(-np.inf), logits)
    check_selection(right(logits, 20), logits, 20, FORCED)
    with pytest.raises(AssertionError):
        check_selection(break_it(logits), logits, 20, FORCED)


CELLS, ALPHA = np.arange(0, 400, 7), F32(0.75)


def attention(b: Block, dtype, cells=CELLS, alpha=ALPHA, mean=None, sinks=True, **changed):
    """SparQ with mean_v and sinks, over one fixed selection."""
    now = {
        "q": b.q,
        "k": b.k,
        "v": b.v,
        "bias": b.bias,
        "scale": CASE.scale,
        "softcap": 0,
    } | changed
    y = oracle.attend(*now.values(), cells, b.sinks if sinks else None, dtype)
    mean = oracle.v_mean(b.v, b.bias, dtype) if mean is None else mean
    return oracle.interpolate(y, np.full(len(b.q), alpha), mean)


WRONG_ATTENTION = {
    "one position less": lambda b: {"cells": CELLS[:-1]},
    "neighbours": lambda b: {"cells": CELLS + 1},
    "alpha ignored": lambda b: {"alpha": F32(1)},
    "alpha reversed": lambda b: {"alpha": 1 - ALPHA},
    "scale": lambda b: {"scale": 1.01 * CASE.scale},
    "softcap": lambda b: {"softcap": 50.0},
    "sinks ignored": lambda b: {"sinks": False},
    "mean of the selection": lambda b: {"mean": b.v[CELLS].mean(axis=0)},
    "another count": lambda b: {"mean": oracle.v_mean(b.v, b.bias, F32) * F32(501 / 500)},
    "q in f16": lambda b: {"q": cases.to_type(b.q, "f16")},
    "components shifted": lambda b: {"v": np.roll(b.v, 1, axis=1)},
}


@pytest.mark.parametrize("break_it", WRONG_ATTENTION.values(), ids=WRONG_ATTENTION)
def test_comparison_trips_on_wrong_attention(break_it) -> None:
    right, wrong = Errors("attend"), Errors("attend")
    for b in cases.make(CASE).blocks():
        right.compare(attention(b, F32), b.size, attention, b)
        wrong.compare(attention(b, F32, **break_it(b)), b.size, attention, b)
    right.check()
    with pytest.raises(AssertionError, match="attend: error"):
        wrong.check()


def test_pairwise_covers_every_pair() -> None:
    rows = cases.pairwise(cases.FACTORS)
    names = list(cases.FACTORS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            pairs = {(r[a], r[b]) for r in rows}
            assert len(pairs) == len(cases.FACTORS[a]) * len(cases.FACTORS[b]), f"{a} x {b}"


def test_deviations_name_tests_that_exist() -> None:
    """docs/numerics.md and the DEVIATION comments of ggml_ops: same tests, and all defined."""
    root = Path(__file__).parents[2]
    page = set(re.findall(r"test_\w+", (root / "docs" / "numerics.md").read_text()))
    defined = {
        n for f in root.glob("tests/**/*.py") for n in re.findall(r"def (test_\w+)", f.read_text())
    }
    code = {
        n
        for f in root.glob("ggml_ops/**/*.[ch]*")
        for line in f.read_text().splitlines()
        if "DEVIATION" in line
        for n in re.findall(r"test_\w+", line) or [f"no test in {f.name}: {line}"]
    }
    assert code <= page, "DEVIATION comments that docs/numerics.md does not have"
    assert page <= defined
