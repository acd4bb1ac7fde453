"""Speed of decoded tokens and of prompts at a depth: stock llama.cpp beside ours, in one run.

The tests are those of llama-bench: `tg N @ dD` decodes N tokens after D positions, `pp N @ dD`
reads a prompt of N. The D positions hold random K and V (`pyorch/bench/state.py`), or a prompt
that was read for real. Stock `-fa 0`, stock `-fa 1` and ours are processes of their own; they take
turns (A B C, C B A, ...), a whole test each, after one that is not timed.

    roofline   the bytes a token needs (weights once, K and V and shadow as read), at the speed of
               a plain sequential read by as many threads, measured between the turns
    limit      bytes stock needs / bytes ours needs: the speed-up of a program that does nothing
               but read
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from pyorch.attention.bytes import CELLS, GROUP, cache_bytes, layer_costs, shadow_bytes
from pyorch.attention.saved import resolve
from pyorch.attention.spec import CALIBRATED, check_against_model, parse_spec
from pyorch.bench import records
from pyorch.bench.bandwidth import BUFFER_BYTES, MemoryReader
from pyorch.bench.records import Record, spread, where_given
from pyorch.bench.turns import FLOATS, Side, check_same, gather, turns
from pyorch.bench.worker import FORGET_BYTES, Workers
from pyorch.engine import cache_type
from pyorch.errors import SparqError
from pyorch.models import synth
from pyorch.models.geometry import Geometry, geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.models.memory import available_memory, of_nodes
from pyorch.progress import Progress
from pyorch.text import human_bytes

BENCH = "speed"
N_BATCH = 512  # of a prompt

# Llama-2-7B, Q8_0 weights, f16 cache, ratio 1/8, by depth: the limit by bytes, and the speed-up
# that was measured on a CPU with 32 threads (SparQ, arXiv 2312.04985, figure 9)
PAPER = {
    4096: (1.27, 1.14),
    8192: (1.52, 1.26),
    16384: (1.97, 1.57),
    32768: (2.71, 1.73),
    65536: (3.77, 2.06),
    131072: (4.99, 2.54),
}
MAX_POSITIONS = 1 << 20  # that a synthetic model claims to be trained on
FILL = 0.75  # share of the memory that a model chosen by us may take
PROCESS_BYTES = 300 << 20  # of a measured process, beside the model, the cache and FORGET_BYTES


@dataclass(frozen=True)
class Case(Side):
    """One row. Field names that llama-bench has are its own."""

    model_filename: str
    model_type: str
    model_size: int  # bytes of all tensors
    model_n_params: int
    n_threads: int
    type_k: str
    type_v: str
    n_prompt: int  # either this
    n_gen: int  # or this is 0
    n_depth: int
    library: str  # stock | sparq
    flash_attn: bool
    spec: str
    prefill: bool  # the positions before were read for real
    repetitions: int
    numa: str = ""
    below_min_ctx: bool = False  # ours is to run dense
    seed: int = 1
    n_gpu_layers: int | None = where_given(None)  # all
    rope: str = where_given("")  # `engine.Rope` as text
    calibration: str = where_given("")  # what a budget of `spec` stands for with this model

    @property
    def test(self) -> str:
        return test(vars(self))

    @property
    def n_positions(self) -> int:
        """The largest number of positions in the cache; one token goes before those of a test."""
        return self.n_depth + max(self.n_prompt, self.n_gen, 1) + 1


@dataclass(frozen=True)
class Plan:
    """What to measure: the product of all lists. Models are files, or one to be synthesised."""

    models: Sequence[Path] = ()
    like: Sequence[str] = ("llama2-7b",)  # without models
    n_layer: int | None = None  # of `like`; None = as many as fit into memory, a power of two
    quant: str = "q8_0"
    n_prompt: Sequence[int] = (0,)
    n_gen: Sequence[int] = (16,)
    n_depth: Sequence[int] = (0,)
    threads: Sequence[int] = (1,)
    type_k: Sequence[str] = ("f16",)
    type_v: Sequence[str] = ("f16",)
    flash_attn: Sequence[bool] = (False, True)  # of stock
    specs: Sequence[str] = ("sparq,ratio=1/8",)
    repetitions: int = 5
    prefill: bool = False
    numa: str = ""
    n_gpu_layers: int | None = None
    rope: str = ""
    below_min_ctx: bool = False
    seed: int = 1  # of the positions before

    def groups(self) -> Iterator[tuple[Path, list[Case]]]:
        """A model, and cases that share its cache and take turns. Writes synthetic models."""
        for source, cases in self._caches():
            path = source if isinstance(source, Path) else source.written()
            cases = [replace(c, calibration=calibration(c.spec, path)) for c in cases]
            model = _model(path)
            for (n_prompt, n_gen), n in product(self._tests(), self.threads):
                this = model | {"n_prompt": n_prompt, "n_gen": n_gen, "n_threads": n}
                yield path, [replace(c, **this) for c in cases]

    def to_write(self) -> dict[Path, int]:
        """The synthetic models that `groups` will write, and their sizes in bytes."""
        sources = [source for source, _ in self._caches() if isinstance(source, Synthetic)]
        return {s.path: s.n_bytes for s in sources if not s.path.exists()}

    def _tests(self) -> list[tuple[int, int]]:
        """(tokens of a prompt, decoded tokens), one of them 0."""
        tests = [(n, 0) for n in self.n_prompt if n] + [(0, n) for n in self.n_gen if n]
        if not tests:
            raise SparqError("nothing to measure: -p 0 and -n 0", "-n 16", exit_code=2)
        return tests

    def _caches(self) -> Iterator[tuple[Path | Synthetic, list[Case]]]:
        """What shares a cache: a model, and its cases but for what `groups` adds to them."""
        specs = list(dict.fromkeys(str(parse_spec(s)) for s in self.specs))
        sources = list(self.models) or list(self.like)
        every = product(sources, self.n_depth, self.type_k, self.type_v)
        for source, n_depth, type_k, type_v in every:
            stock = [fa for fa in self.flash_attn if fa or type_v in FLOATS]
            if not stock:
                raise SparqError(
                    f"llama.cpp has no {type_v} V without flash attention",
                    "-fa 1, or a -ctv of f16 or bf16",
                    exit_code=2,
                )
            first = Case(
                model_filename="",
                model_type="",
                model_size=0,
                model_n_params=0,
                n_threads=1,
                type_k=type_k,
                type_v=type_v,
                n_prompt=0,
                n_gen=max(max(test) for test in self._tests()),
                n_depth=n_depth,
                library="stock",
                flash_attn=False,
                spec="off",
                prefill=self.prefill,
                repetitions=self.repetitions,
                numa=self.numa,
                n_gpu_layers=self.n_gpu_layers,
                rope=self.rope,
                below_min_ctx=self.below_min_ctx,
                seed=self.seed,
            )
            cases = [replace(first, flash_attn=fa) for fa in stock]
            cases += [replace(first, library="sparq", flash_attn=True, spec=s) for s in specs]
            yield source if isinstance(source, Path) else self._synthetic(source, cases), cases

    def _synthetic(self, like: str, cases: Sequence[Case]) -> Synthetic:
        """With as many layers as fit: decided by the size of the memory, not by what is free, so
        that another run has the same cases."""
        full, (memory, on_gpu) = synth.shape_like(like).n_layer, _memory(cases)
        fewer = [2**i for i in range(10, -1, -1) if 2**i < full]
        fitting = (
            n
            for n in [full, *fewer]
            if _needs(cases, *_sizes(like, n, self.quant), on_gpu) < FILL * memory
        )
        return Synthetic(like, self.n_layer or next(fitting, 1), self.quant)


def calibration(line: str, model: Path) -> str:
    """A hash of the settings that `calibrated` or `top-p` stands for, "" for other budgets: after
    another calibration a record is of something else.

    Raises:
        SparqError: the model is not calibrated for these settings.
    """
    spec = parse_spec(line)
    found = str(resolve(spec, model))
    return hashlib.sha256(found.encode()).hexdigest()[:8] if spec.budget in CALIBRATED else ""


@dataclass(frozen=True)
class Synthetic:
    """A model of random weights with `n_layer` layers, and the output head in proportion."""

    like: str
    n_layer: int
    quant: str

    @property
    def path(self) -> Path:
        name = f"{self.like}-{self.n_layer}-{self.quant}-v{synth.VERSION}.gguf"
        return synth.folder() / name

    @property
    def n_bytes(self) -> int:
        return synth.file_bytes(synth.fewer_layers(self.like, self.n_layer), self.quant)

    def written(self) -> Path:
        """Its file, which is kept in the cache: another run would write the same again."""
        if not self.path.exists():
            full = synth.shape_like(self.like).n_layer
            fewer = f", {self.n_layer} of {full} layers" if self.n_layer != full else ""
            shape = replace(synth.fewer_layers(self.like, self.n_layer), n_ctx=MAX_POSITIONS)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            synth.write(self.path, shape, self.quant, name=f"{self.like} {self.quant}{fewer}")
        return self.path


def _sizes(like: str, n_layer: int, quant: str) -> tuple[int, Geometry, bool]:
    """What `_needs` has to know of a synthetic model that need not exist."""
    shape = synth.fewer_layers(like, n_layer)
    n_bytes = synth.file_bytes(shape, quant)
    geo = Geometry(
        arch="llama",
        name=like,
        n_layer=n_layer,
        n_embd=shape.n_embd,
        n_head=(shape.n_head,) * n_layer,
        n_head_kv=(shape.n_head_kv,) * n_layer,
        head_dim_k=shape.head_dim,
        head_dim_v=shape.head_dim,
        n_ctx_train=shape.n_ctx,
        is_mla=False,
        n_params=0,
        weight_bytes=n_bytes,
        weight_bytes_per_token=n_bytes,
    )
    return n_bytes, geo, quant == "q4_k_m"


def _memory(cases: Sequence[Case]) -> tuple[float, bool]:
    """Bytes of the memory that the layers go to, and whether it is a GPU's."""
    machine = records.machine()
    on_gpu = "gpu_gib" in machine and cases[0].n_gpu_layers != 0
    total = machine["gpu_gib" if on_gpu else "memory_gib"] * 2**30
    return total if on_gpu else min(total, of_nodes("MemTotal") or total), on_gpu


