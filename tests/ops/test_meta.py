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
from cases import Case
from tolerances import Errors, check_selection, score_scale

CASE = Case(n_kv=501, heads=(8, 2), mask="causal", batch=(3, 1), extra="sinks")
F32 = np.float32


def blocks(case: Case = CASE) -> list[cases.Block]:
    return list(cases.make(case).blocks())


def compare_scores(
    case: Case, implementation: Callable[[cases.Block, np.ndarray], np.ndarray]
) -> None:
    errors = Errors("score")
    for b in blocks(case):
        kept = oracle.select_components(b.q, case.rank_value)
        args = (b.q, b.k_score, b.bias, case.scale, case.softcap, kept)
        tau = oracle.temperature_factor(b.q, kept)
        errors.add(
            implementation(b, kept),
            oracle.logits_of(*args),
            oracle.logits_of(*args, dtype=F32),
            score_scale(
                b.q[:, kept], b.k_score[:, kept], b.bias, case.scale / np.where(tau == 0, 1, tau)
            ),
        )
    errors.check()


def f32_scores(
    b: cases.Block, kept: np.ndarray, scale=CASE.scale, softcap=0.0, **changed
) -> np.ndarray:
    now = {"q": b.q, "k": b.k_score, "bias": b.bias} | changed
    return oracle.logits_of(now["q"], now["k"], now["bias"], scale, softcap, kept, F32)


def at_least(tau: np.ndarray) -> np.ndarray:
    return np.maximum(tau, 0.01)[:, None]


def tau_of_the_group(b: cases.Block, kept: np.ndarray) -> np.ndarray:
    tau = oracle.temperature_factor(b.q, kept)
    of_all = np.concatenate([kept + h * b.q.shape[1] for h in range(len(b.q))])
    group = oracle.temperature_factor(b.q.reshape(1, -1), of_all)
    return (f32_scores(b, kept) * at_least(tau) / group).astype(F32)


def components_per_head(b: cases.Block, kept: np.ndarray) -> np.ndarray:
    heads = [slice(h, h + 1) for h in range(len(b.q))]
    own = [oracle.select_components(b.q[h], len(kept)) for h in heads]
    parts = [f32_scores(b, c, q=b.q[h], bias=b.bias[h]) for c, h in zip(own, heads, strict=True)]
    return np.concatenate(parts)


def with_cell(out: np.ndarray, cell: int, value: float) -> np.ndarray:
    out[:, cell] = value
    return out


WRONG_SCORES = {
    "without tau": lambda b, kept: (
        f32_scores(b, kept) * at_least(oracle.temperature_factor(b.q, kept)).astype(F32)
    ),
    "tau without root": lambda b, kept: (
        f32_scores(b, kept) / at_least(oracle.temperature_factor(b.q, kept)).astype(F32)
    ),
    "tau of the group": tau_of_the_group,
    "components per head": components_per_head,
    "one component less": lambda b, kept: f32_scores(b, kept[1:]),
    "q in f16": lambda b, kept: f32_scores(b, kept, q=cases.to_type(b.q, "f16")),
    "neighbours": lambda b, kept: f32_scores(b, kept, k=np.roll(b.k_score, 1, axis=0)),
    "a hidden position": lambda b, kept: with_cell(f32_scores(b, kept), -1, 0),
    "the last one missing": lambda b, kept: with_cell(
        f32_scores(b, kept), oracle.visible_positions(b.bias)[-1], -np.inf
    ),
}


def test_comparison_accepts_the_right_scores() -> None:
    compare_scores(CASE, f32_scores)


@pytest.mark.parametrize("break_it", WRONG_SCORES.values(), ids=WRONG_SCORES)
def test_comparison_trips_on_wrong_scores(break_it) -> None:
    with pytest.raises(AssertionError, match=r"score: error|-inf|NaN"), np.errstate(all="ignore"):
        compare_scores(CASE, break_it)


@pytest.mark.parametrize(
    ("extra", "mask", "wrong"), [("softcap", "causal", "softcap"), ("plain", "alibi", "bias")]
)
def test_comparison_trips_on_ignored_softcap_or_alibi(extra, mask, wrong) -> None:
    case = Case(n_kv=501, mask=mask, extra=extra)

    def ignores(b: cases.Block, kept: np.ndarray) -> np.ndarray:
        if wrong == "bias":
            return f32_scores(b, kept, bias=np.where(np.isneginf(b.bias), b.bias, 0))
        return f32_scores(b, kept)

    compare_scores(case, lambda b, kept: f32_scores(b, kept, softcap=case.softcap))
    with pytest.raises(AssertionError, match="score: error"):
        compare_scores(case, ignores)


# ---- selection: (cells, logits, k, forced) with one thing wrong ----

LOGITS = np.round(np.random.default_rng(1).standard_normal((1, 200)) * 2).astype(F32)  # heavy ties
GROUP_LOGITS = np.random.default_rng(2).standard_normal((4, 200)).astype(F32) * 3


def right_cells(logits: np.ndarray, k: int, forced: list[int]) -> np.ndarray:
    return oracle.select(logits, k, forced, 200)


def better_left_out(x: np.ndarray, k: int) -> np.ndarray:
    more = right_cells(x, k + 1, [3, 199])
    return np.setdiff1d(more, [c for c in more if c not in (3, 199)][0])


