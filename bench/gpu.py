"""Measures attention by itself on a CUDA device: SparQ against the best dense attention.

    python bench/gpu.py                 # Table 4, Fig. 8 (batch 64) and F1 (batch 1, MHA and GQA)
    python bench/gpu.py --quick         # small sizes, to see that it runs

A graph has several layers with their own K and V, more bytes than any cache holds, so that every
layer reads fresh data. It is computed again and again (llama.cpp then replays it as one CUDA graph)
and timed by the host's clock from the call until the device is done: launches count, as they do in
decoding. What each kernel takes of it is read from torch's profiler, in one more run. Dense
attention is ggml's flash attention, and torch's scaled_dot_product_attention if torch is installed
(each of its backends, in a CUDA graph, timed in the same way). The time excludes SEAL.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "ops")]

import commands  # noqa: E402
from ggml_ctypes import (  # noqa: E402
    STATS,
    TYPES,
    Ggml,
    InitParams,
    ScoreParams,
    ScoreSelectParams,
    SealParams,
    SelectParams,
    TensorPtr,
    _library,
)

from pyorch import native  # noqa: E402
from pyorch.attention.bytes import GROUP, GROUPS_PER_SUM, RUN, SHADOW_BYTES  # noqa: E402
from pyorch.bench import records  # noqa: E402
from pyorch.cli import run as run_command  # noqa: E402
from pyorch.errors import SparqError  # noqa: E402
from pyorch.native.slots import sources  # noqa: E402

FILE = "gpu_attention.jsonl"
BENCH = "gpu_attention"
D, RANK, TOPK, LOCAL, SINKS = 128, 32, 128, 32, 4
SHADOWS = {name: int(8 * size) for name, size in SHADOW_BYTES.items()}  # bits
FRESH = 2 << 30  # the least bytes of K and V in a graph
SECONDS = 0.3  # of timed repetitions of a case
POOL = 8_388_593  # random elements of K and V: a prime, so that no two rows are alike


class NoTorch(SparqError):
    """Torch is missing: dense attention is only ggml's, and no case has failed."""


@dataclass(frozen=True)
class Case:
    batch: int
    n_head: int
    n_head_kv: int
    positions: int
    method: str  # `copy`, `ggml flash`, `torch sdpa`, `sparq f16|q8|q4`
    rank: int = RANK
    topk: int = TOPK
    head_dim: int = D
    type_kv: str = "f16"

    def __str__(self) -> str:
        heads = f"batch {self.batch:2} heads {self.n_head}/{self.n_head_kv}"
        return f"{heads} S {self.positions:6} {self.method}"

    @property
    def layer_bytes(self) -> int:
        """The bytes of K and V in a layer."""
        return 4 * self.batch * self.n_head_kv * self.positions * self.head_dim


def cases(quick: bool) -> list[Case]:
    shapes = [(64, 32, 32, 4096)]
    shapes += [(1, 32, kv, 4096 << i) for kv in (32, 8) for i in range(6)]
    if quick:
        shapes = [(2, 4, 4, 768), (1, 8, 2, 1024)]
    methods = ("ggml flash", "torch sdpa", *(f"sparq {s}" for s in SHADOWS))
    return [Case(*shape, method) for shape in shapes for method in methods]


