"""Fig. 9: end-to-end speed-up on a CPU, from the records of `sparq-cpp bench`.

Decoded tokens of the Llama-2-7B geometry with 8-bit weights and an f16 cache, batch 1, against the
faster of llama.cpp's `-fa 0` and `-fa 1` in the same run; the limit is what the bytes allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plot

from pyorch.bench import output

NAME = "end_to_end"
FILE = "speed.jsonl"
TITLE = "End-to-end speed-up on a CPU (Fig. 9)"
CAPTION = (
    "Time of one decoded token against the faster of llama.cpp's two attentions in the same run, "
    "medians; bars are the 10th to 90th percentile. Dotted: the speed-up of a program that does "
    "nothing but read the same bytes. The paper's baseline is dense llama.cpp of early 2024. Where "
    "the whole model does not fit into memory, fewer layers of it were measured, with the output "
    "head in proportion: `n_layer` in the CSV."
)
FULL_LAYERS = 32
NEEDS = "sparq-cpp bench -d 4096-131072*2 -n 10 -r 3 --ratio 1/8 --attn-shadow f16,q4"


def data(folder: Path) -> list[plot.Row]:
    """One row per (model, length, what ran)."""
    who = "library", "flash_attn", "sparse_attn"
    found = plot.rows_of(folder, FILE, output.rows, lambda r: (_setting(r), *(r[x] for x in who)))
    found = [r for r in found if _is_ours(r)]
    plot.need(found, "decoded tokens of llama2-7b q8_0 with an f16 cache", NEEDS)
    threads = max(r["n_threads"] for r in found)
    found = [r for r in found if r["n_threads"] == threads]
    # of several models with fewer layers than the whole one, the largest that was measured
    layers: dict[tuple[int, str], int] = {}
    for r in found:
        at = r["n_depth"], _who(r)
        layers[at] = max(layers.get(at, 0), r["n_layer"])
    out = []
    for r in sorted(found, key=lambda r: r["n_depth"]):
        if r["n_layer"] != layers[r["n_depth"], _who(r)]:
            continue
        best = r["median_ns"] * r["speedup"]
        out.append(
            {
                "model": r["model_type"],
                "cpu": r["cpu_info"],
                "threads": threads,
                "positions": r["n_depth"],
                "attention": _who(r),
                "n_layer": r["n_layer"],
                "token_ms": r["median_ns"] / 1e6,
                "full_token_ms": r["median_ns"] / 1e6 * FULL_LAYERS / r["n_layer"],
                "speedup": r["speedup"],
                "speedup_low": best / r["p90_ns"],
                "speedup_high": best / r["p10_ns"],
                "limit": r["roofline_speedup"],
                "roofline_share": r["roofline_share"],
            }
        )
    return out


def _is_ours(r: plot.Row) -> bool:
    plain = r["type_k"] == r["type_v"] == "f16" and not r["n_prompt"] and not r["prefill"]
    lengths = [x for x, _ in plot.paper(NAME, "SparQ CPU: dense")]
    return plain and r["model_type"].startswith("llama2-7b q8_0") and r["n_depth"] in lengths


def _setting(r: plot.Row) -> tuple[Any, ...]:
    return r["model_type"], r["n_threads"], r["type_k"], r["type_v"], r["n_prompt"], r["n_depth"]


def _who(r: plot.Row) -> str:
    return plot.name_of(r["library"], r["flash_attn"], r["sparse_attn"])


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (left, right) = plot.panels(2)
    ours = list(dict.fromkeys(r["attention"] for r in rows if "stock" not in r["attention"]))
    styles = plot.colours(ours)
    published = {s: dict(plot.paper(NAME, f"SparQ CPU: {s}")) for s in ("dense", "SparQ 1/8")}
    paper = [(x, published["dense"][x] / y) for x, y in published["SparQ 1/8"].items()]

    ends = []
    for name in ours:
        here = [r for r in rows if r["attention"] == name]
        x, y = [r["positions"] for r in here], [r["speedup"] for r in here]
        spread = [[r["speedup"] - r["speedup_low"] for r in here]]
        spread.append([r["speedup_high"] - r["speedup"] for r in here])
        left.errorbar(x, y, [[max(v, 0) for v in s] for s in spread], fmt="o-", color=styles[name])
        limit = [(r["positions"], r["limit"]) for r in here if not math.isnan(r["limit"])]
        left.plot(*zip(*limit, strict=True), ":", color=styles[name], linewidth=1.2)
        ends.append((name, x[-1], y[-1], styles[name]))
    left.plot(*zip(*paper, strict=True), "s--", color=plot.PAPER)
    ends.append(("paper, 32 threads", *paper[-1], plot.PAPER))
    left.axhline(1, color=plot.PAPER, linewidth=0.8)
    all_x = [r["positions"] for r in rows] + [x for x, _ in paper]
    plot.positions_axis(left, all_x)
    left.set(ylabel="times faster than dense", title="speed-up (dotted: limit by bytes)")
    left.set_ylim(bottom=0)

    more = []
    for name, colour in [
        ("stock -fa 0", plot.STOCK),
        ("stock -fa 1", plot.STOCK_2),
        *styles.items(),
    ]:
        here = [r for r in rows if r["attention"] == name]
        if here:
            x, y = [r["positions"] for r in here], [r["full_token_ms"] for r in here]
            right.plot(x, y, "o-", color=colour)
            more.append((name, x[-1], y[-1], colour))
    plot.positions_axis(right, [r["positions"] for r in rows])
    plot.decades(right, [r["full_token_ms"] for r in rows])
    fewer = any(r["n_layer"] < FULL_LAYERS for r in rows)
    right.set(ylabel="ms per token" + f", scaled to {FULL_LAYERS} layers" * fewer)
    right.set_title("time of a token")
    figure.canvas.draw()
    plot.label_ends(left, ends)
    plot.label_ends(right, more)
    return figure
