"""Measures how token time grows with the number of positions, and what happens at the edges.

slope       the slope of token time over positions, fitted through the medians at several depths,
            for stock and ours; if only bytes count, ours is below ratio times stock's. Each round
            of all depths has a fit of its own, since a machine that is slower for some minutes
            would bend a single line
min_ctx     below it our attention is exact and dense: the token time beside stock's
sealing     a restored state is transposed when it is read: the time that takes, and a check that no
            token after it is slower than the others
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pyorch.attention.spec import AttentionSpec
from pyorch.bench import output, records, speed
from pyorch.bench.plan import SpeedPlan, check, cost
from pyorch.bench.records import Record, spread, where_given
from pyorch.bench.worker import Workers
from pyorch.errors import SparqError
from pyorch.progress import Progress
from pyorch.table import markdown as table

BENCH = "sealing"
SHORT = (256, 768)  # still below the default min_ctx after one more test
TITLE = "**Growth** of token time, "  # and what it is of


@dataclass(frozen=True)
class Case:
    """A state of `n_depth` positions that is restored while `spec` is on, and then decoded."""

    model_filename: str
    model_type: str
    n_threads: int
    type_k: str
    type_v: str
    n_depth: int
    spec: AttentionSpec
    n_token: int = 20
    repetitions: int = 3
    seed: int = 1
    library: str = "sparq"
    calibration: str = where_given("")
    numa: str = where_given("")


def run(
    plan: SpeedPlan, file: Path, progress: Progress, *, force: bool = False
) -> tuple[list[Record], list[Record]]:
    """Measure speed at the plan's depths and at `SHORT`, and sealing at the largest depth.

    The plan's repetitions are rounds of all depths; every other round takes the cases of a depth in
    reverse.

    Returns:
        The records of speed, and those of sealing.

    Raises:
        SparqError: as `speed.run`; or there is only one depth, or nothing was sealed.
    """
    if len(set(plan.n_depth)) < 2:
        raise SparqError("a slope needs two depths", "-d 4096,16384", exit_code=2)
    rounds = [replace(plan, repetitions=1, seed=i + 1) for i in range(plan.repetitions)]
    below = replace(plan, n_depth=SHORT, below_min_ctx=True)
    check((*rounds[0].groups(), *below.groups()))
    costs = [sum(cost(*group) for group in p.groups()) for p in (*rounds, below)]
    costs.append(costs[0])  # sealing costs about as much as a round
    part = _parts(costs, progress)
    long = [r for i, p in enumerate(rounds) for r in speed.run(p, file, part(i), force=force)]
    short = speed.run(below, file, part(len(rounds)), force=force)
    ((model, group), *_) = replace(plan, n_depth=[max(plan.n_depth)]).groups()
    first = group[0]
    cases = [
        Case(
            model_filename=first.model_filename,
            model_type=first.model_type,
            n_threads=first.n_threads,
            type_k=first.type_k,
            type_v=first.type_v,
            n_depth=first.n_depth,
            spec=c.spec,
            calibration=c.calibration,
            numa=c.numa,
        )
        for c in group
        if c.spec.method == "sparq"
    ]
    with Workers() as workers:
        sealing = records.resume(
            BENCH,
            [cases] if cases else [],
            lambda cases, done: _measure(model, cases, workers, done),
            file.with_name("sealing.jsonl"),
            part(len(rounds) + 1),
            cost=len,
            force=force,
        )
    return long + short, sealing


def _parts(costs: Sequence[int], progress: Progress) -> Callable[[int], Progress]:
    """Returns the progress of each part of a whole, weighted by the costs of the parts."""

    def part(n: int) -> Progress:
        before = sum(costs[:n])
        return lambda done, total: progress(before + done * costs[n] // total, sum(costs))

    return part


def _measure(
    model: Path, cases: Sequence[Case], workers: Workers, progress: records.Done
) -> list[dict[str, Any]]:
    results = []
    for i, case in enumerate(cases):
        worker = workers.start("sparq", case.library)
        worker.open(
            model=str(model),
            n_ctx=case.n_depth + 256,
            n_threads=case.n_threads,
            n_batch=8,
            type_k=case.type_k,
            type_v=case.type_v,
            numa=case.numa,
        )
        runs, sealing = [], []
        for n in range(case.repetitions):
            worker.attention(spec="off")
            worker.fill(n_pos=case.n_depth, seed=case.seed)
            # this is what restoring does, by itself
            sealing.append(worker.turned_on(spec=str(case.spec)))
            runs.append(worker.restored(n_pos=case.n_depth, n_token=case.n_token, seed=case.seed))
            progress((i + (n + 1) / case.repetitions) / len(cases))
        worker.close()
        if not all(r["sealed"] for r in (*sealing, *runs)):
            raise SparqError(f"{case.spec}: no group of positions was sealed; not reported")
        if not all(r["counters"]["calls_sparse"] for r in runs):
            raise SparqError(f"{case.spec}: no attention call was sparse; not reported")
        results.append(
            {
                "samples_ns": [x for r in runs for x in r["samples_ns"]],
                "seal_ns": [s["ns"] for s in sealing],
                "counters": {
                    "groups_sealed": sum(r["sealed"] for r in runs),
                    "calls_sparse": sum(r["counters"]["calls_sparse"] for r in runs),
                },
            }
        )
    return results


# ---- tables ----


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope and intercept of the least-squares line through (x, y)."""
    a, b = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    return float(a), float(b)


