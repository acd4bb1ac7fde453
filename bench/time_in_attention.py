"""Fig. 3 and D1: the share of a token's time that goes to attention, from the records of the bench.

It follows the paper: single-token times at several lengths S, a line y(S) = y(0) + slope*S through
the samples of each S in its interquartile range, and z(S) = (y(S) - y(0)) / y(S). Beside it stands
the share that the attention nodes themselves take (`bench/node_times.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import node_times
import numpy as np
import plot

from pyorch.bench import paper
from pyorch.bench.plan import Case
from pyorch.bench.records import load_all, read_case, spread

FILE = "speed.jsonl"
NEEDS = "sparq-cpp bench --layers 4 -d 2048-32768*2 -n 20 -r 10"
MIN_LENGTHS = 3  # a line through fewer says nothing


def data(folder: Path) -> list[plot.Row]:
    """A row for each library with its settings, and each S."""
    samples = _samples(folder)
    kinds = {kind for kind, _ in samples}
    # the model, threads and machine with the most lengths
    best = max(kinds, key=lambda kind: sum(k == kind for k, _ in samples), default=("", 0))
    found: dict[str, dict[int, np.ndarray]] = {}
    for (kind, (who, n_depth)), values in samples.items():
        if kind == best:
            found.setdefault(who, {})[n_depth] = values
    found = {who: at for who, at in found.items() if len(at) >= MIN_LENGTHS}
    plot.need(list(found), f"decoded tokens at {MIN_LENGTHS} lengths or more", NEEDS)
    nodes = _node_shares(folder, best)
    out = []
    for who, at in found.items():
        slope, start = fit(at)
        for n_depth, values in sorted(at.items()):
            mid, p25, p75 = np.percentile(values, (50, 25, 75))
            y = start + slope * n_depth
            out.append(
                {
                    "model": best[0],
                    "threads": best[1],
                    "attention": who,
                    "positions": n_depth,
                    "samples": len(values),
                    "token_ms": mid,
                    "token_ms_p25": p25,
                    "token_ms_p75": p75,
                    "fit_ms_at_0": start,
                    "fit_ms_per_1k": 1024 * slope,
                    "share": (y - start) / y,
                    "share_nodes": nodes.get((who, n_depth), ""),
                }
            )
    return out


def fit(at: dict[int, np.ndarray]) -> tuple[float, float]:
    """(slope, value at 0) of the line through the samples within the quartiles of each length."""
    xs, ys = [], []
    for n_depth, values in at.items():
        low, high = np.percentile(values, (25, 75))
        inner = values[(values >= low) & (values <= high)]
        xs += [n_depth] * len(inner)
        ys += inner.tolist()
    slope, start = np.polyfit(xs, ys, 1)
    return float(slope), float(start)


def _samples(folder: Path) -> dict[tuple[Any, tuple[str, int]], np.ndarray]:
    """The ms of single tokens, by (model and threads, (what ran, S)), from the newest run.

    A line belongs to one library: the newest one with `MIN_LENGTHS` lengths, if there is one.
    """
    lines: dict[tuple[Any, str], dict[str, dict[int, np.ndarray]]] = {}  # by library, newest last
    for rec in load_all(folder / FILE):
        c = read_case(Case, rec)
        plain = c.n_gen and not c.prefill and c.type_k == c.type_v == "f16"
        if c.spec.sparse and not rec["counters"].get("calls_sparse"):
            continue  # it ran dense below min_ctx, so it does not belong on its line
        if plain and c.model_type.startswith("llama2-7b q8_0") and c.n_depth:
            line = lines.setdefault(
                ((c.model_type, c.n_threads), plot.name_of(c.library, c.flash_attn, c.spec)), {}
            )
            stamp = rec["env"]["stamps"][c.library]
            line[stamp] = at = line.pop(stamp, {})
            at[c.n_depth] = np.array(rec["samples_ns"]) / 1e6
    out = {}
    for (kind, who), line in lines.items():
        newest = list(line.values())[::-1]
        for n_depth, values in next(
            (x for x in newest if len(x) >= MIN_LENGTHS), newest[0]
        ).items():
            out[kind, (who, n_depth)] = values
    return out


def _node_shares(folder: Path, kind: tuple[str, int]) -> dict[tuple[str, int], float]:
    out = {}
    for rec in load_all(folder / "node_times.jsonl"):
        c = node_times.Case(**rec["case"])
        if (c.model_type, c.n_threads) == kind:
            who = f"stock -fa {int(c.flash_attn)}"
            out[who, c.n_depth] = spread(node_times.shares(rec))[0]
    return out


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (left, right) = plot.panels(2)
    names = list(dict.fromkeys(r["attention"] for r in rows))
    colours = plot.colours(names)
    all_x = [r["positions"] for r in rows]
    grid = np.geomspace(min(all_x), max(all_x), 80)
    lines = plot.Names()
    for name in names:
        here = [r for r in rows if r["attention"] == name]
        start, slope = here[0]["fit_ms_at_0"], here[0]["fit_ms_per_1k"] / 1024
        bars = "token_ms_p25", "token_ms_p75"
        lines.line(left, "", here, "positions", "token_ms", bars, color=colours[name], fmt="o")
        end = here[-1]["positions"]
        left.plot([0, end], [start, start + slope * end], color=colours[name], linewidth=1.3)
        text = f"{name}\n{here[0]['fit_ms_per_1k']:.2g} ms per 1k"
        lines.at(left, text, end, start + slope * end, colours[name])
        z = slope * grid / (start + slope * grid)
        right.plot(grid, 100 * z, color=colours[name])
        lines.at(right, name, grid[-1], 100 * z[-1], colours[name])
        nodes = [(r["positions"], 100 * r["share_nodes"]) for r in here if r["share_nodes"] != ""]
        if nodes:
            right.plot(*zip(*nodes, strict=True), "x", color=colours[name], markersize=7)
    if any(r["share_nodes"] != "" for r in rows):
        note = "× attention nodes timed alone"
        right.text(0.03, 0.94, note, transform=right.transAxes, fontsize=8)
    for name in ("CPU", "A100"):
        ((_, slope),), ((_, start),) = _paper(name)
        z = slope * grid / (start + slope * grid)
        right.plot(grid, 100 * z, "--", color=plot.PAPER, linewidth=1.3)
        lines.at(right, f"paper, {name}", grid[-1], 100 * z[-1], plot.PAPER)
    left.set(xlim=(0, max(all_x) * 1.02), xlabel="sequence length S (positions)")
    ticks = [t for t in range(0, max(all_x) + 1, max(max(all_x) // 4, 1))]
    left.set_xticks(ticks, [f"{t / 1024:g}k" for t in ticks])
    left.set(ylabel="ms per token", title=f"{rows[0]['model']}", ylim=(0, None))
    plot.positions_axis(right, all_x)
    right.set(ylabel="share of the token's time (%)", ylim=(0, 100), title="time in attention")
    lines.write(figure)
    return figure


def _paper(name: str) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The slope and the value at 0 of a published line, in s."""
    points = paper.points("time_in_attention", name)
    return [p for p in points if p[0] == 1], [p for p in points if p[0] == 0]


FIGURE = plot.Figure(
    name="time_in_attention",
    title="Time in attention (Fig. 3, D1)",
    caption="Single-token times of the Llama-2-7B geometry, 8-bit weights, f16 cache, batch 1; "
    "bars span the quartiles, lines are fitted to the samples between them. Right: the share of "
    "the fitted time that grows with S; crosses are the attention nodes of llama.cpp timed by "
    "themselves. A line is of one library; its points may be from different hours.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)
