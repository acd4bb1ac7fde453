"""Points of the papers' figures and tables, from `paper.csv`."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("paper.csv")


@cache
def points(figure: str, series: str) -> list[tuple[float, float]]:
    """The published points (x, y) of one series.

    Raises:
        KeyError: there is no such series.
    """
    with _FILE.open(newline="", encoding="utf-8") as f:
        rows = [r for r in csv.DictReader(f) if (r["figure"], r["series"]) == (figure, series)]
    if not rows:
        raise KeyError(f"{figure}, {series}: not in paper.csv")
    return [(float(r["x"]), float(r["y"])) for r in rows]
