"""Tables of attention time, from the records of `attention`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyorch.bench import records
from pyorch.bench.attention import TURN, Case
from pyorch.bench.records import Record, spread
from pyorch.table import columns, number
from pyorch.table import markdown as markdown_table


@dataclass(frozen=True)
class Row:
    """A record in the units of the table: milliseconds, bytes and shares."""

    case: Case
    attention_ms: float
    attention_p10_ms: float
    attention_p90_ms: float
    token_ms: float
    bytes_per_token: int
    roofline: float  # share of the speed at which these bytes can be read; nan if noise hides it
    bandwidth: float
    speedup: float  # over the faster of stock's two; nan if noise hides it


def rows(recs: Sequence[Record]) -> list[Row]:
    """The rows of the table. `recs` holds whole runs, as `run` returns them."""
    out = []
    # attention to so few positions is dense, whatever the settings: ours share one base
    base: dict[tuple[Any, ...], list[float]] = {}
    for rec in recs:
        base.setdefault(_base_key(rec), []).extend(rec["base_samples_ns"])
    bases = {key: spread(samples)[0] for key, samples in base.items()}
    best: dict[str, float] = {}
    for rec in recs:
        if rec["case"]["library"] == "stock":
            run, mid = records.run_of(rec), _attention_ns(rec, bases[_base_key(rec)])[0]
            best[run] = min(best.get(run, float("inf")), mid)
    for rec in recs:
        case = records.read_case(Case, rec)
        mid, low, high = _attention_ns(rec, bases[_base_key(rec)])
        # read before each turn: those at S are the last; memory may have been another at BASE
        bandwidth = float(np.median(rec["bandwidth_bytes_per_s"][-(case.n_samples // TURN) :]))
        moved = rec["bytes_per_token"] - rec["base_bytes_per_token"]
        out.append(
            Row(
                case=case,
                attention_ms=mid / 1e6,
                attention_p10_ms=low / 1e6,
                attention_p90_ms=high / 1e6,
                token_ms=spread(rec["samples_ns"])[0] / 1e6,
                bytes_per_token=rec["bytes_per_token"],
                roofline=moved / (mid / 1e9) / bandwidth if mid > 0 else math.nan,
                bandwidth=bandwidth,
                speedup=best[records.run_of(rec)] / mid if mid > 0 else math.nan,
            )
        )
    return out


def flat(recs: Sequence[Record]) -> list[dict[str, Any]]:
    """The rows as flat dicts, for CSV and similar formats."""
    out = []
    for rec, row in zip(recs, rows(recs), strict=True):
        values = {k: v for k, v in vars(row).items() if k != "case"}
        env = {"build_commit": rec["env"]["commit"][:9], "cpu_info": rec["env"]["machine"]["cpu"]}
        out.append(env | vars(row.case) | values | {"test_time": rec["time"]})
    return out


def _attention_ns(rec: Record, base: float) -> tuple[float, float, float]:
    mid, low, high = spread(rec["samples_ns"])
    return mid - base, low - base, high - base


def _base_key(rec: Record) -> tuple[Any, ...]:
    return records.run_of(rec), rec["case"]["library"], rec["case"]["flash_attn"]


_SHOWN: dict[str, Callable[[Row], object]] = {
    "positions": lambda r: r.case.n_depth,
    "attention": lambda r: f"`{r.case.label}`",
    "ms per token (p10-p90)": lambda r: (
        f"{r.attention_ms:.2f} ({r.attention_p10_ms:.2f}-{r.attention_p90_ms:.2f})"
    ),
    "against best stock": lambda r: number(r.speedup, "{:.2f}x"),
    "whole token, ms": lambda r: f"{r.token_ms:.2f}",
    "MB read per token": lambda r: f"{r.bytes_per_token / 1e6:.1f}",
    "share of roofline": lambda r: number(100 * r.roofline, "{:.0f} %"),
}


def markdown(recs: Sequence[Record]) -> str:
    """A table for each model, number of threads, types of K and V and place of memory."""
    tables: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows(recs):
        c = row.case
        of = c.like, c.n_layer, c.n_threads, c.type_k, c.type_v, c.numa
        tables.setdefault(of, []).append(row)
    out: list[str] = []
    for table in tables.values():
        c = table[0].case
        out += ["", f"**{c.like}**, {c.n_layer} layers, {c.n_head} heads, "]
        out[-1] += f"{c.n_head_kv} KV heads of {c.head_dim}, "
        out[-1] += f"{c.type_k} K, {c.type_v} V, threads: {c.n_threads}"
        out[-1] += f", numa: {c.numa}" if c.numa else ""
        out += ["", columns(_SHOWN, table, left=("attention",))]
    return "\n".join([*out, "", _machine_line(recs)]).strip()


def summary(recs: Sequence[Record]) -> str:
    """The table for a README: a line per attention, and a column per model, length, threads, types
    of K and V and place of memory."""
    cells: dict[str, dict[tuple[str, int, int, str, str], str]] = {}
    for row in rows(recs):
        c = row.case
        text = f"{row.attention_ms:.1f}"
        if row.attention_ms > 0 and c.library != "stock":
            text += f" ({row.speedup:.1f}x, {100 * row.roofline:.0f} %)"
        types = f"{c.type_k} K, {c.type_v} V"
        cells.setdefault(c.label, {})[c.like, c.n_depth, c.n_threads, types, c.numa] = text
    measured = list(dict.fromkeys(place for line in cells.values() for place in line))
    several, mixed, placed = (len({place[i] for place in measured}) > 1 for i in (2, 3, 4))
    heads = [
        f"{like}, S {s}"
        + (f", threads {n}" if several else "")
        + (f", {t}" if mixed else "")
        + (f", numa {numa or 'none'}" if placed else "")
        for like, s, n, t, numa in measured
    ]
    lines = ([f"`{name}`", *(line.get(c, "") for c in measured)] for name, line in cells.items())
    table = markdown_table(["attention", *heads], lines)
    layers = sorted({f"{r['case']['n_layer']} layers of {r['case']['like']}" for r in recs})
    text = (
        f"Milliseconds of attention per token in {', '.join(layers)}; in brackets how many times "
        "faster than the faster of llama.cpp's two, and the share of the speed at which memory "
        "delivers the bytes that were read. "
    )
    return f"{table}\n\n{text}{_machine_line(recs)}"


def _machine_line(recs: Sequence[Record]) -> str:
    speeds = sorted(row.bandwidth / 1e9 for row in rows(recs))
    machine = recs[0]["env"]["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores; sequential read "
        f"{speeds[0]:.1f}-{speeds[-1]:.1f} GB/s in the same run.{records.about_old(recs)}"
    )
