"""The numbers that are published follow from the committed records: sentences of the README, the
intervals of the documentation, the tables beside the records and the CSVs of the figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import draw
from bench.gpu import kernels as gpu_attention
from bench.gpu import tokens as gpu_tokens
from bench.users import prompt_time, serving
from pyorch import table as tables
from pyorch.attention.spec import AttentionSpec
from pyorch.cli.bench import attention_time, measurement, speed
from pyorch.evals import figures, series, stats, table
from pyorch.measure import records

ROOT = Path(__file__).parents[1]
EPYC = ROOT / "bench" / "results" / "amd-epyc-2-cores"
H100 = ROOT / "bench" / "results" / "nvidia-h100-intel-xeon-16-cores"


def speedup(rows: list[dict[str, Any]], **where: Any) -> float:
    (factor,) = (r["speedup"] for r in rows if where.items() <= r.items())
    return float(factor)


def token(positions: int) -> str:
    """By what factor ours is faster with the most layers, at the last measurement."""
    case = {"n_depth": positions, "n_prompt": 0, "type_k": "f16", "type_v": "f16", "text": ""}
    case |= {"sparse_attn": AttentionSpec("sparq", ratio=1 / 8)}
    rows = speed.rows(records.latest(records.load_all(EPYC / "speed.jsonl")))
    rows = [r for r in rows if r["model_type"].startswith("llama2-7b q8_0")]
    rows = [r for r in rows if case.items() <= r.items()]
    return f"{max(rows, key=lambda r: (r['n_layer'], r['test_time']))['speedup']:.1f}"


def real(positions: int) -> tuple[str, ...]:
    """A row of the real model: tokens/s of stock, exact and 1/8, and by what factor they differ."""
    rows = speed.rows(records.load_all(EPYC / "token_rate" / "speed.jsonl"))
    rows = [r for r in rows if r["n_depth"] == positions and r.get("text")]
    ours = {str(r["sparse_attn"]): 1e9 / r["median_ns"] for r in rows if r["library"] == "sparq"}
    stock = max(1e9 / r["median_ns"] for r in rows if r["library"] == "stock")
    exact, sparse = ours["dense"], ours["sparq,ratio=1/8"]
    gains = (sparse / stock, exact / stock, sparse / exact)
    return tuple(f"{x:.1f}" for x in (stock, exact, sparse)) + tuple(f"{x:.2f}x" for x in gains)


def prompt(file: str, tokens: int, attention: str, **of: Any) -> str:
    """How many times faster a prompt is read than by the faster of llama.cpp's two."""
    for run in records.by_run(records.load_all(EPYC / file)):
        recs = list(run.values())
        case = records.read_case(prompt_time.PromptCase, recs[0])
        rows = [r for r in prompt_time.rows(recs) if r["tokens"] == tokens]
        if rows and of.items() <= vars(case).items():
            factor = speedup(rows, attention=attention)
    return f"{factor:.1f}"


def users() -> str:
    run = records.by_run(records.load_all(EPYC / serving.FILE))[-1]
    return f"{speedup(serving.rows([*run.values()]), attention='sparq,ratio=1/8'):.1f}"


def on_gpu(positions: int) -> str:
    rows = gpu_attention.FIGURE.data(H100)
    of = {"model": "llama2-7b", "batch": 1, "attention": "SparQ q4"}
    return f"{speedup(rows, positions=positions, **of):.1f}"


def gpu_token(positions: int) -> str:
    rows = gpu_tokens.FIGURE.data(H100)
    return f"{speedup(rows, positions=positions, attention='SparQ 1/8 q4'):.1f}"


def evaluated(folder: str, task: str, method: str) -> table.Row:
    results = series.read(EPYC / "eval-real" / folder / f"{task}.jsonl")
    (row,) = (r for r in table.rows(results) if str(r.method) == method)
    return row


