"""The scalar reference against the oracle. Needs a C compiler only."""

from __future__ import annotations

import cases
import numpy as np
import oracle
import pytest
from cases import Case
from test_steps import NOT_FINITE
from tolerances import Errors, check_selection, score_scale

# the reference is O(n*k): the large sizes are for the kernels
SMALL = [c for c in cases.quick_cases() if c.n_kv <= 2042]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_ref_equals_oracle(case: Case, ref) -> None:
    """Each step apart, on the same inputs; and the whole."""
    score, rests, attend = Errors("ref"), Errors("ref"), Errors("ref")
    for b in cases.make(case).blocks():
        kept = oracle.select_components(b.q_score, case.rank_value)
        assert np.array_equal(ref.components(b.q_score, case.rank_value), kept)

        for components in (kept, np.arange(case.d)):
            args = (b.q_score, b.k_score, b.bias, case.scale, case.softcap, components)
            want = oracle.logits_of(*args)
            got = ref.score(b.q_score, b.k_score, b.bias, components, case.scale, case.softcap)
            size = score_scale(
                b.q_score[:, components],
                b.k_score[:, components],
                b.bias,
                np.full(len(b.q_score), case.scale)
                / np.maximum(oracle.temperature_factor(b.q_score, components), 1e-3),
            )
            score.add(got, want, want, size)

        logits = got.astype(np.float64)  # selection is compared on the very same numbers
        sel, rest = ref.select(got, b.topk, b.forced, case.topk_value)
        check_selection(sel, logits, b.topk, b.forced)
        want = oracle.rest(logits, sel)
        rests.add(rest, want, want, 1.0)

        for selected, left in ((sel, rest), (sel, None), (None, None)):
            args = (b.q, b.k, b.v, b.bias, case.scale, case.softcap, selected)
            y = oracle.attend(*args, b.sinks, rest=left)
            got_y = ref.attend(*args, left, b.sinks)
            seen = oracle.visible_positions(b.bias)
            attend.add(got_y, y, y, float(np.abs(b.v[seen]).max(initial=0)))
    for errors in (score, rests, attend):
        errors.check()


def test_ref_seal_clamps_to_f16(ref) -> None:
    k = np.array([[1e9, -np.inf], [3.0, np.inf]], np.float32)
    k_t, _ = ref.seal(k, np.ones((2, 2), np.float32), 2)
    assert k_t.tolist() == [[65504.0, 3.0], [-65504.0, 65504.0]]


@pytest.mark.parametrize("kind", NOT_FINITE)
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_ref_selects_of_what_is_not_finite(kind: str, top_p: float, ref) -> None:
    logits = np.random.default_rng(4).standard_normal((4, 700)).astype(np.float32)
    for h, cell, value in NOT_FINITE[kind]:
        logits[h, cell] = value
    for k in (3, 8, 700):
        sel, rest = ref.select(logits, k, [600, 40], 700, top_p=top_p)
        want = oracle.select(logits.astype(np.float64), k, [600, 40], 700, top_p)
        assert sel.tolist() == want.tolist()
        assert np.allclose(rest, oracle.rest(logits.astype(np.float64), sel), rtol=1e-12)


def test_ref_scores_with_a_spread(ref) -> None:
    """Components that hardly vary give way to others, and do not count in the temperature."""
    rng = np.random.default_rng(3)
    for b in cases.make(Case(n_kv=100, heads=(4, 2), mask="part")).blocks():
        spread = np.exp(2 * rng.standard_normal(b.q.shape[1])).astype(np.float32)
        kept = oracle.select_components(b.q, 16, spread)
        assert np.array_equal(ref.components(b.q, 16, spread), kept)
        assert not np.array_equal(ref.components(b.q, 16), kept)
        got = ref.score(b.q, b.k, b.bias, kept, 0.1, spread=spread)
        want = oracle.logits_of(b.q, b.k, b.bias, 0.1, components=kept, spread=spread)
        assert np.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [np.inf, 2e38])
def test_ref_scores_of_a_query_beyond_f32(value: float, ref) -> None:
    """Where |q|_1 of a head is beyond f32 its logits are 0, as the kernels have it."""
    b = next(iter(cases.make(Case(n_kv=100, heads=(4, 1), mask="open")).blocks()))
    q = b.q.copy()
    q[1, :2] = value
    kept = oracle.select_components(q, 16)
    got = ref.score(q, b.k, b.bias, kept, 0.1)
    assert np.array_equal(got[1], b.bias[1])
    assert np.allclose(got, oracle.logits_of(q, b.k, b.bias, 0.1, components=kept), rtol=1e-5)


def test_ref_selects_all(ref) -> None:
    """k < 0: every visible position, and no mean of v."""
    for b in cases.make(Case(n_kv=100, heads=(4, 2), mask="part", extra="sinks")).blocks():
        kept = oracle.select_components(b.q, 16)
        logits = ref.score(b.q, b.k, b.bias, kept, 0.1)
        out, rest = np.full(5, 7, np.int32), np.empty(len(b.q))
        n_sel = ref.select_raw(out, rest, logits, -1, [3], 5)
        assert n_sel == -1 and np.isneginf(rest).all() and (out == 7).all()
        got = ref.attend(b.q, b.k, b.v, b.bias, 0.1, selected=out, rest=rest, n_sel=-1)
        assert np.array_equal(got, ref.attend(b.q, b.k, b.v, b.bias, 0.1))
