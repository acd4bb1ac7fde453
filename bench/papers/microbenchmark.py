"""Figs. 8 and F1: attention by itself over the sequence length, r = 32, k = 128.

From the records of `sparq-cpp bench --attn-only`: one layer's 32 heads of 128, f16 cache, against
the faster of llama.cpp's `-fa 0` and `-fa 1` in the same run. `bench/gpu/kernels.py` draws the
same of a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import plot
from pyorch.attention.spec import AttentionSpec
from pyorch.bench import paper
from pyorch.cli.bench import attention_time

FILE = "attention.jsonl"
SHADOWS = ("f16", "q4")
SPECS = (
    AttentionSpec("dense"),
    *(AttentionSpec("sparq", rank=32, topk=128, shadow=s) for s in SHADOWS),
)
NEEDS = "sparq-cpp bench --attn-only -d '4096-65536*2' " + " ".join(f"-a {s}" for s in SPECS)
MODELS = {"llama2-7b": "32 KV heads (Llama-2-7B)", "llama3-8b": "8 KV heads (Llama-3-8B)"}
_COLOURS = plot.colours(
    ["stock -fa 0", "stock -fa 1", "our dense", *(f"SparQ {s}" for s in SHADOWS)]
)


def _name(r: plot.Row) -> str:
    """The name of a line; empty for lines that are not in this figure."""
    if r["library"] == "stock" or r["spec"].method == "dense":
        return plot.name_of(r["library"], r["flash_attn"], r["spec"])
    return f"SparQ {r['spec'].shadow}" if r["spec"] in SPECS else ""


def _rows(recs: Sequence[Any]) -> list[plot.Row]:
    dense = min(r["bytes_per_token"] for r in recs if r["case"]["library"] == "stock")
    return [
        {
            "model": r["like"],
            "threads": r["n_threads"],
            "type_k": r["type_k"],
            "type_v": r["type_v"],
            "positions": r["n_depth"],
            "attention": _name(r),
            "layer_ms": r["attention_ms"] / r["n_layer"],
            "layer_ms_p10": r["attention_p10_ms"] / r["n_layer"],
            "layer_ms_p90": r["attention_p90_ms"] / r["n_layer"],
            "speedup": r["speedup"],
            "limit": dense / r["bytes_per_token"],
            "roofline_share": r["roofline"],
        }
        for r in attention_time.rows(recs)
    ]


def data(folder: Path) -> list[plot.Row]:
    found = plot.rows_of(folder, FILE, _rows)
    found = [r for r in found if r["attention"] in _COLOURS and r["model"] in MODELS]
    found = [r for r in found if r["type_k"] == r["type_v"] == "f16"]
    plot.need(found, "attention by itself with r = 32, k = 128", NEEDS)
    threads = max(r["threads"] for r in found)
    order = list(_COLOURS)
    return sorted(
        (r for r in found if r["threads"] == threads),
        key=lambda r: (r["model"], order.index(r["attention"]), r["positions"]),
    )


def draw(
    dense: str,
    colours: Mapping[str, str],
    published: Callable[[Any], None],
    rows: Sequence[plot.Row],
) -> Any:
    """Draw a line of panels per model: times, and speed-ups, with `published` in the first.

    Args:
        dense: what the speed-ups are over, in words.
        colours: those of the lines by name.
    """
    models = [m for m in MODELS if any(r["model"] == m for r in rows)]
    figure, axes = plot.panels(2, len(models), height=3.2)
    lines = plot.Names()
    for i, model in enumerate(models):
        times, gains = axes[2 * i], axes[2 * i + 1]
        here = [r for r in rows if r["model"] == model]
        _draw_lines(lines, times, gains, here, colours)
        if model == "llama2-7b":
            published(gains)
        gains.axhline(1, color=plot.PAPER, linewidth=0.8)
        for ax in (times, gains):
            plot.positions_axis(ax, [r["positions"] for r in here])
        plot.decades(times, [r["layer_ms"] for r in here])
        times.set(ylabel="ms per token and layer", title=MODELS[model])
        gains.set(ylabel=f"times faster than best {dense}", title="speed-up (dotted: by bytes)")
        gains.set_ylim(bottom=0)
    lines.write(figure)
    return figure


def _draw_lines(
    lines: plot.Names, times: Any, gains: Any, rows: Sequence[plot.Row], colours: Mapping[str, str]
) -> None:
    """Draw a line per kind of attention; diamonds are for larger batches."""
    ours = {name: colour for name, colour in colours.items() if "SparQ" in name}
    one = [r for r in rows if r.get("batch", 1) == 1]
    many, bars = [r for r in rows if r not in one], ("layer_ms_p10", "layer_ms_p90")
    x, dense = "positions", {k: v for k, v in colours.items() if k == "our dense"}
    lines.each(gains, many, x, "speedup", ours, named=False, fmt="D")
    lines.each(times, one, x, "layer_ms", colours, *bars, elinewidth=1)
    lines.each(gains, one, x, "speedup", dense | ours)
    lines.each(gains, one, x, "limit", ours, named=False, fmt=":", linewidth=1.2)


def _points(gains: Any) -> None:
    for name, text in (
        ("A10G: Triton", ""),
        ("A100: Triton", "paper, A100 and A10G"),
        ("IPU", "paper, IPU"),
    ):
        (at,) = paper.points("microbenchmark", name)
        gains.plot(*at, "s", color=plot.PAPER)
        style = {"textcoords": "offset points", "color": plot.PAPER, "fontsize": 7.5}
        gains.annotate(text, at, (6, -9), **style)


FIGURE = plot.Figure(
    name="microbenchmark",
    title="Attention by itself (Fig. 8, F1)",
    caption="32 query heads of 128, one layer, batch 1, cold caches; medians, bars are the 10th "
    "to 90th percentile of single tokens. Dotted: dense bytes by bytes read, what a program that "
    "does nothing but read would gain. llama.cpp's own attention is slower than its bytes, most "
    "so where query heads share KV heads, and ours may pass that line.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=partial(draw, "stock", _COLOURS, _points),
)