def architectures() -> tuple[int, int]:
    """Of how many the suite of docs/architectures.md ran a model, on the first pin, and how many
    of them had sparse layers."""
    page = (ROOT / "docs" / "architectures.md").read_text("utf-8")
    rows = re.findall(r"(?m)^\| ([^-|][^|]*) \| [^|]* \| ([^|]+) \|$", page)[1:]
    outcomes = [x for x, names in rows for _ in names.split(", ")]
    made = [x for x in outcomes if not x.startswith("not made")]
    sparse = [x for x in made if x.startswith("sparse")]
    assert set(sparse) == {"sparse", "sparse, but for: sliding-window layer"}
    return len(made), len(sparse)


def factor(folder: str, task: str, base: str, method: str) -> tuple[float, float, float]:
    """By what factor the KL of a method differs from that of another: the geometric mean over the
    texts, with its interval."""
    by_method = {str(s.method): s for s in series.read(EPYC / folder / f"{task}.jsonl")}
    one, other = by_method[base].common(by_method[method])
    change = np.log(other.scores / one.scores)
    return np.exp(change.mean()), *np.exp(stats.mean(change, one.texts))


def difference(folder: str, task: str) -> tuple[str, ...]:
    """The score of dense attention, and what 1/8 differs from it, with its interval."""
    dense, at_eighth = (evaluated(folder, task, m) for m in ("off", "sparq,ratio=1/8"))
    of = (at_eighth.difference, at_eighth.difference_low, at_eighth.difference_high)
    values = (f"{100 * x:+.1f}".replace("+0.0", "0.0") for x in of)
    return f"{100 * dense.score:.1f}", *values


def times(method: str) -> tuple[str, ...]:
    """How far a method is above SparQ with no fewer bytes, in KL."""
    folder, base = "q05-equal-2k", "sparq,ratio=1/10"
    of = [evaluated(folder, "answers_squad", m).share_of_dense for m in (base, method)]
    assert of[0] <= of[1]
    return tuple(f"{x:,.0f}" for x in factor(f"eval-real/{folder}", "answers_squad", base, method))


def facts() -> dict[str, tuple[str, ...]]:
    """What a line of the README is about -> the numbers that the records give for it."""
    tokens, defaults = "Qwen2.5-Coder-1.5B, Q4_K_M, a novel | ", AttentionSpec("sparq", ratio=0.5)
    return {
        **{f"{tokens}{n:,}": (f"{n:,}", *real(n)) for n in (4096, 16384, 32000)},
        "Llama-2-7B's geometry": tuple(token(1024 * k) for k in (16, 64, 128)),
        "users of a server": (users(),),
        "Prompts gain too": (prompt("prompt_time.jsonl", 32000, "ours, fast", repack=False),),
        "Coder-1.5B, 4,096 | SQuAD": difference("q15-4k", "squad"),
        "Coder-0.5B, 4,096 | SQuAD": difference("q05-4k", "squad"),
        "Coder-0.5B, 8,192 | needles": difference("q05-8k", "niah_many"),
        "Quest": times("quest,ratio=7/40"),
        "bit-identical": tuple(map(str, architectures())),
        "**GPUs.**": (f"{gpu_token(32768)}x", str(defaults.gpu_min_mb)),
        "**What is sparse.**": (f"{defaults.min_ctx:,}",),
        "**Memory.**": ("13",),  # 4 bits and two scales per 512 of 32 bits: tests/attention
    }


# what a number may be besides a measurement: names, types, settings, links, amounts of a test
NAMES = (
    r"\]\([^)]*\)|`[^`]*`|Llama-2-7B|Qwen2\.5-Coder-[\d.]+B|the 0\.5B|NVIDIA H100|q[48]_0|Q[48]\w+"
    r"|b?f(16|32)|1/(8|16)|95 %|\d+k\b|[\d,]+ (?:positions|questions|tokens)|, [\d,]+ \|| batch 1"
    r"|Qwen2.5-Coder-0.5B|sparsity|AMD EPYC|x86-64"
)


