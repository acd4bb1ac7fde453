"""Fig. 3 and D1: the share of a token's time that goes to attention, from the records of the bench.

It follows the paper: single-token times at several lengths S, a line y(S) = y(0) + slope*S through
the samples of each S in its interquartile range, and z(S) = (y(S) - y(0)) / y(S).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import plot
from pyorch.cli.bench.speed import SpeedCase
from pyorch.measure.records import load_all, read_case

FILE = "speed.jsonl"
NEEDS = "sparq-cpp bench --layers 4 -d '2048-32768*2' -n 20 -r 10"
MIN_LENGTHS = 3  # a line through fewer says nothing

Samples = dict[int, np.ndarray]  # the ms of single tokens, by S


def data(folder: Path) -> list[plot.Row]:
    """A row for each attention and S, of the model and threads with the most lengths."""
    models = _samples(folder / FILE)
    size = {model: sum(map(len, lines.values())) for model, lines in models.items()}
    model = max(size, key=lambda m: size[m], default=("", 0))
    lines = {k: at for k, at in models.get(model, {}).items() if len(at) >= MIN_LENGTHS}
    plot.need(list(lines), f"decoded tokens at {MIN_LENGTHS} lengths or more", NEEDS)
    rows = []
    for attention, at in lines.items():
        slope, start = fit(at)
        for positions, values in sorted(at.items()):
            line = start + slope * positions
            rows.append(
                {
                    "model": model[0],
                    "threads": model[1],
                    "attention": attention,
                    "positions": positions,
                    "samples": len(values),
                    "token_ms": float(np.median(values)),
                    "fit_ms_at_0": start,
                    "fit_ms_per_1k": 1024 * slope,
                    "share_percent": 100 * (line - start) / line,
                }
            )
    return rows


def fit(at: Samples) -> tuple[float, float]:
    """(slope, value at 0) of the line through the samples within the quartiles of each length."""
    xs, ys = [], []
    for positions, values in at.items():
        low, high = np.percentile(values, (25, 75))
        inner = values[(values >= low) & (values <= high)]
        xs += [positions] * len(inner)
        ys += inner.tolist()
    slope, start = np.polyfit(xs, ys, 1)
    return float(slope), float(start)


def _samples(file: Path) -> dict[tuple[str, int], dict[str, Samples]]:
    """By model and threads, then by attention: of each length the newest."""
    models: dict[tuple[str, int], dict[str, Samples]] = {}
    for rec in load_all(file):
        c = read_case(SpeedCase, rec)
        if c.spec.sparse and not rec["counters"].get("calls_sparse"):
            continue  # it ran dense below min_ctx, so it does not belong on its line
        plain = not c.text and c.type_k == c.type_v == "f16" and c.n_gen and c.n_depth
        if plain and c.model_type.startswith("llama2-7b q8_0"):
            stock = f"stock -fa {int(c.flash_attn)}"
            name = stock if c.library == "stock" else plot.name_of(c.spec)
            at = models.setdefault((c.model_type, c.n_threads), {}).setdefault(name, {})
            at[c.n_depth] = np.array(rec["samples_ns"]) / 1e6
    return models


def draw(rows: Sequence[plot.Row]) -> Any:
    colours = plot.colours(list(dict.fromkeys(r["attention"] for r in rows)))
    colours |= {"stock -fa 0": plot.STOCK, "stock -fa 1": plot.STOCK_2}
    points = dict(plot.points("time_in_attention", "CPU"))
    grid = sorted({r["positions"] for r in rows})
    known = [(s, 100 * points[1] * s / (points[0] + points[1] * s)) for s in grid]
    labels = {"ylabel": "share of the token's time (%)", "title": rows[0]["model"]}
    return plot.over_positions(rows, "share_percent", colours, published=known, **labels)


FIGURE = plot.Figure(
    name="time_in_attention",
    title="Time in attention (Fig. 3, D1)",
    caption="Single-token times of the Llama-2-7B geometry, 8-bit weights, f16 cache, batch 1: the "
    "share of the fitted time that grows with S. The paper's line is of llama.cpp on its CPU.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)
