"""Measures how fast this machine reads memory, and makes its caches forget."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from pyorch import paths, system
from pyorch.errors import SparqError
from pyorch.models.memory import available_memory
from pyorch.native import probe
from pyorch.progress import say

BUFFER_BYTES = 256 << 20  # per thread; far above any cache
LEAST_BYTES = 32 << 20  # per thread, the least if memory is short
SHARE = 4  # all buffers together take at most 1/SHARE of the free memory
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
    name = f"bandwidth {probe.cpu()[0]} {probe.cores()} cores {n} threads".lower()
    kept = paths.cache() / "bench" / re.sub(r"[^a-z0-9]+", "-", name)
    with suppress(OSError, ValueError):
        return float(kept.read_text())
    is_busy, reader = system.is_busy(), MemoryReader(n)
    fastest = max(reader.read() for _ in range(_PASSES))
    if not is_busy:
        with suppress(OSError):  # it is measured again each time
            paths.put(kept, str(fastest))
    return fastest


def usual_bytes(n_threads: int) -> int:
    """The bytes of each thread's buffer: all together take at most a share of the free memory,
    unless they are of the least size."""
    return min(BUFFER_BYTES, max(LEAST_BYTES, available_memory() // SHARE // n_threads))
