"""Measures how fast memory delivers the reads of sparse attention, without attention.

    python bench/row_reads.py [-t 1,2] [--samples 21]

Loops in C (row_reads.c) read the rows of K and V that ATTEND would read, and the components of the
transposed K that SCORE would, of 32 heads of 128 at 16,384 positions in f16, cold, in huge pages.
A sequential read of the same minute is measured too: if a kernel falls short of that, this shows
how much is due to the machine. It writes row_reads.jsonl.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import commands
import numpy as np

from pyorch.bench import records
from pyorch.bench.bandwidth import SHARE, MemoryReader, compiled, together
from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.models.memory import available_memory
from pyorch.progress import progress_bar
from pyorch.table import markdown

BENCH = "row_reads"
SOURCE = Path(__file__).with_suffix(".c")
N_KV, N_HEAD, D = 16384, 32, 128
ROW = D * 2  # bytes: a head's part of a position, f16
LAYER = 2 * N_KV * N_HEAD * ROW  # K, then V
ROWS_AHEAD = 32  # as the kernels do
RANK, TILE = 32, 4096  # of SCORE: components; positions of each per unit

# name -> the kind of read
READS = {
    "rows": "rows of K and V, 1 position of 8",
    "few rows": "rows of K and V, 1 of 128",
    "few rows, known pages": "the same, page tables in the caches",
    "channels": "32 of 128 channels, 16 side by side, runs of 8 KiB",
    "codes": "the same in 4 bits, 32 side by side, runs of 2 KiB",
}


@dataclass(frozen=True)
class Components:
    """The way in which SCORE reads the transposed K."""

    n_bit: int
    pad: int  # bytes: components a power of two apart would be in one set of a cache
    side: int  # components side by side
    ahead: int  # the cache lines that are fetched ahead

    @property
    def run(self) -> int:
        """Bytes of a component, one after another."""
        return TILE * self.n_bit // 8

    @property
    def stride(self) -> int:
        """Bytes from one component to the next."""
        return N_KV * self.n_bit // 8 + self.pad


COMPONENTS = {"channels": Components(16, -128, 16, 8), "codes": Components(4, 64, 32, 3)}


@dataclass(frozen=True)
class Case:
    read: str
    n_threads: int
    n_samples: int
    n_layer: int


class Layers:
    """K and V of some layers, in huge pages if the kernel grants them, and what to read of them."""

    def __init__(self, n_layer: int) -> None:
        self.lib = compiled(SOURCE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory is not given huge pages
        self.memory = mmap.mmap(-1, n_layer * LAYER + (2 << 20), flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(self.memory, np.uint8)
        skip = -raw.ctypes.data % (2 << 20)
        self.bytes = raw[skip : skip + n_layer * LAYER]
        self.bytes[:] = 1
        self.n_layer = n_layer
        self.huge = _in_huge_pages() > 0.9 * self.bytes.size
        # the CPU may have no instruction for it
        can_drop = self.lib.sparq_bench_drop(None, None, 0, 0)
        self.reads = [read for read in READS if can_drop or read != "few rows, known pages"]

    def pieces(self, read: str, rng: np.random.Generator) -> np.ndarray:
        """Where the pieces begin (of `size(read)` bytes each), in the order of reading."""
        layer = np.arange(self.n_layer)[:, None, None] * LAYER
        head = np.arange(N_HEAD)[:, None]
        if c := COMPONENTS.get(read):
            component = head * D + _sorted_choice(rng, (self.n_layer, N_HEAD), D, RANK)
            at = (layer + component * c.stride).reshape(self.n_layer, N_HEAD, 1, RANK)
            return (at + np.arange(N_KV // TILE)[:, None] * c.run).ravel()
        n = N_KV // (8 if read == "rows" else 128)
        pos = _sorted_choice(rng, (self.n_layer, N_HEAD), N_KV, n)
        k = layer + (pos * N_HEAD + head) * ROW
        return np.stack([k, k + LAYER // 2], axis=-1).ravel()

    def call(
        self, name: str, parts: Sequence[np.ndarray], cpus: Sequence[int], *more: int
    ) -> float:
        """Run a function of row_reads.c on each part in a thread of its own. Returns seconds."""

        def work(i: int) -> None:
            where = (ctypes.c_void_p(x.ctypes.data) for x in (self.bytes, parts[i]))
            self.lib[name](*where, *map(ctypes.c_size_t, (parts[i].size, *more)))

        return together(work, len(parts), cpus)


def _in_huge_pages() -> int:
    """The bytes of this process in huge pages; 0 if the system does not say."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(x.split()[1]) << 10 for x in text.splitlines() if "AnonHuge" in x), 0)


