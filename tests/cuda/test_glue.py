"""How nodes are cut into launches: splits, runs per block, scratch, what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import cases
import graphs
import numpy as np
import oracle
import pytest
import test_steps
from cases import Case
from graphs import Sources
from test_layer import planned

CASE = Case(n_kv=1500, heads=(7, 1), d=64, mask="part", extra="mean_v+sinks", strided=True)


@pytest.mark.parametrize("n_sm", [1, 200])
@pytest.mark.parametrize(
    "case",
    [CASE, replace(CASE, heads=(4, 4), type_k="q4_0", extra="plain")],
    ids=str,
)
def test_any_number_of_multiprocessors(case: Case, n_sm: int, ggml) -> None:
    """1: a block walks all its runs, rows are not split. 200: as many blocks as there are tiles."""
    with planned(ggml, n_sm):
        test_steps.check_steps(case, ggml)


def test_what_is_refused(ggml) -> None:
    """An old GPU, another maker's, a shadow whose rows begin anywhere, too many positions."""
    data = cases.make(Case(n_kv=512, d=64, heads=(4, 2), sealed="all"))
    odd = replace(data, k_t=np.concatenate([data.k_t, data.k_t[..., :3]], axis=-1))
    runs, refused = nullcontext(), pytest.raises(NotImplementedError)
    cases_ = [(900, data, runs), (750, data, runs), (700, data, refused)]
    for cc, data_, context in [*cases_, (0x1000000 + 900, data, refused), (900, odd, refused)]:
        with planned(ggml, cc=cc), context, ggml.graph() as graph:
            graph.compute(graphs.score_select(Sources(data_, graph)))
    with pytest.raises(NotImplementedError):  # lists end at two million positions
        test_steps.run_select(ggml, np.zeros((1, 1, 1, 2**21 + 1), np.float32), 1)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
@pytest.mark.parametrize("op", [graphs.score_select, graphs.whole])
def test_a_shadow_is_not_read_behind_its_end(op, heads, ggml) -> None:
    """It has whole groups only: the emulator stops at what lies behind the last of them, though the
    group before it lies in the same run."""
    data = cases.make(Case(n_kv=1000, heads=heads, rank="d", mask="open", sealed="all"))
    with ggml.graph() as graph:
        graph.compute(op(Sources(replace(data, k_t=data.k_t[:, :, : 7 * cases.GROUP]), graph)))


@pytest.mark.parametrize("kind", ["too high", "too low", "more forced than fit"])
@pytest.mark.parametrize(("g", "top_p"), [(1, 1.0), (4, 1.0), (1, 0.9), (4, 0.9)])
def test_a_guessed_cut_does_not_show(g: int, top_p: float, kind: str, ggml) -> None:
    """The cut of a long head is guessed from 1,024 of its positions: eight beside each other, all
    over it. They may be the largest or the smallest of all."""
    n, k = 5000, 64
    rng = np.random.default_rng(5)
    sample = np.arange(1024) // 8 * (n // 128) + np.arange(1024) % 8
    logits = rng.standard_normal((1, 1, g, n)).astype(np.float32)
    logits[..., sample] += {"too high": 20, "too low": -20}.get(kind, 0)
    if kind == "too high":
        logits[..., sample[:40]] += 20  # the guess is among or below these, and above the others
    forced = np.arange(0, 700, 7) if kind == "more forced than fit" else [4999, 0]
    chosen = test_steps.run_select(ggml, logits, k, forced, topk_max=k, top_p=top_p)
    want = oracle.select(logits[0, 0].astype(np.float64), k, list(forced)[:k], k, top_p)
    assert np.array_equal(chosen.cells[0, 0, 0], want)
