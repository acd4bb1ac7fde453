"""What the figures share: records in, a picture and its numbers out, all drawn alike.

A figure is a module with NAME, TITLE, CAPTION, FILE (of its records), `data(folder)` -> rows, and
`draw(rows)` -> a matplotlib figure. `main` writes NAME.csv and NAME.svg.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np

from pyorch.attention.spec import make_spec, parse_spec, ratio_text
from pyorch.bench import records
from pyorch.cli import fail
from pyorch.errors import SparqError

Row = dict[str, Any]
HERE = Path(__file__).parent
FIGURES = HERE / "figures"

# of middle lightness: they are seen on white and on black
OURS, OURS_2, OURS_3, STOCK, STOCK_2, PAPER = (
    "#2f7ed8",
    "#e8710a",
    "#1a9850",
    "#d9480f",
    "#b7791f",
    "#868e96",
)
_INK = "#010203"  # stands for the reader's own text colour until the SVG is written


# ---- records ----


def batches(file: Path) -> Iterator[list[Row]]:
    """Records that were measured together: neighbours that differ in what ran, and in no more.

    A speed-up is a ratio within one of these.
    """
    own = ("library", "flash_attn", "spec")

    def group(rec: Row) -> str:
        return json.dumps([v for k, v in rec["case"].items() if k not in own])

    for _, found in itertools.groupby(_lines(file), group):
        batch = list(found)
        start = 0
        for i, rec in enumerate(batch):  # the same case again: a later batch
            if any(rec["case"] == other["case"] for other in batch[start:i]):
                yield batch[start:i]
                start = i
        yield batch[start:]


def _lines(file: Path) -> list[Row]:
    """In the order of the file, which `records.load` has checked."""
    known = records.load(file)
    found = []
    for line in file.read_text("utf-8").splitlines() if known else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # cut short by an interruption
    return found


def rows_of(
    folder: Path,
    name: str,
    rows: Callable[[Sequence[Any]], Sequence[Row]],
    key: Callable[[Row], Any],
) -> list[Row]:
    """Rows that ran as they say, of all batches with a stock row; of one key, the last."""
    found: dict[Any, Row] = {}
    for batch in batches(folder / name):
        if any(rec["case"]["library"] == "stock" for rec in batch):
            for row in rows(batch):
                if not row.get("below_min_ctx"):  # dense, whatever it is called
                    found[key(row)] = row
    return list(found.values())


def need(rows: Sequence[Any], what: str, command: str) -> None:
    """Refuse to draw nothing.

    Raises:
        SparqError: there are no rows.
    """
    if not rows:
        raise SparqError(f"no records of {what}", f"first: {command}")


def caption(figure: ModuleType | Any, folder: Path) -> str:
    """Its text, and the machine of the last record."""
    if not figure.FILE:
        return figure.CAPTION
    m = _lines(folder / figure.FILE)[-1]["env"]["machine"]
    return f"{figure.CAPTION} {m['cpu']}, {m['cores']} cores."


def default_folder() -> Path:
    """The records of this kind of machine; else those of the machine with most of them."""
    own = records.default_folder()
    if own.is_dir():
        return own
    others = sorted(
        (p for p in own.parent.glob("*/") if any(p.glob("*.jsonl"))),
        key=lambda p: sum(f.stat().st_size for f in p.glob("*.jsonl")),
    )
    return others[-1] if others else own


def name_of(label: str) -> str:
    """What a line is called: `SparQ 1/8 q4` for `sparq,ratio=1/8,shadow=q4`."""
    if label.startswith("stock"):
        return label
    spec = parse_spec(label)
    if not spec.sparse:
        return f"our {label}"
    plain = replace(make_spec(spec.method, ratio=spec.ratio), shadow=spec.shadow)
    if spec.ratio is None or spec != plain:
        return label
    shadow = f" {spec.shadow}" if spec.method == "sparq" else ""
    return f"{dict(sparq='SparQ', topk='top-k')[spec.method]} {ratio_text(spec.ratio)}{shadow}"


def colours(names: Sequence[str]) -> dict[str, str]:
    """Of lines, by name; the same in every figure."""
    fixed = {"stock -fa 0": STOCK, "stock -fa 1": STOCK_2, "our dense": OURS_3}
    by_type = {"q4": OURS, "f16": OURS_2, "q8": OURS_3}
    return {n: fixed.get(n) or by_type.get(n.rpartition(" ")[2], PAPER) for n in names}


@cache
def paper(figure: str, series: str) -> list[tuple[float, float]]:
    """Published points (x, y)."""
    with (HERE / "paper.csv").open(newline="") as f:
        found = [r for r in csv.DictReader(f) if (r["figure"], r["series"]) == (figure, series)]
    if not found:
        raise KeyError(f"{figure}, {series}: not in paper.csv")
    return [(float(r["x"]), float(r["y"])) for r in found]


# ---- pictures ----


def panels(
    n: int = 1, n_rows: int = 1, *, height: float = 3.6, width: float = 4.6
) -> tuple[Any, list[Any]]:
    """A figure of rows of `n` panels side by side: (figure, its axes); sizes in inches."""
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
    ax.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
    ax.set_xticks([], minor=True)
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


def label_ends(
    ax: Any, ends: Sequence[tuple[str, float, float, str]], *, pad: float = 0.02, lines: int = 1
) -> None:
    """Names of lines at their right ends, moved apart: (text of some lines, x, y, colour)."""
    height = 0.062 * lines  # as a share of the axis
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
        ax.text(right + pad, y, text, color=colour, transform=ax.transAxes, va="center", fontsize=8)


def write(
    picture: Any, rows: Sequence[Row], name: str, about: dict[str, str], out: Path, png: bool
) -> None:
    """`name`.svg, with the title and caption inside, and `name`.csv."""
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(k for row in rows for k in row))
    with (out / f"{name}.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: _short(v) for k, v in row.items()} for row in rows)
    svg = out / f"{name}.svg"
    picture.savefig(svg, metadata={"Date": None, "Creator": None, **about})
    text = svg.read_text("utf-8").replace(_INK, "currentColor")
    style = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#d1d7e0}}</style>"
    text = re.sub(r"(<svg [^>]*>)", rf"\1{style}", text, count=1)
    svg.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", "utf-8")
    if png:
        picture.savefig(out / f"{name}.png", dpi=110, facecolor="white")
    plt.close(picture)


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


# ---- the command of each script ----


def make(figure: ModuleType | Any, folder: Path, out: Path, png: bool = False) -> None:
    """Draw one figure from the records in `folder`.

    Raises:
        SparqError: its records are missing, or matplotlib is.
    """
    rows = figure.data(folder)
    try:
        picture = figure.draw(rows)
    except ModuleNotFoundError as e:
        raise SparqError(f"{e.name} is not installed", "pip install '.[figures]'") from None
    about = {"Title": figure.TITLE, "Description": caption(figure, folder)}
    write(picture, rows, figure.NAME, about, out, png)


def main(*figures: ModuleType | Any) -> None:
    """The command line of the figures: draw those that have records, say what the others lack."""

    @click.command(context_settings={"help_option_names": ["-h", "--help"]})
    @click.option("--results", metavar="DIR", help="Records.  [default: bench/results/<machine>]")
    @click.option("--out", metavar="DIR", default=str(FIGURES), help="[default: bench/figures]")
    @click.option("--png", is_flag=True, help="A PNG as well.")
    def command(results: str | None, out: str, png: bool) -> None:
        """Draw from records: NAME.svg and NAME.csv."""
        folder = Path(results) if results else default_folder()
        missing = 0
        for figure in figures:
            try:
                make(figure, folder, Path(out), png)
                print(Path(out) / f"{figure.NAME}.svg")
            except SparqError as e:
                missing += 1
                click.echo(f"{figure.NAME}: not drawn: {e.message} ({e.hint})", err=True)
        if missing:
            raise SparqError(f"{missing} of {len(figures)} figures not drawn", str(folder))

    try:
        command(standalone_mode=False)
    except SparqError as error:
        fail(error.message, error.hint, error.exit_code)
    except click.UsageError as error:
        fail(error.format_message(), "--help", 2)
