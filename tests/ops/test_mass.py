"""The share of the true attention that an ATTEND node reads, against the oracle."""

from __future__ import annotations

import ctypes

import cases
import graphs
import numpy as np
import oracle
import pytest
from cases import Case
from ggml_ctypes import Ggml, TensorPtr, _library
from graphs import Selection, Sources

CASES = [
    c if c.size <= 600_000 else pytest.param(c, marks=pytest.mark.slow) for c in cases.quick_cases()
]


def mass(ggml: Ggml, node) -> float:
    call = ctypes.CDLL(str(_library(ggml.folder, "llama"))).llama_sparse_attn_mass
    call.restype, call.argtypes = ctypes.c_double, [TensorPtr]
    return call(node)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mass_is_the_share_of_the_softmax(case: Case, ggml: Ggml) -> None:
    """Of positions drawn at random, with hidden ones poisoned. A sink misses nothing."""
    data, rng = cases.make(case), np.random.default_rng(case.seed)
    cells, want = {}, []
    for b in data.blocks():
        seen = oracle.visible_positions(b.bias)
        n = min(data.topk_max, -(-len(seen) // 3))
        chosen = np.sort(rng.choice(seen, n, replace=False))
        cells[b.stream, b.tok, b.head] = chosen
        logits = oracle.logits_of(b.q, b.k, b.bias, case.scale, case.softcap)
        want.append(oracle.mass_kept(logits, chosen, b.sinks))
    n_tok, n_stream = case.batch
    group = case.heads[0] // case.heads[1]
    rest = np.full((n_stream, n_tok, case.heads[1], group), -np.inf)
    with ggml.graph() as g:
        s = Sources(data, g)
        sel = g.tensor(Selection.pack(cells, rest, data.topk_max), "i32")
        got = mass(ggml, graphs.attend(s, sel))
    assert 0 < np.mean(want) <= 1
    assert got == pytest.approx(np.mean(want), abs=2e-5)


def test_nothing_is_missed_where_all_is_read(ggml: Ggml) -> None:
    data = cases.make(Case(n_kv=333, batch=(2, 1)))
    every = np.full((1, 2, 2, 1 + 4 + data.topk_max), -1, np.int32)
    with ggml.graph() as g:
        s = Sources(data, g)
        assert mass(ggml, graphs.attend(s, None)) == 1
        assert mass(ggml, graphs.attend(s, g.tensor(every, "i32"))) == 1
