"""Times a model whose layers lie on 1 to 3 workers of this machine, beside one process.

    python bench/machines.py -m MODEL [-d 4096,32768,131072] [--workers 0,1,2,3] [--trip 1,20]

The workers have one thread each, and so has the one process, so that nothing is gained but room: a
token goes through the machines one after the other. K and V are random. llama.cpp's flash attention
(`off` of our library), ours exact and ours sparse take turns in one context. llama.cpp's `-fa 0`,
which is often faster on CPUs, needs another cache; `sparq-cpp bench --rpc` compares with it.

With --trip a network of so many milliseconds, or with --rate of so many Mbit/s, lies between; its
bytes are counted, and what `explain --rpc` predicts for them is beside what they cost. The last
table is not measured: it says what a cluster of such machines reaches with Llama-3-70B at a million
positions, by the same formulas.

It writes machines.jsonl and .md.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import commands

from pyorch import engine
from pyorch.attention import bytes as cost
from pyorch.attention import shares
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import records, state
from pyorch.bench.bandwidth import MemoryReader
from pyorch.bench.link import Link, local_worker
from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.cli.types import Numbers
from pyorch.engine import machines
from pyorch.errors import SparqError
from pyorch.ggml import BY_NAME
from pyorch.models import synth
from pyorch.models.content import content_hash
from pyorch.models.geometry import Geometry, geometry, layer_weights
from pyorch.models.gguf_file import read_gguf
from pyorch.table import markdown

BENCH = "machines"
SPECS = tuple(map(parse_spec, ("off", "dense", "sparq,ratio=1/8")))
F16 = BY_NAME["f16"]
THREADS = 1


@dataclass(frozen=True)
class Case:
    """An attention on so many workers. `model` is a hash, trip_ms a round trip of the network, and
    mbit its rate, 0 being what loopback does."""

    model: str
    n_depth: int
    n_workers: int
    trip_ms: float
    mbit: float
    spec: AttentionSpec
    n_samples: int
    library: str = "sparq"


def measure(model: Path, group: Sequence[Case]) -> list[dict[str, Any]]:
    """The seconds and the bytes of tokens, of cases that differ in their attention.

    Raises:
        SparqError: a sparse token was not sparse, or an exact one of ours not ours.
    """
    first, file = group[0], read_gguf(model)
    geo = geometry(file)
    n_ctx = -(-(first.n_depth + 2) // cost.CELLS) * cost.CELLS
    found: list[dict[str, Any]] = [{"samples_ns": [], "wire": []} for _ in group]
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        links = []
        for i in range(first.n_workers):
            worker, _ = opened.enter_context(local_worker(folder / f"{i}.log", THREADS))
            delay, rate = first.trip_ms / 2000, first.mbit * 1e6 / 8
            links.append(opened.enter_context(Link(worker, delay, rate)))
        ends = [link.endpoint for link in links]
        trips = [machines.ask(e).round_trip_s for e in ends]
        rates = [machines.measure_rate(e) for e in ends]
        s = opened.enter_context(
            engine.load(
                model,
                n_ctx=n_ctx,
                n_threads=THREADS,
                n_batch=8,
                workers=ends,
                tensor_split=[1.0] * len(ends),
                n_away=None if ends else 0,
                rope=_stretched(geo, n_ctx),
            )
        )
        state.fill(s, first.n_depth)
        reader = MemoryReader(THREADS)
        bandwidth = []
        for turn in range(first.n_samples):
            reader.read()
            bandwidth.append(reader.read())
            for case, result in list(zip(group, found, strict=True))[:: -1 if turn % 2 else 1]:
                _time(s, case, links, result)
        held, used = (layer_weights(file, geo.n_layer, x) for x in (False, True))
        n_vocab = next(max(t.shape) for t in file.tensors if t.name == "token_embd.weight")
    layers = (
        shares.split_layers(geo.n_layer, [1.0] * len(ends)) if ends else [range(geo.n_layer + 1)]
    )
    for case, result in zip(group, found, strict=True):
        parts = shares.shares(
            geo, case.spec, first.n_depth, (F16, F16), held, used, n_vocab, layers
        )
        result |= {
            "bytes_read": sum(x.weights_read + x.read for x in parts),
            "wire_predicted": sum(x.sent + x.received for x in parts),
            "wire_predicted_s": shares.wire_s(parts[1:], trips, rates),
            "bandwidth": statistics.median(bandwidth),
        }
    return found


def _stretched(geo: Geometry, n_ctx: int) -> engine.Rope | None:
    """What lets a model have a context beyond its training, whose K and V are random here."""
    if n_ctx <= geo.n_ctx_train:
        return None
    return engine.Rope("linear", freq_scale=geo.n_ctx_train / n_ctx)


def _time(s: engine.Session, case: Case, links: Sequence[Link], result: dict[str, Any]) -> None:
    n_pos = len(s.tokens)
    engine.set_attention(s, case.spec)
    for token in (3, 4):  # plans its graphs, and sends them
        engine.decode(s, token)
        engine.rewind(s, n_pos)
    engine.reset_counters(s)
    before = sum(x.there + x.back for x in links)
    started = time.perf_counter_ns()
    engine.decode(s, 5)
    result["samples_ns"].append(time.perf_counter_ns() - started)
    result["wire"].append(sum(x.there + x.back for x in links) - before)
    name = "calls_sparse" if case.spec.sparse else "calls_dense_op"
    calls = engine.info(s).counter(name)
    engine.rewind(s, n_pos)
    if case.spec.method != "off" and calls != s.geometry.n_layer:
        raise SparqError(f"{case.spec}: {name} is {calls}, not {s.geometry.n_layer}")


def table(recs: Sequence[Record]) -> str:
    """Tokens per second by length and workers, and what the network costs beside its prediction."""
    rows = [(records.read_case(Case, r), r) for r in recs]
    plain = {
        (c.n_depth, c.n_workers, c.spec): records.spread(r["samples_ns"])[0] / 1e9
        for c, r in rows
        if not c.trip_ms and not c.mbit
    }
    speed = []
    for c, r in rows:
        if c.trip_ms or c.mbit:
            continue
        mid, low, high = records.spread(r["samples_ns"])
        limit = r["bytes_read"] / r["bandwidth"]
        one = plain.get((c.n_depth, 0, c.spec))
        speed.append(
            [
                f"{c.n_depth}",
                f"{c.n_workers or 'one process'}",
                f"`{c.spec}`",
                f"{1e9 / mid:.1f} ({1e9 / high:.1f}-{1e9 / low:.1f})",
                f"{1e9 * limit / mid:.2f}",
                f"{mid / 1e9 / one:.2f}" if one else "",
                f"{statistics.median(r['wire']) / 1000:.0f}",
                f"{r['wire_predicted'] / 1000:.0f}",
            ]
        )
    there = {
        (c.n_depth, c.n_workers, c.spec): r["wire_predicted_s"]
        for c, r in rows
        if not c.trip_ms and not c.mbit
    }
    net = []
    for c, r in rows:
        base = plain.get((c.n_depth, c.n_workers, c.spec))
        if not (c.trip_ms or c.mbit) or base is None:
            continue
        mid = records.spread(r["samples_ns"])[0] / 1e9
        net.append(
            [
                f"{c.n_depth}",
                f"{c.n_workers}",
                f"{c.trip_ms:g} ms, {f'{c.mbit:g} Mbit/s' if c.mbit else 'any rate'}",
                f"`{c.spec}`",
                f"{1 / mid:.1f}",
                f"{1000 * (mid - base):.1f}",
                f"{1000 * (r['wire_predicted_s'] - there[c.n_depth, c.n_workers, c.spec]):.1f}",
            ]
        )
    head = ["positions", "workers", "attention", "tokens/s (10th-90th percentile)"]
    head += ["limit / time", "time / one process", "KB per token", "predicted"]
    env = recs[0]["env"]["machine"]
    out = [
        f"{recs[0]['model_name']}, workers of one thread on loopback, {env['cpu']}; medians of "
        f"{rows[0][0].n_samples}. `off` is llama.cpp's `-fa 1`. The limit is the time that the "
        "bytes of a token take at the speed of memory.",
        markdown(head, speed),
    ]
    if net:
        head = ["positions", "workers", "network", "attention", "tokens/s", "ms more", "predicted"]
        out += [
            "What a network costs, and what `explain --rpc` says that it costs.",
            markdown(head, net),
        ]
    shown = statistics.median(
        r["bytes_read"] / r["bandwidth"] / (records.spread(r["samples_ns"])[0] / 1e9)
        for c, r in rows
        if c.spec.sparse and c.n_depth == rows[-1][0].n_depth and not c.trip_ms and not c.mbit
    )
    return "\n\n".join([*out, simulated(shown)])


# ---- what is not measured ----

LIKE, POSITIONS, MEMORY = "Llama-3-70B", 1 << 20, 128 << 30
SIZES = {"n_layer": 80, "n_embd": 8192, "n_head": 64, "n_ff": 28672}  # its own, else as the 8B has
READS = (50e9, 200e9, 400e9)  # bytes per second: a desktop, a server, a large server
NETS = ((0.1, 10_000.0), (1.0, 1000.0), (20.0, 1000.0))  # ms of a round trip, Mbit/s


def simulated(reached: float) -> str:
    """Tokens per second of a cluster, by the formulas that the tables above are compared with.

    Args:
        reached: the share of the memory's speed that a token reaches, measured.
    """
    shape = synth.shape_like("llama3-8b", **SIZES)
    size = synth.file_bytes(shape, "q4_k_m")
    output = size * shape.n_vocab // (shape.n_vocab + 12 * shape.n_embd * shape.n_layer)
    weights = [(size - output) // shape.n_layer] * shape.n_layer + [output]
    geo = Geometry(
        arch="llama",
        name=LIKE,
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        n_head=(shape.n_head,) * shape.n_layer,
        n_head_kv=(shape.n_head_kv,) * shape.n_layer,
        head_dim_k=shape.head_dim,
        head_dim_v=shape.head_dim,
        n_ctx_train=POSITIONS,
        is_mla=False,
        n_params=0,
        weight_bytes=size,
        weight_bytes_per_token=size,
    )
    rows = []
    for spec in (
        parse_spec("dense"),
        parse_spec("sparq,ratio=1/8"),
        parse_spec("sparq,ratio=1/32"),
    ):
        n = next(
            n
            for n in itertools.count(1)
            if max(x.memory for x in _parts(geo, spec, weights, shape, n)) < 0.9 * MEMORY
        )
        parts = _parts(geo, spec, weights, shape, n)
        read = sum(x.weights_read + x.read for x in parts)
        for trip, mbit in NETS:
            wire = shares.wire_s(parts[1:], [trip / 1e3] * n, [mbit * 1e6 / 8] * n)
            times = [read / (b * reached) + wire for b in READS]
            row = [f"`{spec}`", f"{n}", f"{read / 1e9:.0f}", f"{trip:g} ms, {mbit:g} Mbit/s"]
            rows.append([*row, f"{1000 * wire:.0f}", *(f"{1 / t:.2f}" for t in times)])
    head = ["attention", "machines", "GB per token", "network", "ms of network per token"]
    head += [f"tokens/s at {b / 1e9:.0f} GB/s" for b in READS]
    about = (
        f"Predicted, not measured: {LIKE} in Q4_K_M ({size / 1e9:.0f} GB) after {POSITIONS} "
        f"positions with a cache of f16, on so many machines of {MEMORY >> 30} GiB as hold it. "
        "A token goes through them one after the other, each reads its part at the speed in the "
        f"heading times {reached:.2f}, which is what a sparse token reached above, and one round "
        "trip and the bytes counted above pass for each machine. That the model is of use at that "
        "length is assumed."
    )
    return f"{about}\n\n{markdown(head, rows)}"


def _parts(
    geo: Geometry, spec: AttentionSpec, weights: Sequence[int], shape: synth.Shape, n: int
) -> list[shares.Share]:
    layers = shares.split_layers(geo.n_layer, [1.0] * n)
    return shares.shares(geo, spec, POSITIONS, (F16, F16), weights, weights, shape.n_vocab, layers)


@commands.command(
    click.option("--model", "-m", metavar="FILE", required=True, help="GGUF model to measure."),
    click.option("-d", "--n-depth", type=Numbers(1), default="4096,32768", show_default=True),
    click.option("--workers", type=Numbers(0), default="0,1,2,3", show_default=True),
    click.option(
        "--trip", type=Numbers(0), default="1,20", show_default=True, help="Milliseconds."
    ),
    click.option("--rate", type=Numbers(0), default="1000", show_default=True, help="Mbit/s."),
    commands.samples(9),
    commands.OUT,
    commands.FORCE,
)
def command(
    model: str,
    n_depth: Sequence[int],
    workers: Sequence[int],
    trip: Sequence[int],
    rate: Sequence[int],
    samples: int,
    folder: Path,
    force: bool,
) -> None:
    """Layers on workers of this machine: tokens per second, bytes on the way, and slow networks."""
    path = Path(model)
    first = Case(content_hash(path), 0, 0, 0.0, 0.0, SPECS[0], samples)
    nets = [(0.0, 0.0), *((float(t), 0.0) for t in trip if t)]
    nets += [(0.0, float(r)) for r in rate if r]
    groups = [
        [replace(first, n_depth=d, n_workers=w, trip_ms=t, mbit=r, spec=spec) for spec in SPECS]
        for d in sorted(n_depth)
        for w in workers
        for t, r in (nets if w and d == min(n_depth) else nets[:1])
    ]
    found = commands.recorded(
        BENCH,
        path,
        groups,
        lambda group, _: measure(path, group),
        folder,
        cost=lambda group: 1000 + group[0].n_depth // 10,
        force=force,
        libraries=("sparq",),
    )
    commands.show(table(found), folder / f"{BENCH}.jsonl")


if __name__ == "__main__":
    run_command(command)
