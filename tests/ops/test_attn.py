"""The methods whole: ggml_sparq_attn, ggml_topk_attn, dense ATTEND. Oracle and properties."""

from __future__ import annotations

from dataclasses import replace

import cases
import graphs
import numpy as np
import oracle
import pytest
from cases import GROUP, SUM, Case
from ggml_ctypes import Ggml
from graphs import Selection, Sources, dense_run, sparse_run
from tolerances import EPS32, Errors

TIED = (12, 29)  # seeds of cases that have ties or near-ties at every cut
CASES = [
    c if c.size <= 600_000 else pytest.param(c, marks=pytest.mark.slow)
    for c in cases.quick_cases()
    if c.seed not in TIED
]

SHAPES = [
    Case(n_kv=2042, heads=(8, 2), topk="64", local=32),
    Case(n_kv=501, heads=(4, 4), d=128, batch=(2, 2), mask="part", extra="mean_v", strided=True),
    Case(n_kv=4097, heads=(7, 1), d=80, type_k="bf16", batch=(3, 1), extra="sinks"),
    Case(n_kv=9000, heads=(2, 2), d=64, type_k="f32", extra="softcap", mask="alibi"),
    Case(n_kv=11000, heads=(8, 8), d=16, topk="n"),  # units of more than 128 cells
]
over_shapes = pytest.mark.parametrize("case", SHAPES, ids=str)
either_method = pytest.mark.parametrize("exact", [False, True], ids=["sparq", "topk"])


@either_method
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attn_equals_oracle(case: Case, exact: bool, ggml: Ggml) -> None:
    """End to end. Left out: blocks where rounding may flip a key (test_steps.py covers them)."""
    data = cases.make(case)
    got = sparse_run(ggml, data, exact=exact)
    one_launch = case.mean_v and not exact and ggml.fast_exp
    errors = Errors("attend_one_launch" if one_launch else "attend")
    rank = None if exact else case.rank_value
    for b in data.blocks():
        scored = (b.q, b.k) if exact else (b.q_score, b.k_score)
        if _may_flip(b, scored, rank, case, data.topk_max):
            continue
        args = (b.q, b.k, b.v, b.bias, case.scale, b.topk, rank, b.forced, (), case.softcap)
        more = {"sinks": b.sinks, "mean_v": case.mean_v, "k_max": data.topk_max}
        more |= {"top_p": case.top_p, "q_score": scored[0], "k_score": scored[1]}
        errors.compare(b.of(got), b.size, oracle.sparse, *args, **more)
    errors.check()
    assert errors.count and np.isfinite(got).all()


def _may_flip(b: cases.Block, scored, rank, case: Case, topk_max: int) -> bool:
    kept = None if rank is None else oracle.select_components(scored[0], rank)
    logits = oracle.logits_of(*scored, b.bias, case.scale, case.softcap, kept)
    cells = oracle.select(logits, b.topk, b.forced, topk_max, case.top_p)
    rest = np.setdiff1d(oracle.visible_positions(b.bias), cells)
    chosen = np.setdiff1d(cells, b.forced)
    if not len(rest) or not len(chosen):
        return False
    score = oracle.rank_scores(logits)
    if case.top_p < 1:
        mass = oracle.softmax(logits).mean(axis=0)
        kept = mass[cells].sum()
        if min(abs(kept - case.top_p), abs(kept - mass[chosen].min() - case.top_p)) < 1e-5:
            return True
    gap = score[chosen].min() - score[rest].max()
    size = 1.0 if len(b.q) == 1 else score[chosen].min()
    return bool(gap < 64 * EPS32 * size * max(1.0, np.abs(logits[:, cells]).max()))


def clean(data: cases.Data) -> cases.Data:
    """The same without poison: hidden positions hold zeros, so do unsealed groups."""

    def zero(x: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(x) & (np.abs(x) < 1e6), x, 0)

    return replace(data, k=zero(data.k), v=zero(data.v), k_t=zero(data.k_t), v_sum=zero(data.v_sum))


@over_shapes
@pytest.mark.parametrize("sealed", ["all", "mixed", "none"])
def test_attn_hidden_positions_never_leak(case: Case, sealed: str, ggml: Ggml) -> None:
    """NaN, inf and 1e9 at hidden positions change no bit of the result."""
    case = replace(case, sealed=sealed, mask="part" if case.mask == "causal" else case.mask, seed=5)
    data = cases.make(case)
    assert not np.isfinite(data.k).all() or not data.hidden.any()
    for exact in (False, True):
        assert np.array_equal(
            sparse_run(ggml, data, exact=exact), sparse_run(ggml, clean(data), exact=exact)
        )
    assert np.array_equal(dense_run(ggml, data), dense_run(ggml, clean(data)))


