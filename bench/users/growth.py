"""Fits how the time of a token grows with the number of positions, for stock and ours in turns.

    python -m bench growth [-m MODEL] [-d 4096-65536*2] [-a SPEC]...

If only bytes count, the slope of ours is below its ratio times that of stock. Each round of all
depths has a line of its own, through the medians of its tokens: a machine that is slower for some
minutes would bend a single line. Every other round takes the cases of a depth in reverse.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from bench import plot, runner
from pyorch.bench import output, speed
from pyorch.bench.plan import Case, SpeedPlan, check
from pyorch.bench.records import Done, Record, Result
from pyorch.bench.worker import Workers
from pyorch.cli.types import Number, Numbers
from pyorch.errors import SparqError
from pyorch.table import markdown

TOKENS = 20  # of a test
OPTIONS = (
    runner.SOME_MODEL,
    runner.layers(2),
    click.option("-d", "--n-depth", type=Numbers(1), default="4096-65536*2", show_default=True),
    runner.specs("sparq,ratio=1/8"),
    runner.THREADS,
    click.option(
        "--rounds", type=Number(int, 1), default=5, show_default=True, help="Rounds of all depths."
    ),
)


def _plan(given: runner.Given) -> SpeedPlan:
    """The plan of a round, whose number is its seed."""
    return SpeedPlan(
        models=[runner.model_of(given)],
        n_gen=[TOKENS],
        n_depth=given.n_depth,
        threads=[given.threads],
        specs=given.specs,
        repetitions=1,
    )


def groups(given: runner.Given) -> list[list[Case]]:
    """A group for each depth of each round.

    Raises:
        SparqError: there is only one depth, or a sparse row is dense at one.
    """
    if len(set(given.n_depth)) < 2:
        raise SparqError("a slope needs two depths", "-d 4096,16384", exit_code=2)
    plan = _plan(given)
    planned = [g for i in range(given.rounds) for g in replace(plan, seed=i + 1).groups()]
    check(planned)
    return [cases for _, cases in planned]


def measure(given: runner.Given, group: Sequence[Case], done: Done) -> list[Result]:
    plan = _plan(given)
    with Workers() as processes:
        return speed.measure(plan, Path(plan.models[0]), group, processes, done)


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope and the value at 0 of the least-squares line through (x, y)."""
    a, b = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    return float(a), float(b)


def table(recs: Sequence[Record]) -> str:
    """A table for each model and number of threads."""
    models: dict[tuple[str, int], list[plot.Row]] = {}
    for r in output.rows(recs):
        if not r["below_min_ctx"]:  # in records until November 2026
            models.setdefault((r["model_type"], r["n_threads"]), []).append(r)
    return "\n\n".join(_table(*of, rows) for of, rows in models.items())


def _table(model: str, threads: int, rows: Sequence[plot.Row]) -> str:
    rounds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for r in rows:
        points = rounds.setdefault(r["seed"], {}).setdefault(output.label(r), [])
        points.append((r["n_depth"], r["median_ns"]))
    fits: dict[str, list[tuple[float, float, float]]] = {}  # per round: slope, at 0, share
    for lines in rounds.values():
        found = {name: slope(points) for name, points in lines.items()}
        best = min(a for name, (a, _) in found.items() if name.startswith("stock"))
        for name, (a, b) in found.items():
            fits.setdefault(name, []).append((a, b, 100 * a / best))
    body = []
    for name, of_rounds in fits.items():
        slopes, at_0, shares = zip(*of_rounds, strict=True)
        share = f"{statistics.median(shares):.1f} % ({min(shares):.1f}-{max(shares):.1f})"
        row = f"`{name}`", f"{statistics.median(slopes):.1f}", share
        body.append((*row, f"{statistics.median(at_0) / 1e6:.2f}"))
    span = f"{min(r['n_depth'] for r in rows)}-{max(r['n_depth'] for r in rows)}"
    head = ("attention", f"ns per position, d {span}", "share of stock's", "at 0, ms")
    title = (
        f"**Growth** of token time, {model}, threads: {threads}; medians of {len(rounds)} rounds "
        "of all depths, least and most of them in brackets"
    )
    return f"{title}\n\n{markdown(head, body)}"


MEASUREMENT = runner.Measurement(
    name="growth",
    about="How the time of a token grows with the positions, stock and ours in turns.",
    options=OPTIONS,
    groups=groups,
    measure=measure,
    table=table,
    libraries=("stock", "sparq"),
    cost=lambda group: group[0].n_depth,
)
