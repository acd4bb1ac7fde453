"""Times the attention nodes by themselves in stock llama.cpp, as a check of `time_in_attention`.

    python bench/node_times.py [-d 1024,4096,16384] [-fa 0,1]

ggml is stopped before the first and after the last node of each layer's attention (q.k to
the weighted sum of V), and the clock is read there. It writes node_times.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import commands
import watch

from pyorch import engine
from pyorch.bench import records, state
from pyorch.bench.plan import Synthetic
from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.cli.types import LAYERS, THREADS, Numbers
from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.native.tensor import Tensor
from pyorch.progress import Progress, progress_bar

BENCH = "node_times"
BEGINS, ENDS = "Qcur-", "kqv_out-"  # `Qcur-0 (view)` comes after K and V are written


@dataclass(frozen=True)
class Case:
    model_type: str
    n_depth: int
    n_threads: int
    flash_attn: bool
    n_samples: int
    library: str = "stock"
    model_size: int = 0  # bytes of all tensors, as names are not unique; 0 in older records


class Clock:
    """Adds up the time from the last node before a layer's attention to its last node."""

    def __init__(self) -> None:
        self.total = self.started = self.layers = 0

    def see(self, t: Tensor, ask: bool) -> bool:
        name = t.name.decode()
        begins, ends = name.startswith(BEGINS) and name.endswith(" (view)"), name.startswith(ENDS)
        if not ask:
            if ends:
                self.total += time.perf_counter_ns() - self.started
                self.layers += 1
            self.started = time.perf_counter_ns()
        return bool(begins or ends)


def measure(model: Path, case: Case) -> dict[str, Any]:
    """The nanoseconds of whole tokens and of their attention."""
    clock = Clock()
    samples: list[int] = []
    attention: list[int] = []
    with engine.load(
        model,
        n_ctx=-(-(case.n_depth + 1) // 256) * 256,
        n_threads=case.n_threads,
        n_batch=8,
        flash_attn=case.flash_attn,
        watch=watch.Watch(clock.see),
        stock=True,
    ) as session:
        state.fill(session, case.n_depth, 1)
        for i in range(-2, case.n_samples):
            clock.total, clock.layers, started = 0, 0, time.perf_counter_ns()
            engine.decode(session, 5 + i % 200)
            took = time.perf_counter_ns() - started
            engine.rewind(session, case.n_depth)
            n_layer = session.geometry.n_layer
            if clock.layers != n_layer:
                raise SparqError(
                    f"attention of {clock.layers} layers was seen, not of all "
                    f"{n_layer}: a model whose nodes have other names"
                )
            if i >= 0:
                samples.append(took)
                attention.append(clock.total)
    return {"samples_ns": samples, "attention_ns": attention}


def run(
    model: Path, cases: Sequence[Case], file: Path, progress: Progress, *, force: bool = False
) -> list[Record]:
    """Measure what `file` lacks, add it there, and return all records."""
    return records.resume(
        BENCH,
        [[case] for case in cases],
        lambda group, _: [measure(model, case) for case in group],
        file,
        progress,
        cost=lambda group: group[0].n_depth,
        force=force,
        libraries=("stock",),
    )


@commands.command(
    click.option(
        "--model",
        "-m",
        metavar="FILE",
        help="GGUF model to measure.  [default: llama2-7b q8_0, synthetic]",
    ),
    click.option(
        "--layers", type=LAYERS, default=4, show_default=True, help="Layers of the synthetic model."
    ),
    click.option(
        "-d", "--n-depth", type=Numbers(256), default="1024,4096,16384", show_default=True
    ),
    click.option("-fa", "--flash-attn", type=Numbers(), default="0,1", show_default=True),
    click.option("-t", "--threads", type=THREADS, help="Number of threads.  [default: all cores]"),
    commands.samples(20),
    commands.OUT,
    commands.FORCE,
)
def command(
    model: str | None, layers: int, threads: int | None, folder: Path, force: bool, **options: Any
) -> None:
    """Time of the attention nodes of stock llama.cpp, token by token."""
    path = Path(model) if model else Synthetic("llama2-7b", layers, "q8_0").written()
    geo = geometry(read_gguf(path))
    n_threads, n = threads or engine.usable_cores(), options["samples"]
    cases = [
        Case(geo.name, n_depth, n_threads, bool(fa), n, model_size=geo.weight_bytes)
        for n_depth in options["n_depth"]
        for fa in options["flash_attn"]
    ]
    with progress_bar("nodes") as progress:
        found = run(path, cases, folder / "node_times.jsonl", progress, force=force)
    for rec in found:
        case = records.read_case(Case, rec)
        token, share = records.spread(rec["samples_ns"])[0], shares(rec)
        print(
            f"-fa {int(case.flash_attn)}  S {case.n_depth:6d}  {token / 1e6:8.2f} ms per token  "
            f"{100 * records.spread(share)[0]:5.1f} % in attention"
        )


def shares(rec: Record) -> list[float]:
    """The share of attention in each token."""
    return [a / b for a, b in zip(rec["attention_ns"], rec["samples_ns"], strict=True)]


if __name__ == "__main__":
    run_command(command)
