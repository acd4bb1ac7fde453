"""Attention time per decoded token: stock llama.cpp beside ours, at the same cache, in one run.

A model has the attention of Llama-2-7B or Llama-3-8B in a few layers, with next to nothing else.
Its cache is filled with S positions of random K and V; single tokens are decoded there. The
variants take turns (A B C, C B A, ...), a few tokens each: if the machine slows down, it slows all.

    attention time = token time at S - token time at 32 positions, medians
    roofline       = the bytes read (by the library's counters), at the speed of a plain sequential
                     read by as many threads, measured between the turns at S
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from pyorch.attention.bytes import CELLS, per_token
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import records
from pyorch.bench.bandwidth import MemoryReader
from pyorch.bench.records import Record, where_given
from pyorch.bench.turns import FLOATS, Side, check_dense, gather, turns
from pyorch.bench.worker import Workers
from pyorch.engine import cache_type
from pyorch.errors import SparqError
from pyorch.models import synth
from pyorch.progress import Progress

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
BASE = 32  # the positions whose token time is subtracted
TURN = 5  # tokens per turn

# The rest of the model is as small as possible, so that attention is measured. Projections that
# fit the caches at BASE and not at S would count as attention (width 512: up to 0.1 ms per layer).
N_EMBD = 64
_REST = {"n_embd": N_EMBD, "n_ff": 32, "n_vocab": 288}
_LAYERS = {"llama2-7b": 2, "llama3-8b": 4}  # K and V of each case far exceed the caches of the CPU


@dataclass(frozen=True)
class Case(Side):
    """A row of the table. Fields that llama-bench has too keep its names; a new field has to be
    `where_given`, or all records are measured again."""

    like: str
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_depth: int  # visible positions, including the decoded token
    n_threads: int
    library: str  # stock | sparq
    flash_attn: bool
    spec: AttentionSpec
    n_samples: int
    seed: int
    type_k: str = "f16"
    type_v: str = "f16"
    n_base: int = BASE  # always; it stays because the key of every record is made from it
    numa: str = where_given("")
    n_embd: int = where_given(512)  # the value in older records


@dataclass(frozen=True)
class AttentionPlan:
    """The plan of a run, with `n_samples` timed tokens per row, rounded up to whole turns."""

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
        SparqError: a sparse row did not run sparse, a result differs from stock's, or the library
            refuses something.
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
    """The relative duration of a group, for the estimate of the time left."""
    c = group[0]
    return len(group) * (2000 + c.n_depth * c.n_head * c.n_layer // 64)


def _measure(
    group: Sequence[Case], workers: Workers, progress: records.Done
) -> list[records.Result]:
    """Returns one result per case: samples at S and at BASE, bytes, counters and bandwidth."""
    first = group[0]
    model = model_file(first.like, first.n_layer)
    reader = MemoryReader(first.n_threads)
    places = {c.place: c for c in group}
    for place, case in places.items():
        workers.start(place, case.library).open(
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
    """Seal everything before timing starts. `check` makes sure that no wrong kernel is timed."""
    if check:
        check_dense(group, lambda c: workers[c.place], group[0].n_depth)
    for case in group:
        workers[case.place].attention(spec=str(case.spec))


def refuse_idle(case: Case, counters: dict[str, int]) -> None:
    """Refuse to report a row of ours unless every layer of every timed token ran as it says.

    Raises:
        SparqError: some or all did not.
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
    """The bytes of K, V and shadow per token: our counters, or all of K and V once for stock."""
    if counters.get("steps"):
        return int(per_token(counters)[0])
    n_cells = -(-n_pos // CELLS) * CELLS
    width = case.n_layer * case.n_head_kv * case.head_dim
    k, v = (cache_type(t).bytes_per_element for t in (case.type_k, case.type_v))
    return int(n_cells * width * (k + v))