def _sorted_choice(rng: np.random.Generator, shape: tuple[int, ...], n: int, k: int) -> np.ndarray:
    """`k` of 0 .. n - 1, ascending, for each of `shape`."""
    return np.sort(rng.random((*shape, n)).argpartition(k - 1)[..., :k])


def size(read: str) -> int:
    """The bytes of a piece."""
    return COMPONENTS[read].run if read in COMPONENTS else ROW


def measure(layers: Layers, reader: MemoryReader, case: Case) -> dict[str, Any]:
    """Returns each sample's nanoseconds, its bytes, and the sequential bytes/s before it."""
    rng = np.random.default_rng(0)
    samples, bandwidth = [], []
    for i in range(-1, case.n_samples):
        at = layers.pieces(case.read, rng)
        components = COMPONENTS.get(case.read)
        parts = np.array_split(at.reshape(-1, components.side if components else 1), case.n_threads)
        reader.read()
        sequential = reader.read()
        if case.read == "few rows, known pages":
            layers.call("sparq_bench_drop", parts, reader.cpus, size(case.read))
        if components:
            name, more = f"sparq_bench_runs{components.side}", (components.run, components.ahead)
            seconds = layers.call(name, parts, reader.cpus, *more)
        else:
            seconds = layers.call("sparq_bench_rows", parts, reader.cpus, ROWS_AHEAD)
        if i >= 0:
            samples.append(round(seconds * 1e9))
            bandwidth.append(sequential)
    n_bytes = at.size * size(case.read)
    return {"samples_ns": samples, "bytes": n_bytes, "bandwidth_bytes_per_s": bandwidth}


def table(recs: Sequence[Record]) -> str:
    """Markdown: a row per case."""
    lines = []
    for rec in recs:
        case, ns = Case(**rec["case"]), np.array(rec["samples_ns"])
        speed = rec["bytes"] / ns
        lo, mid, hi = np.percentile(speed, [10, 50, 90])
        share = np.median(speed * 1e9 / np.array(rec["bandwidth_bytes_per_s"]))
        each = np.median(ns) / rec["bytes"] * size(case.read)
        speeds = f"{mid:.1f} ({lo:.1f}-{hi:.1f})"
        lines.append((READS[case.read], case.n_threads, f"{each:.1f}", speeds, f"{share:.0%}"))
    head = ("what is read", "threads", "ns per piece", "GB/s (p10-p90)", "of a sequential read")
    return markdown(head, lines)


@commands.command(commands.THREADS, commands.samples(21), commands.OUT)
def command(threads: Sequence[int], samples: int, folder: Path) -> None:
    """Measure how fast memory delivers the reads of sparse attention."""
    n_layer = max(1, min(8, available_memory() // SHARE // LAYER))
    stamp = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    file = folder / f"{BENCH}.jsonl"
    made: list[Record] = []
    with progress_bar("reads") as progress:
        layers = Layers(n_layer)
        if not layers.huge:
            click.echo("note: no huge pages: rows come more slowly than to the library", err=True)
        for n_threads in threads:
            reader = MemoryReader(n_threads)
            for read in layers.reads:
                progress(len(made), len(threads) * len(layers.reads))
                case = Case(read, n_threads, samples, n_layer)
                result = measure(layers, reader, case) | {"huge_pages": layers.huge}
                env = {"machine": records.machine()}
                made.append(records.record(BENCH, asdict(case), stamp, **result, env=env))
                records.append(file, made[-1])
    commands.show(table(made), file)


if __name__ == "__main__":
    run_command(command)
