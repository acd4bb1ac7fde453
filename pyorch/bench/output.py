"""Rows of `sparq-cpp bench` as Markdown, CSV, JSON or JSON lines, as llama-bench writes them.

`compare-llama-bench.py` and other tools of llama.cpp find their fields under their names; our own
fields come after them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyorch import table
from pyorch.bench import paper, records
from pyorch.bench.plan import Case, test_name
from pyorch.bench.records import Record, spread
from pyorch.table import number

Row = dict[str, Any]


def rows(recs: Sequence[Record]) -> list[Row]:
    """One flat row per record, llama-bench's fields first. `recs` holds whole runs.

    `samples_ns` are for single tokens (or whole prompts), `avg_ns` is for a whole test. `speedup`
    and `roofline_speedup` are over the faster of the run's stock; nan where they mean nothing.
    """
    best: dict[str, tuple[float, int]] = {}
    for rec in recs:
        if rec["case"]["library"] == "stock":
            run, this = records.run_of(rec), spread(rec["samples_ns"])[0]
            best[run] = min(best.get(run, (math.inf, 0)), (this, rec["bytes_kv"]))
    return [_row(rec, *best.get(records.run_of(rec), (math.nan, 0))) for rec in recs]


def _row(rec: Record, best_ns: float, best_kv: int) -> Row:
    c, env = records.read_case(Case, rec), rec["env"]
    samples = rec["samples_ns"]
    n = c.n_prompt or c.n_gen
    # whole tests, as in llama-bench
    per = c.n_gen or 1
    tests = [sum(samples[i : i + per]) for i in range(0, len(samples), per)]
    speeds = [1e9 * n / t for t in tests]
    mid, low, high = spread(samples)
    bandwidth = statistics.median(rec["bandwidth_bytes_per_s"])
    weights = rec["bytes_weights"]
    moved = weights + rec["bytes_kv"] if rec["bytes_kv"] else math.nan
    case = dict(vars(c))
    spec = case.pop("spec")
    paper_limit, paper_speedup = _published(c)
    return {
        "build_commit": env["commit"][:9],
        "cpu_info": env["machine"]["cpu"],
        "backends": _backend(c, env["machine"]),
        "model_filename": c.model_filename,
        "model_size": c.model_size,
        "model_n_params": c.model_n_params,
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
        "old": records.is_old(rec),
        "key": rec["key"],
    }


def _backend(c: Case, machine: Mapping[str, Any]) -> str:
    if c.n_workers:
        return "RPC"
    return "CUDA" if "gpu" in machine and c.n_gpu_layers != 0 else "CPU"


def _published(c: Case) -> tuple[float, float]:
    """SparQ's Fig. 9 for a row with its model, weights, cache and ratio: the limit by bytes, and
    the speed-up measured on a CPU with 32 threads. NaN if the figure has no such point."""
    like_paper = (
        c.model_type.startswith("llama2-7b q8_0")
        and (c.type_k, c.type_v, c.spec.method) == ("f16", "f16", "sparq")
        and c.spec.ratio == 1 / 8
        and c.n_gen
    )
    limit, dense, ours = (
        dict(paper.points("end_to_end", f"SparQ CPU: {x}")) for x in ("limit", "dense", "SparQ 1/8")
    )
    if not like_paper or c.n_depth not in limit:
        return math.nan, math.nan
    return limit[c.n_depth], round(dense[c.n_depth] / ours[c.n_depth], 2)


def label(row: Row) -> str:
    """The name of a row."""
    if row["library"] == "stock":
        return f"stock -fa {row['flash_attn']}"
    if row["n_prompt"] > 1:  # SparQ seals during a prompt
        whose = "our" if row["calls_prefill"] else "llama.cpp's"
        return f"{row['sparse_attn']}, {whose} prefill"
    return str(row["sparse_attn"]) + (", dense: below min_ctx" if row["below_min_ctx"] else "")


def test(row: Row) -> str:
    return test_name(row["n_prompt"], row["n_gen"], row["n_depth"])


def markdown(recs: Sequence[Record]) -> str:
    """llama-bench's table, with our own columns at the right."""
    found = rows(recs)
    shown: dict[str, Callable[[Row], object]] = {
        "model": lambda r: r["model_type"],
        "size": lambda r: _size(r["model_size"]),
        "threads": lambda r: r["n_threads"],
        "type_k": lambda r: r["type_k"],
        "type_v": lambda r: r["type_v"],
        "attention": lambda r: f"`{label(r)}`",
        "test": test,
        "t/s": lambda r: f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}",
        "ms (p10-p90)": lambda r: (
            f"{r['median_ns'] / 1e6:.2f} ({r['p10_ns'] / 1e6:.2f}-{r['p90_ns'] / 1e6:.2f})"
        ),
        "against best stock": lambda r: number(r["speedup"], "{:.2f}x"),
        "limit": lambda r: number(r["roofline_speedup"], "{:.2f}x"),
        "share of roofline": lambda r: number(100 * r["roofline_share"], "{:.0f} %"),
        "paper: limit": lambda r: number(r["paper_limit"], "{:.2f}x"),
        "paper: measured": lambda r: number(r["paper_speedup"], "{:.2f}x"),
    }
    for name in ("type_k", "type_v"):  # as in llama-bench, only if rows differ in it
        if {r[name] for r in found} == {"f16"}:
            del shown[name]
    shown |= _telling_apart(found)
    return _table(shown, found) + "\n\n" + _machine(recs)


