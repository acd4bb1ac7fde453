"""Rows of `sparq-cpp bench` as Markdown, CSV, JSON, JSON lines or SQL, as llama-bench writes them.

`compare-llama-bench.py` and other tools of llama.cpp find their fields under their names; those
that are ours come after.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence

from pyorch.bench.records import Record
from pyorch.bench.speed import Row, label, rows, test

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
        "against best stock": lambda r: _number(r["speedup"], "{:.2f}x"),
        "limit": lambda r: _number(r["roofline_speedup"], "{:.2f}x"),
        "share of roofline": lambda r: _number(100 * r["roofline_share"], "{:.0f} %"),
        "paper: limit": lambda r: _number(r["paper_limit"], "{:.2f}x"),
        "paper: measured": lambda r: _number(r["paper_speedup"], "{:.2f}x"),
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
        "limit by bytes": lambda r: _number(r["roofline_speedup"], "{:.2f}x"),
        "share of roofline": lambda r: _number(100 * r["roofline_share"], "{:.0f} %"),
        "paper: limit": lambda r: _number(r["paper_limit"], "{:.2f}x"),
        "paper: measured": lambda r: _number(r["paper_speedup"], "{:.2f}x"),
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
    left = {"model", "attention"}
    out = ["| " + " | ".join(cells) + " |"]
    out += ["| " + " | ".join("---" if n in left else "---:" for n in cells) + " |"]
    out += ["| " + " | ".join(line) + " |" for line in zip(*cells.values(), strict=True)]
    return "\n".join(out)


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


def _number(x: float, form: str) -> str:
    return "-" if math.isnan(x) else form.format(x)


def as_csv(found: Sequence[Row], _: Sequence[Record]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]), quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _plain(v) for k, v in row.items()} for row in found)
    return text.getvalue().rstrip()


def as_json(found: Sequence[Row], recs: Sequence[Record]) -> str:
    return json.dumps(_with_samples(found, recs), indent=2)


def as_jsonl(found: Sequence[Row], recs: Sequence[Record]) -> str:
    return "\n".join(json.dumps(row) for row in _with_samples(found, recs))


def _with_samples(found: Sequence[Row], recs: Sequence[Record]) -> list[Row]:
    return [
        {k: _plain(v) for k, v in row.items()}
        | {"counters": rec["counters"], "samples_ns": rec["samples_ns"]}
        for row, rec in zip(found, recs, strict=True)
    ]


def as_sql(found: Sequence[Row], recs: Sequence[Record]) -> str:
    table = TABLES[recs[0]["bench"]]
    kinds = {bool: "INTEGER", int: "INTEGER", float: "REAL", str: "TEXT", type(None): "INTEGER"}
    columns = ",\n".join(f"  {k} {kinds[type(v)]}" for k, v in found[0].items())
    out = [f"CREATE TABLE IF NOT EXISTS {table} (\n{columns}\n);\n"]
    for row in found:
        values = ", ".join(_quoted(_plain(v)) for v in row.values())
        out.append(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({values});")
    return "\n".join(out)


def _plain(value: object) -> object:
    """NaN, which neither JSON nor SQL has, is nothing."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _quoted(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool | int | float):
        return str(int(value) if isinstance(value, bool) else value)
    return "'" + str(value).replace("'", "''") + "'"


# besides Markdown, which each bench writes itself
FORMATS = {"csv": as_csv, "json": as_json, "jsonl": as_jsonl, "sql": as_sql}
