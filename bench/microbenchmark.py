"""Fig. 8 and F1, for a CPU: attention by itself over the sequence length, r = 32, k = 128.

From the records of `sparq-cpp bench --attn-only`: one layer's 32 heads of 128, f16 cache, against
the faster of llama.cpp's `-fa 0` and `-fa 1` in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plot

from pyorch.attention.spec import AttentionSpec
from pyorch.bench import attention

NAME = "microbenchmark"
FILE = "attention.jsonl"
TITLE = "Attention by itself (Fig. 8, F1)"
CAPTION = (
    "32 query heads of 128, one layer, batch 1, cold caches; medians, bars are the 10th to 90th "
    "percentile of single tokens. Dotted: dense bytes by bytes read, what a program that does "
    "nothing but read would gain. llama.cpp's own attention is slower than its bytes, most so "
    "where query heads share KV heads, and ours may pass that line."
)
SHADOWS = ("f16", "q4")
SPECS = (
    AttentionSpec("dense"),
    *(AttentionSpec("sparq", rank=32, topk=128, shadow=s) for s in SHADOWS),
)
NEEDS = "sparq-cpp bench --attn-only -d 4096-65536*2 " + " ".join(f"-a {s}" for s in SPECS)
MODELS = {"llama2-7b": "32 KV heads (Llama-2-7B)", "llama3-8b": "8 KV heads (Llama-3-8B)"}
_COLOURS = plot.colours(
    ["stock -fa 0", "stock -fa 1", "our dense", *(f"SparQ {s}" for s in SHADOWS)]
)


def _name(c: attention.Case) -> str:
    """What a line is called; empty for what is not in this figure."""
    if c.library == "stock" or c.spec.method == "dense":
        return plot.name_of(c.library, c.flash_attn, c.spec)
    return f"SparQ {c.spec.shadow}" if c.spec in SPECS else ""


def _rows(recs: Sequence[Any]) -> list[plot.Row]:
    out = []
    dense = min(r["bytes_per_token"] for r in recs if r["case"]["library"] == "stock")
    for row in attention.rows(recs):
        c = row.case
        out.append(
            {
                "model": c.like,
                "threads": c.n_threads,
                "type_k": c.type_k,
                "type_v": c.type_v,
                "positions": c.n_depth,
                "attention": _name(c),
                "layer_ms": row.attention_ms / c.n_layer,
                "layer_ms_p10": row.attention_p10_ms / c.n_layer,
                "layer_ms_p90": row.attention_p90_ms / c.n_layer,
                "speedup": row.speedup,
                "limit": dense / row.bytes_per_token,
                "roofline_share": row.roofline,
            }
        )
    return out


def data(folder: Path) -> list[plot.Row]:
    names = ("model", "threads", "type_k", "type_v", "positions", "attention")
    found = plot.rows_of(folder, FILE, _rows, lambda r: tuple(r[n] for n in names))
    found = [r for r in found if r["attention"] in _COLOURS and r["model"] in MODELS]
    found = [r for r in found if r["type_k"] == r["type_v"] == "f16"]
    plot.need(found, "attention by itself with r = 32, k = 128", NEEDS)
    threads = max(r["threads"] for r in found)
    order = list(_COLOURS)
    return sorted(
        (r for r in found if r["threads"] == threads),
        key=lambda r: (r["model"], order.index(r["attention"]), r["positions"]),
    )


def draw(rows: Sequence[plot.Row]) -> Any:
    models = [m for m in MODELS if any(r["model"] == m for r in rows)]
    figure, axes = plot.panels(2, len(models), height=3.2)
    labels: list[tuple[Any, list[Any]]] = []
    for i, model in enumerate(models):
        times, gains = axes[2 * i], axes[2 * i + 1]
        time_ends, gain_ends = [], []
        for name, colour in _COLOURS.items():
            here = [r for r in rows if r["model"] == model and r["attention"] == name]
            if not here:
                continue
            x, y = [r["positions"] for r in here], [r["layer_ms"] for r in here]
            bars = [
                [max(r["layer_ms"] - r["layer_ms_p10"], 0) for r in here],
                [max(r["layer_ms_p90"] - r["layer_ms"], 0) for r in here],
            ]
            times.errorbar(x, y, bars, fmt="o-", color=colour, elinewidth=1)
            time_ends.append((name, x[-1], y[-1], colour))
            if "stock" not in name:
                gain = [r["speedup"] for r in here]
                gains.plot(x, gain, "o-", color=colour)
                gain_ends.append((name, x[-1], gain[-1], colour))
                if name != "our dense":
                    gains.plot(x, [r["limit"] for r in here], ":", color=colour, linewidth=1.2)
        if model == "llama2-7b":
            for name, text in (
                ("A10G: Triton", ""),
                ("A100: Triton", "paper, A100 and A10G"),
                ("IPU", "paper, IPU"),
            ):
                ((x0, y0),) = plot.paper(NAME, name)
                gains.plot(x0, y0, "s", color=plot.PAPER)
                gains.annotate(
                    text,
                    (x0, y0),
                    (6, -9),
                    textcoords="offset points",
                    color=plot.PAPER,
                    fontsize=7.5,
                )
        gains.axhline(1, color=plot.PAPER, linewidth=0.8)
        for ax in (times, gains):
            plot.positions_axis(ax, [r["positions"] for r in rows if r["model"] == model])
        plot.decades(times, [r["layer_ms"] for r in rows if r["model"] == model])
        times.set(ylabel="ms per token and layer", title=MODELS[model])
        gains.set(ylabel="times faster than best stock", title="speed-up (dotted: by bytes)")
        gains.set_ylim(bottom=0)
        labels += [(times, time_ends), (gains, gain_ends)]
    figure.canvas.draw()
    for ax, ends in labels:
        plot.label_ends(ax, ends)
    return figure
