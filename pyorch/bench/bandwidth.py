"""How fast this machine reads memory, and how to make its caches forget.

A few lines of C do the reading, compiled once with the compiler that the library needs anyway.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.native import probe

BUFFER_BYTES = 256 << 20  # per thread; far above any cache
_SOURCE = Path(__file__).with_name("read.c")


@cache
def _read() -> Any:
    """The compiled `sparq_bench_read`. ctypes lets other threads run during a call."""
    compiler = probe.need_compiler()
    command = [*shlex.split(compiler.cc), "-O3", "-march=native", "-shared", "-fPIC"]
    text = f"{compiler.version} {probe.cpu()[1]} {command}".encode() + _SOURCE.read_bytes()
    target = paths.cache() / "bench" / f"read-{hashlib.sha256(text).hexdigest()[:12]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            done = subprocess.run(
                [*command, "-o", str(made), str(_SOURCE)], capture_output=True, text=True
            )
            if done.returncode != 0:
                raise SparqError(f"cannot compile {_SOURCE.name}: {done.stderr.strip()[:200]}")
            os.replace(made, target)
    function = ctypes.CDLL(str(target)).sparq_bench_read
    function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_size_t]
    return function


class MemoryReader:
    """One buffer per thread, read by all threads together.

    With several NUMA nodes each thread keeps to one core, so that its buffer is in the memory next
    to it; the cores are spread over all that may be used.

    Args:
        n_threads: threads that read.
        buffer_bytes: per thread, a multiple of 512.
    """

    def __init__(self, n_threads: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.function = _read()
        self.buffers = [np.empty(0, np.uint64)] * n_threads

        def make(i: int) -> None:
            self.buffers[i] = _aligned_ones(buffer_bytes)

        self._on_each_core(make)

    def read(self) -> float:
        """Read every buffer once. Returns bytes per second."""

        def read(i: int) -> None:
            self.function(self.buffers[i].ctypes.data, self.buffers[i].size)

        started = time.perf_counter()
        self._on_each_core(read)
        return sum(b.nbytes for b in self.buffers) / (time.perf_counter() - started)

    def _on_each_core(self, work: Callable[[int], None]) -> None:
        n = len(self.buffers)

        def pinned(i: int) -> None:
            if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) > 1:
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {cores[i * len(cores) // n % len(cores)]})  # this thread's
            work(i)

        threads = [threading.Thread(target=pinned, args=(i,)) for i in range(n)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()


def _aligned_ones(n_bytes: int) -> np.ndarray:
    """Words of 64 bit that begin at a multiple of 64 bytes, as the C code needs them."""
    raw = np.ones(n_bytes // 8 + 8, np.uint64)
    skip = -raw.ctypes.data % 64 // 8
    return raw[skip : skip + n_bytes // 8]
