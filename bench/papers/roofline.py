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
    found = plot.rows_of(folder, FILE, speed.rows, _key)
    plain = [r for r in found if r["type_k"] == r["type_v"] == "f16" and not r["text"]]
    plain = [r for r in plain if r["model_type"].startswith("llama2-7b q8_0")]
    sizes = Counter((r["n_threads"], r["model_type"]) for r in plain)
    # the most threads, then the model with the most points
    threads, model = max(sizes, key=lambda size: (size[0], sizes[size]), default=(0, ""))
    here = [r for r in plain if (r["n_threads"], r["model_type"]) == (threads, model)]
    plot.need(here, "decoded tokens of llama2-7b q8_0 with an f16 cache", NEEDS)
    peaks = [
        r for r in records.load(folder / PEAK_FILE).values() if r["case"]["n_threads"] == threads
    ]
    plot.need(peaks, f"the compute peak with {threads} threads", "python -m bench peak")
    bandwidth = float(np.median([r["bandwidth_bytes_per_s"] for r in here]))
    peak = _peak(peaks[-1])
    out: list[plot.Row] = []
    for r in here:
        point = _point(r)
        if point:
            out.append(point)
    out.append({"what": "roof", "macs_per_byte": peak / bandwidth, "macs_per_s": peak})
    return out


def _key(r: plot.Row) -> Any:
    return r["model_type"], r["n_threads"], r["type_k"], r["type_v"], r["text"], *_what(r)


def _what(r: plot.Row) -> tuple[Any, ...]:
    return speed.label(r), r["n_depth"], r["n_prompt"]


def _point(r: plot.Row) -> plot.Row | None:
    """The multiply-adds and bytes of a test; None for tests that do not belong here."""
    # weights are read once; each of their elements is multiplied with each token
    macs = r["bytes_weights"] * 32 / 34  # q8_0: 34 bytes hold 32 elements
    moved = r["bytes_weights"]
    if r["n_prompt"]:
        if r["n_depth"] or r["library"] == "sparq":
            return None
        macs *= r["n_prompt"]
        name = f"prompt of {r['n_prompt']}"
    elif r["bytes_kv"]:
        macs += attention_macs(r["sparse_attn"], r["n_depth"], r["n_layer"])
        moved += r["bytes_kv"]
        name = plot.name_of(r["library"], r["flash_attn"], r["sparse_attn"])
    else:
        return None
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
    (roof,) = [r for r in rows if r["what"] == "roof"]
    ridge, peak = roof["macs_per_byte"], roof["macs_per_s"]
    x = [0.2, ridge, 1000]
    left.plot(x, [v / 1e9 for v in (x[0] / ridge * peak, peak, peak)], color=plot.PAPER)
    left.text(
        x[2], peak / 1e9 * 0.78, "f32 matrix product", color=plot.PAPER, fontsize=8, ha="right"
    )
    slope = f"sequential read, {peak / ridge / 1e9:.0f} GB/s"
    left.text(0.8 * ridge, 0.45e-9 * peak, slope, color=plot.PAPER, fontsize=8)
    points = [r for r in rows if r["what"] != "roof"]
    names = list(dict.fromkeys(r["what"] for r in points))
    tokens = [n for n in names if not n.startswith("prompt")]
    colours = plot.colours(names)
    lines = plot.Names()
    for name in names:
        here = sorted((r for r in points if r["what"] == name), key=lambda r: r["positions"])
        colour = colours[name]
        at = [r["macs_per_byte"] for r in here], [r["macs_per_s"] / 1e9 for r in here]
        left.plot(*at, "o", color=colour, alpha=0.8)
        if name in tokens:
            if len(here) > 1:
                share = "roofline_share"
                lines.line(right, name, here, "positions", share, color=colour, factor=100)
        else:
            left.text(
                at[0][0] / 1.3, at[1][0], name, color=colour, fontsize=8, ha="right", va="center"
            )
    tops = [r for r in points if r["what"] in tokens]
    middle = float(np.median([r["macs_per_s"] for r in tops])) / 1e9
    edge = max(r["macs_per_byte"] for r in tops) * 1.5
    left.text(edge, middle, "decoded tokens", fontsize=8, va="center")
    low = min(r["macs_per_s"] for r in points) / 1e9
    left.set_ylim(low / 3, 3 * max(peak, *(r["macs_per_s"] for r in points)) / 1e9)
    left.set(xscale="log", yscale="log", xlim=(x[0], x[2]))
    left.set(xlabel="multiply-adds per byte read", ylabel="G multiply-adds per second")
    left.set_title(points[0]["model"])
    plot.positions_axis(right, [r["positions"] for r in points if r["what"] in tokens])
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