@over_shapes
def test_attn_threads_are_bit_identical(case: Case, ggml: Ggml) -> None:
    data = cases.make(case)
    for run in (sparse_run, dense_run, lambda *a, **kw: sparse_run(*a, exact=True, **kw)):
        one = run(ggml, data, n_threads=1)
        for n_threads in ggml.threads(1, 2, 3, 5)[1:]:
            assert np.array_equal(one, run(ggml, data, n_threads=n_threads)), f"{n_threads} threads"


@either_method
@over_shapes
def test_attn_room_for_more_changes_no_bit(case: Case, exact: bool, ggml: Ggml) -> None:
    """Beside a token that selects many positions, one that selects few gets what it gets alone."""
    data = cases.make(replace(case, topk="64"))
    alone = sparse_run(ggml, data, exact=exact)
    for n in (200, 450, case.n_kv):
        assert np.array_equal(sparse_run(ggml, replace(data, topk_max=n), exact=exact), alone), n


@over_shapes
def test_attn_everything_selected_equals_dense(case: Case, ggml: Ggml) -> None:
    """rank = d and topk >= n_kv: nothing is approximated. With the mean value too: alpha is 1."""
    data = cases.make(replace(case, rank="d", topk="n+5"))
    for mean_v in ("plain", "mean_v"):
        extra = case.extra if mean_v == "plain" else mean_v + "+sinks" * ("sinks" in case.extra)
        data.case = replace(data.case, extra=extra)
        dense = dense_run(ggml, data)
        seen = np.abs(data.v[~data.hidden]).max()
        for exact in (False, True):
            assert np.abs(sparse_run(ggml, data, exact=exact) - dense).max() <= 16 * EPS32 * seen


def test_attn_sinks_mean_v(ggml: Ggml) -> None:
    """With exact scores the share of what was left out is exact: a sink takes mass, but none that
    v_mean may have. V is the same everywhere, so the result says how much of it came in.
    """
    case = Case(n_kv=501, heads=(4, 4), topk="64", local=0, extra="mean_v+sinks", seed=2)
    data = cases.make(case)
    data.v[:] = 2.0
    data.v_sum[:] = 2.0 * GROUP
    got, shares = sparse_run(ggml, data, exact=True), []
    for b in data.blocks():
        logits = oracle.logits_of(b.q, b.k, b.bias, case.scale)
        chosen = oracle.select(logits, b.topk, b.forced, data.topk_max)
        alpha = np.sqrt(oracle.mass_kept(logits, chosen, b.sinks))
        valued = oracle.softmax(logits[:, chosen], b.sinks).sum(axis=1)  # the sink is worth nothing
        want = 2.0 * (alpha * valued + 1 - alpha)
        y = got[b.stream, b.tok, b.head]
        assert np.abs(y - want[:, None]).max() <= 32 * EPS32 * 2
        shares.append((*alpha, *valued))
    assert (np.min(shares, axis=0) < 0.995).all(), "nothing was left out, or no sink has mass"


