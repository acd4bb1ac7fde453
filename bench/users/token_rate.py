"""Tokens per second over the positions for a real model: llama.cpp's best setting, ours exact, and
ours sparse, from records of `sparq-cpp bench` in their own folder, of the model measured last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plot
from pyorch.cli.bench import speed
from pyorch.measure import records

FILE = "token_rate/speed.jsonl"
NEEDS = (
    "sparq-cpp bench -m MODEL.gguf -d 4096,8192,16384,32000 -a dense -a sparq,ratio=1/8 "
    "-r 4 --text BOOK --out bench/results/MACHINE/token_rate"
)
STOCK = "llama.cpp, its best setting"
SAME = ("model_n_params", "model_size", "n_threads", "type_k", "type_v", "text", "repack")


def data(folder: Path) -> list[plot.Row]:
    """A row for each length and line; stock's is the faster of its two."""
    rows = speed.rows(records.latest(records.load_all(folder / FILE)))
    rows = [r for r in rows if r["n_gen"]]
    plot.need(rows, "decoded tokens of a real model", NEEDS)
    last = max(rows, key=lambda r: r["test_time"])
    best: dict[tuple[str, int], plot.Row] = {}
    for r in sorted(rows, key=lambda r: r["n_depth"]):
        at = _name(r), r["n_depth"]
        faster = at not in best or r["median_ns"] < best[at]["median_ns"]
        if faster and all(r[x] == last[x] for x in SAME):
            best[at] = r
    return [
        {
            "model": last["model_type"],
            "threads": r["n_threads"],
            "cpu": r["cpu_info"],
            "positions": n_depth,
            "attention": line,
            "flash_attn": r["flash_attn"],
            "tokens_per_s": 1e9 / r["median_ns"],
            "tokens_per_s_low": 1e9 / r["p90_ns"],
            "tokens_per_s_high": 1e9 / r["p10_ns"],
            "speedup": r["speedup"],
        }
        for (line, n_depth), r in best.items()
    ]


def _name(r: plot.Row) -> str:
    name = plot.name_of(r["sparse_attn"])
    return STOCK if r["library"] == "stock" else {"dense": "ours, exact"}.get(name, name)


def draw(rows: Sequence[plot.Row]) -> Any:
    colours = plot.colours(list(dict.fromkeys(r["attention"] for r in rows)))
    colours |= {STOCK: plot.STOCK, "ours, exact": plot.OURS_3}
    title = f"{rows[0]['model']}, threads: {rows[0]['threads']}"
    bars = "tokens_per_s_low", "tokens_per_s_high"
    labels: dict[str, Any] = {"ylabel": "tokens per second", "title": title}
    return plot.over_positions(rows, "tokens_per_s", colours, *bars, **labels)


FIGURE = plot.Figure(
    name="token_rate",
    title="Tokens per second over the length of the context",
    caption="Decoded tokens of a real model, batch 1; medians, bars are the 10th to 90th "
    "percentile of single tokens. llama.cpp is the faster of its `-fa 0` and `-fa 1` at each "
    "length, in the same run.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)
