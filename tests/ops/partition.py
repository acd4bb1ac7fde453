"""How evenly the op's work splits over threads: counted at every access of the real kernels.

    python -m pytest -q -s tests/ops/test_partition.py      prints the table

Two cores cannot show by time what 64 would do. The kernels are compiled so that each of their
accesses calls a function that counts (count_reads.c), and run with 1 to 128 threads. The balance of
a node is the mean over the threads of the bytes of K, V and the transposed K, divided by the
largest: 1 is perfect, and times the number of threads it is the speed-up that the split allows.
It is that of the parts that threads begin with, and with NUMA nodes keep to; elsewhere, those that
are done early take from the others, which more threads than cores would not show.
"""

from __future__ import annotations

from ctypes import POINTER, c_bool, c_int, c_long, c_size_t, c_void_p
from pathlib import Path

import numpy as np
from ggml_ctypes import (
    AttendParams,
    PrefillParams,
    ScoreParams,
    ScoreSelectParams,
    SealParams,
    SelectParams,
)
from isa import IsaGgml

from pyorch.native.slots import sources

THREADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
HEADS = (32, 8)
D = 128
Found = dict[tuple[int, str, str], dict[int, float]]  # (positions, method, node): by threads
NAMES = {0: "seal", 1: "visible", 2: "score", 3: "select", 4: "score_select", 5: "attend"}
NAMES[6] = "prefill"


class Counting(IsaGgml):
    """Runs each node by itself; `bytes[name]` is (threads, 9): in each watched region, anywhere."""

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

    def compute(self, graph: c_void_p, nodes: list, n_threads: int) -> None:
        for node in nodes:
            self.take()
            super().compute(graph, [node], n_threads)
            if node.contents.op_params[0] in NAMES:
                name = NAMES[node.contents.op_params[0]]
                self.bytes[name] = self.take()[:n_threads]


