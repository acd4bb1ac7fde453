"""How sparse attention is, by head, layer and length: from the records of `attention_stats.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plot

from pyorch.bench import records

NAME = "attention_sparsity"
FILE = "attention_stats.jsonl"
TITLE = "How sparse attention is (SparQ Fig. 4a, 4b; ALISA Fig. 3; top-k paper Figs. 3, 5)"
CAPTION = (
    "Demo model, prose. From the left: share of attention on the 32 highest-scoring positions, all "
    "rows, then each query head; share of the scores below 1 % of the row's largest; scores that "
    "make up 75 % of a row, by layer and length."
)
NEEDS = "python bench/attention_stats.py --text BOOKS"
TASK = "prose"
_COLOURS = (plot.OURS, plot.OURS_2, plot.OURS_3, plot.STOCK, plot.STOCK_2, plot.PAPER)


def records_of(folder: Path, task: str = TASK) -> list[plot.Row]:
    """Those of one kind of text, by length."""
    recs = [r for r in records.load(folder / FILE).values() if r["case"]["task"] == task]
    plot.need(recs, f"attention over {task}", NEEDS)
    return sorted(recs, key=lambda r: r["case"]["n_pos"])


def data(folder: Path) -> list[plot.Row]:
    out: list[plot.Row] = []
    for rec in records_of(folder):
        n, s = rec["case"]["n_pos"], rec["samples"]
        counts = np.array(s["mass32_histogram"])
        for i, share in enumerate(counts / counts.sum()):
            x = (i + 0.5) / len(counts)
            out.append({"panel": "histogram", "n_pos": n, "layer": -1, "x": x, "value": share})
        for layer, heads in enumerate(s["mass32"]):
            for head, value in enumerate(heads):
                out.append(_row("mass32", n, layer, head, value))
        for name in ("near_zero", "scores75", "entropy"):
            for layer, heads in enumerate(s[name]):
                out.append(_row(name, n, layer, layer, float(np.mean(heads))))
    return out


def _row(panel: str, n_pos: int, layer: int, x: float, value: float) -> plot.Row:
    return {"panel": panel, "n_pos": n_pos, "layer": layer, "x": x, "value": value}


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (bars, heads, zeros, needed) = plot.panels(4, width=3.3)
    lengths = sorted({r["n_pos"] for r in rows})
    longest = lengths[-1]
    here = _pick(rows, "histogram", longest)
    width = 1 / len(here)
    bars.bar([r["x"] for r in here], [100 * r["value"] for r in here], width, color=plot.OURS)
    bars.set(title=f"all rows, S = {longest}", xlabel="attention on the top 32", xlim=(0, 1))
    bars.set_ylabel("share of the rows (%)")
    here = _pick(rows, "mass32", longest)
    n_head = 1 + max(r["x"] for r in here)
    x = [r["layer"] + 0.7 * (r["x"] + 0.5) / n_head - 0.35 for r in here]
    heads.bar(x, [r["value"] for r in here], 0.6 / n_head, color=plot.OURS)
    heads.set(title=f"by head, S = {longest}", xlabel="layer", ylim=(0, 1))
    heads.set_ylabel("attention on the top 32")
    needed.set(title="scores to 75 % of attention", ylabel="positions", yscale="log")
    for ax, name, factor in ((zeros, "near_zero", 100), (needed, "scores75", 1)):
        ends = []
        for n, colour in zip(lengths, _COLOURS, strict=False):
            here = _pick(rows, name, n)
            y = [factor * r["value"] for r in here]
            ax.plot([r["x"] for r in here], y, "o-", color=colour)
            ends.append((f"S = {n}", here[-1]["x"], y[-1], colour))
        figure.canvas.draw()
        plot.label_ends(ax, ends)
        ax.set(xlabel="layer")
    zeros.set(title="scores near 0", ylabel="below 1 % of the row's largest (%)")
    for ax in (heads, zeros, needed):
        ax.set_xticks(sorted({r["layer"] for r in rows if r["layer"] >= 0}))
    return figure


def _pick(rows: Sequence[plot.Row], panel: str, n_pos: int) -> list[plot.Row]:
    return [r for r in rows if r["panel"] == panel and r["n_pos"] == n_pos]
