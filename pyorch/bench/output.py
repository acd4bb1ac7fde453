"""Rows of `sparq-cpp bench` as Markdown, CSV, JSON, JSON lines or SQL, as llama-bench writes them.

`compare-llama-bench.py` and other tools of llama.cpp find their fields under their names; those
that are ours come after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyorch import table
from pyorch.bench.records import Record
from pyorch.bench.speed import Row, label, rows, test
from pyorch.table import number

# of SQL, by bench, because they differ in columns: llama-bench's own name, and one of ours
TABLES = {"speed": "llama_bench", "attention": "attention_bench"}


def markdown(recs: Sequence[Record]) -> str:
    """llama-bench's table, and what is only ours to its right."""
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
    for name in ("type_k", "type_v"):  # as llama-bench, only if there is something to tell apart
        if {r[name] for r in found} == {"f16"}:
            del shown[name]
    shown |= _telling_apart(found)
    return _table(shown, found) + "\n\n" + _machine(recs)


def summary(recs: Sequence[Record]) -> str:
    """One line per row of ours, the faster stock in it: for a README."""
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


_BEFORE = {True: "read for real", False: "random K and V"}


def _telling_apart(found: Sequence[Row]) -> dict[str, Callable[[Row], object]]:
    """Columns of what is mostly the same, where rows differ in it."""
    columns: dict[str, tuple[str, Callable[[Row], object]]] = {
        "positions before": ("prefill", lambda r: _BEFORE[r["prefill"]]),
        "numa": ("numa", lambda r: r["numa"] or "none"),
        "RoPE": ("rope", lambda r: r["rope"] or "the model's own"),
        "layers on the GPU": (
            "n_gpu_layers",
            lambda r: "all" if r["n_gpu_layers"] is None else r["n_gpu_layers"],
        ),
    }
    return {name: show for name, (key, show) in columns.items() if len({r[key] for r in found}) > 1}


def _table(shown: dict[str, Callable[[Row], object]], found: Sequence[Row]) -> str:
    """Markdown; a column that says nothing is left out."""
    cells = {name: [str(show(r)) for r in found] for name, show in shown.items()}
    cells = {name: column for name, column in cells.items() if set(column) != {"-"}}
    lines = zip(*cells.values(), strict=True)
    return table.markdown(list(cells), lines, left=("model", "attention"))


def _machine(recs: Sequence[Record]) -> str:
    speeds = sorted(r["bandwidth_bytes_per_s"] / 1e9 for r in rows(recs))
    env = recs[0]["env"]
    before = " or ".join(dict.fromkeys(_BEFORE[r["case"]["prefill"]] for r in recs))
    pins = ", ".join(dict.fromkeys(r["env"]["pin"] for r in recs))
    commits = dict.fromkeys(
        f"{r['env']['commit'][:9]}{' and changes' if r['env']['dirty'] else ''}" for r in recs
    )
    return (
        f"{env['machine']['cpu']}, {env['machine']['cores']} cores; sequential read "
        f"{speeds[0]:.1f}-{speeds[-1]:.1f} GB/s in the same run; positions before: {before}; "
        f"{pins}, {', '.join(commits)}."
    )


def _size(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.2f} MiB"


def _with_samples(found: Sequence[Row], recs: Sequence[Record]) -> list[Row]:
    return [
        row | {"counters": rec["counters"], "samples_ns": rec["samples_ns"]}
        for row, rec in zip(found, recs, strict=True)
    ]


# besides Markdown, which each bench writes itself: (rows, their records) -> text
FORMATS: dict[str, Callable[[Sequence[Row], Sequence[Record]], str]] = {
    "csv": lambda found, _: table.as_csv(found, quoted=True),
    "json": lambda found, recs: table.as_json(_with_samples(found, recs)),
    "jsonl": lambda found, recs: table.as_jsonl(_with_samples(found, recs)),
    "sql": lambda found, recs: table.as_sql(found, TABLES[recs[0]["bench"]]),
}
