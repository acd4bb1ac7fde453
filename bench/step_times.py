"""Times the steps of sparse attention by themselves, beside the bytes they read.

    python bench/step_times.py [--like llama2-7b,llama3-8b] [-d 16384,65536] [-t 1,2] [-a SPEC]...

ggml is stopped after every node, and the clock is read around SCORE (or SCORE_SELECT, which is both
in one node) and ATTEND; in a run of its own SCORE is run in the place of SCORE_SELECT, and nothing
is selected. Before each token the caches are made to forget, by a sequential read that is timed
too: shares are of that read's speed. It writes step_times.jsonl.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import commands
import numpy as np
import watch

from pyorch import engine
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import attention, records, state
from pyorch.bench.bandwidth import MemoryReader
from pyorch.bench.records import Record, where_given
from pyorch.cli import run as run_command
from pyorch.cli.types import Numbers
from pyorch.errors import SparqError
from pyorch.native.slots import ATTEND, SCORE, SCORE_SELECT, SELECT
from pyorch.native.tensor import Tensor, op_number
from pyorch.progress import Progress, progress_bar
from pyorch.table import markdown

BENCH = "step_times"
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
    only_score: bool = where_given(False)
    library: str = "sparq"


class Clock:
    """Adds up nanoseconds by step; every node is computed by itself."""

    def __init__(self, op: int, only_score: bool) -> None:
        self.op, self.only_score, self.started = op, only_score, 0
        self.spent: dict[str, int] = {}
        self.node, self.logits = Tensor(), np.empty(0, np.float32)

    def see(self, t: Tensor, ask: bool) -> bool:
        now = time.perf_counter_ns()
        step = STEPS.get(t.op_params[0]) if t.op == self.op else None
        if self.only_score:
            if ask and step == "score_select":
                self.become_score(t)
            step = step if step == "score" else None
        if step and not ask:
            self.spent[step] = self.spent.get(step, 0) + now - self.started
            if self.only_score:
                self.select_nothing(t)
        self.started = time.perf_counter_ns()
        return True

    def become_score(self, t: Tensor) -> None:
        """Puts SCORE in the place of SCORE_SELECT, whose sources stand in the same slots."""
        q, k = t.src[0].contents, t.src[1].contents
        shape = k.ne[2], q.ne[1], q.ne[2], q.ne[3]
        if self.logits.size < np.prod(shape):
            self.logits = np.empty(np.prod(shape), np.float32)
        self.node = Tensor.from_buffer_copy(t)
        t.op_params[0], t.data = SCORE, self.logits.ctypes.data
        for i in range(len(shape)):
            t.ne[i], t.nb[i] = shape[i], 4 * int(np.prod(shape[:i]))

    def select_nothing(self, t: Tensor) -> None:
        """Makes the node SCORE_SELECT again, with a result for ATTEND that holds no position."""
        ctypes.memmove(ctypes.byref(t), ctypes.byref(self.node), ctypes.sizeof(t))
        ctypes.memset(t.data, 0, t.ne[3] * t.nb[3])


def measure(model: Path, case: Case) -> dict[str, Any]:
    """Returns the nanoseconds of each token in all layers by step, bytes per token, and bytes/s."""
    reader = MemoryReader(case.n_threads)
    samples: dict[str, list[int]] = {}
    bandwidth = []
    with engine.load_model(model) as loaded:
        clock = Clock(op_number(loaded.lib, "SPARSE_ATTN"), case.only_score)
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
    if case.only_score and (n := counters["positions_read"]):
        raise SparqError(f"{case.spec}: {n} positions were selected; not reported")
    score, attend = counters["bytes_score"], counters["bytes_attend"]
    bytes_read = {"attend": attend, "score": score, "score_select": score}
    return {
        "samples_ns": samples,
        "bytes": {k: n / case.n_samples for k, n in bytes_read.items() if k in samples},
        "bandwidth_bytes_per_s": bandwidth[2:],
    }


def run(
    cases: Sequence[Case], file: Path, progress: Progress, *, force: bool = False
) -> list[Record]:
    """Measure what `file` lacks, add it there, and return all records."""
    return records.resume(
        BENCH,
        [[case] for case in cases],
        lambda group, _: [measure(attention.model_file(c.like, c.n_layer), c) for c in group],
        file,
        progress,
        cost=lambda group: group[0].n_depth,
        force=force,
    )


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


@commands.command(
    click.option(
        "--like",
        default="llama2-7b,llama3-8b",
        show_default=True,
        help="Known models whose heads to measure.",
    ),
    click.option("-d", "--n-depth", type=Numbers(256), default="16384,65536", show_default=True),
    click.option(
        "-a",
        "--attn",
        "specs",
        multiple=True,
        metavar="SPEC",
        help="Settings of attention; repeatable.  [default: five]",
    ),
    commands.THREADS,
    commands.samples(21),
    commands.OUT,
    commands.FORCE,
)
def command(like: str, folder: Path, force: bool, **options: Any) -> None:
    """Time the steps of sparse attention, token by token."""
    cases = [
        Case(name, 2, n, threads, spec, options["samples"], only_score)
        for name in like.split(",")
        for n in options["n_depth"]
        for threads in options["threads"]
        for spec in map(parse_spec, options["specs"] or SPECS)
        for only_score in ((False, True) if spec.method == "sparq" else (False,))
    ]
    file = folder / f"{BENCH}.jsonl"
    with progress_bar("steps") as progress:
        found = run(cases, file, progress, force=force)
    commands.show(table(found), file)


if __name__ == "__main__":
    run_command(command)
