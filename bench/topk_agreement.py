"""Are the best positions found from r components of q, and is alpha right? From the records of
`attention_stats.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attention_sparsity
import attention_stats as stats
import numpy as np
import plot

NAME = "topk_agreement"
FILE = attention_sparsity.FILE
NEEDS = attention_sparsity.NEEDS
TITLE = "Approximate scores (SparQ Fig. 4e, 4f, E2)"
CAPTION = (
    "Demo model, prose, the longest texts measured. Left and middle: share of the k "
    "highest-scoring positions that approximate scores find, by the share of the components of q "
    "that is used: the largest ones, the first ones, a random projection; means over layers and "
    "heads. Right: a point for each head in ten contexts: attention on the 128 highest-scoring "
    "positions, and what approximate scores (r = d/4) say of theirs, by softmax temperature."
)
N_CONTEXT = 10  # more points hide each other
_CHOICES = dict(zip(stats.CHOICES, (plot.OURS, plot.OURS_2, plot.PAPER), strict=True))
_TOPS = dict(zip(stats.TOPS, (plot.OURS_2, plot.OURS, plot.OURS_3), strict=True))
_TEMPERATURES = dict(zip(stats.TEMPERATURES, (plot.OURS, plot.OURS_2, plot.OURS_3), strict=True))


def data(folder: Path) -> list[plot.Row]:
    rec = attention_sparsity.records_of(folder)[-1]
    out: list[plot.Row] = []
    for choice in stats.CHOICES:
        for part in stats.PARTS:
            for k in stats.TOPS:
                value = stats.agreement(rec, choice, str(part), k)
                out.append({"series": choice, "k": k, "x": 1 / part, "value": value})
    coverage = np.array(rec["samples"]["coverage"])[:N_CONTEXT]
    for true, *guesses in coverage.reshape(-1, coverage.shape[-1]).tolist():
        for name, guess in zip(stats.TEMPERATURES, guesses, strict=True):
            out.append({"series": name, "k": stats.TOP_ALPHA, "x": true, "value": guess})
    return out


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (choices, tops, alpha) = plot.panels(3, width=3.7)
    ends = []
    for choice, colour in _CHOICES.items():
        x, y = _line(rows, choice, stats.TOP)
        choices.plot(x, y, "o-", color=colour)
        ends.append((choice, x[-1], y[-1], colour))
    tops_ends = []
    for k, colour in _TOPS.items():
        x, y = _line(rows, "largest", k)
        tops.plot(x, y, "o-", color=colour)
        tops_ends.append((f"k = {k}", x[-1], y[-1], colour))
    for ax in (choices, tops):
        ax.set_xscale("log", base=2)
        ax.set_xticks(x, [f"d/{round(1 / v)}" for v in x])
        ax.set(xlabel="r", ylabel="share of the top k found", ylim=(0, 1))
    choices.set(title=f"k = {stats.TOP}, which components")
    tops.set(title="the largest components")
    for name, colour in _TEMPERATURES.items():
        x, y = _line(rows, name, stats.TOP_ALPHA)
        alpha.plot(x, y, ".", color=colour, markersize=2.5, alpha=0.5)
        alpha.plot([], [], "o", color=colour, label=name)
    alpha.plot((0, 1), (0, 1), color=plot.PAPER, linestyle=":")
    alpha.legend(frameon=False, fontsize=8, loc="upper left")
    alpha.set(title="alpha, by temperature", xlim=(0, 1), ylim=(0, 1))
    alpha.set(xlabel=f"attention on the top {stats.TOP_ALPHA}", ylabel="alpha")
    figure.canvas.draw()
    plot.label_ends(choices, ends)
    plot.label_ends(tops, tops_ends)
    return figure


def _line(rows: Sequence[plot.Row], series: str, k: int) -> tuple[list[float], list[float]]:
    here = [r for r in rows if r["series"] == series and r["k"] == k]
    return [r["x"] for r in here], [r["value"] for r in here]
