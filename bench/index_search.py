"""Finds the best positions through a nearest-neighbour index, beside a scan of a 4-bit copy of K.

    pip install faiss-cpu
    python bench/index_search.py --text BOOKS --model FILE [-S 8192,32768] [--copies 1,8,32]

Top-k attention for a million tokens (arXiv 2502.06766, section 3) keeps the keys in an index of
faiss and asks it for the k largest inner products of each query head. Here the keys and queries are
those of a real model over real text; the newest 64 positions, which are always read, are in no
index. For each index, with one thread, this measures

    mass     share of the true attention over the indexed positions that lies on those it found,
             over the share that lies on the k best
    bytes    of keys in f16, centroids and links that were read for the query heads of a KV head
    us       for these query heads, asked together
    build    seconds to put the keys of one KV head into it

and mass and bytes for a scan of 4-bit codes, as `sparq` does it; `step_times.py` has its time. Each
query head has its own k positions, 1 % of all, as in the paper. `--copies` puts so many copies of
each key into the index, every component moved by a tenth of its deviation: lengths that the model
cannot read. A graph (HNSW) takes minutes to build for each head beyond 65,536 keys, and is left out
there.

It writes index_search.jsonl and .md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import capture
import click
import commands
import numpy as np
from recall import approximate, scan_bytes, shadow_of, softmax

from pyorch.attention.bytes import GROUP, RUN
from pyorch.bench import records
from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.cli.types import Numbers
from pyorch.errors import SparqError
from pyorch.policies.index import faiss, inverted_lists
from pyorch.progress import progress_bar
from pyorch.table import markdown

BENCH = "index_search"
FILE = f"{BENCH}.jsonl"
SHARE = 0.01  # of the positions that each query head wants
N_LAYER = 4  # spread over the model
LINKS = 32  # of an entry of HNSW, 4 bytes each
BUILT_WITH = 100  # candidates that HNSW looks at for each new entry
LONGEST_GRAPH = 1 << 16  # keys
MOVED = 0.1  # standard deviations of a component
Found = tuple[np.ndarray, float]  # positions (g, k), -1: none; bytes


@dataclass(frozen=True)
class Case(capture.Case):
    """copies: of each key, so many lengths."""

    copies: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Search:
    """A way to find positions: `ask` takes queries (g, d) and k."""

    name: str
    build_s: float
    ask: Callable[[np.ndarray, int], Found]


def indexes(k: np.ndarray, n_best: int) -> Iterator[Search]:
    """Indexes of faiss over the keys `k` (n, d) f32: flat, inverted lists, and HNSW if few."""
    lib = faiss()
    lib.omp_set_num_threads(1)
    n, d = k.shape
    row = 2 * d  # f16
    flat = lib.IndexFlatIP(d)
    flat.add(k)

    def ask_flat(q: np.ndarray, n_found: int) -> Found:
        return flat.search(q, n_found)[1], n * row  # one pass serves all heads

    yield Search("flat", 0.0, ask_flat)
    started = time.perf_counter()
    ivf = inverted_lists(k)
    n_list = ivf.nlist
    ivf.add(k)
    build_s = time.perf_counter() - started
    for part in (64, 16, 4):
        n_probe = max(n_list // part, 1)

        def ask_ivf(q: np.ndarray, n_found: int, n_probe: int = n_probe) -> Found:
            ivf.nprobe = n_probe
            lib.cvar.indexIVF_stats.reset()
            cells = ivf.search(q, n_found)[1]
            return cells, lib.cvar.indexIVF_stats.ndis * row + n_list * row

        yield Search(f"lists, 1/{part} of {n_list}", build_s, ask_ivf)
    if n > LONGEST_GRAPH:
        return
    started = time.perf_counter()
    hnsw = lib.IndexHNSWFlat(d, LINKS // 2, lib.METRIC_INNER_PRODUCT)
    hnsw.hnsw.efConstruction = BUILT_WITH
    hnsw.add(k)
    build_s = time.perf_counter() - started
    for factor in (1, 4):

        def ask_hnsw(q: np.ndarray, n_found: int, n_look: int = factor * n_best) -> Found:
            hnsw.hnsw.efSearch = n_look
            lib.cvar.hnsw_stats.reset()
            cells = hnsw.search(q, n_found)[1]
            stats = lib.cvar.hnsw_stats
            return cells, stats.ndis * row + stats.nhops * 4 * LINKS

        yield Search(f"HNSW, {factor} k candidates", build_s, ask_hnsw)


def scans(k: np.ndarray, scale: float) -> Iterator[Search]:
    """Scans of 4-bit codes of `k`; their time here, in numpy, means nothing."""
    n, d = k.shape
    shadow = shadow_of(k, n // RUN * RUN, "q4")
    for rank in (d // 4, d // 2):

        def ask(q: np.ndarray, n_found: int, rank: int = rank) -> Found:
            logits = approximate(q[None], shadow, rank, scale)[0]
            return np.argpartition(-logits, n_found, axis=1)[:, :n_found], scan_bytes(n, rank, "q4")

        yield Search(f"scan of {rank} of {d} components", 0.0, ask)


def measure(layers: Sequence[capture.Heads], case: Case) -> list[dict[str, Any]]:
    """A sample for each number of copies, way, layer and KV head: means over the queries, and the
    median time."""
    rng = np.random.default_rng(case.seed)
    pick = np.linspace(0, GROUP - 1, case.n_query).astype(int)
    out = []
    for il in np.linspace(0, len(layers) - 1, N_LAYER).round().astype(int):
        layer = layers[il]
        for h, of_head in enumerate(layer.k):
            for copies in case.copies:
                k = np.tile(of_head[:-GROUP], (copies, 1))
                if copies > 1:
                    k += MOVED * k.std(0) * rng.standard_normal(k.shape, np.float32)
                here = {"layer": int(il), "head": h, "n": len(k), "row": 4 * k.shape[1]}
                found = measure_head(k, layer.q[pick, h], layer.scale)
                out += [sample | here for sample in found]
    return out


def measure_head(k: np.ndarray, queries: np.ndarray, scale: float) -> Iterator[dict[str, Any]]:
    """A sample for each way to find positions in `k` (n, d) for `queries` (n_query, g, d)."""
    n_best = max(int(SHARE * len(k)), 1)
    true = [softmax((q @ k.T) * np.float32(scale)) for q in queries]
    best = np.mean([-np.partition(-t, n_best)[:, :n_best].sum(1).mean() for t in true])
    for way in (*indexes(k, n_best), *scans(k, scale)):
        mass, n_bytes, spent = [], [], []
        for q, t in zip(queries, true, strict=True):
            started = time.perf_counter()
            cells, read = way.ask(np.ascontiguousarray(q), n_best)
            spent.append(time.perf_counter() - started)
            inside = np.take_along_axis(t, np.maximum(cells, 0), 1) * (cells >= 0)
            mass.append(inside.sum(1).mean())
            n_bytes.append(read)
        yield {
            "way": way.name,
            "mass": float(np.mean(mass) / best),
            "bytes": float(np.mean(n_bytes)),
            "us": 1e6 * float(np.median(spent)),
            "build_s": way.build_s,
        }


def table(recs: Sequence[Record]) -> str:
    head = ["positions", "found by", "attention of the k best, worst head", "bytes of all K and V"]
    head += ["us for a KV head", "s to build"]
    body = []
    for rec in recs:
        lines: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for s in rec["samples"]:
            lines.setdefault((s["n"], s["way"]), []).append(s)
        for (n, name), here in sorted(lines.items(), key=lambda line: line[0][0]):
            mass = [s["mass"] for s in here]
            share = np.mean([s["bytes"] / (s["n"] * s["row"]) for s in here])
            is_scan = name.startswith("scan")
            body.append(
                [
                    f"{n:,}",
                    name,
                    f"{100 * np.mean(mass):.1f} %, {100 * min(mass):.1f} %",
                    f"{100 * share:.1f} %",
                    "-" if is_scan else f"{np.median([s['us'] for s in here]):.0f}",
                    "-" if is_scan else f"{np.median([s['build_s'] for s in here]):.2f}",
                ]
            )
    first = recs[0]
    case = records.read_case(Case, first)
    about = (
        f"k is 1 % of the positions, for each query head; {first['model_name']}, {N_LAYER} of its "
        f"layers, all KV heads, {case.n_query} queries in each of {case.n_context} contexts; "
        "beyond what a context has, copies of its keys. One thread, "
        f"{first['env']['machine']['cpu']}."
    )
    return f"{about}\n\n{markdown(head, body, left=('found by',))}"


@commands.measurement(
    *capture.SIZES,
    click.option("--copies", type=Numbers(1), default="1", show_default=True, help="Of each key."),
)
def command(
    model: Path,
    texts: list[Path],
    folder: Path,
    threads: int,
    copies: Sequence[int],
    force: bool,
    **sizes: Any,
) -> None:
    """Find positions through an index of faiss, and by a scan of 4-bit codes."""
    faiss()
    if min(sizes["positions"]) < RUN + GROUP:
        raise SparqError(f"a scan reads {RUN} positions at once", "more --positions", exit_code=2)
    file = folder / FILE

    def samples_of(all_layers: Iterator[list[capture.Heads]], case: Case) -> list[dict[str, Any]]:
        return [s for layers in all_layers for s in measure(layers, case)]

    options = {**sizes, "copies": tuple(copies), "n_threads": threads, "force": force}
    with progress_bar(BENCH) as progress:
        found = capture.measured(
            BENCH, Case, samples_of, model, texts, file, progress, tasks=("prose",), **options
        )
    commands.show(table(found), file)


if __name__ == "__main__":
    run_command(command)
