"""Measures how fast this machine and its GPUs read memory, and makes its caches forget."""

from __future__ import annotations

import re
import threading
import time
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from pyorch import paths, system
from pyorch.attention.placement import Rates
from pyorch.errors import SparqError
from pyorch.ggml import BY_NAME
from pyorch.models.memory import available_memory
from pyorch.native import probe
from pyorch.native.devices import Device
from pyorch.native.tensor import InitParams
from pyorch.progress import say

BUFFER_BYTES = 256 << 20  # per thread; far above any cache
LEAST_BYTES = 32 << 20  # per thread, the least if memory is short
SHARE = 4  # all buffers together take at most 1/SHARE of the free memory
COPY_BYTES = 64 << 20  # of a GPU's memory, read and written
_PASSES = 9
_START_S = 10.0


class MemoryReader:
    """Threads with a buffer each, which they read together. numpy's maximum of bytes is as fast as
    the memory.

    Args:
        n_threads: how many threads read.
        buffer_bytes: the bytes per thread; None = `usual_bytes`.

    Raises:
        SparqError: a thread does not start, or gets no memory.
    """

    def __init__(self, n_threads: int, buffer_bytes: int | None = None) -> None:
        self._n = n_threads
        self._size = usual_bytes(n_threads) if buffer_bytes is None else buffer_bytes
        self._threads = ThreadPoolExecutor(n_threads)
        self._start = threading.Barrier(n_threads, timeout=_START_S)
        self._own = threading.local()  # a buffer is in the memory next to its thread
        self.read()

    def read(self) -> float:
        """Read every buffer once. Returns bytes per second, without the start of the threads."""
        try:
            times = list(self._threads.map(self._read, range(self._n)))
        except (RuntimeError, MemoryError) as e:
            why = str(e) or type(e).__name__
            raise SparqError(
                f"cannot read memory with {self._n} threads: {why}", "fewer threads: -t"
            ) from None
        started, ended = zip(*times, strict=True)
        return float(self._n * self._size / (max(ended) - min(started)))

    def _read(self, _: int) -> tuple[float, float]:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = np.ones(self._size, np.uint8)
        self._start.wait()
        started = time.perf_counter()
        self._own.buffer.max()
        return started, time.perf_counter()


def measured(n_threads: int) -> float:
    """The bytes per second that the threads can read from memory: the fastest of a few passes, kept
    in the cache for machines of this CPU and so many cores, unless other programs run meanwhile.

    Fewer threads read where the free memory has no room for the buffers of all, as in a small
    container on a large machine, where the system would end the program.

    Raises:
        SparqError: as `MemoryReader`.
    """
    n = max(1, min(n_threads, available_memory() // SHARE // LEAST_BYTES))
    if n < n_threads:
        say(f"memory is short: its speed is measured with {n} of {n_threads} threads")

    def fastest() -> list[float]:
        reader = MemoryReader(n)
        return [max(reader.read() for _ in range(_PASSES))]

    return _once(f"bandwidth {probe.cpu()[0]} {probe.cores()} cores {n} threads", fastest)[0]


def beside_gpu(ggml: Any, gpu: Device, n_threads: int) -> Rates:
    """How fast a GPU of `ggml`, whose functions are declared, reads its memory, and so many threads
    ours; and what a layer costs whose K and V lie in ours. Kept for GPUs of this name.

    Raises:
        SparqError: as `MemoryReader`.
    """
    rate, wait = _once(f"gpu {gpu.name}", lambda: _gpu(ggml, gpu.pointer))
    return Rates(rate, measured(n_threads), wait)


def _gpu(ggml: Any, device: int) -> list[float]:
    """Bytes per second of a copy, and the seconds of what crosses for a token in a layer: q, k, v
    and the result, for each of which one side waits."""
    backend = ggml.ggml_backend_dev_init(device, None)
    context = ggml.ggml_init(InitParams(1 << 20, None, True))
    shape = BY_NAME["f32"].number, 1024, COPY_BYTES // 4096, 1, 1
    x, y = (ggml.ggml_new_tensor_4d(context, *shape) for _ in range(2))
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, ggml.ggml_cpy(context, x, y))
    buffer, row = ggml.ggml_backend_alloc_ctx_tensors(context, backend), np.zeros(4096, np.float32)
    copy = partial(ggml.ggml_backend_graph_compute, backend, graph)
    cross = partial(ggml.ggml_backend_tensor_get, x, row.ctypes.data, 0, row.nbytes)
    copied, crossed = (min(timeit.repeat(do, number=1, repeat=_PASSES)) for do in (copy, cross))
    ggml.ggml_backend_buffer_free(buffer)
    ggml.ggml_free(context)
    ggml.ggml_backend_free(backend)
    return [2 * COPY_BYTES / copied, 4 * crossed]


def _once(name: str, measure: Callable[[], list[float]]) -> list[float]:
    """Numbers that are kept in the cache, unless other programs run while they are measured."""
    kept = paths.cache() / "bench" / re.sub(r"[^a-z0-9]+", "-", name.lower())
    with suppress(OSError, ValueError):
        if numbers := [float(word) for word in kept.read_text().split()]:
            return numbers
    is_busy, numbers = system.is_busy(), measure()
    if not is_busy:
        with suppress(OSError):  # it is measured again each time
            paths.put(kept, " ".join(map(str, numbers)))
    return numbers


def usual_bytes(n_threads: int) -> int:
    """The bytes of each thread's buffer: all together take at most a share of the free memory,
    unless they are of the least size."""
    return min(BUFFER_BYTES, max(LEAST_BYTES, available_memory() // SHARE // n_threads))
