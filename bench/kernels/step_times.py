"""Times the steps of sparse attention by themselves, beside the bytes they read.

    python -m bench step_times [--like llama2-7b,llama3-8b] [-d 16384,65536] [-t 1,2] [-a SPEC]...

ggml is stopped after every node, and the clock is read around SCORE (or SCORE_SELECT, which is both
in one node), SELECT and ATTEND. Before each token the caches are made to forget, by a sequential
read that is timed too: shares are of that read's speed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from bench import runner
from bench.kernels import watch
from pyorch import engine
from pyorch.attention.spec import AttentionSpec
from pyorch.bench import attention, records, state
from pyorch.bench.bandwidth import MemoryReader
from pyorch.bench.records import Done, Record, Result, where_given
from pyorch.cli.types import THREADS, Numbers
from pyorch.errors import SparqError
from pyorch.native.slots import ATTEND, SCORE, SCORE_SELECT, SELECT
from pyorch.native.tensor import Tensor, op_number
from pyorch.table import markdown

STEPS = {SCORE: "score", SELECT: "select", SCORE_SELECT: "score_select", ATTEND: "attend"}
SPECS = tuple(f"sparq,rank=32,topk=128,shadow={s}" for s in ("f16", "q8", "q4"))
SPECS += ("sparq,ratio=1/8", "dense")


@dataclass(frozen=True)
class Case:
    like: str
    n_layer: int
    n_depth: int
    n_threads: int
    spec: AttentionSpec
    n_samples: int
    only_score: bool = where_given(False)  # of records until November 2026, of SCORE by itself
    library: str = "sparq"


class Clock:
    """Adds up nanoseconds by step; every node is computed by itself."""

    def __init__(self, op: int) -> None:
        self.op, self.started = op, 0
        self.spent: dict[str, int] = {}

    def see(self, t: Tensor, ask: bool) -> bool:
        now = time.perf_counter_ns()
        step = STEPS.get(t.op_params[0]) if t.op == self.op else None
        if step and not ask:
            self.spent[step] = self.spent.get(step, 0) + now - self.started
        self.started = time.perf_counter_ns()
        return True


OPTIONS = (
    click.option(
        "--like",
        default="llama2-7b,llama3-8b",
        show_default=True,
        help="Known models whose heads to measure.",
    ),
    click.option("-d", "--n-depth", type=Numbers(256), default="16384,65536", show_default=True),
    runner.specs(*SPECS),
    click.option(
        "--threads",
        "-t",
        type=Numbers(1, THREADS.high),
        callback=lambda _, __, given: given or sorted({1, engine.usable_cores()}),
        help="Numbers of threads.  [default: 1 and all cores]",
    ),
    runner.samples(21),
)


def groups(given: runner.Given) -> list[list[Case]]:
    """Each case by itself."""
    return [
        [Case(name, 2, n, threads, spec, given.samples)]
        for name in given.like.split(",")
        for n in given.n_depth
        for threads in given.threads
        for spec in given.specs
    ]


def measure(_: runner.Given, group: Sequence[Case], __: Done) -> list[Result]:
    (case,) = group
    return [steps(attention.model_file(case.like, case.n_layer), case)]


def steps(model: Path, case: Case) -> Result:
    """Returns the nanoseconds of each token in all layers by step, bytes per token, and bytes/s."""
    reader = MemoryReader(case.n_threads)
    samples: dict[str, list[int]] = {}
    bandwidth = []
    with engine.load_model(model) as loaded:
        clock = Clock(op_number(loaded.lib, "SPARSE_ATTN"))
        session = loaded.session(
            n_ctx=case.n_depth,
            n_threads=case.n_threads,
            n_batch=32,
            attention=case.spec,
            watch=watch.Watch(clock.see),
        )
        state.fill(session, case.n_depth - 1, 1)
        engine.seal(session)
        for i in range(-2, case.n_samples):
            if i == 0:
                engine.reset_counters(session)
            reader.read()  # the threads of the last token go to sleep meanwhile
            bandwidth.append(reader.read())
            clock.spent = {}
            engine.decode(session, 5 + i % 200)
            engine.rewind(session, case.n_depth - 1)
            for step, ns in clock.spent.items() if i >= 0 else ():
                samples.setdefault(step, []).append(ns)
        counters = engine.info(session).counters
    name = "calls_sparse" if case.spec.sparse else "calls_dense_op"
    calls, wanted = counters[name], case.n_samples * case.n_layer
    if calls != wanted:
        raise SparqError(f"{case.spec}: {calls} of {wanted} calls counted in {name}; not reported")
    score, attend = counters["bytes_score"], counters["bytes_attend"]
    bytes_read = {"attend": attend, "score": score, "score_select": score}
    return {
        "samples_ns": samples,
        "bytes": {k: n / case.n_samples for k, n in bytes_read.items() if k in samples},
        "bandwidth_bytes_per_s": bandwidth[2:],
    }


def table(recs: Sequence[Record]) -> str:
    """Markdown: a row per case and step, and one for the sum of the steps."""
    lines = []
    for rec in recs:
        case = records.read_case(Case, rec)
        name = case.like, case.n_depth, case.n_threads, f"`{case.spec}`"
        n_read = rec["bytes"] | {step: 0 for step in rec["samples_ns"] if step not in rec["bytes"]}
        steps = {step: (np.array(rec["samples_ns"][step]), n) for step, n in n_read.items()}
        if len(steps) > 1:
            total = np.sum([t for t, _ in steps.values()], axis=0)
            steps["all"] = total, sum(n for _, n in steps.values())
        for step, (ns, n_bytes) in steps.items():
            lo, mid, hi = np.percentile(ns, [10, 50, 90]) / case.n_layer / 1e3
            read = "-", "-"  # SELECT reads only scores, which are in a cache
            if n_bytes:
                share = np.median(n_bytes / ns * 1e9 / np.array(rec["bandwidth_bytes_per_s"]))
                read = f"{n_bytes / np.median(ns):.1f}", f"{share:.0%}"
            lines.append((*name, step, f"{mid:.0f} ({lo:.0f}-{hi:.0f})", *read))
    head = ("heads", "positions", "threads", "attention", "step", "us per layer (p10-p90)")
    return markdown((*head, "GB/s", "share"), lines, left=("heads", "attention", "step"))


MEASUREMENT = runner.Measurement(
    name="step_times",
    about="Time of the steps of sparse attention, token by token.",
    options=OPTIONS,
    groups=groups,
    measure=measure,
    table=table,
    cost=lambda group: group[0].n_depth,
)