def _needs(
    cases: Sequence[Case], weights: int, geo: Geometry, packed: bool, on_gpu: bool = False
) -> int:
    """Bytes of memory, the GPU's or the machine's, while the cases of a group are measured.

    Each process has a cache of its own, which is filled from a copy. `packed`: and weights of its
    own, because llama.cpp arranges them anew; otherwise the file is mapped once for all. On a GPU
    each has weights of its own, and the copy is not there.
    """
    places = {c.place: c for c in cases}.values()
    c = cases[0]
    cache = cache_bytes(geo, c.n_positions, cache_type(c.type_k), cache_type(c.type_v))
    shadows = [
        shadow_bytes(geo, c.n_positions, parse_spec(c.spec)) for c in places if c.library == "sparq"
    ]
    if on_gpu:
        return (weights + cache + PROCESS_BYTES) * len(places) + sum(shadows)
    each = cache + FORGET_BYTES + PROCESS_BYTES
    weights *= 1 + len(places) if packed else 1
    return weights + each * len(places) + sum(shadows) + cache + c.n_threads * BUFFER_BYTES


@cache
def _geometry(path: Path) -> Geometry:
    return geometry(read_gguf(path))


def _model(path: Path) -> dict[str, Any]:
    geo = _geometry(path)
    return {
        "model_filename": path.name,
        "model_type": geo.name,
        "model_size": geo.weight_bytes,
        "model_n_params": geo.n_params,
    }