def test_every_number_of_the_readme_is_one_of_the_records() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    text = text.partition("## What you get")[2].partition("## How it works")[0]
    lines = [
        " ".join(line.split())
        for block in re.split(r"\n\n|\n(?=- )", text)
        for line in (block.splitlines() if block.startswith("|") else [block])
    ]
    numbers = facts()
    for about, known in numbers.items():
        (line,) = (x for x in lines if about in x)
        assert [x for x in known if x not in line] == [], about
    for line in lines:
        allowed = [x for about, known in numbers.items() if about in line for x in known]
        rest = line
        for x in sorted(allowed, key=len, reverse=True):
            rest = rest.replace(x, "")
        assert not re.findall(r"\S*\d\S*", re.sub(NAMES, "", rest)), line


def wide(text: str) -> str:
    """A number or an interval as tables have it: without the plus of a zero."""
    return re.sub(r"\+(0\.0+)(?!\d)", r"\1", " ".join(text.split()))


def timed(name: str, made: Callable[[list[records.Record]], str]) -> str:
    return made(records.latest(records.load_all(EPYC / f"{name}.jsonl")))


# the tables that are made from the records beside them
TABLES: dict[str, Callable[[], str]] = {
    **{
        name: lambda name=name: table.of_folder(
            EPYC / name, lambda f: table.markdown(series.read_folder(f))
        )
        for name in ("eval", "eval-real", "eval-floor", "eval-prompts", "ablations")
    },
    "eval-budgets": lambda: table.summary(series.read_folder(EPYC / "eval-budgets")),
    **{
        name: lambda name=name, made=made: timed(name, made)
        for name, made in (
            ("speed", speed.markdown),
            ("token_rate/speed", speed.markdown),
            ("quantisations/speed", speed.markdown),
            ("long/speed", speed.markdown),
            ("attention", attention_time.markdown),
            ("long/prompt_time", prompt_time.table),
            ("ik_llama/prompt_time", prompt_time.table),
        )
    },
    **{
        of.name: lambda of=of: measurement.whole_table(of, EPYC)
        for of in (prompt_time.MEASUREMENT, serving.MEASUREMENT)
    },
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_beside_records_is_made_from_them(name: str) -> None:
    assert (EPYC / f"{name}.md").read_text("utf-8") == TABLES[name]() + "\n"


INTERVAL = re.compile(r"[-+]?\d+\.\d+ \([-+]?[\d.]+(?:-| to )[-+]?[\d.]+\)")


def factors() -> Iterator[str]:
    """The factors that docs/quality.md gives in place of the KL itself."""
    compared = [(f"eval-prompts/{m}-4k", "fidelity", "stock-fa0") for m in ("q15", "sm", "ge")]
    compared += [
        (f"eval-real/{name}", "answers_squad", "sparq,ratio=1/8")
        for name in ("q05-settings", "sm-settings", "ge-settings", "q05-equal", "q05-min-k")
    ]
    for folder, task, base in compared:
        for s in series.read(EPYC / folder / f"{task}.jsonl"):
            if str(s.method) not in (base, "off"):
                yield "{:.2f} ({:.2f}-{:.2f})".format(*factor(folder, task, base, str(s.method)))


def test_intervals_of_the_documentation_are_those_of_the_tables() -> None:
    made = {x for name in TABLES for x in INTERVAL.findall(wide(TABLES[name]()))}
    made |= {x.group() for x in map(INTERVAL.match, factors()) if x}
    intervals = INTERVAL.findall(wide((ROOT / "docs" / "quality.md").read_text("utf-8")))
    assert len(intervals) > 50
    assert [x for x in intervals if x not in made] == []


def needles() -> list[dict[str, Any]]:
    """Those that `sparq-cpp eval plot` draws."""
    groups = series.by_setting(series.read_folder(EPYC / "eval", ["needle"]))
    return figures.needle_rows(groups[-1])


@pytest.mark.parametrize("name", [*draw.FIGURES, "eval_needle"])
def test_the_numbers_of_a_figure_are_those_of_the_records(name: str) -> None:
    folder = H100 if "gpu" in name else EPYC
    rows = needles() if name == "eval_needle" else draw.figure(name).data(folder)
    short = [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in rows]
    kept = (ROOT / "bench" / "figures" / f"{name}.csv").read_text("utf-8")
    assert kept == tables.as_csv(short) + "\n", "`make figures` draws it again"