def count(ggml: Counting, n_pos: int, n_bit: int, rank: int, topk: int, n_threads: int) -> None:
    """One token over `n_pos` sealed positions; K and V are zeros, which any split treats alike.

    n_bit: of the transposed K; 0 runs exact dense attention.
    """
    n_head, n_kv = HEADS
    n_run, n_group = n_pos // 512, n_pos // 64
    with ggml.graph() as g:
        ggml.take(forget=True)

        def zeros(shape: tuple[int, ...], kind: str, watched: bool = True):
            t, array = g.lazy(shape, kind)
            if watched:
                ggml.lib.count_watch(array.ctypes.data, array.nbytes)
            return t, array

        q, values = zeros((1, 1, n_head, D), "f32", False)
        values[:] = np.random.default_rng(0).standard_normal(values.shape)
        k, _ = zeros((1, n_pos, n_kv, D), "f16")
        v, _ = zeros((1, n_pos, n_kv, D), "f16")
        mask, _ = zeros((1, 1, 1, n_pos), "f16", False)
        visible = g.op("ggml_sparse_attn_visible", mask)
        if n_bit == 0:
            src = sources(q=q, k=k, v=v, mask=mask, visible=visible)
            out = g.op("ggml_sparse_attn_attend", src, AttendParams(D**-0.5, 0, 0, 0))
            g.compute(out, n_threads=n_threads)
            return
        if n_bit == 16:
            k_t, k_range = zeros((1, n_kv * D, n_pos + 192), "f16")[0], None
        else:
            k_t, _ = zeros((1, n_kv * D, n_run * 512 * n_bit // 8 + 192), "i8")
            k_range, ranges = zeros((1, n_run, n_kv * D, 2), "f32")
            ranges[..., 0] = 1
        sealed, flags = zeros((1, 1, 1, n_group), "i32", False)
        flags[:] = 1
        n_local = topk // 4
        wanted, row = zeros((1, 1, 1, 2 + n_local + 4), "i32", False)
        row[..., :2] = topk, n_local
        row[..., 2:-4] = np.arange(n_pos - 1, n_pos - 1 - n_local, -1)
        row[..., -4:] = np.arange(4)
        cache = {"k": k, "v": v, "k_t": k_t, "k_range": k_range, "sealed": sealed}
        src = sources(q=q, **cache, mask=mask, visible=visible, wanted=wanted)
        params = ScoreSelectParams(
            ScoreParams(rank, D**-0.5, 0, 0, n_bit), SelectParams(topk, n_kv, n_local, 0)
        )
        g.compute(g.op("ggml_sparq_attn", src, params), n_threads=n_threads)


def count_question(ggml: Counting, n_pos: int, n_threads: int) -> np.ndarray:
    """Two tokens after `n_pos` positions, of one query head for each of 8 KV heads: the bytes of
    K and V that each thread reads."""
    n_kv, n_tok = HEADS[1], 2
    with ggml.graph() as g:
        ggml.take(forget=True)
        rows = []
        for _ in range(2):
            row, array = g.lazy((1, n_pos, n_kv, D), "f16")
            ggml.lib.count_watch(array.ctypes.data, array.nbytes)
            rows.append(row)
        q = g.tensor(np.random.default_rng(0).standard_normal((1, n_tok, n_kv, D)), "f32")
        mask = g.lazy((1, 1, n_tok, n_pos), "f16")[0]
        src = sources(q=q, k=rows[0], v=rows[1], mask=mask)
        out = g.op("ggml_sparse_attn_prefill", src, PrefillParams(D**-0.5, 0, 0, 0, 0))
        g.compute(out, n_threads=n_threads)
        return ggml.bytes["prefill"][:, :8].sum(1)


def shadow_threads(ggml: Counting, n_pos: int, n_threads: int) -> dict[str, np.ndarray]:
    """Which threads write and read the 4-bit codes of each KV head: (heads, threads) by node."""
    n_head, n_kv = HEADS
    n_run, n_group = n_pos // 512, n_pos // 64
    with ggml.graph() as g:
        ggml.take(forget=True)
        k_t, codes = g.lazy((1, n_kv * D, n_pos // 2 + 192), "i8")
        for head in codes.reshape(n_kv, D, -1):
            ggml.lib.count_watch(head.ctypes.data, head.nbytes)
        k, _ = g.lazy((1, n_pos, n_kv, D), "f16")
        k_range, _ = g.lazy((1, n_run, n_kv * D, 2), "f32")
        sealed = g.tensor(np.ones((1, n_group)), "i32")
        groups = g.tensor(np.arange(n_group)[None], "i32")
        src = sources(k_t=k_t, k=k, list=groups, k_range=k_range, sealed=sealed)
        k_t = g.op("ggml_sparse_attn_seal", src, SealParams(4))
        values = np.random.default_rng(0).standard_normal((1, 1, n_head, D))
        wanted = g.tensor(np.array([[[[64, 0, 0]]]]), "i32")
        q, mask = g.tensor(values, "f32"), g.tensor(np.zeros((1, 1, 1, n_pos)), "f16")
        src = sources(q=q, k=k, k_t=k_t, k_range=k_range, sealed=sealed, mask=mask, wanted=wanted)
        params = ScoreSelectParams(ScoreParams(32, D**-0.5, 0, 0, 4), SelectParams(64, n_kv, 0, 0))
        out = g.op("ggml_sparse_attn_score_select", src, params)
        g.compute(out, n_threads=n_threads)
        return {name: ggml.bytes[name][:, :8].T > 0 for name in ("seal", "score_select")}


def list_bytes(ggml: Counting, n_group: int, n_bit: int) -> int:
    """Bytes that SEAL of so many groups, with sums of V, reads of the list that names them."""
    with ggml.graph() as g:
        ggml.take(forget=True)
        n_pos, d = n_group * 64, 8
        k_t = g.tensor(np.zeros((1, d, n_pos * n_bit // 8)), "i8")
        k_range = g.tensor(np.zeros((1, n_group // 8, d, 2)), "f32")
        if n_bit == 16:
            k_t, k_range = g.tensor(np.zeros((1, d, n_pos)), "f16"), None
        k, _ = g.lazy((1, n_pos, 1, d), "f16")
        v_sum, _ = g.lazy((1, n_group // 16 * 17, d), "f32")
        groups, array = g.lazy((1, n_group), "i32")
        array[:] = np.arange(n_group)
        ggml.lib.count_watch(array.ctypes.data, array.nbytes)
        sealed = None if n_bit == 16 else g.tensor(np.ones((1, n_group)), "i32")
        src = sources(k_t=k_t, v_sum=v_sum, k=k, v=k, list=groups, k_range=k_range, sealed=sealed)
        out = g.op("ggml_sparse_attn_seal", src, SealParams(n_bit))
        g.compute(out, n_threads=2)
        return int(ggml.bytes["seal"][:, 0].sum())


def add(
    found: Found, key: tuple[int, str], n_threads: int, counts: dict[str, np.ndarray]
) -> dict[str, int]:
    """Put the balance of each node that reads K or V into `found`; returns the bytes.

    "all": of the nodes together; threads wait for each other between them, so the largest counts
    add up. "accesses": of one node, whatever memory it reads or writes, also
    SCORE_SELECT's logits.
    """
    own = {name: c[:, :8].sum(1) for name, c in counts.items() if c[:, :8].any()}
    for name, c in own.items():
        found.setdefault((*key, name), {})[n_threads] = float(c.mean() / c.max())
        any_memory = counts[name][:, 8]
        balance = float(any_memory.mean() / any_memory.max())
        found.setdefault((*key, f"{name}, accesses"), {})[n_threads] = balance
    longest = sum(int(c.max()) for c in own.values())
    mean = sum(float(c.mean()) for c in own.values())
    found.setdefault((*key, "all"), {})[n_threads] = mean / longest
    return {name: int(c.sum()) for name, c in own.items()}


def table(found: Found) -> str:
    """Markdown: a row per length, method and node; a column per number of threads."""
    rows = ["| positions | method | node | " + " | ".join(map(str, THREADS)) + " |"]
    rows.append("| ---: | --- | --- |" + " ---: |" * len(THREADS))
    for (n_pos, method, name), by_threads in found.items():
        cells = " | ".join(f"{by_threads[n]:.2f}" if n in by_threads else "" for n in THREADS)
        rows.append(f"| {n_pos} | {method} | {name} | {cells} |")
    return "\n".join(rows)
