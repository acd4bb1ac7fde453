"""Queries have heavy tails: few components say most. From the records of `attention_stats.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attention_sparsity
import attention_stats as stats
import numpy as np
import plot

NAME = "query_tails"
FILE = attention_sparsity.FILE
NEEDS = attention_sparsity.NEEDS
TITLE = "Components of the query (SparQ Fig. 4c, 4d, E1)"
CAPTION = (
    "Demo model, prose. Left: components of q in the middle layer, in standard deviations of their "
    "head, beside a Gaussian. Middle: Fisher kurtosis of each head's components, 0 for a Gaussian. "
    "Right: share of them beyond 3 standard deviations, over a Gaussian's 0.27 %."
)


def data(folder: Path) -> list[plot.Row]:
    rec = attention_sparsity.records_of(folder)[-1]
    s, out = rec["samples"], []
    for i, value in enumerate(s["z_histogram"]):
        x = -8 + 16 * (i + 0.5) / len(s["z_histogram"])
        gauss = float(np.exp(-x * x / 2) / np.sqrt(2 * np.pi))
        out.append({"panel": "density", "layer": -1, "x": x, "value": value, "gauss": gauss})
    for name in ("kurtosis", "tail"):
        for layer, heads in enumerate(s[name]):
            for head, value in enumerate(heads):
                out.append({"panel": name, "layer": layer, "x": head, "value": value})
    return out


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (density, kurtosis, tail) = plot.panels(3, width=3.7)
    here = [r for r in rows if r["panel"] == "density"]
    x = [r["x"] for r in here]
    density.plot(x, [r["gauss"] for r in here], color=plot.PAPER)
    density.plot(x, [r["value"] or np.nan for r in here], color=plot.OURS)
    density.text(2.2, 0.04, "Gaussian", color=plot.PAPER, fontsize=8)
    density.text(-5.2, 0.002, "q", color=plot.OURS, fontsize=9)
    density.set(yscale="log", ylim=(1e-5, 1), xlim=(-8, 8), title="middle layer")
    density.set(xlabel="standard deviations", ylabel="density")
    for ax, name, level, title in (
        (kurtosis, "kurtosis", 0, "kurtosis of a head's components"),
        (tail, "tail", 1, f"beyond {stats.Z:.0f} standard deviations"),
    ):
        here = [r for r in rows if r["panel"] == name]
        ax.plot([r["layer"] for r in here], [r["value"] for r in here], "o", color=plot.OURS)
        ax.axhline(level, color=plot.PAPER, linestyle=":")
        ax.set(xlabel="layer", title=title, xticks=sorted({r["layer"] for r in here}))
    kurtosis.set_ylabel("Fisher kurtosis")
    tail.set_ylabel("share over a Gaussian's")
    return figure
