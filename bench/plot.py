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

from pyorch import paths
from pyorch.attention.spec import AttentionSpec, ratio_text
from pyorch.errors import SparqError
from pyorch.measure import records
from pyorch.measure.pictures import (  # noqa: F401  the figures have them from here
    OURS,
    OURS_2,
    OURS_3,
    PAPER,
    STOCK,
    STOCK_2,
    Names,
    Row,
    decades,
    panels,
    positions_axis,
    write,
    x_ticks,
)

HERE = Path(__file__).parent
FIGURES = HERE / "figures"


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
    about = f"{figure.caption} {m['cpu']}, {m['cores']} cores."
    return about + records.about_old(recs)


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
