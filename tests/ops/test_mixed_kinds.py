"""Batches that mix tokens that read everything (k < 0) with tokens that read a selection.

And tokens that have ranks of their own.
"""

from __future__ import annotations

from dataclasses import replace

import cases
import numpy as np
import pytest
from cases import Case
from ggml_ctypes import Ggml, ScoreParams, ScoreSelectParams, SelectParams
from graphs import Sources, dense_run, sparse_run
from tolerances import EPS32

CASES = [
    Case(n_kv=501, heads=(8, 2), d=64, batch=(3, 2), mask="part", extra="mean_v"),
    Case(n_kv=701, heads=(4, 4), d=80, type_k="bf16", batch=(3, 1), mask="part", extra="sinks"),
    Case(n_kv=500, heads=(7, 1), d=100, type_k="f32", batch=(2, 2), extra="softcap", strided=True),
    Case(n_kv=900, heads=(6, 2), d=64, type_k="q8_0", batch=(3, 1), mask="part", seed=1),
    Case(n_kv=600, heads=(4, 4), d=96, type_k="q4_0", batch=(2, 2), extra="mean_v", seed=2),
    Case(n_kv=9000, heads=(8, 2), d=64, batch=(4, 1), mask="part", extra="mean_v+sinks+top_p"),
]
over_cases = pytest.mark.parametrize("case", CASES, ids=str)


def mixed(data: cases.Data, parity: int) -> tuple[cases.Data, np.ndarray]:
    """Every other token reads everything; also a mask of these tokens (n_stream, n_tok)."""
    n_tok, n_stream = data.case.batch
    every = np.arange(n_stream * n_tok).reshape(n_stream, n_tok) % 2 == parity
    kl = data.kl.copy()
    kl[:, 0, :, 0] = np.where(every, -1, kl[:, 0, :, 0])
    return replace(data, kl=kl), every


@over_cases
@pytest.mark.parametrize("exact", [False, True], ids=["sparq", "topk"])
def test_mixed_batch(case: Case, exact: bool, ggml: Ggml) -> None:
    """Each token has the bits that it has in a batch of its own kind, by any number of threads.

    On a GPU one launch has all tokens of a batch, and adds up in another order than dense ATTEND.
    """
    data = cases.make(case)
    assert np.isnan(data.k).any() or case.mask != "part", "hidden positions are poisoned"
    dense, sparse = dense_run(ggml, data), sparse_run(ggml, data, exact=exact)
    limit = 0 if ggml.same_bits else 16 * EPS32 * np.abs(dense).max()
    for parity in (0, 1):
        both, every = mixed(data, parity)
        want = np.where(every[..., None, None], dense, sparse)
        for n_threads in ggml.threads(1, 2, 3, 16):
            got = sparse_run(ggml, both, n_threads, exact)
            assert np.array_equal(got[~every], want[~every]), n_threads
            assert np.abs(got - want).max() <= limit, n_threads
    both.kl[..., 0] = -1
    assert np.abs(sparse_run(ggml, both, exact=exact) - dense).max() <= limit


@over_cases
@pytest.mark.parametrize("exact", [False, True], ids=["sparq", "topk"])
def test_tokens_of_prompts_among_replies(case: Case, exact: bool, ggml: Ggml) -> None:
    """As llama/ hides them: they ask for nothing, see nothing, get zeros, and disturb nobody."""
    data = cases.make(case)
    want = sparse_run(ggml, data, exact=exact)
    for parity in (0, 1):
        _, gone = mixed(data, parity)
        mask, kl, forced = data.mask.copy(), data.kl.copy(), data.forced.copy()
        mask[:, 0][gone], kl[:, 0][gone], forced[:, 0][gone] = -np.inf, 0, -1
        both = replace(data, mask=mask, kl=kl, forced=forced)
        for n_threads in ggml.threads(1, 3):
            got = sparse_run(ggml, both, n_threads, exact)
            assert (got[gone] == 0).all()
            assert np.array_equal(got[~gone], want[~gone]), n_threads


@over_cases
def test_each_token_has_its_own_rank(case: Case, ggml: Ggml) -> None:
    """It is scored as in a batch that has this rank; ranks out of range are clamped."""
    n_tok, n_stream = case.batch
    ranks = np.resize([1, case.d, 7, 16, 33], (n_stream, 1, n_tok, 1))
    data = cases.make(case)
    wide = replace(data, kl=np.concatenate([data.kl, ranks + (ranks == case.d)], axis=3))

    def run(data: cases.Data, rank: int, i_rank: int) -> tuple[np.ndarray, int]:
        with ggml.graph() as g:
            s = Sources(data, g)
            p = ScoreParams(rank, case.scale, case.max_bias, case.softcap, 16, case.n_rot, i_rank)
            sizes = (data.topk_max, case.heads[1], data.n_local_max, case.mean_v, case.top_p)
            select = SelectParams(*sizes, i_forced=data.kl.shape[3])
            node = s.node("score_select", ScoreSelectParams(p, select))
            g.compute(node, n_threads=n_threads)
            return g.read(node).copy(), s.stats_read()["bytes_score"]

    for n_threads in ggml.threads(1, 2, 3, 16):
        got, _ = run(wide, case.d, 2)
        for rank in np.unique(ranks):
            want, _ = run(data, int(rank), 0)
            mine = (ranks == rank)[:, 0, :, 0]
            assert np.array_equal(got[mine], want[mine]), (n_threads, rank)
    n_threads = 1
    each = {rank: run(data, int(rank), 0)[1] for rank in (1, 2, 3)}
    assert each[3] - each[2] == each[2] - each[1] > 0
    same = replace(data, kl=np.concatenate([data.kl, np.full_like(ranks, 2)], axis=3))
    assert run(same, case.d, 2)[1] == each[2]


DRAFTS = [replace(c, batch=(7, c.batch[1]), mask="part") for c in CASES if c.n_kv != 501]


@pytest.mark.parametrize("case", DRAFTS, ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["sparq", "topk"])
def test_tokens_of_one_sequence(case: Case, exact: bool, ggml: Ggml) -> None:
    """Each sees those before it in the batch, and has the bits that it has alone.

    Alone there are fewer positions in all: the view of the cache ends with its block of 256, and
    what comes after the token is not written yet.
    """
    data = cases.make(case)
    first = 511 - 3  # of the last block of 256 or so, which some of them alone do not see
    n_tok = case.batch[0]
    mask = data.mask.copy()
    for i in range(n_tok):
        mask[:, :, i, first + i + 1 :] = -np.inf
    both = sparse_run(ggml, replace(data, mask=mask), exact=exact)
    assert np.isfinite(both).all() and both.any()
    for i in range(n_tok):
        n_kv = min(-(-(first + i + 1) // 256) * 256, case.n_kv)
        k, v = data.k[:, :n_kv].copy(), data.v[:, :n_kv].copy()
        k[:, first + i + 1 :] = v[:, first + i + 1 :] = np.nan
        alone = replace(
            data,
            case=replace(case, n_kv=n_kv, batch=(1, case.batch[1])),
            q=data.q[:, i : i + 1],
            k=k,
            v=v,
            sealed=data.sealed[:, : -(-n_kv // cases.GROUP)],
            mask=mask[:, :, i : i + 1, :n_kv],
            kl=data.kl[:, :, i : i + 1],
            forced=np.where(data.forced < n_kv, data.forced, -1)[:, :, i : i + 1],
            hidden=data.hidden[:, :n_kv],
        )
        got = sparse_run(ggml, alone, exact=exact)
        assert np.array_equal(got[:, 0], both[:, i]) or not ggml.same_bits, i
