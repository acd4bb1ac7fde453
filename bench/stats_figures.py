"""Draws the figures of `attention_stats.py`: the sparsity of attention, the tails of queries, and
whether r components of q find the best positions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attention_stats as stats
import numpy as np
import plot

from pyorch.bench import records

FILE = "attention_stats.jsonl"
NEEDS = "python bench/attention_stats.py --text BOOKS"
TASK = "prose"
N_CONTEXT = 10  # contexts in the figure of agreement: more points hide each other
_LENGTHS = (plot.OURS, plot.OURS_2, plot.OURS_3, plot.STOCK, plot.STOCK_2, plot.PAPER)
_CHOICES = dict(zip(stats.CHOICES, (plot.OURS, plot.OURS_2, plot.PAPER), strict=True))
_TOPS = dict(zip(stats.TOPS, (plot.OURS_2, plot.OURS, plot.OURS_3), strict=True))
_TEMPERATURES = dict(zip(stats.TEMPERATURES, (plot.OURS, plot.OURS_2, plot.OURS_3), strict=True))


def records_of(folder: Path) -> list[plot.Row]:
    """The records of one kind of text, by length."""
    recs = [r for r in records.load(folder / FILE).values() if r["case"]["task"] == TASK]
    plot.need(recs, f"attention over {TASK}", NEEDS)
    return sorted(recs, key=lambda r: r["case"]["n_pos"])


# ---- the sparsity of attention ----


def sparsity(folder: Path) -> list[plot.Row]:
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


def draw_sparsity(rows: Sequence[plot.Row]) -> Any:
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
        lines = plot.Names()
        for n, colour in zip(lengths, _LENGTHS, strict=False):
            line = _pick(rows, name, n)
            lines.line(ax, f"S = {n}", line, "x", "value", color=colour, factor=factor)
        lines.write(figure)
        ax.set(xlabel="layer")
    zeros.set(title="scores near 0", ylabel="below 1 % of the row's largest (%)")
    for ax in (heads, zeros, needed):
        ax.set_xticks(sorted({r["layer"] for r in rows if r["layer"] >= 0}))
    return figure


def _pick(rows: Sequence[plot.Row], panel: str, n_pos: int) -> list[plot.Row]:
    return [r for r in rows if r["panel"] == panel and r["n_pos"] == n_pos]


# ---- the tails of queries ----


def tails(folder: Path) -> list[plot.Row]:
    rec = records_of(folder)[-1]
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


def draw_tails(rows: Sequence[plot.Row]) -> Any:
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


# ---- approximate scores ----


def agreement(folder: Path) -> list[plot.Row]:
    rec = records_of(folder)[-1]
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


def draw_agreement(rows: Sequence[plot.Row]) -> Any:
    figure, (choices, tops, alpha) = plot.panels(3, width=3.7)
    lines = plot.Names()
    for choice, colour in _CHOICES.items():
        lines.line(choices, choice, _line(rows, choice, stats.TOP), "x", "value", color=colour)
    for k, colour in _TOPS.items():
        lines.line(tops, f"k = {k}", _line(rows, "largest", k), "x", "value", color=colour)
    x = [1 / part for part in stats.PARTS]
    for ax in (choices, tops):
        ax.set_xscale("log", base=2)
        ax.set_xticks(x, [f"d/{round(1 / v)}" for v in x])
        ax.set(xlabel="r", ylabel="share of the top k found", ylim=(0, 1))
    choices.set(title=f"k = {stats.TOP}, which components")
    tops.set(title="the largest components")
    for name, colour in _TEMPERATURES.items():
        style: dict[str, Any] = {"color": colour, "fmt": ".", "markersize": 2.5, "alpha": 0.5}
        lines.line(alpha, "", _line(rows, name, stats.TOP_ALPHA), "x", "value", **style)
        alpha.plot([], [], "o", color=colour, label=name)
    alpha.plot((0, 1), (0, 1), color=plot.PAPER, linestyle=":")
    alpha.legend(frameon=False, fontsize=8, loc="upper left")
    alpha.set(title="alpha, by temperature", xlim=(0, 1), ylim=(0, 1))
    alpha.set(xlabel=f"attention on the top {stats.TOP_ALPHA}", ylabel="alpha")
    lines.write(figure)
    return figure


def _line(rows: Sequence[plot.Row], series: str, k: int) -> list[plot.Row]:
    return [r for r in rows if r["series"] == series and r["k"] == k]


SPARSITY = plot.Figure(
    name="attention_sparsity",
    title="How sparse attention is (SparQ Fig. 4a, 4b; ALISA Fig. 3; top-k paper Figs. 3, 5)",
    caption="Demo model, prose. From the left: share of attention on the 32 highest-scoring "
    "positions, all rows, then each query head; share of the scores below 1 % of the row's "
    "largest; scores that make up 75 % of a row, by layer and length.",
    needs=NEEDS,
    file=FILE,
    data=sparsity,
    draw=draw_sparsity,
)
TAILS = plot.Figure(
    name="query_tails",
    title="Components of the query (SparQ Fig. 4c, 4d, E1)",
    caption="Demo model, prose. Left: components of q in the middle layer, in standard "
    "deviations of their head, beside a Gaussian. Middle: Fisher kurtosis of each head's "
    "components, 0 for a Gaussian. Right: share of them beyond 3 standard deviations, over a "
    "Gaussian's 0.27 %.",
    needs=NEEDS,
    file=FILE,
    data=tails,
    draw=draw_tails,
)
AGREEMENT = plot.Figure(
    name="topk_agreement",
    title="Approximate scores (SparQ Fig. 4e, 4f, E2)",
    caption="Demo model, prose, the longest texts measured. Left and middle: share of the k "
    "highest-scoring positions that approximate scores find, by the share of the components of q "
    "that is used: the largest ones, the first ones, a random projection; means over layers and "
    "heads. Right: a point for each head in ten contexts: attention on the 128 highest-scoring "
    "positions, and what approximate scores (r = d/4) say of theirs, by softmax temperature.",
    needs=NEEDS,
    file=FILE,
    data=agreement,
    draw=draw_agreement,
)
