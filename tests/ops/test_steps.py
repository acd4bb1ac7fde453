"""Each step of the CPU op apart, against the oracle, over the shapes of tests/cases.py."""

from __future__ import annotations

import cases
import graphs
import numpy as np
import oracle
import pytest
from cases import BLOCKS, GROUP, SUM, Case, row_bytes
from ggml_ctypes import STATS, Ggml, SealParams, SelectParams
from graphs import Selection, Sources
from tolerances import EPS32, Errors, as_alpha, check_selection, score_scale

QUICK = cases.quick_cases()

over_cases = pytest.mark.parametrize("case", QUICK, ids=str)


@over_cases
def test_steps_equal_oracle(case: Case, ggml: Ggml) -> None:
    check_steps(case, ggml)


def check_steps(case: Case, ggml: Ggml) -> None:
    """One graph with every node, each compared with the oracle given that node's own input."""
    data = cases.make(case)
    with ggml.graph() as g:
        s = Sources(data, g)
        visible = g.op("ggml_sparse_attn_visible", s.mask)
        exact = graphs.score(s, exact=True)
        approximate = graphs.score(s)
        sel = graphs.select(s, approximate)
        out, dense = graphs.attend(s, sel), graphs.attend(s, None)
        fused = graphs.score_select(s)
        g.compute(visible, exact, approximate, out, dense, fused)
        assert np.array_equal(g.read(visible), data.visible)
        logits = {None: g.read(exact), case.rank_value: g.read(approximate)}
        assert np.array_equal(g.read(fused), g.read(sel)), "SCORE_SELECT is not SELECT(SCORE)"
        chosen = Selection.unpack(g.read(sel), case.heads[0] // case.heads[1])
        result = g.read(out).reshape(*data.q.shape[:3], -1)
        dense_result = g.read(dense).reshape(*data.q.shape[:3], -1)
        stats = s.stats_read()

    check_scores(data, logits)
    check_select(data, logits[case.rank_value], chosen)
    check_attend(data, chosen, result)
    check_attend(data, None, dense_result)
    check_stats(data, chosen, stats)


def check_scores(data: cases.Data, logits: dict) -> None:
    case = data.case
    errors = Errors("score")
    for rank, got in logits.items():
        for b in data.blocks():
            q, k = (b.q, b.k) if rank is None else (b.q_score, b.k_score)
            kept = None if rank is None else oracle.select_components(q, rank)
            part = slice(None) if kept is None else kept
            tau = 1 if kept is None else oracle.temperature_factor(q, kept)
            factor = case.scale / np.where(tau == 0, 1, tau) * np.ones(len(b.q))
            size = score_scale(q[:, part], k[:, part], b.bias, factor)
            args = (q, k, b.bias, case.scale, case.softcap, kept)
            errors.compare(b.of(got), size, oracle.logits_of, *args)
    errors.check()


def check_select(data: cases.Data, logits: np.ndarray, chosen: Selection) -> None:
    errors = Errors("alpha")
    for b in data.blocks():
        cells, rest, seen = chosen.cells[b.index], chosen.rest[b.index], b.of(logits)
        check_selection(cells, seen, b.topk, b.forced, data.case.top_p)
        if data.case.mean_v:
            errors.add(*as_alpha(rest, seen, cells), 1.0)
        else:
            assert np.isneginf(rest).all(), "rest was not asked for"
    errors.check()


def check_attend(data: cases.Data, chosen: Selection | None, got: np.ndarray) -> None:
    """chosen None: dense."""
    case = data.case
    errors = Errors("attend")
    for b in data.blocks():
        cells = None if chosen is None else chosen.cells[b.index]
        rest = chosen.rest[b.index] if chosen is not None and case.mean_v else None
        args = (b.q, b.k, b.v, b.bias, case.scale, case.softcap, cells, b.sinks)
        errors.compare(b.of(got), b.size, oracle.attend, *args, rest=rest)
        if np.isneginf(b.bias).all():
            assert (b.of(got) == 0).all(), "a token that sees nothing gives zeros"
    errors.check()


def check_stats(data: cases.Data, chosen: Selection, stats: dict[str, int]) -> None:
    """Counters after two SCOREs, exact and not, SCORE_SELECT, a sparse and a dense ATTEND."""
    case = data.case
    _, n_head_kv = case.heads
    row_k, row_v = row_bytes(case.d, case.type_k), row_bytes(case.d_v, case.type_v)
    visible = data.visible[:, 0]  # (n_stream, n_tok, n_grp)
    n_visible = int(visible.sum()) * n_head_kv
    n_read = sum(map(len, chosen.cells.values()))

    sealed = data.sealed[:, None] != 0
    scored = np.where(
        visible == 0, 0, np.where(sealed, GROUP * 2 * case.rank_value, visible * row_k)
    ).sum()
    mean = 0
    if case.mean_v:
        from_sum = sealed & (visible == GROUP)
        mean = int(np.where(from_sum, 0, visible * row_v).sum())
        for token in from_sum.reshape(-1, from_sum.shape[-1]):
            for whole in np.split(token, range(SUM, len(token), SUM)):
                n_sums = 1 if len(whole) == SUM and whole.all() else int(whole.sum())
                mean += n_sums * case.d_v * 4
        mean *= n_head_kv
    n_call = int((visible.sum(axis=-1) > 0).sum())  # tokens that see something
    assert stats == {
        "attend_sparse": n_call,
        "attend_dense": n_call,
        "pos_visible": 2 * n_visible,
        "pos_read": n_read + n_visible,
        "bytes_score": n_visible * row_k + 2 * int(scored) * n_head_kv,
        "bytes_attend": (n_read + n_visible) * (row_k + row_v) + mean,
        "bytes_dense": 2 * n_visible * (row_k + row_v),
        "groups_sealed": 0,
        "prefill": 0,
        "prefill_fast": 0,
        "cut_passes": 0,
    }


@pytest.mark.parametrize("n_head", [1, 4])
@pytest.mark.parametrize("rank", [1, 5, 63])
def test_score_component_ties(n_head: int, rank: int, ggml: Ggml) -> None:
    """Components of equal |q|: the lowest ones are kept. With keys that tell which ones were."""
    case = Case(128, heads=(n_head, 1), rank=str(rank), mask="open", sealed="all", type_k="f32")
    data = cases.make(case)
    data.q[:] = np.round(data.q / 3)
    data.k[0, :, 0] = np.tile(np.eye(64) * 4, (2, 1))  # position t sees component t % 64
    data.k_t[0] = data.k[0, :, 0].T
    with ggml.graph() as g:
        out = graphs.score(Sources(data, g))
        g.compute(out)
        got = g.read(out)[0, 0]
    kept = oracle.select_components(data.q[0, 0], rank)
    want = np.zeros_like(got)
    want.reshape(n_head, 2, 64)[..., kept] = oracle.logits_of(
        data.q[0, 0], data.k[0, :, 0], np.zeros_like(got), case.scale, 0, kept
    ).reshape(n_head, 2, 64)[..., kept]
    assert np.allclose(got, want, rtol=1e-5, atol=0)


# ---- SEAL ----


def sealed(ggml, k: np.ndarray, type_k: str, groups, before: np.ndarray, n_rot=0) -> np.ndarray:
    """k_t (n_kv*d, n_pos) of the only stream, after `groups` of K were sealed into `before`."""
    with ggml.graph() as g:
        k_t, k = g.tensor(before, "f16", inplace=True), (k, type_k, (0, 3, 2, 0))
        out = g.node("seal", SealParams(16, n_rot), k_t=k_t, k=k, list=np.array([groups]))
        g.compute(out)
        return g.read(out)[0, 0]


@pytest.mark.parametrize("type_k", ["f16", "bf16", "f32", "q8_0", "q4_0"])
@pytest.mark.parametrize(
    ("n_kv", "d", "n_head_kv", "n_stream"),
    [(128, 64, 1, 1), (1280, 128, 2, 1), (400, 80, 3, 2), (31, 96, 1, 2), (4224, 64, 2, 1)],
)
@pytest.mark.parametrize("strided", [False, True])
def test_seal_writes_listed_groups_only(
    type_k, n_kv, d, n_head_kv, n_stream, strided, ggml
) -> None:
    """k_t is K transposed and rounded to f16, bit for bit; v_sum the sums; no more."""
    rng = np.random.default_rng(n_kv + d)
    if type_k in BLOCKS:
        d = -(-d // 64) * 64
    d_v = d // 2
    k = cases.to_type(rng.standard_normal((n_stream, n_kv, n_head_kv, d)), type_k)
    v = cases.to_type(rng.standard_normal((n_stream, n_kv, n_head_kv, d_v)), type_k)
    n_full = n_kv // GROUP
    n_list = max(1, n_full // 2)
    groups = np.stack([rng.permutation(max(1, n_full))[:n_list] for _ in range(n_stream)]).astype(
        np.int32
    )
    groups = np.concatenate([groups, np.full((n_stream, 3), -1)], axis=1).astype(np.int32)
    groups[0, 0] = -1
    if n_full == 0:
        groups[:] = -1
    before_t = rng.standard_normal((n_stream, n_head_kv * d, n_kv + 96)).astype(np.float16)
    n_sum = (n_kv // GROUP // SUM + 1) * (SUM + 1) + 3
    before_sum = rng.standard_normal((n_stream, n_sum, n_head_kv * d_v)).astype(np.float32)
    pad = (0, 64, 2, 0) if strided else ()
    results = []
    for n_threads in ggml.threads(1, 3):
        with ggml.graph() as g:
            k_t = g.tensor(before_t, "f16", (0, 0, 32) if strided else (), inplace=True)
            v_sum = g.tensor(before_sum, "f32", (0, 0, 8) if strided else (), inplace=True)
            stats = g.tensor(np.zeros(len(STATS)), "i64", inplace=True)
            given = {"k_t": k_t, "v_sum": v_sum, "k": (k, type_k, pad), "v": (v, type_k, pad)}
            out = g.node("seal", SealParams(16), list=groups, stats=stats, **given)
            g.compute(out, n_threads=n_threads)
            results.append((g.read(out)[0], g.read(v_sum)[0]))
            counted = dict(zip(STATS, g.read(stats).ravel().tolist(), strict=True))
            sealed = int((groups >= 0).sum())
            assert counted == dict.fromkeys(STATS, 0) | {"groups_sealed": sealed}
    got_t, got_sum = results[0]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True)), (
        "depends on the number of threads"
    )

    errors = Errors("sum")
    want_t = before_t.copy()
    for s, i in zip(*np.nonzero(groups >= 0), strict=True):
        cells = slice(groups[s, i] * GROUP, (groups[s, i] + 1) * GROUP)
        want_t[s, :, cells] = k[s, cells].reshape(GROUP, -1).T.astype(np.float16)
        rows = v[s, cells].reshape(GROUP, -1)
        row = cases.sum_row(groups[s, i])
        errors.add(
            got_sum[s, row],
            rows.astype(np.float64).sum(axis=0),
            rows.sum(axis=0),
            float(np.abs(rows).sum(axis=0).max()),
        )
        before_sum[s, row] = got_sum[s, row]
    listed = [(s, groups[s, i]) for s, i in zip(*np.nonzero(groups >= 0), strict=True)]
    for s, first in {(s, g // SUM * (SUM + 1)) for s, g in listed}:
        parts = got_sum[s, first : first + SUM]
        total = parts.astype(np.float64).sum(axis=0)
        size = float(np.abs(parts).sum(axis=0).max())
        errors.add(got_sum[s, first + SUM], total, parts.sum(axis=0), size)
        before_sum[s, first + SUM] = got_sum[s, first + SUM]
    errors.check()
    assert np.array_equal(got_t, want_t)
    assert np.array_equal(got_sum, before_sum), "a group that was not listed changed"


@pytest.mark.parametrize("type_k", ["q8_0", "q4_0", "f16"])
@pytest.mark.parametrize(("d", "n_rot"), [(64, 64), (192, 64), (128, 128), (256, 32)])
def test_seal_turns_k_back(type_k, d, n_rot, ggml) -> None:
    rng = np.random.default_rng(d)
    k = cases.to_type(rng.standard_normal((1, 256, 2, d)) * 3, type_k)
    got = sealed(ggml, k, type_k, [1], np.full((1, 2 * d, 256), 7.0), n_rot).astype(np.float32)
    want = oracle.hadamard(k, n_rot)[0].reshape(256, -1).T
    size = np.linalg.norm(k, axis=-1).max()
    assert np.abs(got - want)[:, 128:].max() <= 2**-11 * np.abs(want).max() + 8 * EPS32 * size
    assert (got[:, :128] == 7).all()


@pytest.mark.parametrize("type_k", ["f32", "bf16", "f16"])
def test_seal_clamps_to_f16(type_k, ggml) -> None:
    k = np.zeros((1, 128, 1, 64), np.float32)
    k[0, :4, 0, 0] = [1e9, -1e9, 65504, 7e4]
    k[0, 40, 0, 63] = -np.inf
    got = sealed(ggml, k, type_k, [0], np.zeros((1, 64, 128)))
    # bf16 has no 65504: it rounds to 65536, beyond f16
    assert got[0, :5].tolist() == [65504, -65504, 65504, 65504, 0]
    assert got[63, 40] == -65504


def test_an_incomplete_group_is_not_sealed(ggml) -> None:
    """The view of the cache may end inside a group."""
    k = cases.to_type(np.random.default_rng(0).standard_normal((1, 250, 1, 64)), "f16")
    got = sealed(ggml, k, "f16", [0, 1], np.full((1, 64, 256), 7.0))
    assert np.array_equal(got[:, :128], k[0, :128, 0].T.astype(np.float16))
    assert (got[:, 128:] == 7).all()


# ---- SELECT ----


def run_select(
    ggml,
    logits,
    k,
    forced=(-1,),
    n_local_max=0,
    local=0,
    n_head_kv=1,
    topk_max=None,
    rest=False,
    n_threads=2,
    top_p=1.0,
) -> Selection:
    """logits (n_stream, n_tok, n_head, n); forced (n_forced) or (n_tok, n_forced)"""
    n_stream, n_tok, n_head, _ = logits.shape
    wanted = np.empty((n_stream, 1, n_tok, 2 + np.shape(forced)[-1]), np.int32)
    wanted[..., 0], wanted[..., 1], wanted[..., 2:] = k, local, forced
    params = SelectParams(topk_max or k, n_head_kv, n_local_max, rest, top_p)
    with ggml.graph() as g:
        out = g.node("select", params, logits=logits, wanted=wanted)
        g.compute(out, n_threads=n_threads)
        return Selection.unpack(g.read(out), n_head // n_head_kv)


def logits_of_kind(kind: str, n: int, g: int, rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal((1, 1, g, n)).astype(np.float32)
    if kind == "heavy ties":
        x = np.round(x)  # five or so values
    if kind == "all equal":
        x[:] = -3.25
    if kind == "ascending":
        x = np.sort(x, axis=-1)
    if kind == "descending":
        x = -np.sort(x, axis=-1)
    if kind == "huge":
        x *= np.float32(1e30)
    if kind == "tiny":
        x *= np.float32(1e-40)  # subnormal
    if kind == "signed zeros":
        x = np.where(x > 0, np.float32(0.0), np.float32(-0.0))
    if kind == "few visible":
        x[..., rng.random(n) < 0.97] = -np.inf
    if kind == "uneven" and n >= 512:
        # high just where the search for the cut takes its sample: few cells reach its first guess
        x[..., np.arange(128)[:, None] * (n // 128) + np.arange(4)] += 10.0
    if kind == "high":
        x = np.round(x * 64) / 64 + np.float32(300)  # softmax knows differences only
    if kind == "spike":
        x[..., n // 2] = 1e30  # far above all that a sample of the row would show
    if kind == "peaked":
        x *= 40  # nearly all softmaxed scores underflow
    return x


@pytest.mark.parametrize(
    "kind",
    [
        "normal",
        "heavy ties",
        "all equal",
        "ascending",
        "descending",
        "huge",
        "tiny",
        "signed zeros",
        "few visible",
        "peaked",
        "uneven",
        "high",
        "spike",
    ],
)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 9001, 40000])
def test_select_one_head_equals_sort(kind, n, ggml) -> None:
    """One query head: exactly the k largest logits, ties to the lower cell."""
    rng = np.random.default_rng(n)
    logits = logits_of_kind(kind, n, 1, rng)
    for k in sorted({1, min(n, 7), max(1, n // 8), max(1, n - 1), n, n + 5}):
        want = oracle.select(logits[0, 0], k, [], k)
        for n_threads in ggml.threads(1, 3, 5):  # by one; its tiles by several; all of it by many
            got = run_select(ggml, logits, k, n_threads=n_threads).cells[0, 0, 0]
            assert np.array_equal(got, want), f"k={k}, {n_threads} threads"


@pytest.mark.parametrize("kind", ["normal", "heavy ties", "uneven", "few visible"])
@pytest.mark.parametrize(("n_head", "n_head_kv"), [(1, 1), (4, 1), (6, 2), (15, 3)])
def test_select_heads_shared_by_threads(kind, n_head, n_head_kv, ggml) -> None:
    """Bit for bit what one thread finds, however the tiles of few heads fall to many."""
    n, k = 40011, 900
    rng = np.random.default_rng(n_head)
    logits = np.concatenate([logits_of_kind(kind, n, n_head, rng) for _ in range(2)])
    forced = rng.integers(-2, n + 2, 120)
    for top_p in (1.0, 0.6):
        given = (k, forced, 100, 60, n_head_kv, k, True)
        runs = [
            run_select(ggml, logits, *given, n_threads=t, top_p=top_p).raw
            for t in ggml.threads(1, 2, 3, 5, 8, 13)
        ]
        assert all(np.array_equal(run, runs[0]) for run in runs)


def test_select_group_sums_scores_not_logits(ggml) -> None:
    """Softmaxed scores are summed. Summed logits would choose cell 1 (12) over cell 0 (10)."""
    logits = np.array([[10.0, 6.0, 0, 0], [0, 6.0, 9.5, 0]], np.float32)[None, None]
    assert run_select(ggml, logits, 2).cells[0, 0, 0].tolist() == [0, 2]


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("g", [1, 4])
def test_select_of_what_is_not_finite(g: int, rest: bool, ggml) -> None:
    """NaN is never selected, +inf of the only head comes first; the other cells rank as without."""
    n, nan, inf = 9001, [0, 4095, 7000, 9000], [17, 4500]
    logits = np.random.default_rng(g).standard_normal((1, 1, g, n)).astype(np.float32)
    logits[..., nan] = -80.0
    want = logits.copy()
    logits[0, 0, g // 2, nan] = np.nan
    want[..., nan] = -np.inf
    if g == 1:
        logits[..., inf] = np.inf
        want[..., inf] = 1e30
    else:
        want = np.delete(want, g // 2, axis=2)  # a head with a NaN has no softmax
    for k in (1, 40, 5000, n):
        runs = [run_select(ggml, logits, k, rest=rest, n_threads=t) for t in ggml.threads(1, 3)]
        assert np.array_equal(runs[0].raw, runs[1].raw)
        check_selection(runs[0].cells[0, 0, 0], want[0, 0], k, [])
        check_selection(runs[0].cells[0, 0, 0], logits[0, 0], k, [])
        assert not np.isnan(runs[0].rest).any() and (runs[0].rest < np.inf).all()
    forced = run_select(ggml, logits, 1, [8000, 4095], topk_max=1, rest=rest)
    assert forced.cells[0, 0, 0].tolist() == [8000], "+inf does not displace it; NaN is not forced"


# what is not finite in the heads of a group: (head, cell, value) ..
INF, NAN = float("inf"), float("nan")
NOT_FINITE = {
    "inf in one head": [(2, 17, INF), (2, 600, INF)],
    "inf in the first head": [(0, 17, INF)],
    "inf in several heads": [(0, 600, INF), (1, 17, INF), (3, 17, INF)],
    "inf and NaN": [(1, 17, INF), (1, 40, NAN), (2, 600, INF)],
    "NaN in one head": [(2, 40, NAN)],
    "NaN in every head": [(h, 40 + 20 * h, NAN) for h in range(4)],
    "-inf in one head": [(2, 17, -INF), (2, 40, -INF)],
    "-inf in the first head": [(0, 17, -INF), (0, 40, -INF)],
    "a head of -inf": [(2, slice(None), -INF)],
    "a head of NaN": [(1, slice(None), NAN)],
    "NaN among -inf": [(1, slice(512, None), -INF), (1, 600, NAN)],
}


@pytest.mark.parametrize("kind", NOT_FINITE)
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_select_of_what_is_not_finite_in_a_group(kind: str, top_p: float, ggml) -> None:
    """The rule for +-inf and NaN where several query heads share the KV head: ggml-sparse.h."""
    logits = np.random.default_rng(4).standard_normal((1, 1, 4, 700)).astype(np.float32)
    for h, cell, value in NOT_FINITE[kind]:
        logits[0, 0, h, cell] = value
    can = oracle.selectable(logits[0, 0])
    forced = [c for c in (600, 17, 699) if can[c]]
    for k in (8, 700):
        given, more = (k, [600, 40, 17, 699], 0, 0, 1, 700, True), {"top_p": top_p}
        runs = [run_select(ggml, logits, *given, n_threads=t, **more) for t in ggml.threads(1, 3)]
        assert np.array_equal(runs[0].raw, runs[1].raw)
        cells = runs[0].cells[0, 0, 0]
        check_selection(cells, logits[0, 0], k, forced + [40] * bool(can[40]), top_p)
        got, want, _ = as_alpha(runs[0].rest[0, 0, 0], logits[0, 0], cells)
        assert np.allclose(got, want, rtol=0, atol=1e-5, equal_nan=True)
    alone = run_select(ggml, logits, 3).cells[0, 0, 0]
    check_selection(alone, logits[0, 0], 3, [])
    if "inf in" in kind and "-inf" not in kind:
        assert 17 in alone, "the softmax of a head with +inf is there"


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1)])
def test_score_select_of_what_is_not_finite(heads: tuple[int, int], top_p: float, ggml) -> None:
    """Logits beyond f32 in both directions, and NaN: the same rule, and the bits of SELECT."""
    extra = "mean_v+top_p" if top_p < 1 else "mean_v"
    case = Case(n_kv=700, heads=heads, mask="open", sealed="none", type_k="f32", extra=extra)
    data = cases.make(case)
    data.q *= 10
    for i, sign in enumerate((1, -1, 1, -1)):
        data.k[:, 20 + 150 * i, 0] = 3e38 * sign * np.sign(data.q[0, 0, i % heads[0]])
    data.k[:, 650] = np.nan
    with ggml.graph() as g:
        s = Sources(data, g)
        logits = graphs.score(s)
        sel, fused = graphs.select(s, logits), graphs.score_select(s)
        g.compute(sel, fused)
        got, seen = g.read(fused), g.read(logits)
        assert np.array_equal(got, g.read(sel))
    assert np.isposinf(seen).any() and np.isnan(seen).any()
    chosen = Selection.unpack(got, heads[0])
    for b in data.blocks():
        index = (b.stream, b.tok, b.head)
        x = seen[b.stream, b.tok]
        forced = [c for c in b.forced if oracle.selectable(x)[c]]
        check_selection(chosen.cells[index], x, b.topk, forced, case.top_p)


@pytest.mark.parametrize("g", [1, 4])
def test_select_ties(g, ggml) -> None:
    """Equal columns: the lower cell wins, wherever the cells fall in vectors, tiles and tails."""
    for n in (3, 17, 130, 1003, 5003):
        logits = np.tile(np.float32(1.5), (1, 1, g, n))
        for k in (1, n // 2, n - 1):
            assert run_select(ggml, logits, k).cells[0, 0, 0].tolist() == list(range(k)), (
                f"n={n} k={k}"
            )


@pytest.mark.parametrize("g", [1, 4])
def test_select_k_counts_forced(g, ggml) -> None:
    """Forced cells are among the k; hidden ones and -1 do not count; l limits the window only."""
    n = 300
    logits = -np.arange(n, dtype=np.float32)[None, None, None, :].repeat(g, axis=2) * 0.1
    logits[..., 250] = -np.inf
    forced = [299, 250, 298, 298, 297, 0, 299, -1]  # window of 5, then sinks

    def cells(k: int, local: int, **kw) -> list[int]:
        return (
            run_select(ggml, logits, k, forced, n_local_max=5, local=local, **kw)
            .cells[0, 0, 0]
            .tolist()
        )

    assert cells(6, 5) == [0, 1, 2, 297, 298, 299]
    assert cells(6, 1) == [0, 1, 2, 3, 4, 299]
    assert cells(6, 0) == [0, 1, 2, 3, 4, 299], "299 is a sink too"
    assert cells(2, 5, topk_max=10) == [0, 297, 298, 299], "all forced are in, even beyond k"
    assert cells(2, 5, topk_max=3) == [297, 298, 299], "the capacity cuts the sinks first"
    assert cells(2, 5, topk_max=2) == [298, 299]
    assert cells(400, 5) == [i for i in range(n) if i != 250]
    assert cells(400, 5, topk_max=20) == [*range(17), 297, 298, 299]


@pytest.mark.parametrize("rest", [False, True])
def test_select_nothing_visible(rest, ggml) -> None:
    logits = np.full((2, 2, 4, 100), -np.inf, np.float32)
    logits[1, 1, :, 3] = 0
    got = run_select(ggml, logits, 8, [99, 0], n_local_max=1, local=1, n_head_kv=2, rest=rest)
    assert {i: c.tolist() for i, c in got.cells.items() if len(c)} == {
        (1, 1, 0): [3],
        (1, 1, 1): [3],
    }
    assert np.isneginf(got.rest).all()


def test_select_rest_is_the_mass_left_out(ggml) -> None:
    """Where the logits are exact, alpha squared is the share of eq. 10; with nothing left, -inf."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((1, 1, 4, 2000)).astype(np.float32) * 3
    for k in (1, 50, 1999, 2000):
        got = run_select(ggml, logits, k, n_head_kv=2, rest=True)
        errors = Errors("alpha")
        for h in range(2):
            rows, cells = logits[0, 0, 2 * h : 2 * h + 2], got.cells[0, 0, h]
            alpha, _, plain = as_alpha(got.rest[0, 0, h], rows, cells)
            errors.add(alpha**2, oracle.mass_kept(rows.astype(np.float64), cells), plain**2, 1.0)
        errors.check()
        assert np.isneginf(got.rest).all() == (k >= 1999), "less than 2^-18"


@pytest.mark.parametrize(
    "kind",
    ["normal", "heavy ties", "all equal", "huge", "tiny", "few visible", "peaked", "high", "spike"],
)
@pytest.mark.parametrize(("n", "g"), [(1, 1), (65, 4), (1000, 1), (1003, 7), (9001, 2)])
def test_select_top_p(kind, n, g, ggml) -> None:
    """As many as carry the mass; the forced ones at least, k at most; what is left out."""
    rng = np.random.default_rng(n)
    logits = logits_of_kind(kind, n, g, rng)
    seen = np.flatnonzero(~np.isneginf(logits[0, 0, 0]))
    forced = [int(c) for c in rng.choice(seen, min(3, len(seen)), replace=False)]
    for p in (1e-6, 0.3, 0.9, 0.999, 1.0):
        for k in (max(1, n // 8), n):
            runs = [
                run_select(
                    ggml, logits, k, [*forced, -1], topk_max=n, rest=True, top_p=p, n_threads=t
                )
                for t in ggml.threads(1, 3)
            ]
            assert np.array_equal(runs[0].raw, runs[1].raw)
            cells = runs[0].cells[0, 0, 0]
            check_selection(cells, logits[0, 0], k, forced, p)
            got, want, _ = as_alpha(runs[0].rest[0, 0, 0], logits[0, 0], cells)
            # a head for which what was selected is nothing in f32 does without the mean of V
            some = (
                logits[0, 0][:, cells].max(axis=1, initial=-np.inf) > logits[0, 0].max(axis=1) - 80
            )
            assert np.abs(got - want)[some].max(initial=0) < 1e-5


def test_select_top_p_counts(ggml) -> None:
    """By hand: masses 1/2, 1/4, 1/8 .. of one head, and of two that disagree."""
    one = np.log(2.0) * -np.arange(12, dtype=np.float32)[None, None, None, :]

    def count(logits, p, k=12, forced=(-1,), n_local=0) -> list[int]:
        return (
            run_select(ggml, logits, k, forced, n_local, n_local, top_p=p).cells[0, 0, 0].tolist()
        )

    assert count(one, 0.45) == [0]
    assert count(one, 0.7) == [0, 1]
    assert count(one, 0.7, forced=[11, 3], n_local=1) == [0, 1, 3, 11], "3 alone is too little"
    assert count(one, 0.05, forced=[11, 3], n_local=1) == [3, 11], "the forced ones are enough"
    assert count(one, 0.999, k=3) == [0, 1, 2], "k caps"
    assert count(one, 1.0, k=5) == count(one, 0.0, k=5) == [0, 1, 2, 3, 4], "off"
    two = np.concatenate([one, one[..., ::-1]], axis=2)
    assert count(two, 0.45) == [0, 11]
    assert count(two, 0.7) == [0, 1, 10, 11]
