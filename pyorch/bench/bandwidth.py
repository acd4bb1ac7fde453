"""Measures how fast this machine reads memory, and makes its caches forget.

A few lines of C do the reading, compiled once for this CPU. Where there is no compiler, those that
came with the wheel do it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from pyorch import children, paths
from pyorch.errors import SparqError
from pyorch.models.memory import available_memory
from pyorch.native import carried, probe
from pyorch.progress import say

BUFFER_BYTES = 256 << 20  # per thread; far above any cache
LEAST_BYTES = 32 << 20  # per thread, the least if memory is short
SHARE = 4  # all buffers together take at most 1/SHARE of the free memory
CPUS = Path("/sys/devices/system/cpu")
_SOURCE = Path(__file__).with_name("read.c")


@cache
def compiled(source: Path) -> ctypes.CDLL:
    """Compile a C file for this CPU. ctypes lets other threads run during a call.

    Raises:
        SparqError: there is no compiler, and the wheel has none of it; or it refuses the file.
    """
    ready = carried.FOLDER / f"{source.stem}.so"
    if ready.is_file() and not probe.find_compiler():
        return ctypes.CDLL(str(ready))
    compiler = probe.need_compiler()
    command = [*shlex.split(compiler.cc), "-O3", "-march=native", "-shared", "-fPIC"]
    text = f"{compiler.version} {probe.cpu()[1]} {command}".encode() + source.read_bytes()
    target = paths.cache() / "bench" / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:12]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            argv = [*command, *probe.probe(compiler, native=True).flags, "-o", str(made)]
            done = children.run([*argv, str(source)])
            if done.returncode != 0:
                raise SparqError(f"cannot compile {source.name}: {done.stderr.strip()[:200]}")
            os.replace(made, target)
    return ctypes.CDLL(str(target))


class MemoryReader:
    """Buffers, one per thread, which all threads read together.

    With several NUMA nodes each thread keeps to one CPU, so that its buffer is in the memory next
    to it; see `spread_cpus`.

    Args:
        n_threads: how many threads read.
        buffer_bytes: the bytes per thread, a multiple of 512; None = `usual_bytes`.

    Raises:
        SparqError: a thread does not start, or gets no memory.
    """

    def __init__(self, n_threads: int, buffer_bytes: int | None = None) -> None:
        size = usual_bytes(n_threads) if buffer_bytes is None else buffer_bytes
        self.function = compiled(_SOURCE).sparq_bench_read
        self.function.restype = ctypes.c_uint64
        self.function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.buffers = [np.empty(0, np.uint64)] * n_threads
        self.cpus: list[int] = []  # the threads' CPUs; none = wherever the system puts them
        if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) > 1:
            self.cpus = spread_cpus(n_threads, os.sched_getaffinity(0))

        def make(i: int) -> None:
            self.buffers[i] = _aligned_ones(size)

        together(make, n_threads, self.cpus)

    def read(self) -> float:
        """Read every buffer once. Returns bytes per second."""

        def read(i: int) -> None:
            self.function(self.buffers[i].ctypes.data, self.buffers[i].size)

        seconds = together(read, len(self.buffers), self.cpus)
        return sum(b.nbytes for b in self.buffers) / seconds


def measured(n_threads: int) -> float:
    """The bytes per second that the threads read from memory: the median of a few passes. Fewer
    threads read where the free memory has no room for the buffers of all, as in a small container
    on a large machine, where the system would end the program.

    Raises:
        SparqError: as `MemoryReader`.
    """
    n = max(1, min(n_threads, available_memory() // SHARE // LEAST_BYTES))
    if n < n_threads:
        say(f"memory is short: its speed is measured with {n} of {n_threads} threads")
    reader = MemoryReader(n)
    reader.read()
    return statistics.median(reader.read() for _ in range(5))


def together(work: Callable[[int], None], n: int, cpus: Sequence[int] = ()) -> float:
    """Run work(0) .. work(n - 1), each in its own thread, which keeps to its CPU of `cpus`.

    Returns:
        Seconds from the time when all threads are ready to the end of the last one: starting
        threads would take a share of a short read.

    Raises:
        SparqError: a thread does not start, or gets no memory.
    """
    started, ended = [0.0], [0.0] * n

    def begin() -> None:
        started[0] = time.perf_counter()

    all_there = threading.Barrier(n, action=begin)
    errors: list[Exception] = []

    def one(i: int) -> None:
        try:
            if cpus:
                os.sched_setaffinity(0, {cpus[i]})  # this thread's
            all_there.wait()
            work(i)
        except Exception as e:
            errors.append(e)
            all_there.abort()  # otherwise the others wait for this one
        ended[i] = time.perf_counter()

    # daemons, so that if one does not start, those that wait for it do not keep the program
    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(n)]
    try:
        for t in threads:
            t.start()
    except RuntimeError as e:  # the system allows no more threads
        errors.append(e)
        all_there.abort()
    for t in threads:
        if t.ident is not None:  # it did start
            t.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            why = str(error) or type(error).__name__
            raise SparqError(f"cannot read memory with {n} threads: {why}", "fewer threads: -t")
    return max(ended) - started[0]


def usual_bytes(n_threads: int) -> int:
    """The bytes of each thread's buffer: all together take at most a share of the free memory,
    unless they are of the least size."""
    each = available_memory() // SHARE // n_threads // 512 * 512
    return min(BUFFER_BYTES, max(LEAST_BYTES, each))


def spread_cpus(n: int, allowed: Iterable[int], cpus: Path = CPUS) -> list[int]:
    """A CPU for each of `n` threads, spread evenly over those allowed: the second SMT twin of a
    core is used only when every core has a thread.

    Args:
        cpus: the folder that lists twins; a CPU that is not in it is a core of its own.
    """
    seen: Counter[str] = Counter()
    levels: list[list[int]] = []  # the first twin of each core, the second, ...
    for cpu in sorted(allowed):
        try:
            core = (cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        if seen[core] == len(levels):
            levels.append([])
        levels[seen[core]].append(cpu)
        seen[core] += 1
    found: list[int] = []
    while len(found) < n:
        for level in levels:
            m = min(n - len(found), len(level))
            found += [level[i * len(level) // m] for i in range(m)]
    return found


def _aligned_ones(n_bytes: int) -> np.ndarray:
    """64-bit words that begin at a multiple of 64 bytes, as the C code needs them."""
    raw = np.ones(n_bytes // 8 + 8, np.uint64)
    skip = -raw.ctypes.data % 64 // 8
    return raw[skip : skip + n_bytes // 8]