def run(plan: Plan, file: Path, progress: Progress, *, force: bool = False) -> list[Record]:
    """Measure what `file` lacks, add it there, and return all records of the plan in order.

    Raises:
        SparqError: a sparse row that did not run sparse, a result that differs from stock's, or
            anything the library refuses.
    """
    planned = list(plan.groups())
    check(planned)
    models = {id(group): path for path, group in planned}
    with Workers() as workers:
        return records.resume(
            BENCH,
            [group for _, group in planned],
            lambda group, done: _measure(models[id(group)], group, workers, done),
            file,
            progress,
            cost=lambda group: cost(models[id(group)], group),
            force=force,
        )


def check(planned: Iterable[tuple[Path, Sequence[Case]]]) -> None:
    """Rows of tokens that cannot run as they say are refused before anything is measured.

    Raises:
        SparqError: at its positions a sparse row is dense, or one below min_ctx is not.
    """
    for model, group in planned:
        geo = _geometry(model)
        for c in group:
            spec = resolve(parse_spec(c.spec), model)
            check_against_model(spec, geo.head_dim_k, geo.n_layer)
            if not (c.n_gen and spec.sparse) or geo.is_mla:
                continue
            # the most there will be, or those of the first token that is timed
            n_pos = c.n_positions if c.below_min_ctx else c.n_depth + 2
            types = (cache_type(t).bytes_per_element for t in (c.type_k, c.type_v))
            splits = [layer.split for layer in layer_costs(geo, spec, n_pos, *types)]
            if c.below_min_ctx and not all(s.dense for s in splits):
                raise SparqError(
                    f"{c.spec} is not dense at {n_pos} positions, but is to be below min_ctx",
                    "fewer tokens (-n), or a larger min_ctx",
                    exit_code=2,
                )
            if not c.below_min_ctx and all(s.dense for s in splits):
                reason = f": {splits[0].reason}" if splits else ""
                raise SparqError(
                    f"{c.spec} stays dense at {n_pos} positions{reason}",
                    "more positions (-d), or min_ctx=0 in -a; -a dense measures our dense",
                    exit_code=2,
                )


