"""Figures of evaluations: score against bytes and against speed, and needle heatmaps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyorch import paths
from pyorch.attention.spec import ratio_text
from pyorch.errors import SparqError
from pyorch.evals import table, tasks
from pyorch.evals.series import Series, by_setting
from pyorch.measure import pictures
from pyorch.policies import Method, parse

CURVES, NEEDLE = "eval_curves", "eval_needle"
_COLOURS = [pictures.OURS, pictures.OURS_2, pictures.OURS_3, "#ae3ec9", "#c92a2a", "#0c8599"]
_COLOURS += ["#b7791f", "#e64980", "#5c7cfa", "#74b816", "#495057", "#82c91e", "#1098ad", "#d6336c"]
_LETTERS = 120  # of a legend below two panels
_WIDTH = 32  # letters of a name above a heatmap
_MARKS = "osD^vPX*<>hpd8"
_CAPTIONS = {
    CURVES: "Points of a line are ratios or k; bars are 95 % intervals, the grey band is dense's.",
    NEEDLE: "Blue: found; red: not found; white: not asked.",
}


def draw(series: Sequence[Series], out: Path) -> list[Path]:
    """Write eval_curves.svg, and eval_needle.svg if there are needles, each with a CSV.

    Raises:
        SparqError: there is nothing to draw, or matplotlib is missing.
    """
    groups = by_setting(series)
    needles = [g for g in groups if g[0].task == "needle"]
    try:
        written = [(CURVES, *curves(groups))] if any(len(g) > 1 for g in groups) else []
        if needles:
            found_at = needle_rows(needles[-1])
            title = "Needle in a haystack: share found by depth and length"
            written += [(NEEDLE, heatmaps(found_at), found_at, title)]
    except ModuleNotFoundError as e:
        raise SparqError(f"{e.name} is not installed", paths.install_command("figures")) from None
    if not written:
        raise SparqError("a single method makes no curve", "sparq-cpp eval ... -a off -a sparq")
    files = []
    for name, picture, rows, title in written:
        head = groups[0][0]
        about = f"{head.model}, {head.env['machine']['cpu']}. {_CAPTIONS[name]}"
        about += table.about_state(series, [r for g in groups for r in table.rows(g)])
        pictures.write(picture, rows, name, {"Title": title, "Description": about}, out)
        files.append(out / f"{name}.svg")
    return files


# ---- curves ----


def curves(groups: Sequence[Sequence[Series]]) -> tuple[Any, list[pictures.Row], str]:
    """Returns (figure, numbers, title): a row per setting, bytes left and speed right."""
    data = [table.rows(g) for g in groups if len(g) > 1]
    names = list(dict.fromkeys(_line(r.method) for rows in data for r in rows))
    looks = {n: (pictures.PAPER, "x") for n in names if n in ("off", "dense")}
    for i, name in enumerate(n for n in names if n not in looks):
        looks[name] = (_COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)])
    figure, axes = pictures.panels(2, len(data), width=4.6, height=3.7)
    drawn: dict[str, Any] = {}
    for i, rows in enumerate(data):
        left, right = axes[2 * i : 2 * i + 2]
        drawn |= _panel(left, rows, looks, lambda r: 100 * r.share_of_dense)
        drawn |= _panel(right, rows, looks, lambda r: r.tokens_per_s)
        left.set_xlabel("bytes of K and V read per token, % of dense")
        right.set_xlabel("decoded tokens per second")
        left.set_title(f"{rows[0].task}, up to {rows[0].ctx} positions")
    wide = 8 + max(map(len, drawn))  # letters of a name and its mark
    figure.legend(
        drawn.values(),
        drawn,
        loc="outside lower center",
        ncols=max(_LETTERS // wide, 1),
        frameon=False,
    )
    flat = [
        {k: v for k, v in table.flat(r).items() if k not in ("more", "by_layer")}
        for rows in data
        for r in rows
    ]
    return figure, flat, "Score against bytes read and against speed"


def _line(method: Method) -> str:
    """The name of a method's line, whose points differ in the ratio or in k."""
    return table.line_of(method, ("topk", "k"))


