"""Fig. 2: decoding on the roofline of this CPU, from the records of `sparq-cpp bench`.

A point is (multiply-adds / bytes read, multiply-adds / second) of one token or prompt. The slope of
the roof is the sequential read measured in the same run; its top is a product of large f32
matrices, measured by `python -m bench peak`. Eight-bit products (of prompts) may pass that top.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import plot
from pyorch.attention.bytes import split
from pyorch.attention.spec import AttentionSpec
from pyorch.bench import records
from pyorch.bench.records import Record, Result
from pyorch.cli.bench import speed
from pyorch.cli.bench.measurement import Done, Given, Measurement
from pyorch.engine import usable_cores
from pyorch.models import synth
from pyorch.table import markdown

FILE = "speed.jsonl"
NEEDS = "sparq-cpp bench -d 4096,32768 -p 0,512 -n 16 --ratio 1/8"
PEAK_FILE = "peak.jsonl"
N, REPEATS = 2048, 20  # the size of the matrix product, and how often it runs


@dataclass(frozen=True)
class PeakCase:
    """Products of matrices of n x n. Nothing of our library runs in them, but they take seconds, so
    they are measured again with each."""

    n: int
    n_threads: int
    library: str = "sparq"


def measure(_: Given, group: Sequence[PeakCase], __: Done) -> list[Result]:
    """Time products of f32 matrices on all cores, or as many as OPENBLAS_NUM_THREADS allows."""
    n = group[0].n
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n), np.float32) for _ in range(2))
    samples = []
    for i in range(-2, REPEATS):
        started = time.perf_counter_ns()
        a @ b
        if i >= 0:
            samples.append(time.perf_counter_ns() - started)
    return [{"samples_ns": samples}]


def table(recs: Sequence[Record]) -> str:
    rows = [[str(r["case"]["n_threads"]), f"{_peak(r) / 1e9:.0f}"] for r in recs]
    return markdown(["threads", "G multiply-adds per second"], rows)


def _peak(rec: Record) -> float:
    """Multiply-adds per second."""
    return float(rec["case"]["n"] ** 3 / records.spread(rec["samples_ns"])[0] * 1e9)


def _threads() -> int:
    """The threads of numpy's products. As in OpenBLAS, a value that is not a number is ignored."""
    limit = os.environ.get("OPENBLAS_NUM_THREADS", "")
    most = int(limit) if limit.isdecimal() else 0
    return min(usable_cores(), most or usable_cores())


def data(folder: Path) -> list[plot.Row]:
    """The points, and the two lines of the roof."""
    rows = plot.rows_of(folder, FILE, speed.rows)
    plain = [r for r in rows if r["type_k"] == r["type_v"] == "f16" and not r["text"]]
    plain = [r for r in plain if r["model_type"].startswith("llama2-7b q8_0")]
    sizes = Counter((r["n_threads"], r["model_type"]) for r in plain)
    # the most threads, then the model with the most points
    threads, model = max(sizes, key=lambda size: (size[0], sizes[size]), default=(0, ""))
    here = [r for r in plain if (r["n_threads"], r["model_type"]) == (threads, model)]
    plot.need(here, "decoded tokens of llama2-7b q8_0 with an f16 cache", NEEDS)
    known = records.load(folder / PEAK_FILE).values()
    peaks = [_peak(r) for r in known if r["case"]["n_threads"] == threads]
    plot.need(peaks, f"the compute peak with {threads} threads", "python -m bench peak")
    bandwidth = float(np.median([r["bandwidth_bytes_per_s"] for r in here]))
    roof = {"what": "roof", "macs_per_byte": peaks[-1] / bandwidth, "macs_per_s": peaks[-1]}
    return [*map(_point, filter(_belongs, here)), roof]


def _belongs(r: plot.Row) -> bool:
    """Whether a test is shown: tokens, and prompts of stock in an empty cache."""
    is_prompt = r["library"] == "stock" and not r["n_depth"]
    return bool(is_prompt if r["n_prompt"] else r["bytes_kv"])


