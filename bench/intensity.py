"""Fig. C1: multiply-adds per transferred element of a decoded token, computed from eq. C2.

    A/M = (6 + rho*g) / (6/B + rho)          rho = S / (g*d_m)

and, beside it, the share of transfers that is attention (eq. 1). SparQ at a ratio c reads c of the
KV cache: M has c*rho instead of rho, and so has the share.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plot

from pyorch.bench import paper

BATCHES = (1, 8, 64, 512)
GROUPS = (1, 8)
RATIO = 1 / 8


def intensity(rho: float, batch: int, g: int) -> float:
    """The arithmetic intensity, eq. C2."""
    return (6 + rho * g) / (6 / batch + rho)


def share(rho: float, batch: int, ratio: float = 1.0) -> float:
    """Eq. 1: the share of a token's transfers that is attention."""
    return ratio * rho / (ratio * rho + 6 / batch)


def data(_folder: Path) -> list[plot.Row]:
    rhos = [2.0 ** (i / 4) for i in range(-24, 25)]
    out: list[plot.Row] = []
    for g in GROUPS:
        for batch in BATCHES:
            for rho in rhos:
                y = intensity(rho, batch, g)
                out.append({"panel": f"g={g}", "series": batch, "rho": rho, "value": y})
    for ratio in (1.0, RATIO):
        for rho in rhos:
            out.append(
                {"panel": "share", "series": ratio, "rho": rho, "value": share(rho, 1, ratio)}
            )
    return out


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, axes = plot.panels(3, width=3.7)
    colours = (plot.PAPER, plot.OURS, plot.OURS_3, plot.OURS_2)
    titles = ("multi-head attention (g = 1)", "8 query heads per KV head (g = 8)")
    for ax, g, title in zip(axes, GROUPS, titles, strict=False):
        for batch, colour in zip(BATCHES, colours, strict=True):
            x, y = _line(rows, f"g={g}", batch)
            ax.plot(x, y, color=colour)
        ax.set(xscale="log", yscale="log", title=title, xlim=(x[0], x[-1]), ylim=(0.8, 700))
        ax.set(xlabel="ρ = S / (g·d_m)", ylabel="multiply-adds per element read")
        # the lines meet at large rho, so they are named where they start
        for batch, colour in zip(BATCHES, colours, strict=True):
            x, y = _line(rows, f"g={g}", batch)
            ax.text(
                x[0] * 1.4,
                y[0] * (0.68 if batch == BATCHES[-1] else 1.1),
                f"B = {batch}",
                color=colour,
                fontsize=8,
            )
        for name in ("Llama 2 7B", "Llama 2 70B"):
            for rho, most in paper.points("intensity", name):
                if (name == "Llama 2 7B") == (g == 1):
                    ax.plot(rho, most, "D", color=plot.STOCK, markersize=4)
                    where = dict(fontsize=7.5, color=plot.STOCK, va="bottom")
                    ax.text(rho * 1.15, most * 1.05, f"{name}, B → ∞", **where)
        for name in ("Bow IPU (FP16)", "A10 GPU (INT8)", "H100 SXM GPU (FP8)"):
            ((_, hardware),) = paper.points("intensity", name)
            ax.axhline(hardware, color=plot.PAPER, linestyle=":", linewidth=1)
            ax.text(x[-1], hardware * 1.04, name, color=plot.PAPER, ha="right", fontsize=7)
    ax = axes[2]
    for ratio, colour, name in ((1.0, plot.STOCK, "dense"), (RATIO, plot.OURS, "ratio 1/8")):
        x, y = _line(rows, "share", ratio)
        ax.plot(x, [100 * v for v in y], color=colour)
        i = len(x) * 3 // 4
        ax.text(x[i] / 1.3, 100 * y[i], name, color=colour, ha="right", va="bottom", fontsize=8)
    ax.set(xscale="log", title="KV cache in what a token reads", xlabel="ρ = S / (g·d_m)")
    ax.set(ylabel="share of transfers, batch 1 (%)", ylim=(0, 100), xlim=(x[0], x[-1]))
    return figure


def _line(rows: Sequence[plot.Row], panel: str, series: float) -> tuple[list[float], list[float]]:
    here = [r for r in rows if r["panel"] == panel and r["series"] == series]
    return [r["rho"] for r in here], [r["value"] for r in here]


FIGURE = plot.Figure(
    name="intensity",
    title="Arithmetic intensity of decoding (Fig. C1, eq. 1)",
    caption="Multiply-adds per element read, by rho = S/(g*d_m); computed, not measured. Left "
    "and middle: a large batch helps only while rho is small. Right: batch 1, the share of what a "
    "token reads that is KV cache, dense and at a ratio of 1/8. Llama-2-7B has rho = 1 at 4,096 "
    "positions, Llama-3-8B at 16,384.",
    needs="",
    file="",
    data=data,
    draw=draw,
)