class Device(Ggml):
    """The ggml of a build, and one of its devices."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__(folder)
        base, t, p = self.base, TensorPtr, c_void_p
        for name, result, *args in (
            ("ggml_backend_reg_dev_get", p, p, c_size_t),
            ("ggml_backend_reg_dev_count", c_size_t, p),
            ("ggml_backend_dev_init", p, p, c_char_p),
            ("ggml_backend_dev_description", c_char_p, p),
            ("ggml_backend_dev_supports_op", c_bool, p, t),
            ("ggml_backend_dev_memory", None, p, p, p),
            ("ggml_backend_dev_buffer_type", p, p),
            ("ggml_backend_alloc_ctx_tensors_from_buft", p, p, p),
            ("ggml_backend_buffer_free", None, p),
            ("ggml_backend_tensor_set", None, t, p, c_size_t, c_size_t),
            ("ggml_backend_tensor_get", None, t, p, c_size_t, c_size_t),
            ("ggml_backend_graph_compute", c_int, p, p),
            ("ggml_cpy", t, p, t, t),
            ("ggml_permute", t, p, t, c_int, c_int, c_int, c_int),
            ("ggml_flash_attn_ext", t, p, t, t, t, t, c_float, c_float, c_float),
        ):
            getattr(base, name).restype = result
            getattr(base, name).argtypes = args
        where = str(_library(folder, "ggml-cuda")) if device == "cuda" else device
        library = ctypes.CDLL(where)
        register = library.ggml_backend_cuda_reg if device == "cuda" else library.ggml_backend_init
        register.restype = p
        reg = register()
        if not base.ggml_backend_reg_dev_count(reg):
            raise SparqError("no CUDA device", "sparq-cpp doctor")
        self.dev = base.ggml_backend_reg_dev_get(reg, 0)
        self.backend = base.ggml_backend_dev_init(self.dev, None)
        self.name = base.ggml_backend_dev_description(self.dev).decode()

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.base.ggml_backend_dev_memory(self.dev, ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextmanager
    def context(self) -> Iterator[c_void_p]:
        size = 32 << 20
        memory = np.empty(size, np.uint8)
        ctx = self.base.ggml_init(InitParams(size, memory.ctypes.data, True))
        self.buffer = None
        try:
            yield ctx
        finally:
            if self.buffer:
                self.base.ggml_backend_buffer_free(self.buffer)
            self.base.ggml_free(ctx)

    def new(self, ctx: c_void_p, kind: str, *ne: int) -> Any:
        return self.base.ggml_new_tensor(ctx, TYPES[kind][0], len(ne), (c_int64 * len(ne))(*ne))

    def allocate(self, ctx: c_void_p) -> None:
        """Allocate all tensors of the context, including the results of nodes."""
        buft = self.base.ggml_backend_dev_buffer_type(self.dev)
        self.buffer = self.base.ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft)
        if not self.buffer:
            raise SparqError("no memory on the device for this case", "smaller sizes: --quick")

    def fill(self, t: Any, block: np.ndarray) -> None:
        """Fill a tensor by repeating a block."""
        raw, size = block.view(np.uint8).reshape(-1), self.base.ggml_nbytes(t)
        for at in range(0, size, raw.size):
            self.base.ggml_backend_tensor_set(t, raw.ctypes.data, at, min(raw.size, size - at))

    def graph(self, ctx: c_void_p, nodes: list[Any]) -> c_void_p:
        graph = self.base.ggml_new_graph(ctx)
        for node in nodes:
            self.base.ggml_build_forward_expand(graph, node)
            if not self.base.ggml_backend_dev_supports_op(self.dev, node):
                raise SparqError(f"{self.name} has no kernel for a node of this case", "doctor")
        return graph

    def run(self, graph: c_void_p) -> None:
        """Compute a graph. Returns when the device is done."""
        if self.base.ggml_backend_graph_compute(self.backend, graph) != 0:
            raise SparqError("the device failed to compute the graph", "sparq-cpp doctor")


def timed(run: Callable[[], None], n_layer: int, seconds: float) -> list[float]:
    """The nanoseconds per layer of each repetition, without the first runs, in which graphs are
    captured."""
    for _ in range(4):
        run()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 10 or (time.perf_counter() < end and len(samples) < 500):
        start = time.perf_counter_ns()
        run()
        samples.append((time.perf_counter_ns() - start) / n_layer)
    return samples


def kernel_times(run: Callable[[], None], n_layer: int) -> dict[str, float]:
    """The microseconds per layer of each kernel, by its name; empty without torch."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    torch.zeros(1, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            ours = re.search(r"sparse_cuda::(\w+)", event.key)
            name = ours.group(1) if ours else event.key[:60]
            found[name] = found.get(name, 0.0) + event.self_device_time_total / n_layer
    return found