def summary(recs: Sequence[Record]) -> str:
    """The table for a README: a line for each row of ours, with the faster stock."""
    found = rows(recs)
    ours = [r for r in found if r["library"] != "stock" and r["n_gen"] and not r["below_min_ctx"]]
    shown = {
        "model": lambda r: r["model_type"],
        "K, V": lambda r: ", ".join(dict.fromkeys((r["type_k"], r["type_v"]))),
        "positions": lambda r: r["n_depth"],
        "attention": lambda r: f"`{label(r)}`",
        "best stock, ms": lambda r: f"{r['speedup'] * r['median_ns'] / 1e6:.1f}",
        "ours, ms": lambda r: f"{r['median_ns'] / 1e6:.1f}",
        "faster": lambda r: f"{r['speedup']:.2f}x",
        "limit by bytes": lambda r: number(r["roofline_speedup"], "{:.2f}x"),
        "share of roofline": lambda r: number(100 * r["roofline_share"], "{:.0f} %"),
        "paper: limit": lambda r: number(r["paper_limit"], "{:.2f}x"),
        "paper: measured": lambda r: number(r["paper_speedup"], "{:.2f}x"),
    }
    if len({r["n_threads"] for r in ours}) > 1:
        shown["threads"] = lambda r: r["n_threads"]
    shown |= _telling_apart(ours)
    return _table(shown, ours) + "\n\n" + _machine(recs)


def _before(r: Row) -> str:
    if r["text"] == "random tokens":  # of versions that read them
        return "random tokens"
    return "a text (ours), random K and V (llama.cpp)" if r["text"] else "random K and V"


def _telling_apart(found: Sequence[Row]) -> dict[str, Callable[[Row], object]]:
    """Columns of settings that are mostly the same, if rows differ in them."""
    columns: dict[str, tuple[str, Callable[[Row], object]]] = {
        "positions before": ("text", _before),
        "weights": ("repack", lambda r: "rearranged" if r["repack"] else "as in the file"),
        "numa": ("numa", lambda r: r["numa"] or "none"),
        "RoPE": ("rope", lambda r: r["rope"] or "the model's own"),
        "K and V": ("kv_offload", lambda r: "with the layers" if r["kv_offload"] else "in memory"),
        "layers on the GPU": (
            "n_gpu_layers",
            lambda r: "all" if r["n_gpu_layers"] is None else r["n_gpu_layers"],
        ),
        "workers": ("n_workers", lambda r: r["n_workers"]),
        "split": ("tensor_split", lambda r: r["tensor_split"] or "by memory"),
    }
    return {name: show for name, (key, show) in columns.items() if len({r[key] for r in found}) > 1}


def _table(shown: dict[str, Callable[[Row], object]], found: Sequence[Row]) -> str:
    """The rows as Markdown, without columns that say nothing."""
    shown = {name: show for name, show in shown.items() if {show(r) for r in found} != {"-"}}
    return table.columns(shown, found, left=("model", "attention"))


def _machine(recs: Sequence[Record]) -> str:
    speeds = sorted(r["bandwidth_bytes_per_s"] / 1e9 for r in rows(recs))
    env = recs[0]["env"]
    before = " or ".join(dict.fromkeys(map(_before, rows(recs))))
    pins = ", ".join(dict.fromkeys(r["env"]["pin"] for r in recs))
    commits = dict.fromkeys(
        f"{r['env']['commit'][:9]}{' and changes' if r['env']['dirty'] else ''}" for r in recs
    )
    return (
        f"{env['machine']['cpu']}, {env['machine']['cores']} cores; sequential read "
        f"{speeds[0]:.1f}-{speeds[-1]:.1f} GB/s in the same run; positions before: {before}; "
        f"{pins}, {', '.join(commits)}.{records.about_old(recs)}"
    )


def _size(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.2f} MiB"


def _with_samples(found: Sequence[Row], recs: Sequence[Record]) -> list[Row]:
    return [
        row | {"counters": rec["counters"], "samples_ns": rec["samples_ns"]}
        for row, rec in zip(found, recs, strict=True)
    ]


# (rows, their records) -> text, for formats other than Markdown, which each bench writes itself
FORMATS: dict[str, Callable[[Sequence[Row], Sequence[Record]], str]] = {
    "csv": lambda found, _: table.as_csv(found, quoted=True),
    "json": lambda found, recs: table.as_json(_with_samples(found, recs)),
    "jsonl": lambda found, recs: table.as_jsonl(_with_samples(found, recs)),
}
