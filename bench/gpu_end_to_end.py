"""Fig. 10: end-to-end speed-up on a GPU, from the records of `sparq-cpp bench` with CUDA.

Decoded tokens of the Llama-2-7B geometry with f16 weights and cache, batch 1, ratio 1/8.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plot

from pyorch.bench import output

NAME = "gpu_end_to_end"
FILE = "output.jsonl"
TITLE = "End-to-end speed-up on a GPU (Fig. 10)"
CAPTION = (
    "Time of one decoded token against the faster of llama.cpp's two attentions in the same run, "
    "medians. Grey: the paper, on an H100 PCIe with gpt-fast as the dense program."
)
NEEDS = "make bench-gpu"


def data(folder: Path) -> list[plot.Row]:
    """One row per length and spec. The folder's name says that a GPU was used."""
    found = []
    if "nvidia" in folder.name:
        found = plot.rows_of(folder, FILE, output.rows, lambda r: (r["n_depth"], r["sparse_attn"]))
    found = [r for r in found if r["model_type"].startswith("llama2-7b f16")]
    found = [r for r in found if "stock" not in output.label(r)]
    plot.need(found, "decoded tokens of llama2-7b f16 on a GPU", NEEDS)
    names = ("model_type", "n_layer", "n_depth", "sparse_attn", "median_ns", "speedup")
    rows = [{n: r[n] for n in names} | {"attention": output.label(r)} for r in found]
    return sorted(rows, key=lambda r: (r["attention"], r["n_depth"]))


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (ax,) = plot.panels(1)
    ends = []
    for name in dict.fromkeys(r["attention"] for r in rows):
        here = [r for r in rows if r["attention"] == name]
        x, y = [r["n_depth"] for r in here], [r["speedup"] for r in here]
        ax.plot(x, y, "o-", color=plot.OURS)
        ends.append((name, x[-1], y[-1], plot.OURS))
    points = plot.paper(NAME, "H100: speed-up")
    ax.plot(*zip(*points, strict=True), "s--", color=plot.PAPER)
    ends.append(("paper, H100", *points[-1], plot.PAPER))
    ax.axhline(1, color=plot.PAPER, linewidth=0.8)
    ax.set(ylabel="times faster than best dense", title="Llama-2-7B, f16, batch 1")
    ax.set_ylim(bottom=0)
    plot.positions_axis(ax, [*(r["n_depth"] for r in rows), *(x for x, _ in points)])
    figure.canvas.draw()
    plot.label_ends(ax, ends)
    return figure
