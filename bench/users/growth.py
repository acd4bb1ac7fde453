"""Fits how the time of a token grows with the number of positions, for stock and ours in turns.

    python -m bench growth -n 20 -r 5 [-m MODEL] [-d 4096-65536*2] [-a SPEC]...

If only bytes count, the slope of ours is below its ratio times that of stock. Each of the `-r`
rounds of all depths has a line of its own, through the medians of its tokens: a machine that is
slower for some minutes would bend a single line. Every other round takes the cases of a depth in
reverse.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench import plot
from pyorch.cli.bench import speed
from pyorch.cli.bench.comparison import SpeedOptions
from pyorch.cli.bench.speed import SpeedCase
from pyorch.errors import SparqError
from pyorch.measure.records import Record
from pyorch.table import markdown

DEPTHS = [4096, 8192, 16384, 32768, 65536]


def groups(o: SpeedOptions) -> list[list[SpeedCase]]:
    """A group for each depth of each round, whose number is its seed.

    Raises:
        SparqError: there is only one depth, or as `speed.groups`.
    """
    depths = o.n_depth or DEPTHS
    if len(set(depths)) < 2:
        raise SparqError("a slope needs two depths", "-d 4096,16384", exit_code=2)
    one = replace(o, n_depth=depths, n_layer=o.n_layer or 2, repetitions=1)
    of_round = speed.groups(one)
    rounds = range(1, o.repetitions + 1)
    return [[replace(c, seed=i) for c in group] for i in rounds for group in of_round]


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope and the value at 0 of the least-squares line through (x, y)."""
    a, b = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    return float(a), float(b)


def table(recs: Sequence[Record]) -> str:
    """A table for each model and number of threads."""
    models: dict[tuple[str, int], list[plot.Row]] = {}
    for r in speed.rows(recs):
        if not r["below_min_ctx"]:  # in records until November 2026
            models.setdefault((r["model_type"], r["n_threads"]), []).append(r)
    return "\n\n".join(_table(*of, rows) for of, rows in models.items())


def _table(model: str, threads: int, rows: Sequence[plot.Row]) -> str:
    rounds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for r in rows:
        points = rounds.setdefault(r["seed"], {}).setdefault(speed.label(r), [])
        points.append((r["n_depth"], r["median_ns"]))
    fits: dict[str, list[tuple[float, float, float]]] = {}  # per round: slope, at 0, share
    for lines in rounds.values():
        fit = {name: slope(points) for name, points in lines.items()}
        best = min(a for name, (a, _) in fit.items() if name.startswith("stock"))
        for name, (a, b) in fit.items():
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


MEASUREMENT = replace(
    speed.MEASUREMENT,
    name="growth",
    about="How the time of a token grows with the positions, stock and ours in turns.",
    groups=groups,
    table=table,
    show=None,
)
