"""How evenly the op's work splits over threads: counted at every access of the real kernels.

    python -m pytest -q -s tests/ops/test_partition.py      prints the balances

Two cores cannot show by time what 64 would do. The kernels are compiled so that each of their
accesses calls a function that counts (count_reads.c), and run with 1 to 128 threads. The balance is
the mean over the threads of the bytes of K, V and the transposed K, divided by the largest: 1 is
perfect, and times the number of threads it is the speed-up that the split allows. It is that of the
parts that threads begin with, and with NUMA nodes keep to; elsewhere, those that are done early
take from the others, which more threads than cores would not show.
"""

from __future__ import annotations

import shutil
from ctypes import POINTER, c_bool, c_int, c_long, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import pytest
from ggml_ctypes import (
    AttendParams,
    Graph,
    PrefillParams,
    ScoreParams,
    ScoreSelectParams,
    SelectParams,
)
from isa import IsaGgml

from pyorch.native.slots import STEPS

pytestmark = pytest.mark.slow  # a minute to compile
N_HEAD, N_KV, D = 32, 8, 128
# positions: threads
THREADS = {16384: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128), 131072: (1, 16, 64, 128)}
# name: bits of the transposed K (0: exact dense), topk
METHODS = {"dense": (0, 0), "sparq f16, k 128": (16, 128), "sparq q4, k S/16": (4, 0)}


class Counting(IsaGgml):
    """Runs each node by itself; `bytes[step]` is (threads, 9): in each watched region, anywhere."""

    def __init__(self, lib_dir: Path, headers: Path, folder: Path) -> None:
        super().__init__(lib_dir, "count", headers, folder)
        self.lib.count_watch.argtypes = [c_void_p, c_size_t]
        self.lib.count_take.argtypes = [POINTER(c_long), c_int]
        c_bool.in_dll(self.lib, "isa_numa").value = True
        self.bytes: dict[str, np.ndarray] = {}

    def take(self, forget: bool = False) -> np.ndarray:
        counts = np.zeros((128, 9), np.int64)
        self.lib.count_take(counts.ctypes.data_as(POINTER(c_long)), forget)
        return counts

    def graph(self) -> Graph:
        self.take(forget=True)
        self.bytes = {}
        return super().graph()

    def zeros(self, g: Graph, kind: str, *shape: int):
        """A tensor whose memory is watched."""
        t, array = g.lazy(shape, kind)
        self.lib.count_watch(array.ctypes.data, array.nbytes)
        return t

    def compute(self, graph: c_void_p, nodes: list, n_threads: int) -> None:
        for node in nodes:
            self.take()
            super().compute(graph, [node], n_threads)
            self.bytes[STEPS[node.contents.op_params[0]]] = self.take()[:n_threads]


@pytest.fixture(scope="module")
def counting(tmp_path_factory, native_lib_dir: Path, ggml_headers: Path) -> Counting:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    return Counting(native_lib_dir, ggml_headers, tmp_path_factory.mktemp("counting"))


def query(n_tok: int = 1, n_head: int = N_HEAD) -> np.ndarray:
    shape = (1, n_tok, n_head, D)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def read(ggml: Counting, n_pos: int, n_bit: int, topk: int, n_threads: int) -> list[np.ndarray]:
    """Bytes that each thread reads in each node, for a token over `n_pos` sealed positions; K and V
    are zeros, which any split treats alike."""
    with ggml.graph() as g:
        k, v = (ggml.zeros(g, "f16", 1, n_pos, N_KV, D) for _ in "kv")
        mask = np.zeros((1, 1, 1, n_pos), np.float32)
        visible = np.full((1, 1, 1, n_pos // 128), 128)
        given = {"q": query(), "k": k, "v": v, "mask": mask, "visible": visible}
        if n_bit == 0:
            out = g.node("attend", AttendParams(D**-0.5, 0, 0, 0), **given)
        else:
            if n_bit == 16:
                given["k_t"] = ggml.zeros(g, "f16", 1, N_KV * D, n_pos + 192)
            else:
                given["k_t"] = ggml.zeros(g, "i8", 1, N_KV * D, n_pos * n_bit // 8 + 192)
                given["k_range"] = ggml.zeros(g, "f16", 1, n_pos // 128, N_KV * D, 2)
            n_local = topk // 4
            newest = np.arange(n_pos - 1, n_pos - 1 - n_local, -1)
            given["wanted"] = np.r_[topk, n_local, newest, np.arange(4)].reshape(1, 1, 1, -1)
            given["sealed"] = np.ones((1, 1, 1, n_pos // 128))
            score = ScoreParams(32, D**-0.5, 0, 0, n_bit)
            params = ScoreSelectParams(score, SelectParams(topk, N_KV, n_local, 0))
            out = g.node("sparq_attn", params, **given)
        g.compute(out, n_threads=n_threads)
        return [c[:, :8].sum(1) for c in ggml.bytes.values() if c[:, :8].any()]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_pos", THREADS)
def test_eight_kv_heads_feed_many_threads(n_pos: int, method: str, counting: Counting) -> None:
    """With 32 query heads. Where a node reads little, its units are few: k = 128 is 32 of them.
    Threads wait for each other between nodes, so the largest counts add up."""
    n_bit, topk = METHODS[method]
    balance, total = {}, set()
    for n in THREADS[n_pos]:
        nodes = read(counting, n_pos, n_bit, topk or n_pos // 16, n)
        balance[n] = float(sum(c.mean() for c in nodes) / sum(c.max() for c in nodes))
        total.add(sum(int(c.sum()) for c in nodes))
    print(f"{n_pos} positions, {method}:", {n: round(b, 2) for n, b in balance.items()})
    assert len(total) == 1, "more threads read more"
    assert min(b for n, b in balance.items() if n <= 64) > 0.55
    assert balance[1] == 1 and balance[128] > (0.3 if n_pos < 131072 else 0.6)


def test_few_tokens_feed_many_threads(counting: Counting) -> None:
    """A question after a document, of one query head for each KV head: threads share the positions
    of a head, and none is read twice."""
    n_pos, n_tok, total = 32768, 2, set()
    for n_threads in (1, 8, 16, 64):
        with counting.graph() as g:
            k, v = (counting.zeros(g, "f16", 1, n_pos, N_KV, D) for _ in "kv")
            mask = np.zeros((1, 1, n_tok, n_pos), np.float32)
            params = PrefillParams(D**-0.5, 0, 0, 0)
            out = g.node("prefill", params, q=query(n_tok, N_KV), k=k, v=v, mask=mask)
            g.compute(out, n_threads=n_threads)
            found = counting.bytes["PREFILL"][:, :8].sum(1)
        total.add(int(found.sum()))
        assert found.mean() / found.max() > 0.95, n_threads
    assert len(total) == 1
