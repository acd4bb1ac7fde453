"""The common style of all pictures: panels, axes, SVG and CSV.

matplotlib (extra `figures`) is imported only when something is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyorch import table

Row = dict[str, Any]

# of medium lightness, visible on white and on black
OURS, OURS_2, OURS_3, PAPER = "#2f7ed8", "#e8710a", "#1a9850", "#868e96"
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


def decades(ax: Any, values: Sequence[float]) -> None:
    """A log y axis that is labelled at 1, 3, 10, ... in plain numbers."""
    low, high = min(values), max(values)
    ticks = [m * 10.0**e for e in range(-6, 7) for m in (1, 3)]
    ticks = [t for t in ticks if low / 1.6 <= t <= high * 1.6]
    ax.set_yscale("log")
    ax.set_ylim(low / 1.6, high * 1.6)
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.set_yticks([], minor=True)


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
