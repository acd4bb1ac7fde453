"""Measures decoded tokens and prompts at a depth: stock llama.cpp beside ours, in one run.

The tests are those of llama-bench: `tg N @ dD` decodes N tokens after D positions, `pp N @ dD`
reads a prompt of N. The D positions hold random K and V (`pyorch/measure/state.py`), or a prompt
that was read for real. Stock `-fa 0`, stock `-fa 1` and ours are processes of their own; they take
turns (A B C, C B A, ...) of a whole test each, after one that is not timed.

    roofline   the bytes a token needs (weights once, K and V and shadow as read), at the speed of
               a plain sequential read by as many threads, measured between the turns
    limit      bytes stock needs / bytes ours needs: the speed-up of a program that does nothing
               but read

`compare-llama-bench.py` and other tools of llama.cpp find their fields in the rows under their
names; our own fields come after them.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from pyorch import native, table
from pyorch.attention.cost import CELLS, GROUP, N_BATCH, layer_costs, per_token
from pyorch.attention.saved import resolve
from pyorch.attention.spec import CALIBRATED, AttentionSpec, check_against_model
from pyorch.cli.bench.comparison import NUMA, CacheCase, SpeedOptions, about, best_of_stock
from pyorch.cli.bench.measurement import BOTH, Column, Done, Measurement, Row, differing, text_hash
from pyorch.cli.loading import model_path
from pyorch.cli.options import RpcOptions
from pyorch.cli.terminal import confirm, note_if_beyond
from pyorch.engine.bandwidth import MemoryReader, usual_bytes
from pyorch.engine.settings import context_size
from pyorch.errors import SparqError
from pyorch.measure import records
from pyorch.measure.process import Process, Processes
from pyorch.measure.records import Record, Result, optional, spread
from pyorch.measure.room import Place, Synthetic, geometry_of
from pyorch.measure.turns import OFF, Side, check_dense, in_turns, refuse_idle, sides
from pyorch.models.content import card_of
from pyorch.models.geometry import Geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.models.memory import available_memory
from pyorch.table import number
from pyorch.text import human_bytes, printable

LIKE = ("llama2-7b",)
DEPTHS = [4096]
SPEC = "sparq,ratio=1/8"


@dataclass(frozen=True, kw_only=True)
class SpeedCase(CacheCase):
    """A row. Fields that llama-bench has too keep its names."""

    model: Path = field(default=Path(), metadata={"unrecorded": True})
    model_filename: str
    model_type: str
    model_size: int  # the bytes of all tensors
    model_n_params: int
    n_prompt: int  # either this
    n_gen: int  # or this is 0
    repetitions: int
    # it stays because every key is made from it; records until November 2026 have both
    below_min_ctx: bool = False
    seed: int = 1  # of the positions before
    calibration: str = optional("")  # see `calibration`
    text: str = optional("")  # a hash of what ours has read; without one K and V are random
    repack: bool = optional(True)
    numa: str
    rope: str = optional("")  # `engine.Rope` as text
    kv_offload: bool = optional(True)
    n_gpu_layers: int | None = optional(None)
    n_workers: int = optional(0)
    tensor_split: str = optional("")

    @property
    def test(self) -> str:
        """The name of the test as llama-bench prints it: `tg16 @ d4096`."""
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name

    @property
    def n_batch(self) -> int:
        """The tokens per batch, for which llama.cpp sets memory aside."""
        return N_BATCH if self.n_prompt or self.text else 8

    @property
    def n_positions(self) -> int:
        """The positions that the cache has room for."""
        return room_for(self.n_depth, max(self.n_prompt, self.n_gen))


def room_for(n_depth: int, n_tokens: int) -> int:
    """The positions of a cache that a test needs, with one to spare: the first token of a text
    counts as its prompt, so an empty cache gets one token before ours is checked at the next."""
    return n_depth + max(n_tokens, 1) + 1


def calibration(spec: AttentionSpec, model: Path) -> str:
    """A hash of the settings that `calibrated` or `top-p` stands for, "" for other budgets: a new
    calibration makes other records.

    Raises:
        SparqError: the model is not calibrated for these settings.
    """
    settings = str(resolve(spec, model))
    return hashlib.sha256(settings.encode()).hexdigest()[:8] if spec.budget in CALIBRATED else ""


# ---- plan ----


def groups(o: SpeedOptions) -> list[list[SpeedCase]]:
    """The cases that share a cache and take turns. Synthetic models are written after asking.

    Raises:
        SparqError: there is nothing to measure, a model is neither here nor on the hub, or a row
            cannot run as it says.
    """
    tests = [{"n_prompt": n, "n_gen": 0} for n in o.n_prompt if n]
    tests += [{"n_prompt": 0, "n_gen": n} for n in o.n_gen if n]
    if not tests:
        raise SparqError("nothing to measure: -p 0 and -n 0", "-n 16", exit_code=2)
    o.rpc.allowed()
    specs, depths, most = o.specs(SPEC), o.n_depth or DEPTHS, max(*o.n_prompt, *o.n_gen)
    paths = [model_path(m, o.yes, native.check_compiler) for m in o.models]
    for path in paths:
        geo, room = geometry_of(path), room_for(max(depths), most)
        note_if_beyond(context_size(geo, room, o.rope.settings()), geo.n_ctx_train)
    caches = []
    sources: Sequence[Path | str] = paths or o.like or LIKE
    for source, n_depth, type_k, type_v in product(sources, depths, o.type_k, o.type_v):
        who = sides(o.stock, type_v, specs, o.rivals)
        if who[0]["library"] != "stock":
            raise SparqError(
                f"llama.cpp has no {type_v} V without flash attention",
                "-fa 1, or a -ctv of f16 or bf16",
                exit_code=2,
            )
        model: Path | Synthetic
        if isinstance(source, Path):
            model = source
        else:
            size = room_for(n_depth, most), type_k, type_v
            at = Place(o.n_gpu_layers, o.kv_offload is not False, not o.no_repack)
            all_sides = [Side(**side) for side in who]
            n_layer = o.n_layer or at.fitting(source, o.quant, all_sides, size)
            model = Synthetic(source, n_layer, o.quant)
        caches.append((model, {"n_depth": n_depth, "type_k": type_k, "type_v": type_v}, who))
    _agree_to_write([m for m, *_ in caches if isinstance(m, Synthetic)], o.yes)
    planned = []
    for model, cache, who in caches:
        path = model.written() if isinstance(model, Synthetic) else model
        who = [side | {"calibration": calibration(side["spec"], path)} for side in who]
        shared = _shared(o) | _of_model(path) | cache
        for test, n_threads in product(tests, o.threads):
            common = shared | test | {"n_threads": n_threads}
            planned.append([SpeedCase(**common, **side) for side in who])
    for group in planned:
        check(group)
    return planned


def _shared(o: SpeedOptions) -> dict[str, Any]:
    """The fields of a case that are the same in all of a run."""
    return {
        "repetitions": o.repetitions,
        "text": text_hash(o.book),
        "repack": not o.no_repack,
        "numa": o.numa or "",
        "rope": str(o.rope.settings() or ""),
        "kv_offload": o.kv_offload is not False,
        "n_gpu_layers": o.n_gpu_layers,
        "n_workers": len(o.rpc.workers),
        "tensor_split": ",".join(f"{x:g}" for x in o.rpc.tensor_split),
    }


def _of_model(path: Path) -> dict[str, Any]:
    """The fields of a case that name its model."""
    geo = geometry_of(path)
    return {
        "model": path,
        "model_filename": printable(path.name),
        "model_type": geo.name,
        "model_size": geo.weight_bytes,
        "model_n_params": geo.n_params,
    }


def _agree_to_write(models: Sequence[Synthetic], yes: bool) -> None:
    """Ask before gigabytes of synthetic weights are written.

    Raises:
        SparqError: there is neither a terminal to ask on, nor --yes.
    """
    if todo := {m.path: m.n_bytes for m in models if not m.path.exists()}:
        names = ", ".join(f"{path.name} ({human_bytes(n)})" for path, n in todo.items())
        what = f"{names} with random weights in {next(iter(todo)).parent}"
        hint = "write it with --yes, or measure a model of yours: -m FILE"
        question = f"Write {what}? They stay there until `sparq-cpp clean bench`."
        confirm(question, yes, f"the benchmark would write {what}", hint)


def check(group: Sequence[SpeedCase]) -> None:
    """Refuse rows of tokens that cannot run as they say, before anything is measured.

    Raises:
        SparqError: a sparse row is dense at its positions.
    """
    geo = geometry_of(group[0].model)
    for c in group:
        spec = resolve(c.spec, c.model)
        check_against_model(spec, geo.head_dim_k, geo.n_layer)
        if not (c.n_gen and spec.sparse) or geo.why_dense:
            continue
        # what the first token sees; the very first of a text counts as its prompt
        n_pos = max(c.n_depth, 1) + 1
        splits = [layer.split for layer in layer_costs(geo, spec, n_pos, *c.element_bytes)]
        if all(s.dense for s in splits):
            reason = f": {splits[0].reason}" if splits else ""
            raise SparqError(
                f"{c.spec} stays dense at {n_pos} positions{reason}",
                "more positions (-d), or min_ctx=0 in -a; -a dense measures our dense",
                exit_code=2,
            )


# ---- measure ----


def measure(o: SpeedOptions, group: Sequence[SpeedCase], done: Done) -> list[Result]:
    """Returns one result per case of a group: samples, bytes, counters and bandwidth.

    Raises:
        SparqError: a sparse row did not run sparse, a result differs from stock's, or the library
            refuses something.
    """
    first, geo = group[0], geometry_of(group[0].model)
    if not first.n_workers:
        check_memory(group)
    reader = MemoryReader(first.n_threads)
    opened: list[Process] = []
    with Processes() as processes:

        def process_of(case: SpeedCase) -> Process:
            """The process of a case, with its model and `n_depth` positions in its cache. Other
            machines serve one program at a time, so with them it is closed before the next
            opens."""
            process = processes.start(case.place, case.library, o.rivals.get(case.library))
            if process not in opened:
                if case.n_workers:
                    for other in opened:
                        other.close()
                    opened.clear()
                opened.append(process)
                _open(process, case, o.rpc)
            return process

        for i, case in enumerate(group):
            process_of(case)
            done(0.1 * (i + 1) / len(group))
        layers = _prepare(group, process_of, o.book)
        done(0.2)
        results, bandwidth = in_turns(
            group,
            range(-1, first.repetitions),
            lambda case, turn: once(process_of(case), case, turn),
            reader,
            lambda share: done(0.2 + 0.8 * share),
        )
    card = card_of(first.model)
    for case, result, n_layer in zip(group, results, layers, strict=True):
        check_calls(case, result["counters"], n_layer)
        result["bytes_weights"] = geo.weight_bytes_per_token
        result["bytes_kv"] = kv_bytes(case, geo, result["counters"])
        result["layers_sparse"] = n_layer
        result["n_layer"] = geo.n_layer
        result |= {"model_title": card.title} if card else {}
        result["bandwidth_bytes_per_s"] = bandwidth
    return results


def check_memory(group: Sequence[SpeedCase]) -> None:
    """Raises:
    SparqError: the processes of a group need more memory than there is.
    """
    c, geo = group[0], geometry_of(group[0].model)
    place = Place(c.n_gpu_layers, c.kv_offload, c.repack)
    types = {t.type for t in read_gguf(c.model).tensors}
    buffers = c.n_threads * usual_bytes(c.n_threads)
    needed = place.needs(group, (c.n_positions, c.type_k, c.type_v), geo, types, buffers)
    free = int(place.memory) if place.on_gpu else available_memory()
    if needed > free:
        raise SparqError(
            f"{len({c.place for c in group})} processes with {c.n_positions} positions each need "
            f"about {human_bytes(needed)}, but only {human_bytes(free)} of memory is available",
            "use a lower -d, only one of -fa 0 and -fa 1, or fewer --layers of a synthetic model",
        )


def _open(process: Process, case: SpeedCase, rpc: RpcOptions) -> None:
    same = "n_threads n_batch flash_attn type_k type_v numa n_gpu_layers kv_offload rope repack"
    process.open(
        model=str(case.model),
        n_ctx=-(-case.n_positions // CELLS) * CELLS,
        workers=list(rpc.workers),
        tensor_split=list(rpc.tensor_split),
        **{name: getattr(case, name) for name in same.split()},
    )
    if case.n_depth:
        process.fill(n_pos=case.n_depth, seed=case.seed)


def _prepare(
    group: Sequence[SpeedCase], process_of: Callable[[SpeedCase], Process], text: str
) -> list[int]:
    """Check, read and seal everything before timing starts. Returns how many layers of each case
    are not left to llama.cpp."""
    layers = []
    check_dense(group, process_of, group[0].n_depth)
    for case in {c.place: c for c in group}.values() if text else ():
        n = max(case.n_prompt, case.n_gen + 1)
        process_of(case).read(text=text, n_pos=case.n_depth, n=n)
    for case in group:
        process = process_of(case)
        process.attention(spec=str(case.spec))
        n_layer, reasons = (0, []) if case.spec == OFF else process.layers()
        if not n_layer and case.spec != OFF:
            raise SparqError(
                f"{case.label} with {case.type_k} K and {case.type_v} V stays dense: "
                f"{'; '.join(reasons) or 'no reason given'}",
                "what does not run is not reported; `sparq-cpp explain` says more",
            )
        layers.append(n_layer)
    return layers


def once(process: Process, case: SpeedCase, turn: int) -> Any:
    """Run one test of a case; the cache is unchanged afterwards. Turn -1 only warms up, for which a
    short test is enough."""
    process.attention(spec=str(case.spec))
    test = process.generate if case.n_gen else process.prefill
    n, short = case.n_gen or case.n_prompt, 3 if case.n_gen else 256
    return test(n=n if turn >= 0 else min(n, short), seed=turn + 1)


def check_calls(case: SpeedCase, counters: Mapping[str, int], n_layer: int) -> None:
    """Refuse to report a row of ours unless every timed test ran as the row says. Attention of a
    prompt is exact; `label` tells from a counter whose code it was.

    Args:
        n_layer: layers that are not left to llama.cpp.

    Raises:
        SparqError: an attention call of a decoded token was not sparse (or not our dense), or a
            prompt with SparQ on sealed too few groups of positions.
    """
    what, calls = f"{case.label}, {case.test}", n_layer * case.repetitions
    if case.n_gen and case.counter:
        n_decoded = case.n_gen - (case.n_depth == 0)  # the first token of a text is its prompt
        refuse_idle(what, counters, case.counter, calls * n_decoded)
    elif case.spec.method == "sparq":
        n_groups = case.n_prompt // GROUP
        refuse_idle(what, counters, "groups_sealed", calls * n_groups, at_least=True)


def kv_bytes(case: SpeedCase, geo: Geometry, counters: Mapping[str, int]) -> int:
    """The bytes of K, V, shadow and sums of V per token, as the mean over the tokens of a test.

    Our ops count what they read. For llama.cpp it is predicted: every position that a layer sees,
    once. 0 means unknown (a prompt, or latent attention).
    """
    if case.n_prompt or geo.is_mla:
        return 0
    counted = counters.get("steps", 0)
    total = 0
    for n_pos in range(case.n_depth + 1, case.n_depth + case.n_gen + 1):
        layers = layer_costs(geo, OFF, n_pos, *case.element_bytes)
        total += sum(x.bytes_dense for x in layers if not (counted and x.ours))
    return total // case.n_gen + int(per_token(counters)[0])


# ---- rows and tables ----


def rows(recs: Sequence[Record]) -> list[Row]:
    """One flat row per record, llama-bench's fields first. `recs` holds whole runs.

    `samples_ns` are for single tokens (or whole prompts), `avg_ns` is for a whole test. `speedup`
    and `roofline_speedup` are over the faster of the run's stock; nan where they mean nothing.
    """
    best = best_of_stock(recs, lambda rec: spread(rec["samples_ns"])[0])
    out = []
    for rec in recs:
        ns, stock = best.get(records.run_of(rec), (math.nan, {"bytes_kv": 0}))
        out.append(_row(rec, ns, stock["bytes_kv"]))
    return out


def _row(rec: Record, best_ns: float, best_kv: int) -> Row:
    c, env = records.read_case(SpeedCase, rec), rec["env"]
    samples = rec["samples_ns"]
    per = c.n_gen or 1  # whole tests, as in llama-bench
    tests = [sum(samples[i : i + per]) for i in range(0, len(samples), per)]
    speeds = [1e9 * (c.n_prompt or c.n_gen) / t for t in tests]
    mid, low, high = spread(samples)
    bandwidth = statistics.median(rec["bandwidth_bytes_per_s"])
    weights = rec["bytes_weights"]
    moved = weights + rec["bytes_kv"] if rec["bytes_kv"] else math.nan
    case = {k: v for k, v in vars(c).items() if k not in ("model", "spec")}
    gpu = env["machine"].get("backend", "CUDA") if "gpu" in env["machine"] else ""
    return {
        "build_commit": env["commit"][:9],
        "cpu_info": env["machine"]["cpu"],
        "backends": "RPC" if c.n_workers else gpu if gpu and c.n_gpu_layers != 0 else "CPU",
        "n_batch": c.n_batch,
        "n_ubatch": c.n_batch,
        **case,
        "model_type": rec.get("model_title", c.model_type),
        "flash_attn": int(c.flash_attn),
        "test_time": rec["time"],
        "avg_ns": round(statistics.fmean(tests)),
        "stddev_ns": round(statistics.stdev(tests)) if len(tests) > 1 else 0,
        "avg_ts": statistics.fmean(speeds),
        "stddev_ts": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "test": c.test,
        "sparse_attn": c.spec,
        "median_ns": round(mid),
        "p10_ns": round(low),
        "p90_ns": round(high),
        "speedup": best_ns / mid,
        "roofline_speedup": (weights + best_kv) / moved if best_kv else math.nan,
        **{x: rec[x] for x in ("bytes_weights", "bytes_kv", "n_layer", "layers_sparse", "key")},
        "bandwidth_bytes_per_s": round(bandwidth),
        "roofline_ns": moved / bandwidth * 1e9,
        "roofline_share": moved / bandwidth * 1e9 / mid,
        **{x: rec["counters"].get(x, 0) for x in ("calls_sparse", "calls_prefill")},
        "pin": env["pin"],
        "stamp": env["stamps"].get(c.library, c.library),
        "dirty": env["dirty"],
        "old": records.is_old(rec),
    }


def label(row: Row) -> str:
    """The name of a row."""
    if row["library"] != "sparq":
        return f"{row['library']} -fa {row['flash_attn']}"
    if row["n_prompt"] > 1:  # SparQ seals during a prompt
        whose = "our" if row["calls_prefill"] else "llama.cpp's"
        return f"{row['sparse_attn']}, {whose} prefill"
    return str(row["sparse_attn"])


# shown if rows differ in it
_SETTINGS: dict[str, Column] = {
    "positions before": lambda r: _before(r),
    "weights": lambda r: "rearranged" if r["repack"] else "as in the file",
    **NUMA,
    "RoPE": lambda r: r["rope"] or "the model's own",
    "K and V": lambda r: "with the layers" if r["kv_offload"] else "in memory",
    "layers on the GPU": lambda r: "all" if r["n_gpu_layers"] is None else r["n_gpu_layers"],
    "workers": lambda r: r["n_workers"],
    "split": lambda r: r["tensor_split"] or "by memory",
}


def _before(r: Row) -> str:
    return "a text (ours), random K and V (llama.cpp)" if r["text"] else "random K and V"


def markdown(recs: Sequence[Record]) -> str:
    """llama-bench's table, with our own columns at the right; none that says nothing."""
    shown: dict[str, Column] = {
        "model": lambda r: r["model_type"],
        "size": lambda r: human_bytes(r["model_size"]),
        "threads": lambda r: r["n_threads"],
        "type_k": lambda r: r["type_k"],
        "type_v": lambda r: r["type_v"],
        "attention": lambda r: f"`{label(r)}`",
        "test": lambda r: r["test"],
        "t/s": lambda r: f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}",
        "ms (p10-p90)": lambda r: (
            f"{r['median_ns'] / 1e6:.2f} ({r['p10_ns'] / 1e6:.2f}-{r['p90_ns'] / 1e6:.2f})"
        ),
        "against best stock": lambda r: number(r["speedup"], "{:.2f}x"),
        "limit": lambda r: number(r["roofline_speedup"], "{:.2f}x"),
        "share of roofline": lambda r: number(100 * r["roofline_share"], "{:.0f} %"),
    }
    lines = rows(recs)
    for name in ("type_k", "type_v"):  # as in llama-bench, only if rows differ in it
        if {r[name] for r in lines} == {"f16"}:
            del shown[name]
    every = {**shown, **differing(_SETTINGS, lines)}
    full = {name: show for name, show in every.items() if {show(r) for r in lines} != {"-"}}
    before = " or ".join(dict.fromkeys(map(_before, lines)))
    built = ", ".join(dict.fromkeys(r["env"]["pin"] for r in recs))
    speeds = [statistics.median(r["bandwidth_bytes_per_s"]) for r in recs]
    ending = about(recs, speeds, f"positions before: {before}", built)
    return f"{table.columns(full, lines, left=('model', 'attention'))}\n\n{ending}"


MEASUREMENT = Measurement("speed", SpeedOptions, SpeedCase, groups, measure, markdown, BOTH, rows)
