"""Work buffers are planned for more threads than may run: OpenMP has limits, a pool may be smaller.

The result has the same bits then, and nothing beyond the buffer is written.
"""

from __future__ import annotations

from dataclasses import replace

import cases
import graphs
import numpy as np
import pytest
import test_quant
from cases import Case
from ggml_ctypes import Ggml, SealParams
from graphs import Sources

PLANNED = ((2, 1), (3, 2), (8, 7), (15, 14), (16, 3))  # threads of the plan, threads that run
# shapes that no number of threads divides
CASES = [
    Case(n_kv=501, heads=(7, 1), d=100, type_k="f32", batch=(1, 2), mask="alibi", extra="mean_v"),
    Case(n_kv=2042, heads=(5, 5), d=80, batch=(3, 1), mask="part", extra="mean_v+sinks+top_p"),
    Case(n_kv=9000, heads=(6, 2), d=64, type_k="q8_0", topk="n-1", mask="part", seed=1),
]


def run_all(ggml: Ggml, data: cases.Data, n_threads: int) -> list[np.ndarray]:
    with ggml.graph() as g:
        s = Sources(data, g)
        nodes = [g.op("ggml_sparse_attn_visible", s.mask)]
        nodes += [graphs.score(s, exact=True), graphs.score(s)]
        nodes += [graphs.select(s, nodes[-1]), graphs.score_select(s)]
        nodes += [graphs.attend(s, nodes[-1]), graphs.attend(s, None), graphs.prefill(s)]
        g.compute(*nodes, n_threads=n_threads)
        return [g.read(node) for node in nodes]


def seal_all(ggml: Ggml, data: cases.Data, n_threads: int) -> list[np.ndarray]:
    """Into f16 with sums of V, and into 4 bits; K in blocks is rotated."""
    case = data.case
    n_grp = data.sealed.shape[1]
    groups = np.tile(np.arange(n_grp), (len(data.k), 1))
    clean = np.nan_to_num(np.clip(data.k, -9, 9))
    k = cases.to_type(clean, case.type_k)
    with ggml.graph() as g:
        k_t = g.tensor(np.zeros_like(data.k_t), "f16", inplace=True)
        v_sum = g.tensor(np.zeros_like(data.v_sum), "f32", inplace=True)
        given = {"k_t": k_t, "v_sum": v_sum, "k": (k, case.type_k), "v": (data.v, case.type_v)}
        out = g.node("seal", SealParams(16, case.n_rot), list=groups, **given)
        g.compute(out, n_threads=n_threads)
        res = [g.read(out), g.read(v_sum)]
    shadow = test_quant.Shadow.empty(4, len(k), case.heads[1] * case.d, case.n_kv)
    shadow = test_quant.seal(ggml, shadow, k, groups, case.type_k, n_threads=n_threads)
    return [*res, shadow.codes, shadow.ranges]


def check(run, ggml: Ggml, data: cases.Data, monkeypatch: pytest.MonkeyPatch) -> None:
    want = run(ggml, data, 1)
    for planned, n_threads in PLANNED:
        monkeypatch.setattr(ggml, "n_planned", planned)
        got = run(ggml, data, n_threads)
        same = [np.array_equal(a, b, equal_nan=True) for a, b in zip(got, want, strict=True)]
        assert all(same), f"{n_threads} of {planned} threads: {same}"
        monkeypatch.setattr(ggml, "n_planned", 0)


@pytest.mark.parametrize("run", [run_all, seal_all], ids=["steps", "seal"])
def test_fewer_threads_than_planned(run, ggml: Ggml, monkeypatch) -> None:
    for case in CASES:
        check(run, ggml, cases.make(case), monkeypatch)


def prefill(ggml: Ggml, data: cases.Data, n_threads: int) -> list[np.ndarray]:
    return [graphs.prefill_run(ggml, data, n_threads)]


def test_fewer_threads_than_planned_read_a_prompt(ggml: Ggml, monkeypatch) -> None:
    """Units of PREFILL are larger where 7 threads run, not 8; at each of its sizes of a block."""
    case = Case(n_kv=70, heads=(8, 4), d=64, type_k="f32", topk="1", local=0, mask="open")
    for n_tok in (13, 52, 208):
        check(prefill, ggml, cases.make(replace(case, batch=(n_tok, 1))), monkeypatch)
    few = Case(n_kv=9000, heads=(8, 8), d=64, batch=(3, 1), mask="part")
    # 8 threads have a head each, 7 share positions
    check(prefill, ggml, cases.make(few), monkeypatch)