def _panel(
    ax: Any,
    rows: Sequence[table.Row],
    looks: dict[str, tuple[str, str]],
    x: Callable[[table.Row], float],
) -> dict[str, Any]:
    """Draw one panel. Returns the artists by name."""
    task = tasks()[rows[0].task]
    factor = 100 if task.percent else 1

    base = rows[0]
    known = [y for r in rows for y in (r.score, r.score_low, r.score_high) if y > 0]
    if task.reference and known:  # distances from dense range from small to very large
        pictures.decades(ax, known)
    else:
        low, y, high = (factor * v for v in (base.score_low, base.score, base.score_high))
        ax.axhline(y, color=pictures.PAPER, linestyle="--", linewidth=1)
        ax.axhspan(low, high, color=pictures.PAPER, alpha=0.12)
    drawn = {}
    for name, (colour, mark) in looks.items():
        line = [r for r in rows if _line(r.method) == name and not math.isnan(x(r))]
        if line:
            line.sort(key=lambda r: r.share_of_dense)
            ys = [factor * r.score for r in line]
            spread = np.array([[r.score - r.score_low, r.score_high - r.score] for r in line]).T
            drawn[name] = ax.errorbar(
                [x(r) for r in line],
                ys,
                factor * spread.clip(0),
                fmt=f"{mark}-",
                color=colour,
                elinewidth=0.7,
            )
    at = [x(r) for r in rows if not math.isnan(x(r))]
    ax.set_xscale("log", base=2)
    if at:
        unit = 100 if max(at) < 125 else 1000  # %, or tokens
        ticks = [unit * 2.0**k for k in range(-10, 10)]
        ticks = [t for t in ticks if min(at) / 1.1 <= t <= max(at) * 1.1]
        ax.set_xticks(ticks, [f"{t:.3g}" if t < 20 else f"{t:.0f}" for t in ticks])
    ax.set_xticks([], minor=True)
    ax.set_ylabel(task.metric + (", %" if task.percent else ""))
    return drawn


# ---- needles ----


def needle_rows(group: Sequence[Series]) -> list[pictures.Row]:
    """A row per method, length and depth, with the share found and how many were asked.

    Raises:
        SparqError: a sparse method read everything.
    """
    rows = []
    for s in group:
        s.refuse_idle()
        cells: dict[tuple[int, float], list[float]] = {}
        for about, score in zip(s.about, s.scores, strict=True):
            cells.setdefault((about["length"], about["depth"]), []).append(score)
        for (length, depth), scores in cells.items():
            cell = {"length": length, "depth": depth, "found": float(np.mean(scores))}
            rows.append({"method": str(s.method), **cell, "n": len(scores)})
    return rows


def heatmaps(rows: Sequence[pictures.Row]) -> Any:
    """A figure of `needle_rows`: lines of methods, a panel per ratio, depth over length."""
    cells: dict[Method, list[pictures.Row]] = {}
    for row in rows:
        cells.setdefault(parse(row["method"]), []).append(row)
    lines: dict[str, list[Method]] = {table.line_of(m): [] for m in cells}
    for m in sorted(cells, key=lambda m: -table.ratio_of(m)):
        lines[table.line_of(m)].append(m)
    n = max(map(len, lines.values()))
    figure, axes = pictures.panels(n, len(lines), width=2.4, height=1.3)
    for i, (name, methods) in enumerate(lines.items()):
        for j, ax in enumerate(axes[n * i : n * (i + 1)]):
            if j >= len(methods):
                ax.set_axis_off()
                continue
            _heatmap(ax, cells[methods[j]], name if j == 0 else "")
            below = list(lines.values())[i + 1 : i + 2]
            if below and j < len(below[0]):
                ax.set_xticklabels([])
    figure.supxlabel("positions", fontsize=8)
    figure.supylabel("depth of the needle", fontsize=8)
    return figure


def _heatmap(ax: Any, rows: Sequence[pictures.Row], name: str) -> None:
    """Draw the panel of one method, below `name`."""
    lengths, depths = (sorted({r[key] for r in rows}) for key in ("length", "depth"))
    grid = np.full((len(depths), len(lengths)), np.nan)
    for r in rows:
        grid[depths.index(r["depth"]), lengths.index(r["length"])] = r["found"]
    ax.imshow(grid, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto")
    ax.grid(False)
    ax.set_xticks(range(len(lengths)), lengths, rotation=45, fontsize=6)
    some = range(0, len(depths), max(len(depths) // 2, 1))
    ax.set_yticks(some, [f"{depths[i]:.0%}" for i in some], fontsize=6)
    share = sum(r["n"] * r["found"] for r in rows) / sum(r["n"] for r in rows)
    ratio = table.ratio_of(parse(rows[0]["method"]))
    head = f"{ratio_text(ratio)}: " if ratio else ""
    words = textwrap.fill(name.replace(",", ", "), _WIDTH) + "\n" if name else ""
    ax.set_title(f"{words}{head}{share:.0%}", fontsize=7)
