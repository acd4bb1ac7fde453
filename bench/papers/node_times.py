"""Times the attention nodes by themselves in stock llama.cpp, as a check of `time_in_attention`.

    python -m bench node_times [-d 1024,4096,16384] [-fa 0,1]

ggml is stopped before the first and after the last node of each layer's attention (q.k to
the weighted sum of V), and the clock is read there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench import runner
from pyorch import engine
from pyorch.bench import records, state
from pyorch.bench.records import Done, Record, Result
from pyorch.cli.types import Numbers
from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.native.tensor import Tensor
from pyorch.table import markdown

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
    """The watch of a session that adds up the time from the last node before a layer's attention to
    its last node."""

    def __init__(self) -> None:
        self.total = self.started = self.layers = 0

    def attach(self, session: engine.Session) -> None:
        """There is nothing to learn from the session."""

    def node(self, address: int, ask: bool) -> bool:
        name = Tensor.from_address(address).name.decode(errors="replace")
        begins, ends = name.startswith(BEGINS) and name.endswith(" (view)"), name.startswith(ENDS)
        if not ask:
            if ends:
                self.total += time.perf_counter_ns() - self.started
                self.layers += 1
            self.started = time.perf_counter_ns()
        return bool(begins or ends)

    def done(self, n_past: int) -> None:
        """Nothing is known of the tokens."""

    def reset(self) -> None:
        """Nothing is counted but time."""


OPTIONS = (
    runner.SOME_MODEL,
    runner.layers(4),
    click.option(
        "-d", "--n-depth", type=Numbers(256), default="1024,4096,16384", show_default=True
    ),
    click.option("-fa", "--flash-attn", type=Numbers(), default="0,1", show_default=True),
    runner.THREADS,
    runner.samples(20),
)


def groups(given: runner.Given) -> list[list[Case]]:
    """Each case by itself."""
    geo = geometry(read_gguf(runner.model_of(given)))
    size = geo.weight_bytes
    return [
        [Case(geo.name, n_depth, given.threads, bool(fa), given.samples, model_size=size)]
        for n_depth in given.n_depth
        for fa in given.flash_attn
    ]


def measure(given: runner.Given, group: Sequence[Case], _: Done) -> list[Result]:
    (case,) = group
    return [nodes(runner.model_of(given), case)]


def nodes(model: Path, case: Case) -> Result:
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
        watch=clock,
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


def shares(rec: Record) -> list[float]:
    """The share of attention in each token."""
    return [a / b for a, b in zip(rec["attention_ns"], rec["samples_ns"], strict=True)]


def table(recs: Sequence[Record]) -> str:
    rows = []
    for rec in recs:
        case = records.read_case(Case, rec)
        token, share = (records.spread(x)[0] for x in (rec["samples_ns"], shares(rec)))
        row = case.model_type, case.n_threads, f"`-fa {int(case.flash_attn)}`", case.n_depth
        rows.append([*map(str, row), f"{token / 1e6:.2f}", f"{100 * share:.1f} %"])
    head = ["model", "threads", "attention", "positions", "ms per token", "in attention"]
    return markdown(head, rows, left=("model", "attention"))


MEASUREMENT = runner.Measurement(
    name="node_times",
    about="Time of the attention nodes of stock llama.cpp, token by token.",
    options=OPTIONS,
    groups=groups,
    measure=measure,
    table=table,
    libraries=("stock",),
    cost=lambda group: group[0].n_depth,
)
