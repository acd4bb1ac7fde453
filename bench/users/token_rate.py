"""Tokens per second over the positions for a real model: llama.cpp's best setting, ours exact, and
ours sparse, from records of `sparq-cpp bench` in their own folder, of the model measured last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench import plot
from pyorch.cli.bench import speed

FILE = "token_rate/speed.jsonl"
NEEDS = (
    "sparq-cpp bench -m MODEL.gguf -d 4096,8192,16384,32000 -a dense -a sparq,ratio=1/8 "
    "-r 4 --text BOOK --out bench/results/MACHINE/token_rate"
)
STOCK = "llama.cpp, its best setting"
# what may differ between the rows of one picture
_VARIED = {"model", "model_type", "library", "flash_attn", "spec", "calibration", "n_depth"}
_VARIED |= {"n_prompt", "n_gen", "repetitions"}
SAME = [f.name for f in fields(speed.SpeedCase) if f.name not in _VARIED]


def of_last_model(folder: Path) -> list[plot.Row]:
    """Rows of decoded tokens of the real model measured last, by length, all with one name."""

    found = [r for r in plot.rows_of(folder, FILE, speed.rows) if r["n_gen"]]
    if not found:
        return []
    last = max(found, key=lambda r: r["test_time"])
    name = {"model_type": last["model_type"]}
    same = [r | name for r in found if all(r[x] == last[x] for x in SAME)]
    return sorted(same, key=lambda r: r["n_depth"])


def data(folder: Path) -> list[plot.Row]:
    """A row for each length and line; stock's is the faster of its two."""
    found = of_last_model(folder)
    plot.need(found, "decoded tokens of a real model", NEEDS)
    best: dict[tuple[str, int], plot.Row] = {}
    for r in found:
        at = STOCK if r["library"] == "stock" else _name(r), r["n_depth"]
        if at not in best or r["median_ns"] < best[at]["median_ns"]:
            best[at] = r
    return [
        {
            "model": r["model_type"],
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
    name = plot.name_of(r["library"], r["flash_attn"], r["sparse_attn"])
    return {"our dense": "ours, exact"}.get(name, name)


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (ax,) = plot.panels(width=6.4)
    names = list(dict.fromkeys(r["attention"] for r in rows))
    colours = plot.colours(names) | {STOCK: plot.STOCK, "ours, exact": plot.OURS_3}
    lines, bars = plot.Names(), ("tokens_per_s_low", "tokens_per_s_high")
    lines.each(ax, rows, "positions", "tokens_per_s", colours, *bars, elinewidth=1)
    plot.positions_axis(ax, [r["positions"] for r in rows])
    threads = rows[0]["threads"]
    title = f"{rows[0]['model']}, {threads} thread{'s' * (threads > 1)}"
    ax.set(ylabel="tokens per second", ylim=(0, None), title=title)
    lines.write(figure)
    return figure


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