def run_attend(ggml: Ggml, data: cases.Data, cells: np.ndarray, rest: float) -> np.ndarray:
    """ATTEND with a selection made by hand: the same cells and rest everywhere."""
    n_tok, n_stream = data.case.batch
    n_head, n_head_kv = data.case.heads
    index = list(np.ndindex(n_stream, n_tok, n_head_kv))
    rests = np.full((n_stream, n_tok, n_head_kv, n_head // n_head_kv), rest, np.float32)
    raw = Selection.pack(dict.fromkeys(index, cells), rests, len(cells) + 3)
    with ggml.graph() as g:
        out = graphs.attend(Sources(data, g), g.tensor(raw, "i32"))
        g.compute(out)
        return g.read(out).reshape(*data.q.shape[:3], -1)


NONE, MOST = -np.inf, 500.0  # rest, where nothing was left out, and where all but nothing was


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["mha", "gqa"])
def test_attend_alpha_weighs_the_mean(heads, ggml: Ggml) -> None:
    """alpha = 1: v_mean is irrelevant, whatever v_sum holds. alpha = 0: only v_mean."""
    case = Case(n_kv=700, heads=heads, mask="open", sealed="mixed", extra="mean_v")
    data = cases.make(case)
    cells = np.array([3, 64, 65, 500, 699])
    plain = cases.make(replace(case, extra="plain"))
    only = run_attend(ggml, plain, cells, 0.5)  # without mean_v rest is not used
    assert np.array_equal(run_attend(ggml, data, cells, NONE), only)
    other = replace(data, v_sum=np.full_like(data.v_sum, -7))
    assert np.array_equal(run_attend(ggml, other, cells, NONE), only)

    mean = run_attend(ggml, data, cells, MOST)
    g = heads[0] // heads[1]
    want = data.v.astype(np.float64).mean(axis=1).repeat(g, axis=1)[:, None]
    assert np.abs(mean - want).max() <= 32 * EPS32 * np.abs(data.v).max()
    assert not np.allclose(run_attend(ggml, other, cells, 0.5), only), "v_sum was not read at all"


@pytest.mark.parametrize("rest", [-6.0, 0.0, np.log(695 / 5**4)])
def test_alpha_is_half_way(rest: float, ggml: Ggml) -> None:
    """By hand: all logits are 0, so 5 positions have a mass of 5, and the others 5^4 e^rest."""
    data = cases.make(Case(n_kv=700, heads=(8, 2), mask="open", sealed="mixed", extra="mean_v"))
    data.k[:] = 0
    cells = np.array([3, 64, 65, 500, 699])
    alpha = np.sqrt(5 / (5 + 5**4 * np.exp(rest)))
    v = data.v.astype(np.float64)
    want = alpha * v[:, cells].mean(axis=1) + (1 - alpha) * v.mean(axis=1)
    got = run_attend(ggml, data, cells, rest)
    assert np.abs(got - want.repeat(4, axis=1)[:, None]).max() <= 32 * EPS32 * np.abs(v).max()


def test_attend_mean_of_partly_hidden_group_reads_rows(ggml: Ggml) -> None:
    """A sealed group with a hidden position: its v_sum is no use, the rows are read."""
    case = Case(n_kv=256, heads=(4, 4), mask="open", sealed="all", extra="mean_v")
    data = cases.make(case)
    data.mask[..., 130] = -np.inf
    data.v[:, 130] = 1e4
    data.v_sum[:, cases.sum_row(1)] = np.nan
    mean = run_attend(ggml, data, np.array([3]), MOST)
    want = np.delete(data.v, 130, axis=1).astype(np.float64).mean(axis=1)[:, None]
    assert np.abs(mean - want).max() <= 32 * EPS32 * 5


@pytest.mark.parametrize("damage", ["nothing", "hidden", "unsealed", "end"])
def test_attend_mean_reads_totals_where_they_hold(damage: str, ggml: Ggml) -> None:
    """The total of a sum block counts only when each of them is sealed and fully visible."""
    n_kv = 2 * SUM * GROUP - (GROUP if damage == "end" else 0)
    data = cases.make(Case(n_kv=n_kv, heads=(4, 2), mask="open", sealed="all", extra="mean_v"))
    at = SUM + 3  # a group of the second total
    if damage == "hidden":
        data.mask[..., at * GROUP + 5] = -np.inf
        data.v[:, at * GROUP + 5] = np.nan
    if damage == "unsealed":
        data.sealed[:, at] = 0
        data.v_sum[:, cases.sum_row(at)] = np.nan
    total = data.v_sum[:, 2 * SUM + 1]
    total[:] = total if damage == "nothing" else np.nan
    mean = run_attend(ggml, data, np.array([3]), MOST)
    want = np.nanmean(data.v.astype(np.float64), axis=1).repeat(2, axis=1)[:, None]
    assert np.abs(mean - want).max() <= 32 * EPS32 * 5
    if damage == "nothing":
        total[:] = 0
        assert not np.allclose(run_attend(ggml, data, np.array([3]), MOST), want, atol=1e-3)


def test_attend_mean_reads_sums_from_the_token_on_that_a_group_says(ggml: Ggml) -> None:
    case = Case(n_kv=256, heads=(4, 4), mask="open", sealed="all", extra="mean_v", batch=(3, 1))
    data = cases.make(case)
    data.sealed[:, 1] = 3  # of the third token on
    data.v_sum[:, cases.sum_row(1)] = np.nan
    mean = run_attend(ggml, data, np.array([3]), MOST)
    assert np.isfinite(mean[:, :2]).all() and np.isnan(mean[:, 2]).all()
