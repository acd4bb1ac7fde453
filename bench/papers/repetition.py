"""Draws repetition beside the paper's Table 2, as shares of what dense attention recites."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import plot
from pyorch.evals import series, stats, table

FILE = "eval/repetition.jsonl"
NEEDS = "sparq-cpp eval repetition, then sparq-cpp eval pack: docs/evals.md"
MODELS = ("Llama 2 13B", "Llama 3 8B", "Mistral 7B", "Gemma 7B", "Pythia 6.9B")
METHODS = {
    "SparQ": ("sparq", plot.OURS),
    "LM-Infinite": ("lm-infinite", "#ae3ec9"),
    "H2O": ("h2o", plot.OURS_2),
}


def data(folder: Path) -> list[plot.Row]:
    results = series.read(folder / FILE)
    plot.need(results, "repetition", NEEDS)
    base, *others = series.by_setting(results)[-1]
    out: list[plot.Row] = []
    for name, (line, _) in METHODS.items():
        for s in others:
            if table.line_of(s.method) == line:
                y, low, high = share(*s.common(base))
                out.append({"method": name, "model": s.case["model"]["name"],
                            "x": 100 * s.bytes_per_token / s.bytes_dense, "y": y, "low": low,
                            "high": high, "n": len(s.scores)})  # fmt: skip
        for model in MODELS:
            for x, y in plot.points("repetition", f"{name}: {model}"):
                out.append({"method": name, "model": model, "x": x, "y": y})
    return out


def share(mine: series.Series, dense: series.Series) -> tuple[float, float, float]:
    """The mean over dense's mean for the same passages, in %, and its 95 % interval."""

    def of(i: np.ndarray) -> float:
        return 100 * float(mine.scores[i].mean() / dense.scores[i].mean())

    return stats.jackknife(of, len(mine.scores), mine.texts)


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (ax,) = plot.panels()
    lines = plot.Names()
    for name, (_, colour) in METHODS.items():
        of_method = [r for r in rows if r["method"] == name]
        theirs = [r for r in of_method if r["model"] in MODELS]
        ours = sorted((r for r in of_method if r not in theirs), key=lambda r: r["x"])
        lines.line(ax, name, ours, "x", "y", ("low", "high"), color=colour, elinewidth=1)
        ax.plot([r["x"] for r in theirs], [r["y"] for r in theirs], "o", color=colour,
                markerfacecolor="none", markersize=7)  # fmt: skip
    ax.plot([], [], "o", color=plot.PAPER, markerfacecolor="none", markersize=7,
            label="the paper's five models")  # fmt: skip
    ax.legend(frameon=False, fontsize=8, loc="center")
    ax.axhline(100, color=plot.PAPER, linewidth=1, linestyle="--")
    ax.set_xscale("log", base=2)
    ticks = [6.25, 12.5, 25, 50]
    plot.x_ticks(ax, ticks, [f"{t:g}" for t in ticks])
    ax.set(ylim=(0, None), xlabel="bytes of K and V read, % of dense")
    ax.set(ylabel="characters recited, % of dense", title="Repetition")
    lines.write(figure)
    return figure


FIGURE = plot.Figure(
    name="repetition",
    title="Repetition over bytes, beside SparQ's Table 2",
    caption="Lines: the demo model, with 95 % intervals over the passages. Rings: the "
    "paper's Llama 2 13B, Llama 3 8B, Mistral 7B, Gemma 7B and Pythia 6.9B.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)
