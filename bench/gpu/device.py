"""ggml on a CUDA device: tensors, graphs, and how long they take."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from pyorch.errors import SparqError
from pyorch.ggml import BY_NAME
from pyorch.native.prototypes import declare
from pyorch.native.tensor import InitParams


class Device:
    """The ggml of a build, and one of its devices.

    Raises:
        SparqError: there is no such device.
    """

    def __init__(self, folder: Path, device: str) -> None:
        base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.base = base = declare(base)
        is_cuda = device == "cuda"
        library = declare(ctypes.CDLL(str(folder / "libggml-cuda.so") if is_cuda else device))
        reg = library.ggml_backend_cuda_reg() if is_cuda else library.ggml_backend_init()
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
        ctx = self.base.ggml_init(InitParams(32 << 20, None, True))
        self.buffer = None
        try:
            yield ctx
        finally:
            if self.buffer:
                self.base.ggml_backend_buffer_free(self.buffer)
            self.base.ggml_free(ctx)

    def new(self, ctx: c_void_p, kind: str, *ne: int) -> Any:
        number = BY_NAME[kind].number
        return self.base.ggml_new_tensor(ctx, number, len(ne), (c_int64 * len(ne))(*ne))

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


def timed(run: Callable[[], None], seconds: float) -> list[float]:
    """The nanoseconds of each repetition, without the first runs, in which graphs are captured."""
    for _ in range(4):
        run()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 10 or (time.perf_counter() < end and len(samples) < 500):
        start = time.perf_counter_ns()
        run()
        samples.append(time.perf_counter_ns() - start)
    return samples


def layer_times(
    half: Callable[[], None], whole: Callable[[], None], n_layer: int, seconds: float
) -> list[float]:
    """The nanoseconds of a layer on the device, from repetitions of n_layer of them, less those of
    half of them: what a graph costs once cancels."""
    base = float(np.median(timed(half, seconds / 2)))
    return [(x - base) / (n_layer - n_layer // 2) for x in timed(whole, seconds / 2)]


def torch_with_cuda() -> Any:
    """torch, or None if it is not installed or sees no device."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None
