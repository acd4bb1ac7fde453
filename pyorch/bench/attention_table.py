"""Tables of attention time, from the records of `attention`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pyorch.bench import records
from pyorch.bench.attention import TURN, Case
from pyorch.bench.records import Record, spread
from pyorch.table import columns, number
from pyorch.table import markdown as markdown_table

Row = dict[str, Any]


def rows(recs: Sequence[Record]) -> list[Row]:
    """One flat row per record. `recs` holds whole runs, as `run` returns them.

    The fields of its case, and then its times, with `speedup` over the faster of the run's stock,
    and `roofline`, the share of the speed at which its bytes can be read; nan if noise hides them.
    """
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
        case, env = records.read_case(Case, rec), rec["env"]
        mid, low, high = _attention_ns(rec, bases[_base_key(rec)])
        # read before each turn: those at S are the last; memory may have been another at BASE
        bandwidth = float(np.median(rec["bandwidth_bytes_per_s"][-(case.n_samples // TURN) :]))
        moved = rec["bytes_per_token"] - rec["base_bytes_per_token"]
        out.append(
            {
                "build_commit": env["commit"][:9],
                "cpu_info": env["machine"]["cpu"],
                **vars(case),
                "attention_ms": mid / 1e6,
                "attention_p10_ms": low / 1e6,
                "attention_p90_ms": high / 1e6,
                "token_ms": spread(rec["samples_ns"])[0] / 1e6,
                "bytes_per_token": rec["bytes_per_token"],
                "roofline": moved / (mid / 1e9) / bandwidth if mid > 0 else math.nan,
                "bandwidth": bandwidth,
                "speedup": best[records.run_of(rec)] / mid if mid > 0 else math.nan,
                "test_time": rec["time"],
            }
        )
    return out


def _label(r: Row) -> str:
    return f"stock -fa {int(r['flash_attn'])}" if r["library"] == "stock" else str(r["spec"])


def _attention_ns(rec: Record, base: float) -> tuple[float, float, float]:
    mid, low, high = spread(rec["samples_ns"])
    return mid - base, low - base, high - base


def _base_key(rec: Record) -> tuple[Any, ...]:
    return records.run_of(rec), rec["case"]["library"], rec["case"]["flash_attn"]


_SHOWN: dict[str, Callable[[Row], object]] = {
    "positions": lambda r: r["n_depth"],
    "attention": lambda r: f"`{_label(r)}`",
    "ms per token (p10-p90)": lambda r: (
        f"{r['attention_ms']:.2f} ({r['attention_p10_ms']:.2f}-{r['attention_p90_ms']:.2f})"
    ),
    "against best stock": lambda r: number(r["speedup"], "{:.2f}x"),
    "whole token, ms": lambda r: f"{r['token_ms']:.2f}",
    "MB read per token": lambda r: f"{r['bytes_per_token'] / 1e6:.1f}",
    "share of roofline": lambda r: number(100 * r["roofline"], "{:.0f} %"),
}


def markdown(recs: Sequence[Record]) -> str:
    """A table for each model, number of threads, types of K and V and place of memory."""
    tables: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows(recs):
        of = ("like", "n_layer", "n_threads", "type_k", "type_v", "numa")
        tables.setdefault(tuple(row[x] for x in of), []).append(row)
    out: list[str] = []
    for table in tables.values():
        r = table[0]
        out += ["", f"**{r['like']}**, {r['n_layer']} layers, {r['n_head']} heads, "]
        out[-1] += f"{r['n_head_kv']} KV heads of {r['head_dim']}, "
        out[-1] += f"{r['type_k']} K, {r['type_v']} V, threads: {r['n_threads']}"
        out[-1] += f", numa: {r['numa']}" if r["numa"] else ""
        out += ["", columns(_SHOWN, table, left=("attention",))]
    return "\n".join([*out, "", _machine_line(recs)]).strip()


def summary(recs: Sequence[Record]) -> str:
    """The table for a README: a line per attention, and a column per model, length, threads, types
    of K and V and place of memory."""
    cells: dict[str, dict[tuple[str, int, int, str, str], str]] = {}
    for r in rows(recs):
        text = f"{r['attention_ms']:.1f}"
        if r["attention_ms"] > 0 and r["library"] != "stock":
            text += f" ({r['speedup']:.1f}x, {100 * r['roofline']:.0f} %)"
        types = f"{r['type_k']} K, {r['type_v']} V"
        place = r["like"], r["n_depth"], r["n_threads"], types, r["numa"]
        cells.setdefault(_label(r), {})[place] = text
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
    speeds = sorted(r["bandwidth"] / 1e9 for r in rows(recs))
    machine = recs[0]["env"]["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores; sequential read "
        f"{speeds[0]:.1f}-{speeds[-1]:.1f} GB/s in the same run.{records.about_old(recs)}"
    )
