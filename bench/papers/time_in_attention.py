"""Fig. 3 and D1: the share of a token's time that goes to attention, from the records of the bench.

It follows the paper: single-token times at several lengths S, a line y(S) = y(0) + slope*S through
the samples of each S in its interquartile range, and z(S) = (y(S) - y(0)) / y(S). Beside it stands
the share that the attention nodes themselves take; docs/tried.md names the script that timed
them. A second row of panels has the real model of figure `token_rate`, if there is one, with lines
through its own lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import plot
from bench.users import token_rate
from pyorch.bench import paper
from pyorch.bench.records import load_all, read_case, spread
from pyorch.cli.bench.speed import SpeedCase

FILE = "speed.jsonl"
NEEDS = "sparq-cpp bench --layers 4 -d '2048-32768*2' -n 20 -r 10"
MIN_LENGTHS = 3  # a line through fewer says nothing

Kind = tuple[str, int]  # a model's name, and threads
Lines = dict[str, dict[int, np.ndarray]]  # the ms of single tokens, by what ran and S


def data(folder: Path) -> list[plot.Row]:
    """A row for each model, library with its settings, and S; those of a real model last."""
    shapes = _samples(folder / FILE, _is_of_paper)
    # the model and threads with the most lengths
    best = max(shapes, key=lambda kind: sum(map(len, shapes[kind].values())), default=("", 0))
    rows = _rows(folder, best, shapes.get(best, {}))
    plot.need(rows, f"decoded tokens at {MIN_LENGTHS} lengths or more", NEEDS)
    if real := token_rate.of_last_model(folder):
        same = {x: real[0][x] for x in token_rate.SAME}
        name = {"model": real[0]["model_type"]}
        found = _samples(folder / token_rate.FILE, lambda c: same.items() <= vars(c).items())
        for kind, lines in found.items():
            rows += [row | name for row in _rows(folder, kind, lines)]
    return rows


def _is_of_paper(c: SpeedCase) -> bool:
    plain = not c.text and c.type_k == c.type_v == "f16"
    return plain and c.model_type.startswith("llama2-7b q8_0")


def _rows(folder: Path, kind: Kind, lines: Lines) -> list[plot.Row]:
    """The rows of the lines that have enough lengths."""
    nodes = _node_shares(folder, kind)
    out = []
    for who, at in lines.items():
        if len(at) < MIN_LENGTHS:
            continue
        slope, start = fit(at)
        for n_depth, values in sorted(at.items()):
            mid, p25, p75 = np.percentile(values, (50, 25, 75))
            y = start + slope * n_depth
            out.append(
                {
                    "model": kind[0],
                    "threads": kind[1],
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


def _samples(file: Path, wanted: Callable[[SpeedCase], bool]) -> dict[Kind, Lines]:
    """The lines of each model that is wanted, from the newest run of each length.

    A line belongs to one library: the newest one with `MIN_LENGTHS` lengths, if there is one.
    """
    found: dict[Kind, dict[str, dict[str, dict[int, np.ndarray]]]] = {}  # by library, newest last
    for rec in load_all(file):
        c = read_case(SpeedCase, rec)
        if c.spec.sparse and not rec["counters"].get("calls_sparse"):
            continue  # it ran dense below min_ctx, so it does not belong on its line
        if c.n_gen and c.n_depth and wanted(c):
            lines = found.setdefault((c.model_type, c.n_threads), {})
            line = lines.setdefault(plot.name_of(c.library, c.flash_attn, c.spec), {})
            stamp = rec["env"]["stamps"][c.library]
            line[stamp] = at = line.pop(stamp, {})
            at[c.n_depth] = np.array(rec["samples_ns"]) / 1e6
    return {
        kind: {who: _newest(line) for who, line in lines.items()} for kind, lines in found.items()
    }


def _newest(line: dict[str, dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
    newest = list(line.values())[::-1]
    return next((at for at in newest if len(at) >= MIN_LENGTHS), newest[0])


def _node_shares(folder: Path, kind: Kind) -> dict[tuple[str, int], float]:
    out = {}
    for rec in load_all(folder / "node_times.jsonl"):
        c = rec["case"]
        if (c["model_type"], c["n_threads"]) == kind:
            shares = np.divide(rec["attention_ns"], rec["samples_ns"]).tolist()
            out[f"stock -fa {int(c['flash_attn'])}", c["n_depth"]] = spread(shares)[0]
    return out


def draw(rows: Sequence[plot.Row]) -> Any:
    models = list(dict.fromkeys(r["model"] for r in rows))
    figure, axes = plot.panels(2, n_rows=len(models))
    lines = plot.Names()
    for i, model in enumerate(models):
        here = [r for r in rows if r["model"] == model]
        _draw_model(axes[2 * i : 2 * i + 2], here, lines, () if i else ("CPU", "A100"))
    lines.write(figure)
    return figure


def _draw_model(
    axes: Sequence[Any], rows: Sequence[plot.Row], lines: plot.Names, published: Sequence[str]
) -> None:
    """The times of a model and the lines through them; and the share that grows, beside those of
    published lines."""
    left, right = axes
    names = list(dict.fromkeys(r["attention"] for r in rows))
    colours = plot.colours(names)
    all_x = [r["positions"] for r in rows]
    grid = np.geomspace(min(all_x), max(all_x), 80)
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
    for name in published:
        ((_, slope),), ((_, start),) = _paper(name)
        z = slope * grid / (start + slope * grid)
        right.plot(grid, 100 * z, "--", color=plot.PAPER, linewidth=1.3)
        lines.at(right, f"paper, {name}", grid[-1], 100 * z[-1], plot.PAPER)
    left.set(xlim=(0, max(all_x) * 1.02), xlabel="sequence length S (positions)")
    ticks = range(0, max(all_x) + 1, 2 ** round(np.log2(max(all_x) / 4)))
    left.set_xticks(ticks, [f"{t / 1024:g}k" for t in ticks])
    left.set(ylabel="ms per token", title=f"{rows[0]['model']}", ylim=(0, None))
    plot.positions_axis(right, all_x)
    right.set(ylabel="share of the token's time (%)", ylim=(0, 100), title="time in attention")


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
    "themselves. A line is of one library; its points may be from different hours. A second row is "
    "of a real model, with lines through its own lengths.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)
