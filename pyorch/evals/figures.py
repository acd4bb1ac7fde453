"""Figures of evaluations: score against bytes and against speed, and needle heatmaps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyorch import paths
from pyorch.attention.spec import ratio_text
from pyorch.bench import pictures
from pyorch.errors import SparqError
from pyorch.evals import stats, table, tasks
from pyorch.evals.series import Series, by_setting

CURVES, NEEDLE = "eval_curves", "eval_needle"
_COLOURS = (
    pictures.OURS,
    pictures.OURS_2,
    pictures.OURS_3,
    "#ae3ec9",
    "#c92a2a",
    "#0c8599",
    "#b7791f",
    "#e64980",
    "#5c7cfa",
    "#74b816",
    "#495057",
    "#82c91e",
    "#1098ad",
    "#d6336c",
)
_MARKS = "osD^vPX*<>hpd8"
_CAPTIONS = {
    CURVES: "Points of a line are ratios; bars are 95 % intervals; the grey band is that of dense.",
    NEEDLE: "Blue: found; red: not found; white: not asked; in brackets the 95 % interval.",
}


def draw(found: Sequence[Series], out: Path, png: bool = False) -> list[Path]:
    """Write eval_curves.svg, and eval_needle.svg if there are needles, each with a CSV.

    Raises:
        SparqError: there is nothing to draw, or matplotlib is missing.
    """
    groups = by_setting(found)
    needles = [g for g in groups if g[0].task == "needle"]
    try:
        written = [(CURVES, *curves(groups))] if any(len(g) > 1 for g in groups) else []
        written += [(NEEDLE, *heatmaps(needles[-1]))] if needles else []
    except ModuleNotFoundError as e:
        raise SparqError(f"{e.name} is not installed", paths.install_command("figures")) from None
    if not written:
        raise SparqError("a single method makes no curve", "sparq-cpp eval ... -a off -a sparq")
    files = []
    for name, picture, rows, title in written:
        head = groups[0][0]
        about = f"{head.model}, {head.env['machine']['cpu']}. {_CAPTIONS[name]}"
        pictures.write(picture, rows, name, {"Title": title, "Description": about}, out, png)
        files += [out / f"{name}.{end}" for end in (("svg", "png") if png else ("svg",))]
    return files


# ---- curves ----


def curves(groups: Sequence[Sequence[Series]]) -> tuple[Any, list[pictures.Row], str]:
    """Returns (figure, numbers, title): a row per setting, bytes left and speed right."""
    data = [table.rows(g) for g in groups if len(g) > 1]
    names = list(dict.fromkeys(table.line_of(r.method) for rows in data for r in rows))
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
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=4, frameon=False)
    flat = [
        {k: v for k, v in table.flat(r).items() if k not in ("more", "by_layer")}
        for rows in data
        for r in rows
    ]
    return figure, flat, "Score against bytes read and against speed"


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
    far = [r for r in rows if r.score_low > 0]
    if task.reference and far:  # distances from dense range from small to very large
        pictures.decades(ax, [y for r in far for y in (r.score_low, r.score_high)])
    else:
        low, y, high = (factor * v for v in (base.score_low, base.score, base.score_high))
        ax.axhline(y, color=pictures.PAPER, linestyle="--", linewidth=1)
        ax.axhspan(low, high, color=pictures.PAPER, alpha=0.12)
    drawn = {}
    for name, (colour, mark) in looks.items():
        line = [r for r in rows if table.line_of(r.method) == name and not math.isnan(x(r))]
        if line:
            line.sort(key=x)
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


def heatmaps(group: Sequence[Series]) -> tuple[Any, list[pictures.Row], str]:
    """Returns (figure, numbers, title): a row per method, a panel per ratio, depth over length."""
    lines: dict[str, list[Series]] = {}
    for s in sorted(group, key=lambda s: -table.ratio_of(s.method)):
        lines.setdefault(table.line_of(s.method), []).append(s)
    order = list(dict.fromkeys(table.line_of(s.method) for s in group))
    n = max(map(len, lines.values()))
    figure, axes = pictures.panels(n, len(order), width=2.4, height=1.15)
    rows: list[pictures.Row] = []
    for i, name in enumerate(order):
        panels = axes[n * i : n * (i + 1)]
        below = len(lines[order[i + 1]]) if i + 1 < len(order) else 0
        for j, (ax, s) in enumerate(itertools.zip_longest(panels, lines[name])):
            if s is None:
                ax.set_axis_off()
            else:
                rows += _heatmap(ax, s)
                if j < below:
                    ax.set_xticklabels([])
        panels[0].set_ylabel(name, fontsize=8, fontweight="bold")
    figure.supxlabel("positions", fontsize=8)
    figure.supylabel("method; depth of the needle", fontsize=8)
    return figure, rows, "Needle in a haystack: share found by depth and length"


def _heatmap(ax: Any, s: Series) -> list[pictures.Row]:
    """Draw one panel. Returns its numbers."""
    cells: dict[tuple[int, float], list[float]] = {}
    for about, score in zip(s.about, s.scores, strict=True):
        cells.setdefault((about["length"], about["depth"]), []).append(score)
    lengths, depths = (sorted({c[i] for c in cells}) for i in (0, 1))
    grid = np.full((len(depths), len(lengths)), np.nan)
    for (length, depth), found in cells.items():
        grid[depths.index(depth), lengths.index(length)] = np.mean(found)
    ax.imshow(grid, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto")
    ax.grid(False)
    ax.set_xticks(range(len(lengths)), lengths, rotation=45, fontsize=6)
    some = range(0, len(depths), max(len(depths) // 2, 1))
    ax.set_yticks(some, [f"{depths[i]:.0%}" for i in some], fontsize=6)
    low, high = stats.wilson(float(s.scores.sum()), len(s.scores))
    ratio = table.ratio_of(s.method)
    head = f"{ratio_text(ratio)}: " if ratio else ""
    ax.set_title(f"{head}{s.scores.mean():.0%} ({low:.0%}-{high:.0%})", fontsize=8)
    return [
        {"method": str(s.method), "length": length, "depth": depth, "found": float(np.mean(found)),
         "n": len(found)}
        for (length, depth), found in cells.items()
    ]  # fmt: skip
