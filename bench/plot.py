"""What all figures share: records in, a picture and its numbers out, all in one style.

`draw.py` lists the figures and has the command.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pyorch import paths
from pyorch.attention.spec import AttentionSpec, ratio_text
from pyorch.errors import SparqError
from pyorch.measure import records
from pyorch.measure.pictures import (  # noqa: F401  the figures have them from here
    OURS,
    OURS_2,
    OURS_3,
    PAPER,
    Row,
    decades,
    panels,
    write,
)

HERE = Path(__file__).parent
FIGURES = HERE / "figures"
STOCK, STOCK_2 = "#d9480f", "#b7791f"  # beside the colours of `pictures`


@dataclass(frozen=True)
class Figure:
    """A picture, NAME.svg, with its numbers, NAME.csv."""

    name: str
    title: str
    caption: str
    needs: str  # the command that measures its data
    file: str  # the file of the records
    data: Callable[[Path], list[Row]]  # from the folder of the records
    draw: Callable[[Sequence[Row]], Any]  # a matplotlib figure


class NoRecords(SparqError):
    """The data of a figure have not been measured on this machine."""


# ---- axes and lines ----


def positions_axis(ax: Any, values: Sequence[float]) -> None:
    """A log axis of sequence lengths: 4k, 8k, ..."""
    low, high = min(values), max(values)
    ticks = [2**i for i in range(5, 24) if low <= 2**i <= high]
    ax.set_xscale("log", base=2)
    ax.set_xlim(low / 1.15, high * 1.15)
    x_ticks(ax, ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
    ax.set_xlabel("sequence length S (positions)")


def x_ticks(ax: Any, ticks: Sequence[float], names: Sequence[str]) -> None:
    """Set these ticks on the x axis, and no others between them."""
    ax.set_xticks(ticks, names)
    ax.set_xticks([], minor=True)


class Names:
    """Names of lines at their right ends, which are written when all axes are final."""

    def __init__(self) -> None:
        self._ends: dict[Any, list[tuple[str, float, float, str]]] = {}  # by axes

    def line(
        self,
        ax: Any,
        name: str,
        rows: Sequence[Row],
        x: str,
        y: str,
        bars: tuple[str, str] | None = None,
        *,
        color: str,
        band: bool = False,
        **style: Any,
    ) -> None:
        """Draw the column `y` over `x`, with bars, or a band, between two more columns.

        name: empty = none.
        """
        xs, ys = [r[x] for r in rows], [r[y] for r in rows]
        style = {"fmt": "o-", "color": color} | style
        low, high = ([r[column] for r in rows] for column in bars or (y, y))
        if band:
            ax.fill_between(xs, low, high, color=color, alpha=0.12, linewidth=0)
        if bars and not band:
            down = [max(a - b, 0) for a, b in zip(ys, low, strict=True)]
            up = [max(b - a, 0) for a, b in zip(ys, high, strict=True)]
            ax.errorbar(xs, ys, [down, up], **style)
        else:
            ax.plot(xs, ys, style.pop("fmt"), **style)
        if name:
            self.at(ax, name, xs[-1], ys[-1], color)

    def each(
        self, ax: Any, rows: Sequence[Row], x: str, y: str, colours: Mapping[str, str], *bars: str,
        by: str = "attention", named: bool = True, **style: Any,
    ) -> None:  # fmt: skip
        """A `line` for each value of the column `by` that has a colour and rows."""
        for name, color in colours.items():
            of_name = [r for r in rows if r[by] == name]
            if of_name:
                low_high = (bars[0], bars[1]) if bars else None
                self.line(ax, name * named, of_name, x, y, low_high, color=color, **style)

    def at(self, ax: Any, name: str, x: float, y: float, color: str) -> None:
        """Add a name for a line that ends there."""
        self._ends.setdefault(ax, []).append((name, x, y, color))

    def write(self, figure: Any) -> None:
        """Write the names."""
        figure.canvas.draw()
        for ax, ends in self._ends.items():
            _label_ends(ax, ends)


def _label_ends(ax: Any, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Write names at the right ends of lines, moved apart: (text of some lines, x, y, colour)."""
    n_line = 1 + max(text.count("\n") for text, *_ in ends)
    height = 0.062 * n_line  # the height of a name as a share of the axis
    to_axes = ax.transData + ax.transAxes.inverted()
    spots = sorted(
        ((*to_axes.transform((x, y)), text, colour) for text, x, y, colour in ends),
        key=lambda s: s[1],
    )
    ys = np.array([s[1] for s in spots])
    for _ in range(200):  # push neighbours apart
        for i in range(1, len(ys)):
            lap = height - (ys[i] - ys[i - 1])
            if lap > 1e-6:
                ys[i - 1] -= lap / 2
                ys[i] += lap / 2
    right = max(s[0] for s in spots)
    for (_, _, text, colour), y in zip(spots, ys, strict=True):
        ax.text(
            right + 0.02, y, text, color=colour, transform=ax.transAxes, va="center", fontsize=8
        )


