"""Draws the figures of `attention_stats.py`: the sparsity of attention, the tails of queries, and
whether r components of q find the best positions. A line or a colour is a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attention_stats as stats
import numpy as np
import plot

from pyorch.bench import records
from pyorch.bench.records import Record

FILE = "attention_stats.jsonl"
NEEDS = "python bench/attention_stats.py --text BOOKS --model FILE"
TASK = "prose"
BITS = 12  # of the idle positions in the figure: of 24 there are few
_COLOURS = (plot.OURS, plot.OURS_2, plot.STOCK, plot.OURS_3, plot.STOCK_2)
_CHOICES = dict(
    zip(
        (*stats.CHOICES, stats.SHARED),
        (plot.OURS, plot.OURS_2, plot.PAPER, plot.OURS_3),
        strict=True,
    )
)
_TEMPERATURES = dict(zip(stats.TEMPERATURES, (plot.OURS, plot.OURS_2, plot.OURS_3), strict=True))


def records_of(folder: Path) -> list[Record]:
    """The records of one kind of text, by model and length."""
    recs = [r for r in records.load(folder / FILE).values() if r["case"]["task"] == TASK]
    plot.need(recs, f"attention over {TASK}", NEEDS)
    return stats.ordered(recs)


def longest_of(folder: Path) -> list[Record]:
    """The longest record of each model."""
    found = {}
    for rec in records_of(folder):
        found[rec["model_name"]] = rec
    return list(found.values())


def _row(panel: str, rec: Record, x: float, value: float) -> plot.Row:
    n_pos = rec["case"]["n_pos"]
    return {"panel": panel, "model": rec["model_name"], "n_pos": n_pos, "x": x, "value": value}


def _depth(rec: Record, i: int) -> float:
    """The place of the i-th measured layer among all layers: 0 is the first, 1 the last."""
    return float(rec["layers"][i] / max(rec["n_layer"] - 1, 1))


def _colours(rows: Sequence[plot.Row]) -> dict[str, str]:
    return dict(zip(dict.fromkeys(r["model"] for r in rows), _COLOURS, strict=False))


def _pick(rows: Sequence[plot.Row], panel: str, model: str) -> list[plot.Row]:
    return [r for r in rows if r["panel"] == panel and r["model"] == model]


# ---- the sparsity of attention ----


def sparsity(folder: Path) -> list[plot.Row]:
    out: list[plot.Row] = []
    for rec in longest_of(folder):
        s = rec["samples"]
        counts = np.array(s["mass32_histogram"])
        for i, share in enumerate(counts / counts.sum()):
            out.append(_row("histogram", rec, (i + 0.5) / len(counts), share))
        for name in ("near_zero", "scores75"):
            for i, heads in enumerate(s[name]):
                out.append(_row(name, rec, _depth(rec, i), float(np.mean(heads))))
    for rec in records_of(folder):
        for name in ("idle", "idle_shared"):
            value = float(np.mean(rec["samples"][name][str(BITS)]))
            out.append(_row(name, rec, rec["case"]["n_pos"], value))
    return out


def draw_sparsity(rows: Sequence[plot.Row]) -> Any:
    figure, (mass, zeros, needed, idle) = plot.panels(4, width=3.5)
    lines = plot.Names()
    for model, colour in _colours(rows).items():
        found = _pick(rows, "histogram", model)
        mass.plot([r["x"] for r in found], [100 * r["value"] for r in found], color=colour)
        mass.plot([], [], "o", color=colour, label=model)
        for ax, name, factor in ((zeros, "near_zero", 100), (needed, "scores75", 1)):
            found = _pick(rows, name, model)
            lines.line(ax, "", found, "x", "value", color=colour, factor=factor, markersize=3)
        for name, fmt in (("idle", "o:"), ("idle_shared", "o-")):
            found = _pick(rows, name, model)
            lines.line(idle, "", found, "x", "value", color=colour, factor=100, fmt=fmt)
    mass.set(title="all rows", xlabel=f"attention on the top {stats.TOP}", xlim=(0, 1))
    mass.set_ylabel("share of the rows (%)")
    mass.legend(frameon=False, fontsize=8, loc="upper left")
    for ax in (zeros, needed):
        ax.set(xlabel="depth (first layer to last)", xlim=(-0.02, 1.02))
    zeros.set(title="scores near 0", ylabel="below 1 % of the row's largest (%)")
    needed.set(title="scores to 75 % of attention", ylabel="positions", yscale="log")
    idle.plot([], [], ":", color=plot.PAPER, label="for a query head")
    idle.plot([], [], "-", color=plot.PAPER, label="for all heads of a KV head")
    idle.legend(frameon=False, fontsize=8, loc="lower right")
    lengths = sorted({r["x"] for r in rows if r["panel"] == "idle"})
    idle.set_xscale("log", base=2)
    idle.set_xticks(lengths, [str(n) for n in lengths])
    idle.set(title=f"scores below 2^-{BITS} of the largest", xlabel="positions", ylim=(0, 100))
    idle.set_ylabel("share of the positions (%)")
    return figure


# ---- the tails of queries ----


def tails(folder: Path) -> list[plot.Row]:
    out: list[plot.Row] = []
    for rec in longest_of(folder):
        s = rec["samples"]
        for i, value in enumerate(s["z_histogram"]):
            out.append(_row("density", rec, -8 + 16 * (i + 0.5) / len(s["z_histogram"]), value))
        for name in ("kurtosis", "tail"):
            for i, heads in enumerate(s[name]):
                out += [_row(name, rec, _depth(rec, i), value) for value in heads]
    return out


def draw_tails(rows: Sequence[plot.Row]) -> Any:
    figure, (density, kurtosis, tail) = plot.panels(3, width=3.7)
    x = np.linspace(-8, 8, 161)
    density.plot(x, np.exp(-x * x / 2) / np.sqrt(2 * np.pi), color=plot.PAPER)
    density.text(2.2, 0.04, "Gaussian", color=plot.PAPER, fontsize=8)
    for model, colour in _colours(rows).items():
        here = _pick(rows, "density", model)
        density.plot([r["x"] for r in here], [r["value"] or np.nan for r in here], color=colour)
        for ax, name in ((kurtosis, "kurtosis"), (tail, "tail")):
            here = _pick(rows, name, model)
            style = {"color": colour, "markersize": 2.5, "alpha": 0.6}
            ax.plot([r["x"] for r in here], [r["value"] for r in here], "o", **style)
        tail.plot([], [], "o", color=colour, label=model)
    density.set(yscale="log", ylim=(1e-5, 1), xlim=(-8, 8), title="q in the middle layer")
    density.set(xlabel="standard deviations", ylabel="density")
    kurtosis.axhline(0, color=plot.PAPER, linestyle=":")
    kurtosis.set(title="kurtosis of a head's components", ylabel="Fisher kurtosis")
    kurtosis.set_yscale("symlog", linthresh=1, linscale=0.5)
    kurtosis.set(ylim=(-1, None))
    tail.legend(frameon=False, fontsize=8, loc="upper left")
    tail.axhline(1, color=plot.PAPER, linestyle=":")
    tail.set(title=f"beyond {stats.Z:.0f} standard deviations")
    tail.set_ylabel("share over a Gaussian's")
    highest = max(r["value"] for r in rows if r["panel"] == "tail")
    tail.set(ylim=(0, 1.5 * highest))  # with room for the names
    for ax in (kurtosis, tail):
        ax.set(xlabel="depth (first layer to last)")
    return figure


# ---- approximate scores ----


def agreement(folder: Path) -> list[plot.Row]:
    out: list[plot.Row] = []
    for rec in longest_of(folder):
        for choice in _CHOICES:
            for part in stats.PARTS:
                value = stats.agreement(rec, choice, str(part))
                out.append(_row(choice, rec, 1 / part, value))
        for name, value in zip(stats.TEMPERATURES, rec["samples"]["coverage_error"], strict=True):
            out.append(_row("error", rec, stats.TEMPERATURES.index(name), value))
    widest = longest_of(folder)[-1]
    coverage = np.array(widest["samples"]["coverage"])
    for true, *guesses in coverage.reshape(-1, coverage.shape[-1]).tolist():
        for name, guess in zip(stats.TEMPERATURES, guesses, strict=True):
            out.append(_row(name, widest, true, guess))
    return out


def draw_agreement(rows: Sequence[plot.Row]) -> Any:
    figure, (models, choices, alpha) = plot.panels(3, width=3.7)
    lines = plot.Names()
    colours = _colours(rows)
    for model, colour in colours.items():
        lines.line(models, "", _pick(rows, "largest", model), "x", "value", color=colour)
        models.plot([], [], "o", color=colour, label=model)
    models.legend(frameon=False, fontsize=8, loc="lower right")
    widest = rows[-1]["model"]
    for choice, colour in _CHOICES.items():
        lines.line(choices, choice, _pick(rows, choice, widest), "x", "value", color=colour)
    for ax in (models, choices):
        ax.set_xscale("log", base=2)
        ax.set_xticks([1 / p for p in stats.PARTS], [f"d/{p}" for p in stats.PARTS])
        ax.set(xlabel="r", ylabel=f"share of the top {stats.TOP} found", ylim=(0, 1))
    models.set(title="the largest components")
    choices.set(title=widest)
    for name, colour in _TEMPERATURES.items():
        style: dict[str, Any] = {"color": colour, "fmt": ".", "markersize": 2.5, "alpha": 0.5}
        lines.line(alpha, "", _pick(rows, name, widest), "x", "value", **style)
        alpha.plot([], [], "o", color=colour, label=name)
    alpha.plot((0, 1), (0, 1), color=plot.PAPER, linestyle=":")
    alpha.legend(frameon=False, fontsize=8, loc="upper left")
    alpha.set(title=widest, xlim=(0, 1), ylim=(0, 1))
    alpha.set(xlabel=f"attention on the top {stats.TOP_ALPHA}", ylabel="alpha")
    lines.write(figure)
    return figure


SPARSITY = plot.Figure(
    name="attention_sparsity",
    title="How sparse attention is (SparQ Fig. 4a; ALISA Fig. 3; top-k paper Fig. 3)",
    caption="Real models, prose, the longest texts measured; layers with a sliding window are left "
    "out. From the left: share of attention on the 32 highest-scoring positions, all rows; share "
    "of the scores below 1 % of the row's largest; scores that make up 75 % of a row, by layer; "
    f"positions below 2^-{BITS} of the row's largest, by length.",
    needs=NEEDS,
    file=FILE,
    data=sparsity,
    draw=draw_sparsity,
)
TAILS = plot.Figure(
    name="query_tails",
    title="Components of the query (SparQ Fig. 4c, 4d, E1)",
    caption="Real models, prose. Left: components of q in the middle layer, in standard "
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
    caption="Real models, prose, the longest texts measured. Left and middle: share of the 32 "
    "highest-scoring positions that approximate scores find, by the share of the components of q "
    "that is used: the largest ones, the first ones, a random projection, or (shared) those of all "
    "query heads of a KV head together; means over layers and heads. Right: a point for each head "
    "in one context: attention on the 128 highest-scoring positions, and what approximate scores "
    "(r = d/4) say of theirs, by softmax temperature.",
    needs=NEEDS,
    file=FILE,
    data=agreement,
    draw=draw_agreement,
)
