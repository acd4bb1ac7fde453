"""Attention time per decoded token: stock llama.cpp beside ours, at the same cache, in one run.

A model has the attention of Llama-2-7B or Llama-3-8B in a few layers, with next to nothing else.
Its cache is filled with S positions of random K and V; single tokens are decoded there. The
variants take turns (A B C, C B A, ...), a few tokens each: if the machine slows down, it slows all.

    attention time = token time at S - token time at 32 positions, medians
    roofline       = the bytes read (by the library's counters), at the speed of a plain sequential
                     read by as many threads, measured between the turns at S
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pyorch.attention.cost import CELLS, per_token
from pyorch.cli.bench.comparison import (
    NUMA,
    CacheCase,
    CompareOptions,
    about,
    best_of_stock,
    types_of,
)
from pyorch.cli.bench.measurement import BOTH, Column, Done, Measurement, Row, differing, same
from pyorch.engine.bandwidth import MemoryReader
from pyorch.errors import SparqError
from pyorch.measure import records
from pyorch.measure.process import Processes
from pyorch.measure.records import Record, Result, optional, spread
from pyorch.measure.turns import check_dense, in_turns, refuse_idle, sides
from pyorch.models import synth
from pyorch.table import columns, number

LIKE_BOTH = ("llama2-7b", "llama3-8b")
POSITIONS = [4096, 16384, 32768]
SPECS = (
    "dense",
    "sparq,ratio=1/4",
    "sparq,ratio=1/8",
    "sparq,ratio=1/8,shadow=q8",
    "sparq,ratio=1/8,shadow=f16",
    "sparq,rank=32,topk=128",
    "sparq,rank=32,topk=128,shadow=f16",
    "topk,ratio=1/16",
)
BASE = 32  # the positions whose token time is subtracted
TURN = 5  # tokens per turn

# The rest of the model is as small as possible, so that attention is measured. Projections that
# fit the caches at BASE and not at S would count as attention (width 512: up to 0.1 ms per layer).
N_EMBD = 64
_REST = {"n_embd": N_EMBD, "n_ff": 32, "n_vocab": 288}
_LAYERS = {"llama2-7b": 2, "llama3-8b": 4}  # K and V of each case far exceed the caches of the CPU


@dataclass(frozen=True, kw_only=True)
class AttentionCase(CacheCase):
    """A row of the table. `n_depth` counts the visible positions, including the decoded token."""

    like: str
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_samples: int
    seed: int = 1
    n_base: int = BASE  # always; it stays because the key of every record is made from it
    numa: str = optional("")
    n_embd: int = optional(512)  # as in older records


def groups(o: CompareOptions) -> list[list[AttentionCase]]:
    """Cases that share a cache and take turns.

    Raises:
        SparqError: attention cannot be seen at so few positions.
    """
    depths, specs = o.n_depth or POSITIONS, o.specs(*SPECS)
    if min(depths) < 2 * CELLS:
        raise SparqError(
            f"{min(depths)} positions are too few to see attention in a token's time",
            f"at least {2 * CELLS}",
            exit_code=2,
        )
    planned = []
    for like, type_k, type_v, n_depth, n_threads in product(
        o.like or LIKE_BOTH, o.type_k, o.type_v, depths, o.threads
    ):
        shared = same(_shape(like, o.n_layer), AttentionCase)
        shared |= {"like": like, "n_depth": n_depth, "type_k": type_k, "type_v": type_v}
        shared |= {"n_threads": n_threads, "numa": o.numa or ""}
        shared |= {"n_samples": o.repetitions * TURN}
        who = sides((False, True), type_v, specs)
        planned.append([AttentionCase(**shared, **side) for side in who])
    return planned


def _shape(like: str, n_layer: int | None) -> synth.Shape:
    return synth.shape_like(like, n_layer=n_layer or _LAYERS.get(like, 2), **_REST)


def model_file(like: str, n_layer: int | None = None) -> Path:
    """The model of a case, written on first use."""
    shape = _shape(like, n_layer)
    path = synth.folder() / f"attention-{like}-{shape.n_layer}-{N_EMBD}-v{synth.VERSION}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        synth.write(path, shape)
    return path


def measure(_: CompareOptions, group: Sequence[AttentionCase], done: Done) -> list[Result]:
    """Returns one result per case: samples at S and at BASE, bytes, counters and bandwidth.

    Raises:
        SparqError: a row did not run as it says, or our dense attention differs from stock's.
    """
    first = group[0]
    model = model_file(first.like, first.n_layer)
    reader = MemoryReader(first.n_threads)
    with Processes() as processes:
        for case in {c.place: c for c in group}.values():
            names = ["n_threads", "flash_attn", "type_k", "type_v", "numa"]
            processes.start(case.place, case.library).open(
                model=str(model), n_ctx=case.n_depth, **{x: getattr(case, x) for x in names}
            )
        base, bandwidth = _at(BASE, group, processes, reader, lambda x: done(0.3 * x))
        full, at_s = _at(first.n_depth, group, processes, reader, lambda x: done(0.3 + 0.7 * x))
    results = []
    for case, r0, r in zip(group, base, full, strict=True):
        check_calls(case, r["counters"])
        results.append(
            {
                **r,
                "base_samples_ns": r0["samples_ns"],
                "bytes_per_token": _bytes(case, r["counters"], case.n_depth),
                "base_bytes_per_token": _bytes(case, r0["counters"], BASE),
                "bandwidth_bytes_per_s": bandwidth + at_s,
            }
        )
    return results


def _at(
    n_pos: int,
    group: Sequence[AttentionCase],
    processes: Processes,
    reader: MemoryReader,
    done: Done,
) -> tuple[list[dict[str, Any]], list[float]]:
    """Times all cases at a position, as `in_turns` does."""
    for place in processes.values():
        place.fill(n_pos=n_pos - 1, seed=group[0].seed)
    if n_pos > BASE:
        check_dense(group, lambda c: processes[c.place], n_pos)
    for case in group:  # everything is sealed before timing starts
        processes[case.place].attention(spec=str(case.spec))

    def once(case: AttentionCase, turn: int) -> Any:
        processes[case.place].attention(spec=str(case.spec))
        return processes[case.place].decode(n=TURN, seed=turn)

    return in_turns(group, range(group[0].n_samples // TURN), once, reader, done)


def check_calls(case: AttentionCase, counters: dict[str, int]) -> None:
    """Refuse to report a row of ours unless every layer of every timed token ran as it says.

    Raises:
        SparqError: some or all did not.
    """
    if case.counter:
        what = f"{case.label} at {case.n_depth} positions"
        refuse_idle(what, counters, case.counter, case.n_samples * case.n_layer)


def _bytes(case: AttentionCase, counters: dict[str, int], n_pos: int) -> int:
    """The bytes of K, V and shadow per token: our counters, or all of K and V once for stock."""
    if counters.get("steps"):
        return int(per_token(counters)[0])
    n_cells = -(-n_pos // CELLS) * CELLS
    width = case.n_layer * case.n_head_kv * case.head_dim
    return int(n_cells * width * sum(case.element_bytes))


# ---- rows and tables ----


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
    best = best_of_stock(recs, lambda rec: _attention_ns(rec, bases[_base_key(rec)])[0])
    for rec in recs:
        case, env = records.read_case(AttentionCase, rec), rec["env"]
        mid, low, high = _attention_ns(rec, bases[_base_key(rec)])
        # read before each turn: those at S are the last; memory may have been another at BASE
        bandwidth = float(np.median(rec["bandwidth_bytes_per_s"][-(case.n_samples // TURN) :]))
        moved = rec["bytes_per_token"] - rec["base_bytes_per_token"]
        out.append(
            {
                "build_commit": env["commit"][:9],
                "cpu_info": env["machine"]["cpu"],
                **vars(case),
                "attention": case.label,
                "attention_ms": mid / 1e6,
                "attention_p10_ms": low / 1e6,
                "attention_p90_ms": high / 1e6,
                "token_ms": spread(rec["samples_ns"])[0] / 1e6,
                "bytes_per_token": rec["bytes_per_token"],
                "roofline": moved / (mid / 1e9) / bandwidth if mid > 0 else math.nan,
                "bandwidth": bandwidth,
                "speedup": best[records.run_of(rec)][0] / mid if mid > 0 else math.nan,
                "test_time": rec["time"],
            }
        )
    return out


def _attention_ns(rec: Record, base: float) -> tuple[float, float, float]:
    mid, low, high = spread(rec["samples_ns"])
    return mid - base, low - base, high - base


def _base_key(rec: Record) -> tuple[Any, ...]:
    return records.run_of(rec), rec["case"]["library"], rec["case"]["flash_attn"]


_COLUMNS: dict[str, Column] = {
    "model": lambda r: f"{r['like']}, {r['n_layer']} layers",
    "K, V": types_of,
    "threads": lambda r: r["n_threads"],
    "positions": lambda r: r["n_depth"],
    "attention": lambda r: f"`{r['attention']}`",
    "ms per token (p10-p90)": lambda r: (
        f"{r['attention_ms']:.2f} ({r['attention_p10_ms']:.2f}-{r['attention_p90_ms']:.2f})"
    ),
    "against best stock": lambda r: number(r["speedup"], "{:.2f}x"),
    "whole token, ms": lambda r: f"{r['token_ms']:.2f}",
    "MB read per token": lambda r: f"{r['bytes_per_token'] / 1e6:.1f}",
    "share of roofline": lambda r: number(100 * r["roofline"], "{:.0f} %"),
}


def markdown(recs: Sequence[Record]) -> str:
    """A line for each record."""
    lines = rows(recs)
    text = columns({**_COLUMNS, **differing(NUMA, lines)}, lines, left=("model", "attention"))
    return f"{text}\n\n{about(recs, [r['bandwidth'] for r in lines])}"


MEASUREMENT = Measurement(
    "attention", CompareOptions, AttentionCase, groups, measure, markdown, BOTH, rows
)