# ---- records ----


def need(rows: Sequence[Any], what: str, command: str) -> None:
    """Refuse to draw nothing.

    Raises:
        NoRecords: there are no rows.
    """
    if not rows:
        raise NoRecords(f"no records of {what}", f"first: {command}")


@cache
def points(figure: str, series: str) -> list[tuple[float, float]]:
    """The points (x, y) of a series in the papers' figures and tables.

    Raises:
        KeyError: there is no such series.
    """
    with (HERE / "papers" / "paper.csv").open(newline="", encoding="utf-8") as f:
        rows = [r for r in csv.DictReader(f) if (r["figure"], r["series"]) == (figure, series)]
    if not rows:
        raise KeyError(f"{figure}, {series}: not in paper.csv")
    return [(float(r["x"]), float(r["y"])) for r in rows]


def caption(figure: Figure, folder: Path) -> str:
    """The caption of a figure, with the machine of the last record and how many are old."""
    recs = [r for r in records.load_all(folder / figure.file) if "env" in r]
    m = recs[-1]["env"]["machine"]
    of = f"{m['cpu']}, {m['cores']} cores", recs[-1].get("time", "")[:10]  # none in those of `eval`
    return f"{figure.caption} {', '.join(filter(None, of))}." + records.about_old(recs)


def default_folder() -> Path:
    """The records of this kind of machine, or else of the machine with the most records."""
    own = records.default_folder()
    if own.is_dir():
        return own
    others = sorted(
        (p for p in own.parent.glob("*/") if any(p.glob("*.jsonl"))),
        key=lambda p: sum(f.stat().st_size for f in p.glob("*.jsonl")),
    )
    return others[-1] if others else own


def name_of(spec: AttentionSpec) -> str:
    """The name of a line of ours: `SparQ 1/8 q4` for `sparq,ratio=1/8,shadow=q4`."""
    usual = AttentionSpec(
        spec.method, ratio=spec.ratio, shadow=spec.shadow, gpu_min_mb=spec.gpu_min_mb
    )
    if not spec.sparse or spec.ratio is None or spec != usual:
        return str(spec)
    shadow = f" {spec.shadow}" if spec.method == "sparq" else ""
    return f"{dict(sparq='SparQ', topk='top-k')[spec.method]} {ratio_text(spec.ratio)}{shadow}"


def colours(names: Sequence[str]) -> dict[str, str]:
    """The colours of our lines, by the type of the transposed K at the end of a name; they are the
    same in every figure."""
    by_type = {"q4": OURS, "f16": OURS_2, "q8": OURS_3}
    return {n: by_type.get(n.rpartition(" ")[2], PAPER) for n in names}


def over_positions(
    rows: Sequence[Row],
    y: str,
    colours: Mapping[str, str],
    *bars: str,
    x: str = "positions",
    published: Sequence[tuple[float, float]] = (),
    **labels: Any,
) -> Any:
    """A figure of one panel: the column `y` over lengths, with a line for each attention."""
    figure, (ax,) = panels(width=6.4)
    lines = Names()
    lines.each(ax, rows, x, y, colours, *bars)
    if published:
        ax.plot(*zip(*published, strict=True), "s--", color=PAPER)
        lines.at(ax, "paper", *published[-1], PAPER)
    positions_axis(ax, [r[x] for r in rows] + [at for at, _ in published])
    ax.set(ylim=(0, None), **labels)
    lines.write(figure)
    return figure


def make(figure: Figure, folder: Path, out: Path) -> None:
    """Draw one figure from the records in `folder`.

    Raises:
        NoRecords: its records are missing.
        SparqError: matplotlib is missing.
    """
    rows = figure.data(folder)
    try:
        picture = figure.draw(rows)
    except ModuleNotFoundError as e:
        raise SparqError(f"{e.name} is not installed", paths.install_command("figures")) from None
    about = {"Title": figure.title, "Description": caption(figure, folder)}
    write(picture, rows, figure.name, about, out)
