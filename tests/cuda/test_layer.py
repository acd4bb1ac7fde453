"""SCORE_SELECT and ATTEND of a layer in one launch: what it does, and when it does.

Both orders of the emulator, by clusters of 1 to 16 blocks. That a result is right the tests of the
op tell (test_kernels.py), which run in one launch, too; here it is compared with separate launches
where the cut is hard to find: a cell too many or too few shows, since V is random.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import cases
import numpy as np
import pytest
import test_quant
from cases import Case
from ggml_ctypes import ScoreParams, ScoreSelectParams, SelectParams
from graphs import Sources, sparse_run, whole
from test_mixed_kinds import CASES as MIXED
from test_mixed_kinds import test_mixed_batch as check_mixed_batch

WANTED = 8  # the source of SCORE_SELECT, in ggml-sparse-nodes.h
HEADS = [(2, 2), (8, 2), (12, 2)]  # the last in two passes over the heads
N_SM = [1, 4, 200]  # for clusters of 1 to 16 blocks


@contextmanager
def planned(ggml, n_sm: int = 0, fuse: bool = True, cc: int = 900) -> Iterator[None]:
    ggml.n_sm, ggml.fuse, ggml.cc = n_sm, fuse, cc
    try:
        yield
    finally:
        ggml.n_sm, ggml.fuse, ggml.cc = 0, True, 900


def check(ggml, data: cases.Data, n_sm: int, *orders: int) -> None:
    with planned(ggml, fuse=False):
        want = sparse_run(ggml, data)
    before = ggml.n_fused
    for n_threads in orders or (1, 2):  # the orders of the emulator
        with planned(ggml, n_sm):
            got = sparse_run(ggml, data, n_threads)
        assert np.allclose(got, want, rtol=0, atol=2e-5 * np.abs(data.v[~data.hidden]).max())
    assert ggml.n_fused == before + (len(orders) or 2), "it was not one launch"


@pytest.mark.parametrize("n_sm", N_SM)
@pytest.mark.parametrize("heads", HEADS)
def test_as_separate_launches(heads: tuple[int, int], n_sm: int, ggml) -> None:
    case = Case(n_kv=2600, d=64, heads=heads, local=32, mask="part", extra="mean_v+sinks", seed=3)
    check(ggml, cases.make(case), n_sm)


@pytest.mark.parametrize("n_bit", test_quant.BITS)
@pytest.mark.parametrize("heads", HEADS[:2])
def test_codes(n_bit: int, heads: tuple[int, int], ggml) -> None:
    """With runs that end early, or have groups for one of two tokens or none."""
    n_grp = 72 if heads == (2, 2) else 11  # a block that has eight runs scans them whole
    n_kv = n_grp * cases.GROUP
    rng = np.random.default_rng(n_bit)
    k, v = (test_quant.keys(rng, (1, n_kv, heads[1], 64)) for _ in "kv")
    q = rng.standard_normal((1, 2, heads[0], 64)).astype(np.float32)
    shadow, sealed = test_quant.shadow_of(ggml, n_bit, k, np.arange(n_grp) != 6)
    sealed[0, 9] = 2
    params = ScoreSelectParams(ScoreParams(16, 0.125, 0, 0, n_bit), SelectParams(99, heads[1], 0))
    given = test_quant.given_of(shadow, q, k, sealed, np.zeros((1, 1, 2, n_kv), np.float32))
    given |= {"v": v, "wanted": np.broadcast_to(np.r_[99, 0, 0], (1, 1, 2, 3))}
    got, before = [], ggml.n_fused
    for plan in ({"fuse": False}, {"n_sm": 1}, {"n_sm": 200}):
        with planned(ggml, **plan), ggml.graph() as g:
            out = g.node("sparq_attn", params, **given)
            g.compute(out)
            got.append(g.read(out))
    assert np.abs(np.subtract(got, got[0])).max() <= 2e-5 * np.abs(v).max()
    assert ggml.n_fused == before + 2, "it was not one launch"


@pytest.mark.parametrize("sealed", ["none", "mixed", "all"])
@pytest.mark.parametrize("n_sm", N_SM)
def test_groups_read_by_rows(sealed: str, n_sm: int, ggml) -> None:
    """34 groups: more than are shared by the blocks of a cluster, if none is sealed."""
    case = Case(n_kv=4300, heads=(4, 2), sealed=sealed, extra="mean_v")
    check(ggml, cases.make(case), n_sm, 2)


def with_logits(heads: tuple[int, int], logits: np.ndarray, topk: str = "64") -> cases.Data:
    """Data whose scores are these, the same for all heads: q has one component."""
    case = Case(len(logits), 64, heads, "d", topk, 0, mask="open", sealed="none", extra="mean_v")
    data = cases.make(case)
    q, k = np.zeros_like(data.q), np.zeros_like(data.k)
    q[..., 0] = 8  # the scale is 1/8
    k[..., 0] = logits[:, None]
    return replace(data, q=q, k=k)


CUTS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "ties": lambda rng, n: np.zeros(n),
    # 20 of the 64, the others by their place
    "two values": lambda rng, n: np.where(rng.permutation(n) < 20, 1.0, -1.0),
    # a bin of all that lies between has nearly all
    "far away": lambda rng, n: np.r_[1000, -1000, rng.standard_normal(n - 2)],
    # f16 parts few of them
    "close together": lambda rng, n: 4 + rng.integers(0, 2000, n) / 512.0 * 2.0**-8,
    "below all bins": lambda rng, n: (
        np.where(rng.permutation(n) < 40, 20.0, -40.0) + rng.standard_normal(n)
    ),
}


@pytest.mark.parametrize("heads", HEADS[:2])
@pytest.mark.parametrize("kind", CUTS)
def test_cuts_that_are_hard_to_find(kind: str, heads: tuple[int, int], ggml) -> None:
    logits = CUTS[kind](np.random.default_rng(7), 3000)
    check(ggml, with_logits(heads, logits.astype(np.float16)), 4)


def test_passes_over_the_keys_are_counted(ggml) -> None:
    rng, n = np.random.default_rng(7), 3000
    for logits, passes in ((rng.standard_normal(n), 0), (CUTS["below all bins"](rng, n), 2)):
        with ggml.graph() as g:
            s = Sources(with_logits((2, 2), logits.astype(np.float16)), g)
            g.compute(whole(s))
            assert s.stats_read()["cut_passes"] == passes


def test_k_is_what_the_bins_hold(ggml) -> None:
    """Those of an only head begin two standard deviations below the mean, here at -2: what lies
    below them is not selected, and is a large part of the mass."""
    forced = with_logits((2, 2), np.zeros(3000)).forced
    logits = np.full(3000, -2.5)
    logits[:60] = logits[forced[forced >= 0]] = 0
    check(ggml, with_logits((2, 2), logits, topk=str((logits == 0).sum())), 4)


@pytest.mark.parametrize("topk", ["8", "n-1", "n", "n+5"])
@pytest.mark.parametrize("heads", HEADS[:2])
def test_any_k(topk: str, heads: tuple[int, int], ggml) -> None:
    check(ggml, cases.make(Case(1500, 64, heads, topk=topk, mask="part", extra="mean_v")), 4, 2)


@pytest.mark.parametrize("heads", HEADS[:2])
def test_what_is_not_finite(heads: tuple[int, int], ggml) -> None:
    """A NaN among the keys, which hides its cell; a query of NaN and of inf."""
    data = cases.make(Case(700, 64, heads, "d", sealed="none", mask="open", batch=(3, 1)))
    data.k[:, 100] = np.nan
    data.q[:, 1, 0, 3] = np.nan
    data.q[:, 2, 0, 5] = np.inf
    with planned(ggml, fuse=False):
        want = sparse_run(ggml, data)
    got = sparse_run(ggml, data)
    assert np.array_equal(np.isfinite(got), np.isfinite(want))
    assert np.allclose(got[np.isfinite(got)], want[np.isfinite(got)], rtol=0, atol=1e-4)


def test_when_it_is_one_launch(ggml) -> None:
    """On Hopper and later; without top_p; up to 32 query heads per KV head."""
    plain = Case(n_kv=600, heads=(4, 2))
    for case, cc, one in [
        (plain, 900, True),
        (plain, 890, False),
        (replace(plain, extra="top_p"), 900, False),
        (replace(plain, heads=(64, 1)), 900, False),
        (replace(plain, topk="1", local=1), 900, False),  # more are forced than selected
        (replace(plain, type_k="q8_0"), 900, True),
    ]:
        before = ggml.n_fused
        with planned(ggml, cc=cc):
            sparse_run(ggml, cases.make(case))
        assert (ggml.n_fused > before) == one, (case, cc)


def test_a_result_that_lies_on_what_is_read_is_not_made_in_one_launch(ggml, monkeypatch) -> None:
    """llama.cpp may give ATTEND the memory of `wanted`, which it does not read itself."""
    data = cases.make(Case(n_kv=600, heads=(4, 2), batch=(3, 1)))
    want = sparse_run(ggml, data)
    compute = ggml.compute

    def on_top(graph, nodes, n_threads: int) -> None:
        select, attend = (node.contents for node in nodes[-2:])
        row = select.src[WANTED].contents
        n = ggml.base.ggml_nbytes(select.src[WANTED])
        assert n <= ggml.base.ggml_nbytes(nodes[-1])
        ctypes.memmove(attend.data, row.data, n)
        row.data = attend.data
        compute(graph, nodes, n_threads)

    monkeypatch.setattr(ggml, "compute", on_top)
    before = ggml.n_fused
    assert np.allclose(sparse_run(ggml, data), want, rtol=0, atol=1e-5)
    assert ggml.n_fused == before


def test_separate_launches_give_mixed_batches_the_same_bits(ggml, monkeypatch) -> None:
    """Before Hopper a token that reads everything still has the bits of dense attention."""
    monkeypatch.setattr(ggml, "same_bits", True)
    with planned(ggml, cc=890):
        check_mixed_batch(MIXED[0], False, ggml)
