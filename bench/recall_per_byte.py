"""Draws the attention caught per byte read, from the records of `recall.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import plot
import recall

from pyorch.attention.spec import ratio_text
from pyorch.bench import records

FILE = "recall.jsonl"
NEEDS = "python bench/recall.py --text BOOKS"
N_POS, TASK, RATIO = 4096, "recite", 1 / 8
_COLOURS = plot.colours(["f16", "q8", "q4"])


def data(folder: Path) -> list[plot.Row]:
    recs = [
        r
        for r in records.load(folder / FILE).values()
        if (r["case"]["n_pos"], r["case"]["task"]) == (N_POS, TASK)
    ]
    plot.need(recs, f"recall per byte at {N_POS} positions", NEEDS)
    d, found = recs[-1]["head_dim"], recall.rows(recs[-1])
    out = []
    for row in found:
        rule = row.shadow in recall.KINDS and row is recall.by_rule(
            found, row.ratio, row.shadow, d, recall.RULES[recall.RULE]
        )
        best = row is recall.best(found, row.ratio, row.shadow)
        out.append(asdict(row) | {"best": int(best), "rule": int(rule)})
    return out


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (left, middle, right) = plot.panels(3, width=3.7)
    ratios = sorted({r["ratio"] for r in rows})
    lines = plot.Names()
    ring: dict[str, Any] = {"fmt": "D", "markerfacecolor": "none", "markersize": 8}
    for kind, colour in {"oracle": plot.PAPER, **_COLOURS}.items():
        name = "free choice" if kind == "oracle" else kind
        lines.line(left, name, _pick(rows, shadow=kind, best=1), "ratio", "mass", color=colour)
        line = _pick(rows, shadow=kind, rule=1)
        lines.line(left, "", line, "ratio", "mass", color=colour, **ring)
    left.set(ylabel="share of attention captured", title=f"by budget, S = {N_POS}", ylim=(0, 1))

    for kind, colour in _COLOURS.items():
        line = sorted(_pick(rows, shadow=kind, ratio=RATIO), key=lambda r: r["scan"])
        x, y = [100 * r["scan"] for r in line], [r["mass"] for r in line]
        middle.plot(x, y, ".-", color=colour)
        for r in _pick(line, rule=1):
            at = 100 * r["scan"], r["mass"]
            middle.plot(*at, "D", color=colour, markerfacecolor="none", markersize=8)
        middle.text(x[-1] + 1.5, y[-1], f"{kind}", color=colour, fontsize=8, va="center")
    low, high = min(r["mass"] for r in line), max(r["mass"] for r in rows if r["ratio"] == RATIO)
    middle.set(xlabel="share of the bytes for the scan (%)", xlim=(0, 100))
    middle.set_ylabel("share of attention captured")
    middle.set(title=f"by split, ratio {ratio_text(RATIO)}", ylim=(low - 0.1, high))

    for kind in ("f16", "q4"):
        line = _pick(rows, shadow=kind, rule=1)
        for column, fmt, extra in (("error", "o-", ""), ("error_mean_v", "s--", " + mean of V")):
            colour = _COLOURS[kind]
            lines.line(right, kind + extra, line, "ratio", column, color=colour, fmt=fmt)
    plot.decades(right, [r[n] for r in rows if r["rule"] for n in ("error", "error_mean_v")])
    right.set(ylabel="|y - y'|² / |y|²", title="error of the output")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        plot.x_ticks(ax, ratios, [ratio_text(r) for r in ratios])
        ax.set_xlabel("ratio: share of dense attention's bytes")
    lines.write(figure, pad={left: 0.05})
    return figure


def _pick(rows: Sequence[plot.Row], **values: Any) -> list[plot.Row]:
    here = [r for r in rows if all(r[k] == v for k, v in values.items())]
    return sorted(here, key=lambda r: r["ratio"])


FIGURE = plot.Figure(
    name="recall_per_byte",
    title="Attention caught per byte read",
    caption="Demo model (heads of 64), passages of the context read once more. Left: the best "
    "rank at each budget, by the type of the transposed K; grey: the best positions that all of "
    "the bytes could buy; diamonds: the default rule. Middle: one budget of 1/8, by the share of "
    "it that goes to the scan. Right: error of the heads' outputs under the default rule.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)
