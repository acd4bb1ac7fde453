"""Fig. 8, Table 4 and F1 on a CUDA device: attention by itself, ours beside the paper's points.

From the records of `python bench/gpu.py`; against the faster of ggml's flash attention and torch's
scaled_dot_product_attention, measured with the same library; of each case the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plot

from pyorch.bench import records

NAME = "gpu_attention"
FILE = "gpu_attention.jsonl"
TITLE = "Attention by itself on a GPU (Fig. 8, Table 4, F1)"
CAPTION = (
    "32 query heads of 128, r = 32, k = 128, f16 cache, fresh data for every layer; medians. "
    "Speed-up over the faster of ggml's flash attention and torch's own attention. Grey: the "
    "paper, on other GPUs."
)
NEEDS = "python bench/gpu.py"
DENSE = ("ggml flash", "torch sdpa")


def data(folder: Path) -> list[plot.Row]:
    """One row per (batch, KV heads, positions, method)."""
    known = records.load_all(folder / FILE)
    plot.need(known, "attention by itself on a GPU", NEEDS)
    last: dict[str, plot.Row] = {}  # of each case on each device
    for rec in known:
        c, ns = rec["case"], float(np.median(rec["samples_ns"]))
        same = {  # of each method the last
            r["case"]["method"]: float(np.median(r["samples_ns"]))
            for r in known
            if r["case"]["method"] in DENSE
            and all(r["case"][k] == c[k] for k in c if k != "method")
            and _library(r) == _library(rec)
        }
        if not same:
            continue  # nothing to compare with
        dense_is = min(same, key=lambda method: same[method])
        last[f"{rec['env']['device']} {c}"] = {
            "device": rec["env"]["device"],
            **{k: c[k] for k in ("batch", "n_head", "n_head_kv", "positions", "method")},
            "us_per_layer": ns / 1e3,
            "speedup": same[dense_is] / ns,
            "dense_is": dense_is,
            "gb_s": rec["bytes_read"] / ns,
            "share_of_copy": rec["bytes_read"] / ns / rec["copy_gb_s"],
        }
    rows = list(last.values())
    plot.need(rows, "dense attention on a GPU", NEEDS)
    names = ("batch", "n_head_kv", "method", "positions")
    return sorted(rows, key=lambda r: tuple(r[n] for n in names))


def _library(rec: records.Record) -> Any:
    """Where and by what it was measured: times of two libraries are not compared."""
    return rec["env"]["device"], rec["env"].get("stamps")


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (left, right) = plot.panels(2)
    styles = {"sparq q4": plot.OURS, "sparq q8": plot.OURS_3, "sparq f16": plot.OURS_2}
    ends = []
    for ax, n_head_kv in ((left, 32), (right, 8)):
        for name, colour in styles.items():
            here = [r for r in rows if r["method"] == name and r["n_head_kv"] == n_head_kv]
            one = [(r["positions"], r["speedup"]) for r in here if r["batch"] == 1]
            if one:
                ax.plot(*zip(*one, strict=True), "o-", color=colour)
                ends.append((ax, (name, *one[-1], colour)))
            many = [(r["positions"], r["speedup"]) for r in here if r["batch"] == 64]
            if many:
                ax.plot(*zip(*many, strict=True), "D", color=colour)
        ax.axhline(1, color=plot.PAPER, linewidth=0.8)
        ax.set(ylabel="times faster than best dense", title=f"{n_head_kv} KV heads")
        ax.set_ylim(bottom=0)
        plot.positions_axis(ax, [r["positions"] for r in rows])
    for name, style in (("A100: speed-up at batch 1", "s--"), ("A100: speed-up at batch 64", "D")):
        points = plot.paper(NAME, name)
        left.plot(*zip(*points, strict=True), style, color=plot.PAPER)
    figure.canvas.draw()
    for ax in (left, right):
        mine = [end for where, end in ends if where is ax]
        if mine:
            plot.label_ends(ax, mine)
    return figure
