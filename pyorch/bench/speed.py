"""Measures decoded tokens and prompts at a depth: stock llama.cpp beside ours, in one run.

The tests are those of llama-bench: `tg N @ dD` decodes N tokens after D positions, `pp N @ dD`
reads a prompt of N. The D positions hold random K and V (`pyorch/bench/state.py`), or a prompt
that was read for real. Stock `-fa 0`, stock `-fa 1` and ours are processes of their own; they take
turns (A B C, C B A, ...) of a whole test each, after one that is not timed.

    roofline   the bytes a token needs (weights once, K and V and shadow as read), at the speed of
               a plain sequential read by as many threads, measured between the turns
    limit      bytes stock needs / bytes ours needs: the speed-up of a program that does nothing
               but read
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyorch.attention.bytes import CELLS, GROUP, N_BATCH, layer_costs, per_token
from pyorch.attention.spec import AttentionSpec
from pyorch.bench import records
from pyorch.bench.bandwidth import MemoryReader, usual_bytes
from pyorch.bench.plan import (
    Cache,
    Case,
    SpeedPlan,
    check,
    cost,
    geometry_of,
    memory_of,
    needs,
    rearranged,
)
from pyorch.bench.records import Record
from pyorch.bench.turns import check_dense, gather, turns
from pyorch.bench.worker import Worker, Workers
from pyorch.engine import cache_type
from pyorch.errors import SparqError
from pyorch.models.content import card_of
from pyorch.models.geometry import Geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.models.memory import available_memory
from pyorch.progress import Progress
from pyorch.text import human_bytes

BENCH = "speed"


def run(plan: SpeedPlan, file: Path, progress: Progress, *, force: bool = False) -> list[Record]:
    """Measure what `file` lacks, add it there, and return all records of the plan in order.

    Raises:
        SparqError: a sparse row did not run sparse, a result differs from stock's, or the library
            refuses something.
    """
    planned = list(plan.groups())
    check(planned)
    models = {id(group): path for path, group in planned}
    with Workers() as processes:
        return records.resume(
            BENCH,
            [group for _, group in planned],
            lambda group, done: measure(plan, models[id(group)], group, processes, done),
            file,
            progress,
            cost=lambda group: cost(models[id(group)], group),
            force=force,
        )


class _Places:
    """The processes that hold a model with its cache, by `Case.place`. Workers of other machines
    serve one program at a time, so with them a process is closed before the next opens."""

    def __init__(self, plan: SpeedPlan, processes: Workers) -> None:
        self._plan, self._processes = plan, processes
        self._open: set[str] = set()

    def open(self, case: Case, model: Path) -> Worker:
        """The process of a case; it loads the model and puts `n_depth` positions into its cache."""
        if case.place not in self._open:
            if self._plan.workers:
                self.close()
            self._open.add(case.place)
            process = self._processes.start(case.place, case.library)
            _open(process, self._plan, case, model)
        return self._processes[case.place]

    def close(self) -> None:
        for place in self._open:
            self._processes[place].close()
        self._open.clear()


def measure(
    plan: SpeedPlan,
    model: Path,
    group: Sequence[Case],
    processes: Workers,
    progress: records.Done,
) -> list[records.Result]:
    """Returns one result per case of a group: samples, bytes, counters and bandwidth.

    Raises:
        SparqError: as `run`.
    """
    first, geo, places = group[0], geometry_of(model), _Places(plan, processes)
    if not first.n_workers:
        _check_memory(group, model)
    reader = MemoryReader(first.n_threads)
    for i, case in enumerate(group):
        places.open(case, model)
        progress(0.1 * (i + 1) / len(group))

    def process(case: Case) -> Worker:
        return places.open(case, model)

    layers = _prepare(group, process, plan.text)
    card = card_of(model)
    progress(0.2)
    bandwidth: list[float] = []
    found: list[list[dict[str, Any]]] = [[] for _ in group]
    which = range(-1, first.repetitions)  # the first turn is discarded
    # a round of growth has one timed turn, and its number as the seed: A B, B A, ...
    swap = first.seed % 2 == 0
    for turn, order in turns(len(group), which, reader, bandwidth, swap=swap):
        for i in order:
            got = _once(process(group[i]), group[i], turn)
            if turn >= 0:
                found[i].append(got)
        progress(0.2 + 0.8 * (turn + 2) / (first.repetitions + 1))
    places.close()
    results = [gather(f) for f in found]
    for case, result, n_layer in zip(group, results, layers, strict=True):
        refuse_idle(case, result["counters"], n_layer)
        result["bytes_weights"] = geo.weight_bytes_per_token
        result["bytes_kv"] = kv_bytes(case, geo, result["counters"])
        result["layers_sparse"] = n_layer
        result["n_layer"] = geo.n_layer
        if card:
            result["model_title"] = card.title
        result["bandwidth_bytes_per_s"] = bandwidth
    return results


def _check_memory(group: Sequence[Case], model: Path) -> None:
    geo = geometry_of(model)
    c = group[0]
    packed = rearranged((t.type for t in read_gguf(model).tensors), c.repack)
    memory, on_gpu = memory_of(c.n_gpu_layers, c.kv_offload)
    held = Cache(c.n_depth, c.type_k, c.type_v, group)
    buffers = c.n_threads * usual_bytes(c.n_threads)
    needed = needs(held, c.n_positions, buffers, geo.weight_bytes, geo, packed, on_gpu)
    free = int(memory) if on_gpu else available_memory()
    if needed > free:
        n = len({c.place for c in group})
        raise SparqError(
            f"{n} processes with {c.n_positions} positions each need about "
            f"{human_bytes(needed)}, but only {human_bytes(free)} of memory is available",
            "use a lower -d, only one of -fa 0 and -fa 1, or fewer --layers of a synthetic model",
        )


def _open(process: Worker, plan: SpeedPlan, case: Case, model: Path) -> None:
    process.open(
        model=str(model),
        n_ctx=-(-case.n_positions // CELLS) * CELLS,
        n_threads=case.n_threads,
        n_batch=case.n_batch,
        flash_attn=case.flash_attn,
        type_k=case.type_k,
        type_v=case.type_v,
        numa=case.numa,
        n_gpu_layers=case.n_gpu_layers,
        kv_offload=case.kv_offload,
        rope=case.rope,
        workers=list(plan.workers),
        tensor_split=list(plan.tensor_split),
        repack=case.repack,
    )
    if case.n_depth:
        process.fill(n_pos=case.n_depth, seed=case.seed)


def _prepare(group: Sequence[Case], process: Callable[[Case], Worker], text: str) -> list[int]:
    """Check, read and seal everything before timing starts. Returns how many layers of each case
    are not left to llama.cpp."""
    layers = []
    check_dense(group, process, group[0].n_depth)
    for case in {c.place: c for c in group}.values():
        if text:
            n = max(case.n_prompt, case.n_gen + 1)
            process(case).read(text=text, n_pos=case.n_depth, n=n)
    for case in group:
        worker = process(case)
        worker.attention(spec=str(case.spec))
        if case.spec.method == "off":
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


def _once(worker: Worker, case: Case, turn: int) -> dict[str, Any]:
    """Run one test of a case; the cache is unchanged afterwards. Turn -1 only warms up, for which a
    short test is enough."""
    worker.attention(spec=str(case.spec))
    if case.n_gen:
        n = case.n_gen if turn >= 0 else min(case.n_gen, 3)
        got: dict[str, Any] = worker.generate(n=n, seed=turn + 1)
        return got
    n = case.n_prompt if turn >= 0 else min(case.n_prompt, 256)
    got = worker.prefill(n=n, seed=turn + 1)
    worker.rewind(n_pos=case.n_depth)
    return got


def refuse_idle(case: Case, counters: dict[str, int], n_layer: int) -> None:
    """Refuse to report a row of ours unless every timed test ran as the row says.

    Args:
        n_layer: layers that are not left to llama.cpp.

    Raises:
        SparqError: an attention call of a decoded token was not sparse (or not our dense), or a
            prompt with SparQ on sealed too few groups of positions. Attention of a prompt is
            exact; `label` tells from the counter whose code it was.
    """
    spec = case.spec
    if case.library == "stock" or spec.method == "off":
        return
    if case.n_gen:
        n_decoded = case.n_gen - (case.n_depth == 0)  # the first token of a text is its prompt
        name, wanted = "calls_sparse" if spec.sparse else "calls_dense_op", n_layer * n_decoded
    elif spec.method == "sparq":
        # the last batch's groups are left to the tokens that follow
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


def kv_bytes(case: Case, geo: Geometry, counters: Mapping[str, int]) -> int:
    """The bytes of K, V, shadow and sums of V per token, as the mean over the tokens of a test.

    Our ops count what they read. For llama.cpp it is predicted: every position that a layer sees,
    once. 0 means unknown (a prompt, or latent attention).
    """
    if case.n_prompt or geo.is_mla:
        return 0
    counted = counters.get("steps", 0)
    types = [cache_type(t).bytes_per_element for t in (case.type_k, case.type_v)]
    total = 0
    for n_pos in range(case.n_depth + 1, case.n_depth + case.n_gen + 1):
        layers = layer_costs(geo, AttentionSpec("off"), n_pos, *types)
        total += sum(x.bytes_dense for x in layers if not (counted and x.ours))
    return total // case.n_gen + int(per_token(counters)[0])