def cost(model: Path, group: Sequence[Case]) -> int:
    """Relative duration of a group, for the time that is left: about the MB that are read."""
    c = group[0]
    read = c.model_size + cache_bytes(
        _geometry(model), c.n_positions, cache_type(c.type_k), cache_type(c.type_v)
    )
    per_prompt = 1 / 10  # of a token's time, per token
    once = c.n_depth * per_prompt if c.prefill else 0
    tokens = once + (c.repetitions + 1) * (c.n_gen or c.n_prompt * per_prompt)
    threads = min(c.n_threads, 8)  # more hardly read faster
    return int(len(group) * (2e9 + read * (5 + tokens / threads)) / 1e6)


def _measure(
    model: Path, group: Sequence[Case], workers: Workers, progress: Callable[[float], None]
) -> list[dict[str, Any]]:
    """One result per case: samples, bytes, counters, bandwidth."""
    first, geo = group[0], _geometry(model)
    places = {c.place: c for c in group}
    _check_memory(group, model)
    reader = MemoryReader(first.n_threads)
    for i, (place, case) in enumerate(places.items()):
        _open(workers, place, case, model)
        progress(0.1 * (i + 1) / len(places))
    layers = _prepare(group, workers)
    progress(0.2)
    bandwidth: list[float] = []
    found: list[list[dict[str, Any]]] = [[] for _ in group]
    which = range(-1, first.repetitions)  # the first turn is not kept
    # a round of growth, which has one timed turn, has its number for a seed: A B, B A, ...
    swap = first.seed % 2 == 0
    for turn, order in turns(len(group), which, reader, bandwidth, swap=swap):
        for i in order:
            got = _once(workers, group[i], turn)
            if turn >= 0:
                found[i].append(got)
        progress(0.2 + 0.8 * (turn + 2) / (first.repetitions + 1))
    for place in places:
        workers[place].close()
    results = [gather(f) for f in found]
    for case, result, n_layer in zip(group, results, layers, strict=True):
        refuse_idle(case, result["counters"], n_layer)
        result["bytes_weights"] = geo.weight_bytes_per_token
        result["bytes_kv"] = _kv_bytes(case, geo, result["counters"])
        result["layers_sparse"] = n_layer
        result["n_layer"] = geo.n_layer
        result["bandwidth_bytes_per_s"] = bandwidth
    return results


def _check_memory(group: Sequence[Case], model: Path) -> None:
    geo = _geometry(model)
    packed = any(t.type.startswith(("q2_", "q4_", "iq4_")) for t in read_gguf(model).tensors)
    memory, on_gpu = _memory(group)
    needed = _needs(group, geo.weight_bytes, geo, packed, on_gpu)
    free = int(memory) if on_gpu else available_memory()
    if needed > free:
        n = len({c.place for c in group})
        raise SparqError(
            f"{n} processes with {group[0].n_positions} positions each need about "
            f"{human_bytes(needed)}, but only {human_bytes(free)} of memory is available",
            "a lower -d, one of -fa 0 and -fa 1, or fewer --layers of a synthetic model",
        )