def _point(r: plot.Row) -> plot.Row:
    """The multiply-adds and bytes of a test."""
    # weights are read once; each of their elements is multiplied with each token
    macs = r["bytes_weights"] * 32 / 34 * (r["n_prompt"] or 1)  # q8_0: 34 bytes hold 32 elements
    name, moved = f"prompt of {r['n_prompt']}", r["bytes_weights"]
    if not r["n_prompt"]:
        name = plot.name_of(r["library"], r["flash_attn"], r["sparse_attn"])
        macs += attention_macs(r["sparse_attn"], r["n_depth"], r["n_layer"])
        moved += r["bytes_kv"]
    return {
        "what": name,
        "model": r["model_type"],
        "threads": r["n_threads"],
        "positions": r["n_depth"],
        "test_ms": r["median_ns"] / 1e6,
        "macs_per_byte": macs / moved,
        "macs_per_s": macs / r["median_ns"] * 1e9,
        "roofline_share": r["roofline_share"],
    }


def attention_macs(spec: AttentionSpec, n_pos: int, n_layer: int) -> float:
    """The multiply-adds of attention per token, with the heads of Llama-2-7B."""
    shape = synth.shape_like("llama2-7b")
    s = split(spec, n_pos, shape.head_dim)
    per_head = 2 * s.topk * shape.head_dim + (0 if s.dense else n_pos * s.rank)
    return float(n_layer * shape.n_head * per_head)


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (left, right) = plot.panels(2)
    *points, roof = rows
    ridge, peak = roof["macs_per_byte"], roof["macs_per_s"] / 1e9
    left.plot([0.2, ridge, 1000], [0.2 / ridge * peak, peak, peak], color=plot.PAPER)
    style = {"color": plot.PAPER, "fontsize": 8}
    left.text(1000, peak * 0.78, "f32 matrix product", ha="right", **style)
    left.text(0.8 * ridge, 0.45 * peak, f"sequential read, {peak / ridge:.0f} GB/s", **style)
    colours = plot.colours([*dict.fromkeys(r["what"] for r in points)])
    points = [r | {"gmacs": r["macs_per_s"] / 1e9} for r in points]
    tokens = sorted((r for r in points if r["positions"]), key=lambda r: r["positions"])
    lines, x, y = plot.Names(), "macs_per_byte", "gmacs"
    lines.each(left, points, x, y, colours, by="what", named=False, fmt="o", alpha=0.8)
    for r in {r["what"]: r for r in reversed(points) if not r["positions"]}.values():
        at, colour = (r["macs_per_byte"] / 1.3, r["gmacs"]), colours[r["what"]]
        left.text(*at, r["what"], color=colour, fontsize=8, ha="right", va="center")
    several = [n for n in colours if sum(r["what"] == n for r in tokens) > 1]
    shown = {name: colours[name] for name in several}
    lines.each(right, tokens, "positions", "roofline_share", shown, by="what", factor=100)
    middle = float(np.median([r["gmacs"] for r in tokens]))
    edge = max(r["macs_per_byte"] for r in tokens) * 1.5
    left.text(edge, middle, "decoded tokens", fontsize=8, va="center")
    all_y = [r["gmacs"] for r in points]
    left.set_ylim(min(all_y) / 3, 3 * max(peak, *all_y))
    left.set(xscale="log", yscale="log", xlim=(0.2, 1000), title=points[0]["model"])
    left.set(xlabel="multiply-adds per byte read", ylabel="G multiply-adds per second")
    plot.positions_axis(right, [r["positions"] for r in tokens])
    right.axhline(100, color=plot.PAPER, linewidth=0.8)
    right.set(ylabel="share of the read bandwidth (%)", ylim=(0, 110), title="decoded tokens")
    lines.write(figure)
    return figure


FIGURE = plot.Figure(
    name="roofline",
    title="Roofline of this CPU (Fig. 2)",
    caption="Decoded tokens and prompts of the Llama-2-7B geometry, 8-bit weights, f16 cache, "
    "batch 1. Decoding lies on the slope: memory decides. Right: the bytes a token reads "
    "(weights, K and V, transposed K), at the speed of a sequential read, by the time it took.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)


PEAK = Measurement(
    name="peak",
    about="The compute peak of this machine, the top of the roof, in a few seconds.",
    case=PeakCase,
    groups=lambda _: [[PeakCase(N, _threads())]],
    measure=measure,
    table=table,
)
