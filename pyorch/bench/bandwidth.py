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

    Args:
        n_threads: threads that read.
        buffer_bytes: per thread, a multiple of 512.
    """

    def __init__(self, n_threads: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.function = _read()
        self.buffers = [_aligned_ones(buffer_bytes) for _ in range(n_threads)]

    def read(self) -> float:
        """Read every buffer once. Returns bytes per second."""
        threads = [
            threading.Thread(target=self.function, args=(b.ctypes.data, b.size))
            for b in self.buffers
        ]
        started = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return sum(b.nbytes for b in self.buffers) / (time.perf_counter() - started)


def _aligned_ones(n_bytes: int) -> np.ndarray:
    """Words of 64 bit that begin at a multiple of 64 bytes, as the C code needs them."""
    raw = np.ones(n_bytes // 8 + 8, np.uint64)
    skip = -raw.ctypes.data % 64 // 8
    return raw[skip : skip + n_bytes // 8]