def _open(workers: Workers, place: str, case: Case, model: Path) -> None:
    """Load the model and put `n_depth` positions into its cache."""
    whole = bool(case.n_prompt or case.prefill)
    workers[place].open(
        model=str(model),
        n_ctx=-(-case.n_positions // CELLS) * CELLS,
        n_threads=case.n_threads,
        n_batch=N_BATCH if whole else 8,  # llama.cpp sets memory aside for a batch of this size
        flash_attn=case.flash_attn,
        type_k=case.type_k,
        type_v=case.type_v,
        numa=case.numa,
        n_gpu_layers=case.n_gpu_layers,
        rope=case.rope,
    )
    if case.prefill and case.n_depth:
        workers[place].prefill(n=case.n_depth, seed=case.seed)
    elif case.n_depth:
        workers[place].fill(n_pos=case.n_depth, seed=case.seed)


def _prepare(group: Sequence[Case], workers: Workers) -> list[int]:
    """Check, and have all sealed, before the clock. Returns how many layers of each case are not
    left to llama.cpp."""
    first, layers = group[0], []
    wanted = workers[first.place].logits(token=77)
    ours = next((c for c in group if c.library == "sparq"), None)
    if ours is not None:
        workers[ours.place].attention(spec="dense")
        check_same(wanted, workers[ours.place].logits(token=77), first.n_depth)
    for case in group:
        worker, spec = workers[case.place], parse_spec(case.spec)
        worker.attention(spec=case.spec)
        if spec.method == "off":
            layers.append(0)
            continue
        n_layer, reasons = worker.layers()
        if not n_layer:
            raise SparqError(
                f"{case.label} with {case.type_k} K and {case.type_v} V stays dense: "
                f"{'; '.join(reasons) or 'no reason given'}",
                "what does not run is not reported; `sparq-cpp explain` says more",
            )
        layers.append(n_layer)
    return layers


def _once(workers: Workers, case: Case, turn: int) -> dict[str, Any]:
    """One test of one case; the cache is then as it was."""
    worker = workers[case.place]
    worker.attention(spec=case.spec)
    if case.n_gen:
        got: dict[str, Any] = worker.generate(n=case.n_gen if turn >= 0 else 3, seed=turn + 1)
        return got
    # the first turn only warms up: a short prompt is enough
    n = case.n_prompt if turn >= 0 else min(case.n_prompt, 256)
    got = worker.prefill(n=n, seed=turn + 1)
    worker.rewind(n_pos=case.n_depth)
    return got


def refuse_idle(case: Case, counters: dict[str, int], n_layer: int) -> None:
    """A row of ours is reported only if what it says happened, in every timed test.

    Args:
        n_layer: layers that are not left to llama.cpp.

    Raises:
        SparqError: an attention call of a decoded token was not sparse (or not our dense), or a
            prompt with SparQ on sealed fewer groups of positions than it has to. Attention of a
            prompt is exact; `label` says by the counter whose it was.
    """
    spec = parse_spec(case.spec)
    if case.library == "stock" or spec.method == "off":
        return
    if case.n_gen:
        sparse = spec.sparse and not case.below_min_ctx
        n_decoded = case.n_gen - (case.n_depth == 0)  # the first token of a text is its prompt
        name, wanted = "calls_sparse" if sparse else "calls_dense_op", n_layer * n_decoded
    elif spec.method == "sparq":
        # those of the last batch are left to the tokens that follow
        least = max(case.n_prompt - N_BATCH, 0) // GROUP
        name, wanted = "groups_sealed", n_layer * least
    else:
        return
    got = counters.get(name, 0)
    wanted *= case.repetitions
    if got < wanted or (case.n_gen and got != wanted):
        raise SparqError(
            f"{case.label}, {case.test}: {name} is {got}, not {wanted}; not reported",
            "`sparq-cpp explain` says when attention stays dense, for example below min_ctx",
        )


def _kv_bytes(case: Case, geo: Geometry, counters: dict[str, int]) -> int:
    """Bytes of K, V, shadow and sums of V per token: by our counters; of stock, every visible
    position once. 0: not known (a prompt, or a model whose cache is not plain)."""
    if case.n_prompt or geo.windows.sizes or geo.is_mla:
        return 0
    if counters.get("steps"):
        return counters["bytes_read"] // counters["steps"]
    n_pos = case.n_depth + (case.n_gen + 1) / 2  # the mean over the tokens of a test
    per_pos = cache_bytes(geo, 1, cache_type(case.type_k), cache_type(case.type_v))
    return int(n_pos * per_pos)


# ---- what is said about it ----

Row = dict[str, Any]


def rows(recs: Sequence[Record]) -> list[Row]:
    """One flat row per record, llama-bench's fields first. `recs` holds whole groups.

    `samples_ns` are of single tokens (or of whole prompts), `avg_ns` is of a whole test.
    `speedup` and `roofline_speedup` are against the faster of stock's; nan where they mean nothing.
    """
    best: dict[tuple[Any, ...], tuple[float, int]] = {}
    for rec in recs:
        if rec["case"]["library"] == "stock":
            at, this = _group_of(rec), spread(rec["samples_ns"])[0]
            best[at] = min(best.get(at, (math.inf, 0)), (this, rec["bytes_kv"]))
    return [_row(rec, *best.get(_group_of(rec), (math.nan, 0))) for rec in recs]


def _group_of(rec: Record) -> tuple[Any, ...]:
    own = ("library", "flash_attn", "spec", "calibration")
    case = tuple(v for k, v in rec["case"].items() if k not in own)
    return records.run_of(rec), case


def _row(rec: Record, best_ns: float, best_kv: int) -> Row:
    c, env = Case(**rec["case"]), rec["env"]
    samples = rec["samples_ns"]
    n = c.n_prompt or c.n_gen
    # whole tests, as llama-bench has them
    per = c.n_gen or 1
    tests = [sum(samples[i : i + per]) for i in range(0, len(samples), per)]
    speeds = [1e9 * n / t for t in tests]
    mid, low, high = spread(samples)
    bandwidth = statistics.median(rec["bandwidth_bytes_per_s"])
    weights = rec["bytes_weights"]
    moved = weights + rec["bytes_kv"] if rec["bytes_kv"] else math.nan
    case = asdict(c)
    spec = case.pop("spec")
    like_paper = (
        c.model_type.startswith("llama2-7b q8_0")
        and (c.type_k, c.type_v, parse_spec(c.spec).method) == ("f16", "f16", "sparq")
        and parse_spec(c.spec).ratio == 1 / 8
        and c.n_gen
    )
    paper_limit, paper_speedup = PAPER.get(c.n_depth if like_paper else 0, (math.nan, math.nan))
    return {
        "build_commit": env["commit"][:9],
        "cpu_info": env["machine"]["cpu"],
        "backends": "CUDA" if "gpu" in env["machine"] and c.n_gpu_layers != 0 else "CPU",
        **{k: case.pop(k) for k in list(case)[:4]},
        "n_batch": N_BATCH,
        "n_ubatch": N_BATCH,
        **case,
        "flash_attn": int(c.flash_attn),
        "test_time": rec["time"],
        "avg_ns": round(statistics.fmean(tests)),
        "stddev_ns": round(statistics.stdev(tests)) if len(tests) > 1 else 0,
        "avg_ts": statistics.fmean(speeds),
        "stddev_ts": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "sparse_attn": spec,
        "median_ns": round(mid),
        "p10_ns": round(low),
        "p90_ns": round(high),
        "speedup": best_ns / mid,
        "roofline_speedup": (weights + best_kv) / moved if best_kv else math.nan,
        "paper_speedup": paper_speedup,
        "paper_limit": paper_limit,
        "bytes_weights": weights,
        "bytes_kv": rec["bytes_kv"],
        "bandwidth_bytes_per_s": round(bandwidth),
        "roofline_ns": moved / bandwidth * 1e9,
        "roofline_share": moved / bandwidth * 1e9 / mid,
        "n_layer": rec["n_layer"],
        "layers_sparse": rec["layers_sparse"],
        "calls_sparse": rec["counters"].get("calls_sparse", 0),
        "calls_prefill": rec["counters"].get("calls_prefill", 0),
        "pin": env["pin"],
        "stamp": env["stamps"][c.library],
        "dirty": env["dirty"],
        "key": rec["key"],
    }


def label(row: Row) -> str:
    """What a row is of."""
    if row["library"] == "stock":
        return f"stock -fa {row['flash_attn']}"
    if row["n_prompt"] > 1:  # SparQ seals meanwhile
        whose = "exact" if row["calls_prefill"] else "llama.cpp's"
        return f"{row['sparse_attn']}, {whose} prefill"
    return row["sparse_attn"] + (", dense: below min_ctx" if row["below_min_ctx"] else "")


def test(row: Row) -> str:
    """As llama-bench prints it: `tg16 @ d4096`."""
    name = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
    return f"{name} @ d{row['n_depth']}" if row["n_depth"] else name