def deeper(recs: Sequence[Record], found: Sequence[Record]) -> set[int]:
    """The depths of the lines of this model in `recs` that those of `found` do not go through."""

    def of_model(recs: Sequence[Record]) -> set[int]:
        cases = [r["case"] for r in recs if not r["case"]["below_min_ctx"]]
        same = "model_filename", "n_threads", "numa"
        of = found[0]["case"]
        return {c["n_depth"] for c in cases if all(c[x] == of[x] for x in same)}

    return of_model(recs) - of_model(found)


def by_model(page: str) -> dict[str, str]:
    """The tables of a page of several models, by the part of their titles that names the model,
    threads and NUMA."""
    texts = [f"{TITLE}{rest}".strip() for rest in page.split(TITLE)[1:]]
    return {text.partition(";")[0]: text for text in texts}


def markdown(recs: Sequence[Record], sealing: Sequence[Record]) -> str:
    """Three tables: slopes, short contexts, sealing."""
    long = [r for r in output.rows(recs) if not r["below_min_ctx"]]
    short = [r for r in output.rows(recs) if r["below_min_ctx"]]
    times: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for row in long:
        points = times.setdefault(row["seed"], {}).setdefault(output.label(row), [])
        points.append((row["n_depth"], row["median_ns"]))
    fits: dict[str, list[tuple[float, float, float]]] = {}  # per round: slope, at 0, share
    for lines in times.values():
        found = {name: slope(points) for name, points in lines.items()}
        best = min(a for name, (a, _) in found.items() if name.startswith("stock"))
        for name, (a, b) in found.items():
            fits.setdefault(name, []).append((a, b, 100 * a / best))
    numa = f", numa: {long[0]['numa']}" if long[0]["numa"] else ""
    span = f"{min(r['n_depth'] for r in long)}-{max(r['n_depth'] for r in long)}"
    title = (
        f"{TITLE}{long[0]['model_type']}, threads: {long[0]['n_threads']}"
        f"{numa}; medians of {len(times)} rounds of all depths, least and most of them in brackets"
    )
    growing = []
    for name, of_rounds in fits.items():
        slopes, at_0, shares = zip(*of_rounds, strict=True)
        share = f"{statistics.median(shares):.1f} % ({min(shares):.1f}-{max(shares):.1f})"
        slope_ns, start = statistics.median(slopes), statistics.median(at_0)
        growing.append((f"`{name}`", f"{slope_ns:.1f}", share, f"{start / 1e6:.2f}"))
    head = ("attention", f"ns per position, d {span}", "share of stock's", "at 0, ms")
    out = [title, table(head, growing)]
    below = [
        (
            f"`{output.label(r)}`",
            output.test(r),
            f"{r['median_ns'] / 1e6:.2f} ({r['p10_ns'] / 1e6:.2f}-{r['p90_ns'] / 1e6:.2f})",
            f"{r['speedup']:.3f}x",
        )
        for r in short
    ]
    out.append(table(("below min_ctx", "test", "ms (p10-p90)", "against best stock"), below))
    restored = []
    for rec in sealing:
        mid, seal = spread(rec["samples_ns"])[0], spread(rec["seal_ns"])[0]
        cells = f"{mid / 1e6:.2f}", f"{max(tokens(rec)) / mid:.2f}", f"{seal / 1e6:.1f}"
        restored.append((f"`{rec['case']['spec']}`", rec["case"]["n_depth"], *cells))
    if restored:
        head = ("after a restored state", "positions", "tokens, ms", "slowest of them / median")
        out.append(table((*head, "sealing it, ms"), restored))
    return "\n\n".join(out)


def tokens(rec: Record) -> list[float]:
    """The time of each token after a restored state in ns: the median over the repetitions, because
    the machine may slow a single one down."""
    part, n = rec["samples_ns"], len(rec["samples_ns"]) // rec["case"]["repetitions"]
    runs = [part[i : i + n] for i in range(0, len(part), n)]
    return [statistics.median(token) for token in zip(*runs, strict=True)]
