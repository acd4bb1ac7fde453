"""Times exact attention over one latent for all heads (MLA), ggml's against ours, in turns.

    python -m bench latent [--heads 16,20,128] [-d 4096,32768,131072] [-t 2]

Each node is computed by itself, on K in f16 that is larger than any cache but at 4,096 positions,
with V a view of K as in llama.cpp. Both results are compared with numpy in f64.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from ctypes import byref, c_bool, c_char, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from bench import runner
from bench.gpu.device import TYPES, InitParams, TensorPtr
from pyorch import native
from pyorch.bench import records
from pyorch.bench.bandwidth import MemoryReader
from pyorch.bench.records import Done, Record, Result, spread
from pyorch.cli.types import Numbers
from pyorch.native.params import AttendParams
from pyorch.native.slots import sources
from pyorch.table import markdown

D_K, D_V = 576, 512
KERNELS = ("ggml -fa 1", "ours")


class Plan(ctypes.Structure):
    """ggml_cplan, with room for fields of later versions."""

    _fields_ = [("work_size", c_size_t), ("work_data", c_void_p), ("rest", c_char * 256)]


@dataclass(frozen=True)
class Case:
    n_head: int
    n_depth: int
    n_threads: int
    kernel: str
    n_samples: int
    library: str = "sparq"


OPTIONS = (
    click.option("--heads", type=Numbers(1), default="16,20,128", show_default=True),
    click.option("-d", "--n-depth", type=Numbers(256), default="4096,32768,131072"),
    runner.THREADS,
    runner.samples(15),
)  # fmt: skip


def groups(given: runner.Given) -> list[list[Case]]:
    """The two kernels of a shape take turns."""
    return [
        [Case(h, n, given.threads, kernel, given.samples) for kernel in KERNELS]
        for h in given.heads
        for n in given.n_depth
    ]


def _ggml() -> tuple[Any, Any]:
    base = ctypes.CDLL(str(native.built() / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(native.built() / "libggml-cpu.so"))
    t, p = TensorPtr, c_void_p
    functions: tuple[tuple[Any, ...], ...] = (
        (base, "ggml_init", p, InitParams),
        (base, "ggml_free", None, p),
        (base, "ggml_new_tensor", t, p, c_int, c_int, c_void_p),
        (base, "ggml_view_4d", t, p, t, *[c_int64] * 4, *[c_size_t] * 4),
        (base, "ggml_new_graph", p, p),
        (base, "ggml_build_forward_expand", None, p, t),
        (base, "ggml_flash_attn_ext", t, p, t, t, t, t, c_float, c_float, c_float),
        (base, "ggml_sparse_attn_visible", t, p, t),
        (base, "ggml_sparse_attn_attend", t, p, c_void_p, AttendParams),
        (cpu, "ggml_graph_plan", Plan, p, c_int, p),
        (cpu, "ggml_graph_compute", c_int, p, p),
    )
    for lib, name, result, *args in functions:
        getattr(lib, name).restype = result
        getattr(lib, name).argtypes = args
    cpu.ggml_cpu_init.argtypes, cpu.ggml_cpu_init.restype = [], c_bool
    cpu.ggml_cpu_init()
    return base, cpu


def _aligned(n: int, dtype: Any) -> Any:
    n_bytes = n * np.dtype(dtype).itemsize
    raw = np.zeros(n_bytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + n_bytes].view(dtype)


def measure(_: runner.Given, group: Sequence[Case], __: Done) -> list[Result]:
    """samples_ns, the largest error against f64, and the bytes of K."""
    c = group[0]
    base, cpu = _ggml()
    rng = np.random.default_rng(1)
    k, q, m = (_aligned(n, t) for n, t in (
        (D_K * c.n_depth, np.float16), (D_K * c.n_head, np.float32), (64 * c.n_depth, np.float16)
    ))  # fmt: skip
    k[:] = rng.standard_normal(k.size, np.float32)
    q[:] = rng.standard_normal(q.size, np.float32) / 2
    visible = _aligned(c.n_depth // 64 + 64, np.int32)
    visible[:] = 64
    scale = float(1 / np.sqrt(192))
    memory = np.empty(1 << 20, np.uint8)
    ctx = base.ggml_init(InitParams(memory.nbytes, memory.ctypes.data, True))

    def new(kind: str, array: Any, *ne: int) -> Any:
        t = base.ggml_new_tensor(ctx, TYPES[kind], len(ne), (c_int64 * len(ne))(*ne))
        t.contents.data = array.ctypes.data
        return t

    def values(t: Any, ne: tuple[int, ...], nb: tuple[int, ...]) -> Any:
        v = base.ggml_view_4d(ctx, t, *ne, *nb, 0)
        v.contents.data = t.contents.data
        return v

    row, size = 2 * D_K, k.nbytes
    k_all = new("f16", k, D_K, c.n_depth, 1, 1)
    stock = base.ggml_flash_attn_ext(
        ctx, new("f32", q, D_K, 1, c.n_head, 1), k_all,
        values(k_all, (D_V, c.n_depth, 1, 1), (row, size, size)),
        new("f16", m, c.n_depth, 64, 1, 1), scale, 0, 0,
    )  # fmt: skip
    k_one, mask = new("f16", k, D_K, 1, c.n_depth, 1), new("f16", m, c.n_depth, 1, 1, 1)
    seen = base.ggml_sparse_attn_visible(ctx, mask)
    seen.contents.data = visible.ctypes.data
    v_one = values(k_one, (D_V, 1, c.n_depth, 1), (row, row, size))
    given = sources(q=new("f32", q, D_K, c.n_head, 1, 1), k=k_one, v=v_one, mask=mask, visible=seen)
    ours = base.ggml_sparse_attn_attend(ctx, byref(given), AttendParams(scale, 0, 0, 0))
    runs, results = [], []
    for t in (stock, ours):
        results.append(_aligned(D_V * c.n_head, np.float32))
        t.contents.data = results[-1].ctypes.data
        graph = base.ggml_new_graph(ctx)
        base.ggml_build_forward_expand(graph, t)
        plan = cpu.ggml_graph_plan(graph, c.n_threads, None)
        work = _aligned(plan.work_size + 64, np.uint8)
        plan.work_data = work.ctypes.data
        runs.append((graph, plan, work))
    reader = MemoryReader(c.n_threads)
    samples: list[list[int]] = [[], []]
    bandwidth = []
    for i in range(-2, c.n_samples):
        bandwidth.append(reader.read())
        for j in (0, 1) if i % 2 else (1, 0):
            start = time.perf_counter_ns()
            cpu.ggml_graph_compute(runs[j][0], byref(runs[j][1]))
            if i >= 0:
                samples[j].append(time.perf_counter_ns() - start)
    base.ggml_free(ctx)
    k64, q64 = (
        k.reshape(c.n_depth, D_K).astype(np.float64),
        q.reshape(c.n_head, D_K).astype(np.float64),
    )
    x = q64 @ k64.T * scale
    p = np.exp(x - x.max(1, keepdims=True))
    wanted = p / p.sum(1, keepdims=True) @ k64[:, :D_V]
    errors = [float(np.abs(r.reshape(c.n_head, D_V) - wanted).max()) for r in results]
    assert max(errors) < 0.05, errors
    return [
        {"samples_ns": s, "error": e, "bytes": k.nbytes, "bandwidth_bytes_per_s": bandwidth[2:]}
        for s, e in zip(samples, errors, strict=True)
    ]


def table(recs: Sequence[Record]) -> str:
    rows = []
    best: dict[tuple[int, int, int], float] = {}
    for rec in recs:
        c = records.read_case(Case, rec)
        mid, low, high = (x / 1e6 for x in spread(rec["samples_ns"]))
        shape = c.n_head, c.n_depth, c.n_threads
        best.setdefault(shape, mid)
        flops = 2 * c.n_head * c.n_depth * (D_K + D_V)
        share = rec["bytes"] / mid * 1e3 / np.median(rec["bandwidth_bytes_per_s"])
        rows.append([
            *map(str, shape), f"`{c.kernel}`", f"{mid:.2f} ({low:.2f}-{high:.2f})",
            f"{best[shape] / mid:.2f}x", f"{flops / mid / 1e6:.0f}", f"{share:.0%}",
            f"{rec['error']:.0e}",
        ])  # fmt: skip
    head = ["heads", "positions", "threads", "attention", "ms (p10-p90)", "against ggml"]
    head += ["GFLOP/s", "of memory's speed", "largest error"]
    return markdown(head, rows, left=("attention",))


MEASUREMENT = runner.Measurement(
    name="latent",
    about="Exact attention over one latent for all heads.",
    options=OPTIONS,
    groups=groups,
    measure=measure,
    table=table,
    cost=lambda group: group[0].n_depth * group[0].n_head,
)
