"""The common style of all pictures: panels, axes, names at the ends of lines, SVG and CSV.

matplotlib (extra `figures`) is imported only when something is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyorch import table

Row = dict[str, Any]

# of medium lightness, visible on white and on black
OURS, OURS_2, OURS_3, STOCK, STOCK_2, PAPER = (
    "#2f7ed8",
    "#e8710a",
    "#1a9850",
    "#d9480f",
    "#b7791f",
    "#868e96",
)
_INK = "#010203"  # stands for the reader's own text colour until the SVG is written


def panels(
    n: int = 1, n_rows: int = 1, *, height: float = 3.6, width: float = 4.6
) -> tuple[Any, list[Any]]:
    """Returns a figure with rows of `n` panels side by side, and its axes; sizes in inches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "sparq-cpp",
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans"],
            "font.size": 9,
            "axes.titlesize": 9.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": PAPER,
            "grid.alpha": 0.2,
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "lines.linewidth": 1.8,
            "lines.markersize": 4.5,
            **dict.fromkeys(
                ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"),
                _INK,
            ),
        }
    )
    figure, axes = plt.subplots(
        n_rows, n, figsize=(width * n, height * n_rows), layout="constrained", squeeze=False
    )
    figure.patch.set_alpha(0)
    for ax in axes.flat:
        ax.patch.set_alpha(0)
    return figure, list(axes.flat)


def positions_axis(ax: Any, values: Sequence[float]) -> None:
    """A log axis of sequence lengths: 4k, 8k, ..."""
    low, high = min(values), max(values)
    ticks = [2**i for i in range(5, 24) if low <= 2**i <= high]
    ax.set_xscale("log", base=2)
    ax.set_xlim(low / 1.15, high * 1.15)
    x_ticks(ax, ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
    ax.set_xlabel("sequence length S (positions)")


def decades(ax: Any, values: Sequence[float]) -> None:
    """A log y axis that is labelled at 1, 3, 10, ... in plain numbers."""
    low, high = min(values), max(values)
    ticks = [m * 10.0**e for e in range(-6, 7) for m in (1, 3)]
    ticks = [t for t in ticks if low / 1.6 <= t <= high * 1.6]
    ax.set_yscale("log")
    ax.set_ylim(low / 1.6, high * 1.6)
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.set_yticks([], minor=True)


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


def write(picture: Any, rows: Sequence[Row], name: str, about: dict[str, str], out: Path) -> None:
    """Write `name`.svg, with the title and caption inside, and `name`.csv."""
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    short = [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in rows]
    (out / f"{name}.csv").write_text(table.as_csv(short) + "\n", "utf-8")
    svg = out / f"{name}.svg"
    picture.savefig(svg, metadata={"Date": None, "Creator": None, **about})
    text = svg.read_text("utf-8").replace(_INK, "currentColor")
    style = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#d1d7e0}}</style>"
    text = re.sub(r"(<svg [^>]*>)", rf"\1{style}", text, count=1)
    svg.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", "utf-8")
    plt.close(picture)