def copy_bandwidth(device: Device, n_bytes: int, seconds: float) -> tuple[float, str]:
    """The GB/s of a copy within the device, counting bytes read and written, and whose copy it is:
    torch's, which is the faster one, or without torch ggml's."""
    by = "torch"
    try:
        import torch

        torch.cuda.init()
    except (ImportError, RuntimeError, AssertionError):
        by = "ggml"
        with device.context() as ctx:
            a, b = (device.new(ctx, "f32", n_bytes // 4) for _ in range(2))
            node = device.base.ggml_cpy(ctx, a, b)
            device.allocate(ctx)
            device.fill(a, np.ones(1 << 20, np.float32))
            graph = device.graph(ctx, [node])
            samples = timed(lambda: device.run(graph), 1, seconds)
    else:
        x = torch.ones(n_bytes // 4, device="cuda")
        y = torch.empty_like(x)

        def copy() -> None:
            y.copy_(x)
            torch.cuda.synchronize()

        samples = timed(copy, 1, seconds)
    return 2 * n_bytes / float(np.median(samples)), by


def layers_of(device: Device, case: Case, fresh: int) -> int:
    need = -(-fresh // case.layer_bytes)
    most = int(device.free_bytes() * 0.5 / (case.layer_bytes * 1.6))
    if most < 1:
        raise SparqError("K and V of one layer do not fit on the device", "a larger device")
    return max(1, min(need, most, 64))


def measure(device: Device, case: Case, fresh: int, seconds: float) -> dict[str, Any]:
    """Returns samples_ns per layer, the number of layers, and the bytes read per layer."""
    if case.method == "torch sdpa":
        return measure_torch(case, layers_of(device, case, fresh), seconds)
    c, n, base = case, layers_of(device, case, fresh), device.base
    rng = np.random.default_rng(1)
    block = rng.standard_normal(POOL, np.float32).astype(np.float16)
    n_grp = -(-c.positions // GROUP)
    with device.context() as ctx:
        mask = device.new(ctx, "f16", c.positions, 1, 1, c.batch)
        q = [device.new(ctx, "f32", D, c.n_head, 1, c.batch) for _ in range(n)]
        kv = [
            [device.new(ctx, "f16", D, c.n_head_kv, c.positions, c.batch) for _ in range(2)]
            for _ in range(n)
        ]
        scale, stats = float(1 / np.sqrt(D)), None
        before: list[Any] = []
        if c.method == "ggml flash":
            nodes = [
                base.ggml_flash_attn_ext(
                    ctx, *(base.ggml_permute(ctx, x, 0, 2, 1, 3) for x in (qi, *kvi)),
                    mask, scale, 0.0, 0.0,
                )
                for qi, kvi in zip(q, kv, strict=True)
            ]  # fmt: skip
        else:
            stats, before, nodes, inputs = sparq(device, ctx, c, q, kv, mask, scale, n_grp)
        device.allocate(ctx)
        for x in q:
            device.fill(x, rng.standard_normal(D * c.n_head * c.batch, np.float32))
        for x in (x for pair in kv for x in pair):
            device.fill(x, block)
        device.fill(mask, np.zeros(1 << 16, np.float16))
        read = c.layer_bytes
        if stats is not None:
            write_inputs(device, c, inputs, n_grp)
            device.run(device.graph(ctx, before))  # seal everything
        graph = device.graph(ctx, nodes)
        if stats is not None:
            device.fill(stats, np.zeros(len(STATS), np.int64))
            device.run(graph)
            counted = np.zeros(len(STATS), np.int64)
            base.ggml_backend_tensor_get(stats, counted.ctypes.data, 0, counted.nbytes)
            found = dict(zip(STATS, counted.tolist(), strict=True))
            if found["attend_sparse"] != n * c.batch:
                raise SparqError(f"{c.method}: not every layer ran sparse: {found}", "a bug")
            read = (found["bytes_score"] + found["bytes_attend"]) // n
        samples = timed(lambda: device.run(graph), n, seconds)
        kernels = kernel_times(lambda: device.run(graph), n)
        return {"samples_ns": samples, "n_layer": n, "bytes_read": read, "kernels_us": kernels}


def sparq(
    device: Device,
    ctx: c_void_p,
    c: Case,
    q: list[Any],
    kv: list[list[Any]],
    mask: Any,
    scale: float,
    n_grp: int,
) -> tuple[Any, list[Any], list[Any], dict[str, Any]]:
    """(stats, SEAL nodes, ATTEND nodes, small inputs by name)."""
    bits = SHADOWS[c.method.split()[1]]
    mean_v = c.n_head == c.n_head_kv
    base = device.base

    def new(kind: str, *ne: int) -> Any:
        return device.new(ctx, kind, *ne)

    inputs = {
        "list": new("i32", n_grp, c.batch),
        "sealed": new("i32", n_grp, c.batch),
        "wanted": new("i32", 2 + LOCAL + SINKS, 1, 1, c.batch),
    }
    stats = new("i64", len(STATS))
    visible = base.ggml_sparse_attn_visible(ctx, mask)
    n_run, chan = -(-c.positions // RUN), D * c.n_head_kv
    seals, nodes = [], []
    for qi, (k, v) in zip(q, kv, strict=True):
        width = c.positions if bits == 16 else n_run * RUN * bits // 8
        k_t = new("f16" if bits == 16 else "i8", width, chan, c.batch)
        k_range = None if bits == 16 else new("f32", 2, chan, n_run, c.batch)
        v_sum = (
            new("f32", chan, -(-n_grp // GROUPS_PER_SUM) * (GROUPS_PER_SUM + 1), c.batch)
            if mean_v
            else None
        )
        given = dict(k=k, v=v, k_t=k_t, k_range=k_range, v_sum=v_sum, stats=stats, **inputs)
        src = sources(q=qi, mask=mask, visible=visible, **given)
        seals.append(base.ggml_sparse_attn_seal(ctx, src, SealParams(bits, 0)))
        params = ScoreSelectParams(
            ScoreParams(c.rank, scale, 0.0, 0.0, bits),
            SelectParams(c.topk, c.n_head_kv, LOCAL, mean_v),
        )
        nodes.append(base.ggml_sparq_attn(ctx, src, params))
    return stats, seals, nodes, inputs


def write_inputs(device: Device, c: Case, inputs: dict[str, Any], n_grp: int) -> None:
    groups = np.arange(n_grp, dtype=np.int32)
    full = (groups + 1) * GROUP <= c.positions
    rows = {
        "list": np.where(full, groups, -1),
        "sealed": full,
        "wanted": np.r_[c.topk, LOCAL, c.positions - 1 - np.arange(LOCAL), np.arange(SINKS)],
    }
    for name, row in rows.items():
        device.fill(inputs[name], np.ascontiguousarray(row, np.int32))


def measure_torch(case: Case, n_layer: int, seconds: float) -> dict[str, Any]:
    """The fastest backend of torch's scaled_dot_product_attention.

    Raises:
        NoTorch: torch is not installed, or finds no device.
        SparqError: none of them runs.
    """
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        raise NoTorch("torch is not installed", "dense is ggml's flash attention only") from None
    if not torch.cuda.is_available():
        raise NoTorch("torch sees no CUDA device", "dense is ggml's flash attention only")
    c, like = case, {"dtype": torch.float16, "device": "cuda"}
    q = [torch.randn(c.batch, c.n_head, 1, D, **like) for _ in range(n_layer)]
    kv = [
        [torch.randn(c.batch, c.n_head_kv, c.positions, D, **like) for _ in range(2)]
        for _ in range(n_layer)
    ]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    best: dict[str, Any] = {}
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        graph = torch.cuda.CUDAGraph()
        gqa = {"enable_gqa": True} if c.n_head != c.n_head_kv else {}

        def once(name: str = name, gqa: dict[str, bool] = gqa) -> None:
            with sdpa_kernel(getattr(SDPBackend, name)):
                for qi, (k, v) in zip(q, kv, strict=True):
                    sdpa(qi, k, v, **gqa)

        def replay(graph: Any = graph) -> None:
            graph.replay()
            torch.cuda.synchronize()

        try:
            once()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                once()
        except RuntimeError as error:
            click.echo(f"  torch {name}: {str(error).splitlines()[0]}", err=True)
            continue
        samples = timed(replay, n_layer, seconds / 3)
        if not best or np.median(samples) < np.median(best["samples_ns"]):
            best = {"samples_ns": samples, "backend": name}
    if not best:
        raise SparqError("no backend of torch's attention runs this", "see the lines above")
    return best | {"n_layer": n_layer, "bytes_read": c.layer_bytes, "torch": torch.__version__}


@commands.command(
    click.option(
        "--device", default="cuda", help="Device: cuda, or a library with ggml_backend_init."
    ),
    click.option("--quick", is_flag=True, help="Measure small sizes only, as a quick check."),
    click.option(
        "--only", default="", metavar="REGEX", help="Measure cases with names like this one only."
    ),
    commands.OUT,
    commands.FORCE,
)
def main(device: str, quick: bool, only: str, folder: Path, force: bool) -> None:
    """Attention by itself on a CUDA device."""
    built, file = native.built(), folder / FILE
    if device == "cuda" and not (built / "libggml-cuda.so").exists():
        raise SparqError("this build is for the CPU only", "sparq-cpp build --cuda")
    ours = Device(built, device)
    fresh, seconds = (1 << 24, 0.1) if quick else (FRESH, SECONDS)
    here = records.environment({"ours": built})
    env = {**here, "device": ours.name}
    stamp = here["stamps"]["ours"] + ours.name
    known = {} if force else records.load(file)
    copied, by = copy_bandwidth(ours, fresh, seconds)
    click.echo(f"{ours.name}: {by}'s copy moves {copied:.0f} GB/s, read and written", err=True)
    failed = 0
    for case in cases(quick):
        if not re.search(only, str(case)):
            continue
        if records.key(BENCH, asdict(case), stamp) in known:
            continue
        try:
            found = measure(ours, case, fresh, seconds)
        except SparqError as error:
            click.echo(f"{case}: not measured: {error.message} ({error.hint})", err=True)
            failed += not isinstance(error, NoTorch)
            continue
        rec = records.record(
            BENCH, asdict(case), stamp, env=env, copy_gb_s=copied, copy_by=by, **found
        )
        records.append(file, rec)
        ns = float(np.median(found["samples_ns"]))
        rate = found["bytes_read"] / ns
        click.echo(
            f"{str(case):42} {ns / 1e3:9.1f} us per layer, {rate:6.0f} GB/s,"
            f" {rate / copied:4.0%} of the copy"
            + "".join(f", {k} {us:.1f}" for k, us in found.get("kernels_us", {}).items())
        )
    click.echo(file, err=True)
    if failed:
        raise SparqError(f"{failed} cases not measured, see above", "again: only they are left")


if __name__ == "__main__":
    run_command(main)
