"""How many times as fast as the faster of llama.cpp's settings tokens of today's models are at 1/8,
from records of `sparq-cpp bench` in their own folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plot
from pyorch.attention.spec import AttentionSpec
from pyorch.cli.bench import speed
from pyorch.measure import records
from pyorch.models import cards

FILE = "geometries/speed.jsonl"
NEEDS = (
    "sparq-cpp bench --like qwen3-30b-a3b -d 4096,32768,131072 -a dense -a sparq,ratio=1/4 "
    "-a sparq,ratio=1/8 --out bench/results/MACHINE/geometries"
)


def data(folder: Path) -> list[plot.Row]:
    """A row for each model and length, and one for the faster setting of a rival."""
    rows = speed.rows(records.latest(records.load_all(folder / FILE)))
    ours = [r for r in rows if r["sparse_attn"] == AttentionSpec("sparq", ratio=1 / 8)]
    plot.need(ours, "decoded tokens at 1/8", NEEDS)
    rivals = [r for r in rows if r["library"] not in ("stock", "sparq")]
    rivals.sort(key=lambda r: r["speedup"])  # the fastest last
    fastest = {(r["model_type"], r["n_depth"]): r for r in rivals}
    return [
        {
            "attention": _name(r["model_type"]),
            "positions": r["n_depth"],
            "library": r["library"],
            "ms": r["median_ns"] / 1e6,
            "speedup": r["speedup"],
        }
        for r in sorted([*ours, *fastest.values()], key=lambda r: r["n_depth"])
    ]


def _name(model: str) -> str:
    like = model.split()[0]
    return cards.load(like).title if like in cards.names() else model.removesuffix(" Instruct")


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (ax,) = plot.panels(width=6.4)
    names, lines = list(dict.fromkeys(r["attention"] for r in rows)), plot.Names()
    colours = dict(zip(names, (plot.OURS, plot.OURS_2, plot.OURS_3, plot.PAPER), strict=False))
    for ours, fmt in ((False, "o--"), (True, "o-")):
        some = [r for r in rows if (r["library"] == "sparq") == ours]
        lines.each(ax, some, "positions", "speedup", colours, named=ours, fmt=fmt)
    plot.positions_axis(ax, [r["positions"] for r in rows])
    ax.set(ylim=(0, None), ylabel="times as fast as llama.cpp (dashed: ik_llama.cpp)")
    lines.write(figure)
    return figure


FIGURE = plot.Figure(
    name="geometries",
    title="Decoded tokens of today's models at 1/8",
    caption="Batch 1, random K and V, medians, the faster `-fa`, 4 to 6 layers; the 1.5B whole.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)
