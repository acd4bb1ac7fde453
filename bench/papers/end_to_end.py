"""Fig. 9: end-to-end speed-up on a CPU, from the records of `sparq-cpp bench`.

Decoded tokens of the Llama-2-7B geometry with an f16 cache, batch 1, against the faster of
llama.cpp's `-fa 0` and `-fa 1` in the same run; the limit is what the bytes allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plot
from pyorch.cli.bench import speed
from pyorch.measure import records

FILE = "speed.jsonl"
MODEL = "llama2-7b q8_0"
NEEDS = "sparq-cpp bench -d '4096-131072*2' -n 20 -r 6"


def published() -> list[tuple[float, float]]:
    """The speed-ups of the paper by positions."""
    dense = dict(plot.points("end_to_end", "SparQ CPU: dense"))
    return [(x, dense[x] / y) for x, y in plot.points("end_to_end", "SparQ CPU: SparQ 1/8")]


def data(folder: Path) -> list[plot.Row]:
    """A row for each length and attention of ours: that with the most layers, measured last."""
    rows = speed.rows(records.latest(records.load_all(folder / FILE)))
    lengths = [x for x, _ in published()]
    best: dict[tuple[int, str], plot.Row] = {}
    for r in sorted(rows, key=lambda r: (r["n_layer"], r["test_time"])):
        plain = r["type_k"] == r["type_v"] == "f16" and not r["n_prompt"] and not r["text"]
        is_ours = r["library"] == "sparq" and r["sparse_attn"].sparse and r["n_depth"] in lengths
        if plain and is_ours and r["model_type"].startswith(MODEL):
            best[r["n_depth"], plot.name_of(r["sparse_attn"])] = r
    plot.need(list(best), f"decoded tokens of {MODEL} with an f16 cache", NEEDS)
    return [
        {
            "positions": positions,
            "attention": attention,
            "threads": r["n_threads"],
            "n_layer": r["n_layer"],
            "token_ms": r["median_ns"] / 1e6,
            "stock_ms": r["median_ns"] * r["speedup"] / 1e6,
            "speedup": r["speedup"],
            "speedup_low": r["median_ns"] * r["speedup"] / r["p90_ns"],
            "speedup_high": r["median_ns"] * r["speedup"] / r["p10_ns"],
            "limit": r["roofline_speedup"],
            "roofline_share": r["roofline_share"],
        }
        for (positions, attention), r in sorted(best.items())
    ]


def draw(rows: Sequence[plot.Row]) -> Any:
    colours = plot.colours(list(dict.fromkeys(r["attention"] for r in rows)))
    bars = "speedup_low", "speedup_high"
    labels = {"ylabel": "times faster than the better stock", "title": MODEL}
    return plot.over_positions(rows, "speedup", colours, *bars, published=published(), **labels)


FIGURE = plot.Figure(
    name="end_to_end",
    title="End-to-end speed-up on a CPU (Fig. 9)",
    caption="Time of one decoded token against the faster of llama.cpp's two attentions in the "
    "same run, medians; bars are the 10th to 90th percentile. The paper's are of 32 threads "
    "against dense llama.cpp of early 2024. Where the whole model does not fit into memory, fewer "
    "layers were measured, with the output head in proportion: `n_layer` in the CSV.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)
