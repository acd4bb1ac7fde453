"""Draws two figures of Top-k attention (arXiv 2502.06766) with a real model: the score of tasks
against k, the same in each layer or growing over them (Fig. 8), and a needle beside StreamingLLM
(Fig. 7)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plot
from pyorch.attention.spec import AttentionSpec
from pyorch.evals import figures, series, table

TASKS = {
    "niah_many": "Multiple NIAH",
    "vt": "Variable Tracking",
    "cwe": "Word Counting",
    "fwe": "Word Counting",
}  # ours, and the category of the paper's Table 2
BUDGETS = {"uniform": plot.OURS, "ramp": plot.OURS_2}
BY_K, NEEDLE = "eval-real/q05-ramp", "eval-real/q05-needle"
NEEDS = "sparq-cpp eval, then sparq-cpp eval pack: docs/evals.md"


def scores(folder: Path) -> list[plot.Row]:
    """A row for each task, budget and k; k is None for dense."""
    out: list[plot.Row] = []
    for task in TASKS:
        results = series.read(folder / BY_K / f"{task}.jsonl")
        plot.need(results, task, NEEDS)
        for r in table.rows(series.by_setting(results)[-1]):
            if not isinstance(r.method, AttentionSpec):
                continue
            sparse = r.method.sparse
            out.append({"task": task, "budget": r.method.budget if sparse else "all",
                        "k": r.method.topk if sparse else None, "ctx": r.ctx,
                        "score": 100 * r.score, "low": 100 * r.score_low,
                        "high": 100 * r.score_high, "n": r.n})  # fmt: skip
    return out


def draw_scores(rows: Sequence[plot.Row]) -> Any:
    figure, axes = plot.panels(len(TASKS), width=3.3, height=3.2)
    for ax, (task, category) in zip(axes, TASKS.items(), strict=True):
        of_task = [r for r in rows if r["task"] == task]
        lines = plot.Names()
        for budget, colour in BUDGETS.items():
            line = sorted((r for r in of_task if r["budget"] == budget), key=lambda r: r["k"])
            lines.line(ax, "", line, "k", "score", ("low", "high"), color=colour, band=True)
            ax.plot([], [], "o-", color=colour, label=f"k {budget}")
        (dense,) = (r for r in of_task if r["budget"] == "all")
        ax.axhline(
            dense["score"], color=plot.PAPER, linestyle="--", linewidth=1, label="all positions"
        )
        ((share, part),) = plot.points("topk_tasks", category)
        at = share / 100 * dense["ctx"]
        ax.plot(at, part / 100 * dense["score"], "o", color=plot.PAPER, markerfacecolor="none",
                markersize=8, label=f"the paper's k for {part:g} % of it")  # fmt: skip
        ks = sorted({r["k"] for r in of_task if r["k"]})
        ax.set_xscale("log", base=2)
        ax.set_xlim(min(at, ks[0]) / 1.3, max(at, ks[-1]) * 1.3)
        plot.x_ticks(ax, ks, [str(k) for k in ks])
        ax.set(title=task, xlabel=f"k of {dense['ctx']:,} positions", ylim=(-3, 103))
    axes[0].set_ylabel("answers found, %")
    axes[1].legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def needles(folder: Path) -> list[plot.Row]:
    results = series.read(folder / NEEDLE / "needle.jsonl")
    plot.need(results, "needle", NEEDS)
    return figures.needle_rows(series.by_setting(results)[-1])


SCORES = plot.Figure(
    name="topk_tasks",
    title="Score of tasks against k, the same in each layer or growing",
    caption="Qwen2.5-Coder-0.5B-Instruct, exact top-k without a local window, 12 examples of each "
    "task; bands are 95 % intervals. Rings: what Llama-3-8B needed for 95 % of dense's score on a "
    "category of RULER, as a share of the positions (Table 2).",
    needs=NEEDS,
    file=f"{BY_K}/fwe.jsonl",
    data=scores,
    draw=draw_scores,
)

NEEDLES = plot.Figure(
    name="topk_needle",
    title="A needle for exact top-k, SparQ and StreamingLLM",
    caption="Qwen2.5-Coder-0.5B-Instruct. Blue: found; red: not found.",
    needs=NEEDS,
    file=f"{NEEDLE}/needle.jsonl",
    data=needles,
    draw=figures.heatmaps,
)
