"""Fig. 9: end-to-end speed-up on a CPU, from the records of `sparq-cpp bench`.

Decoded tokens of the Llama-2-7B geometry with an f16 cache, batch 1, against the faster of
llama.cpp's `-fa 0` and `-fa 1` in the same run; the limit is what the bytes allow. A second row of
panels has the real model of figure `token_rate`, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plot
from bench.users import token_rate
from pyorch.bench import paper
from pyorch.cli.bench import speed

FULL_LAYERS = 32
FILE = "speed.jsonl"


WEIGHTS = "q8_0"
NEEDS = (
    "sparq-cpp bench -d '4096-131072*2' -n 10 -r 3 -a sparq,ratio=1/8 -a sparq,ratio=1/8,shadow=f16"
)


def published() -> list[tuple[float, float]]:
    """The speed-ups of the paper by positions."""
    dense = dict(paper.points("end_to_end", "SparQ CPU: dense"))
    return [(x, dense[x] / y) for x, y in paper.points("end_to_end", "SparQ CPU: SparQ 1/8")]


def data(folder: Path) -> list[plot.Row]:
    """A row for each model, length and library with its settings; those of a real model last."""
    found = [r for r in plot.rows_of(folder, FILE, speed.rows) if _is_shown(r)]
    plot.need(found, f"decoded tokens of llama2-7b {WEIGHTS} with an f16 cache", NEEDS)
    threads = max(r["n_threads"] for r in found)
    found = [r for r in found if r["n_threads"] == threads]
    # the largest of several models with fewer layers than the whole one
    layers: dict[tuple[int, str], int] = {}
    for r in found:
        at = r["n_depth"], _who(r)
        layers[at] = max(layers.get(at, 0), r["n_layer"])
    found = [r for r in found if r["n_layer"] == layers[r["n_depth"], _who(r)]]
    out = [_row(r, FULL_LAYERS) for r in sorted(found, key=lambda r: r["n_depth"])]
    real = [r for r in token_rate.of_last_model(folder) if r["backends"] == "CPU"]
    return out + [_row(r, r["n_layer"]) | {"real_model": 1} for r in real]


def _row(r: plot.Row, full_layers: int) -> plot.Row:
    best = r["median_ns"] * r["speedup"]
    return {
        "model": r["model_type"],
        "real_model": 0,
        "cpu": r["cpu_info"],
        "threads": r["n_threads"],
        "positions": r["n_depth"],
        "attention": _who(r),
        "n_layer": r["n_layer"],
        "token_ms": r["median_ns"] / 1e6,
        "full_token_ms": r["median_ns"] / 1e6 * (full_layers / r["n_layer"]),
        "speedup": r["speedup"],
        "speedup_low": best / r["p90_ns"],
        "speedup_high": best / r["p10_ns"],
        "limit": r["roofline_speedup"],
        "roofline_share": r["roofline_share"],
    }


def _is_shown(r: plot.Row) -> bool:
    plain = r["type_k"] == r["type_v"] == "f16" and not r["n_prompt"] and not r["text"]
    here = r["backends"] == "CPU" and r["n_depth"] in [x for x, _ in published()]
    return plain and here and r["model_type"].startswith(f"llama2-7b {WEIGHTS}")


def _who(r: plot.Row) -> str:
    return plot.name_of(r["library"], r["flash_attn"], r["sparse_attn"])


def draw(rows: Sequence[plot.Row]) -> Any:
    shape, real = ([r for r in rows if r["real_model"] == is_real] for is_real in (0, 1))
    figure, axes = plot.panels(2, n_rows=2 if real else 1)
    lines = plot.Names()
    _draw_model(axes[:2], f"llama2-7b {WEIGHTS}", shape, lines, published())
    if real:
        _draw_model(axes[2:], real[0]["model"], real, lines)
    lines.write(figure)
    return figure


def _draw_model(
    axes: Sequence[Any],
    model: str,
    rows: Sequence[plot.Row],
    lines: plot.Names,
    known: Sequence[tuple[float, float]] = (),
) -> None:
    """The speed-ups of a model, beside those that are published (`known`), and its times."""
    left, right = axes
    ours = list(dict.fromkeys(r["attention"] for r in rows if "stock" not in r["attention"]))
    styles, bars = plot.colours(ours), ("speedup_low", "speedup_high")
    lines.each(left, rows, "positions", "speedup", styles, *bars)
    limited = [r for r in rows if not math.isnan(r["limit"])]
    lines.each(left, limited, "positions", "limit", styles, named=False, fmt=":", linewidth=1.2)
    if known:
        left.plot(*zip(*known, strict=True), "s--", color=plot.PAPER)
        lines.at(left, "paper, 32 threads", *known[-1], plot.PAPER)
    left.axhline(1, color=plot.PAPER, linewidth=0.8)
    positions = [r["positions"] for r in rows]
    plot.positions_axis(left, positions + [x for x, _ in known])
    left.set(ylabel=f"times faster than {'dense' if known else 'stock'}")
    left.set_title(f"{model}\nspeed-up (dotted: limit by bytes)")
    left.set_ylim(bottom=0)

    every = plot.colours(["stock -fa 0", "stock -fa 1"]) | styles
    lines.each(right, rows, "positions", "full_token_ms", every)
    plot.positions_axis(right, positions)
    plot.decades(right, [r["full_token_ms"] for r in rows])
    fewer = any(r["full_token_ms"] != r["token_ms"] for r in rows)
    right.set(ylabel="ms per token" + f", scaled to {FULL_LAYERS} layers" * fewer)
    right.set_title("time of a token")


FIGURE = plot.Figure(
    name="end_to_end",
    title="End-to-end speed-up on a CPU (Fig. 9)",
    caption="Time of one decoded token against the faster of llama.cpp's two attentions in the "
    "same run, medians; bars are the 10th to 90th percentile. Dotted: the speed-up of a program "
    "that does nothing but read the same bytes. The paper's baseline is dense llama.cpp of early "
    "2024. Where the whole model does not fit into memory, fewer layers of it were measured, with "
    "the output head in proportion: `n_layer` in the CSV. A second row is of a real model.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)
