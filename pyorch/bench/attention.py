"""Attention time per decoded token: stock llama.cpp beside ours, at the same cache, in one run.

A model has the attention of Llama-2-7B or Llama-3-8B in a few layers, with next to nothing else.
Its cache is filled with S positions of random K and V; single tokens are decoded there. The
variants take turns (A B C, C B A, ...), a few tokens each: a machine that slows down slows all.

    attention time = token time at S - token time at 32 positions, medians
    roofline       = the bytes read (by the library's counters), at the speed of a plain sequential
                     read by as many threads, measured between the turns at S
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pyorch.attention.bytes import CELLS, per_token
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import records
from pyorch.bench.bandwidth import MemoryReader
from pyorch.bench.records import Record, spread, where_given
from pyorch.bench.turns import FLOATS, Side, check_dense, gather, turns
from pyorch.bench.worker import Workers
from pyorch.engine import cache_type
from pyorch.errors import SparqError
from pyorch.models import synth
from pyorch.progress import Progress
from pyorch.table import markdown as markdown_table

BENCH = "attention"
LIKE = ("llama2-7b", "llama3-8b")
POSITIONS = (4096, 16384, 32768)
_SPECS = (
    "dense",
    "sparq,ratio=1/4",
    "sparq,ratio=1/8",
    "sparq,ratio=1/8,shadow=q8",
    "sparq,ratio=1/8,shadow=f16",
    "sparq,rank=32,topk=128",
    "sparq,rank=32,topk=128,shadow=f16",
    "topk,ratio=1/16",
)
SPECS = tuple(map(parse_spec, _SPECS))
BASE = 32  # positions of the token time that is subtracted
TURN = 5  # tokens per turn

# The rest of the model is as small as it can be: what is measured is attention. Projections that
# fit the caches at BASE and not at S would count as attention (width 512: up to 0.1 ms per layer).
N_EMBD = 64
_REST: dict[str, int | str] = {"n_embd": N_EMBD, "n_ff": 32, "n_vocab": 288, "tokenizer": "bytes"}
_LAYERS = {"llama2-7b": 2, "llama3-8b": 4}  # K and V of each case far above the caches of the CPU


@dataclass(frozen=True)
class Case(Side):
    """One row of the table. Field names that llama-bench has are its own."""

    like: str
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_depth: int  # visible positions, the decoded token included
    n_threads: int
    library: str  # stock | sparq
    flash_attn: bool
    spec: AttentionSpec
    n_samples: int
    seed: int
    type_k: str = "f16"
    type_v: str = "f16"
    n_base: int = BASE
    numa: str = where_given("")
    n_embd: int = where_given(512)  # what older records have


@dataclass(frozen=True)
class AttentionPlan:
    """What to measure. `n_samples` timed tokens per row, rounded up to whole turns."""

    like: Sequence[str] = LIKE
    positions: Sequence[int] = POSITIONS
    threads: Sequence[int] = (1,)
    specs: Sequence[AttentionSpec] = SPECS
    n_samples: int = 30
    n_layer: int | None = None
    seed: int = 1
    type_k: Sequence[str] = ("f16",)
    type_v: Sequence[str] = ("f16",)
    numa: str = ""

    def groups(self) -> Iterator[list[Case]]:
        """Cases that share a cache and take turns."""
        too_few = [n for n in self.positions if n < 2 * CELLS]
        if too_few:
            raise SparqError(
                f"{too_few[0]} positions are too few to see attention in a token's time",
                f"at least {2 * CELLS}",
                exit_code=2,
            )
        every = product(self.like, self.type_k, self.type_v, self.positions, self.threads)
        for like, type_k, type_v, n_depth, n_threads in every:
            shape = _shape(like, self.n_layer)
            case = Case(
                like=like,
                n_layer=shape.n_layer,
                n_head=shape.n_head,
                n_head_kv=shape.n_head_kv,
                head_dim=shape.head_dim,
                n_depth=n_depth,
                n_threads=n_threads,
                library="stock",
                flash_attn=False,
                spec=AttentionSpec("off"),
                n_samples=-(-self.n_samples // TURN) * TURN,
                seed=self.seed,
                type_k=type_k,
                type_v=type_v,
                numa=self.numa,
                n_embd=N_EMBD,
            )
            ours = replace(case, library="sparq", flash_attn=True)
            yield [
                *([case] if type_v in FLOATS else []),
                replace(case, flash_attn=True),
                *(replace(ours, spec=s) for s in dict.fromkeys(self.specs)),
            ]


def _shape(like: str, n_layer: int | None) -> synth.Shape:
    return synth.shape_like(like, n_layer=n_layer or _LAYERS.get(like, 2), **_REST)


def model_file(like: str, n_layer: int | None = None) -> Path:
    """The model of a case, written on first use."""
    shape = _shape(like, n_layer)
    name = f"attention-{like}-{shape.n_layer}-{N_EMBD}-v{synth.VERSION}.gguf"
    path = synth.folder() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        synth.write(path, shape)
    return path


def run(
    plan: AttentionPlan, file: Path, progress: Progress, *, force: bool = False
) -> list[Record]:
    """Measure what `file` lacks, add it there, and return all records of the plan in order.

    Raises:
        SparqError: a sparse row that did not run sparse, a result that differs from stock's, or
            anything the library refuses.
    """
    groups = list(plan.groups())
    with Workers() as workers:
        return records.resume(
            BENCH,
            groups,
            lambda group, done: _measure(group, workers, done),
            file,
            progress,
            cost=_cost,
            force=force,
        )


def _cost(group: Sequence[Case]) -> int:
    """Relative duration of a group, for the time that is left."""
    c = group[0]
    return len(group) * (2000 + c.n_depth * c.n_head * c.n_layer // 64)


def _measure(
    group: Sequence[Case], workers: Workers, progress: records.Done
) -> list[records.Result]:
    """One result per case: samples at S and at BASE, bytes, counters, bandwidth."""
    first = group[0]
    model = model_file(first.like, first.n_layer)
    reader = MemoryReader(first.n_threads)
    places = {c.place: c for c in group}
    for place, case in places.items():
        workers[place].open(
            model=str(model),
            n_ctx=case.n_depth,
            n_threads=case.n_threads,
            flash_attn=case.flash_attn,
            type_k=case.type_k,
            type_v=case.type_v,
            numa=case.numa,
        )
    bandwidth: list[float] = []
    results = []
    for n_pos, begin, end in ((BASE, 0.1, 0.3), (first.n_depth, 0.5, 1.0)):
        for place in places:
            workers[place].fill(n_pos=n_pos - 1, seed=first.seed)
        _prepare(group, workers, check=n_pos > BASE)
        progress(begin)
        n_turns = first.n_samples // TURN
        gathered: list[list[dict[str, Any]]] = [[] for _ in group]
        for turn, order in turns(len(group), range(n_turns), reader, bandwidth):
            for i in order:
                worker = workers[group[i].place]
                worker.attention(spec=str(group[i].spec))
                gathered[i].append(worker.decode(n=TURN, seed=turn))
            progress(begin + (end - begin) * (turn + 1) / n_turns)
        results.append([gather(g) for g in gathered])
    for place in places:
        workers[place].close()
    base, full = results
    for case, r in zip(group, full, strict=True):
        refuse_idle(case, r["counters"])
    return [
        {
            "samples_ns": at_s["samples_ns"],
            "base_samples_ns": at_base["samples_ns"],
            "bytes_per_token": _bytes(case, at_s["counters"], case.n_depth),
            "base_bytes_per_token": _bytes(case, at_base["counters"], BASE),
            "counters": at_s["counters"],
            "bandwidth_bytes_per_s": bandwidth,
        }
        for case, at_base, at_s in zip(group, base, full, strict=True)
    ]


def _prepare(group: Sequence[Case], workers: Workers, *, check: bool) -> None:
    """Have all sealed, before the clock. `check`: a wrong kernel is not timed."""
    if check:
        check_dense(group, workers, group[0].n_depth)
    for case in group:
        workers[case.place].attention(spec=str(case.spec))


def refuse_idle(case: Case, counters: dict[str, int]) -> None:
    """A row of ours is reported only if every layer of every timed token ran as it says.

    Raises:
        SparqError: some, or all, did not.
    """
    if case.library == "stock":
        return
    name = "calls_sparse" if case.spec.sparse else "calls_dense_op"
    wanted = case.n_samples * case.n_layer
    if case.spec.method != "off" and counters.get(name, 0) != wanted:
        raise SparqError(
            f"{case.label} at {case.n_depth} positions: {counters.get(name, 0)} of {wanted} "
            f"attention calls counted in {name}; not reported",
            "`sparq-cpp explain` says when attention stays dense",
        )


def _bytes(case: Case, counters: dict[str, int], n_pos: int) -> int:
    """Bytes of K, V and shadow per token: by our counters; for stock, all of K and V once."""
    if counters.get("steps"):
        return int(per_token(counters)[0])
    n_cells = -(-n_pos // CELLS) * CELLS
    width = case.n_layer * case.n_head_kv * case.head_dim
    k, v = (cache_type(t).bytes_per_element for t in (case.type_k, case.type_v))
    return int(n_cells * width * (k + v))


# ---- what is said about it ----


@dataclass(frozen=True)
class Row:
    """One record in the units of the table: milliseconds, bytes, shares."""

    case: Case
    attention_ms: float
    attention_p10_ms: float
    attention_p90_ms: float
    token_ms: float
    bytes_per_token: int
    roofline: float  # share of the speed at which these bytes can be read; nan: lost in the noise
    bandwidth: float
    speedup: float  # against the faster of stock's two; nan: lost in the noise


def rows(recs: Sequence[Record]) -> list[Row]:
    """The table's rows. `recs` holds whole groups, as `run` returns them."""
    out = []
    # so few positions are attended to densely, whatever the settings: ours share one base
    base: dict[tuple[Any, ...], list[float]] = {}
    for rec in recs:
        base.setdefault(_base_key(rec), []).extend(rec["base_samples_ns"])
    bases = {key: spread(samples)[0] for key, samples in base.items()}
    best: dict[tuple[Any, ...], float] = {}
    for rec in recs:
        if rec["case"]["library"] == "stock":
            at, mid = _group_of(rec), _attention_ns(rec, bases[_base_key(rec)])[0]
            best[at] = min(best.get(at, float("inf")), mid)
    for rec in recs:
        case = records.read_case(Case, rec)
        mid, low, high = _attention_ns(rec, bases[_base_key(rec)])
        # read before each turn: those at S are the last; memory may have been another at BASE
        bandwidth = float(np.median(rec["bandwidth_bytes_per_s"][-(case.n_samples // TURN) :]))
        moved = rec["bytes_per_token"] - rec["base_bytes_per_token"]
        out.append(
            Row(
                case,
                mid / 1e6,
                low / 1e6,
                high / 1e6,
                spread(rec["samples_ns"])[0] / 1e6,
                rec["bytes_per_token"],
                moved / (mid / 1e9) / bandwidth if mid > 0 else math.nan,
                bandwidth,
                best[_group_of(rec)] / mid if mid > 0 else math.nan,
            )
        )
    return out


def _group_of(rec: Record) -> tuple[Any, ...]:
    c = records.read_case(Case, rec)
    own = c.like, c.n_layer, c.n_depth, c.n_threads, c.type_k, c.type_v, c.numa
    return records.run_of(rec), *own


def flat(recs: Sequence[Record]) -> list[dict[str, Any]]:
    """The rows, one level deep, for CSV and the like."""
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
    return *_group_of(rec), rec["case"]["library"], rec["case"]["flash_attn"]


_HEAD = ["positions", "attention", "ms per token (p10-p90)", "against best stock"]
_HEAD += ["whole token, ms", "MB read per token", "share of roofline"]


def _cells(row: Row) -> tuple[object, ...]:
    lost = row.attention_ms <= 0  # the machine was too busy to tell it from nothing
    return (
        row.case.n_depth,
        f"`{row.case.label}`",
        f"{row.attention_ms:.2f} ({row.attention_p10_ms:.2f}-{row.attention_p90_ms:.2f})",
        "-" if lost else f"{row.speedup:.2f}x",
        f"{row.token_ms:.2f}",
        f"{row.bytes_per_token / 1e6:.1f}",
        "-" if lost else f"{100 * row.roofline:.0f} %",
    )


def markdown(recs: Sequence[Record]) -> str:
    """One table per model, number of threads, types of K and V and place of memory."""
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
        out += ["", markdown_table(_HEAD, map(_cells, table), left=("attention",))]
    return "\n".join([*out, "", _machine_line(recs)]).strip()


def summary(recs: Sequence[Record]) -> str:
    """For a README: one line per attention, one column per model, length, threads, types of K and
    V and place of memory."""
    cells: dict[str, dict[tuple[str, int, int, str, str], str]] = {}
    for row in rows(recs):
        c = row.case
        text = f"{row.attention_ms:.1f}"
        if row.attention_ms > 0 and c.library != "stock":
            text += f" ({row.speedup:.1f}x, {100 * row.roofline:.0f} %)"
        types = f"{c.type_k} K, {c.type_v} V"
        cells.setdefault(c.label, {})[c.like, c.n_depth, c.n_threads, types, c.numa] = text
    columns = list(dict.fromkeys(column for line in cells.values() for column in line))
    several, mixed, placed = (len({column[i] for column in columns}) > 1 for i in (2, 3, 4))
    heads = [
        f"{like}, S {s}"
        + (f", threads {n}" if several else "")
        + (f", {t}" if mixed else "")
        + (f", numa {numa or 'none'}" if placed else "")
        for like, s, n, t, numa in columns
    ]
    lines = ([f"`{name}`", *(line.get(c, "") for c in columns)] for name, line in cells.items())
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
        f"{speeds[0]:.1f}-{speeds[-1]:.1f} GB/s in the same run."
    )