WRONG_SELECTIONS = {
    "k+1": lambda x, k: right_cells(x, k + 1, [3, 199]),
    "k-1": lambda x, k: right_cells(x, k - 1, [3, 199]),
    "forced left out": lambda x, k: right_cells(x, k, []),
    "descending": lambda x, k: right_cells(x, k, [3, 199])[::-1],
    "repeated": lambda x, k: np.sort(np.append(right_cells(x, k - 1, [3, 199]), 3)),
    "smallest": lambda x, k: right_cells(-x, k, [3, 199]),
    "shifted": lambda x, k: right_cells(np.roll(x, 1, axis=1), k, [3, 199]),
    "better one left out": better_left_out,
}


@pytest.mark.parametrize("logits", [LOGITS, GROUP_LOGITS], ids=["one head", "group"])
@pytest.mark.parametrize("break_it", WRONG_SELECTIONS.values(), ids=WRONG_SELECTIONS)
def test_comparison_trips_on_wrong_selection(logits, break_it) -> None:
    check_selection(right_cells(logits, 20, [3, 199]), logits, 20, [3, 199])
    with pytest.raises(AssertionError):
        check_selection(break_it(logits, 20), logits, 20, [3, 199])


def test_comparison_trips_on_other_ties() -> None:
    last_wins = np.sort(199 - right_cells(LOGITS[:, ::-1], 20, []))
    with pytest.raises(AssertionError, match="largest logits"):
        check_selection(last_wins, LOGITS, 20, [])


def test_comparison_trips_on_summed_logits() -> None:
    """The authors' older code ranks by summed logits: another set."""
    summed = right_cells(GROUP_LOGITS.sum(axis=0, keepdims=True), 20, [])
    with pytest.raises(AssertionError, match="left out"):
        check_selection(summed, GROUP_LOGITS, 20, [])


def test_comparison_trips_on_hidden_cell() -> None:
    logits = np.where(np.arange(200) == 5, -np.inf, LOGITS)
    with pytest.raises(AssertionError, match="hidden"):
        check_selection(np.arange(20), logits, 20, [])


# ---- attention ----


def compare_attend(implementation: Callable) -> None:
    """implementation(b, alpha) at f32 on SparQ with mean_v and sinks, over one fixed selection."""
    errors = Errors("attend")
    for b in blocks():
        cells, alpha = np.arange(0, 400, 7), np.full(len(b.q), 0.75)
        y = [
            oracle.interpolate(
                oracle.attend(b.q, b.k, b.v, b.bias, CASE.scale, 0, cells, b.sinks, t),
                alpha,
                oracle.v_mean(b.v, b.bias, t),
            )
            for t in (np.float64, F32)
        ]
        seen = oracle.visible_positions(b.bias)
        errors.add(
            implementation(b, cells, alpha.astype(F32)), *y, scale=float(np.abs(b.v[seen]).max())
        )
    errors.check()


def f32_attend(
    b, cells, alpha, scale=CASE.scale, softcap=0.0, sinks=True, mean=None, **changed
) -> np.ndarray:
    now = {"q": b.q, "k": b.k, "v": b.v} | changed
    y = oracle.attend(
        now["q"], now["k"], now["v"], b.bias, scale, softcap, cells, b.sinks if sinks else None, F32
    )
    return oracle.interpolate(y, alpha, oracle.v_mean(b.v, b.bias, F32) if mean is None else mean)


def test_comparison_accepts_the_right_attention() -> None:
    compare_attend(f32_attend)


WRONG_ATTENTION = {
    "one position less": lambda b, c, a: f32_attend(b, c[:-1], a),
    "neighbours": lambda b, c, a: f32_attend(b, c + 1, a),
    "alpha ignored": lambda b, c, a: f32_attend(b, c, a * 0 + 1),
    "alpha reversed": lambda b, c, a: f32_attend(b, c, 1 - a),
    "scale": lambda b, c, a: f32_attend(b, c, a, scale=1.01 * CASE.scale),
    "softcap": lambda b, c, a: f32_attend(b, c, a, softcap=50.0),
    "sinks ignored": lambda b, c, a: f32_attend(b, c, a, sinks=False),
    "mean of the selection": lambda b, c, a: f32_attend(b, c, a, mean=b.v[c].mean(axis=0)),
    "mean divided by another count": lambda b, c, a: f32_attend(
        b, c, a, mean=oracle.v_mean(b.v, b.bias, F32) * F32(501 / 500)
    ),
    "q in f16": lambda b, c, a: f32_attend(b, c, a, q=cases.to_type(b.q, "f16")),
    "result in f16": lambda b, c, a: cases.to_type(f32_attend(b, c, a), "f16"),
    "components shifted": lambda b, c, a: f32_attend(b, c, a, v=np.roll(b.v, 1, axis=1)),
    "heads swapped": lambda b, c, a: f32_attend(b, c, a)[::-1],
}


@pytest.mark.parametrize("break_it", WRONG_ATTENTION.values(), ids=WRONG_ATTENTION)
def test_comparison_trips_on_wrong_attention(break_it) -> None:
    with pytest.raises(AssertionError, match=r"attend: error|NaN"), np.errstate(all="ignore"):
        compare_attend(break_it)


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
