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
from bench.papers import end_to_end
from bench.users import prompt_time, serving
from pyorch import table as tables
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import records
from pyorch.cli.bench import attention_time, measurement, speed
from pyorch.evals import figures, series, stats, summary, table

ROOT = Path(__file__).parents[1]
EPYC = ROOT / "bench" / "results" / "amd-epyc-2-cores"
H100 = ROOT / "bench" / "results" / "nvidia-h100-intel-xeon-16-cores"


def speedup(rows: list[dict[str, Any]], **where: Any) -> float:
    (found,) = (r["speedup"] for r in rows if where.items() <= r.items())
    return float(found)


def token(positions: int) -> str:
    rows = [r for r in end_to_end.FIGURE.data(EPYC) if r["model"].startswith("llama2-7b q8_0")]
    return f"{speedup(rows, positions=positions, attention='SparQ 1/8 q4'):.1f}"


def flat() -> str:
    """The time of a token after 32,000 positions over that after 4,096, both of one spec."""
    ms = {
        r["n_depth"]: r["median_ns"]
        for r in speed.rows(records.load_all(EPYC / "token_rate" / "speed.jsonl"))
        if r["sparse_attn"] == parse_spec("sparq,rank=32,topk=512")
    }
    return f"{ms[32000] / ms[4096]:.2f}"


def prompt(file: str, tokens: int, attention: str, **of: Any) -> str:
    """How many times faster a prompt is read than by the faster of llama.cpp's two."""
    for run in records.by_run(records.load_all(EPYC / file)):
        recs = list(run.values())
        case = records.read_case(prompt_time.PromptCase, recs[0])
        lines = prompt_time.lines(recs)
        if tokens in lines[0].depths and of.items() <= vars(case).items():
            at = lines[0].depths.index(tokens)
            best = min(x.whole(at) for x in lines if x.is_stock)
            found = best / next(x for x in lines if x.name == attention).whole(at)
    return f"{found:.1f}"


def users() -> str:
    return f"{speedup(serving.FIGURE.data(EPYC), attention='sparq,ratio=1/8'):.1f}"


def on_gpu(positions: int) -> str:
    rows = gpu_attention.FIGURE.data(H100)
    of = {"model": "llama2-7b", "batch": 1, "attention": "SparQ q4"}
    return f"{speedup(rows, positions=positions, **of):.1f}"


def gpu_token(positions: int) -> str:
    rows = gpu_tokens.FIGURE.data(H100)
    return f"{speedup(rows, positions=positions, attention='SparQ 1/8 q4'):.1f}"


def evaluated(folder: str, task: str, method: str) -> table.Row:
    found = series.read(EPYC / "eval-real" / folder / f"{task}.jsonl")
    (row,) = (r for r in table.rows(found) if str(r.method) == method)
    return row


def right(method: str) -> int:
    return round(100 * evaluated("q15-4k", "squad", method).score)


def right_or_wrong() -> float:
    """Half of the interval of the difference from dense."""
    r = evaluated("q15-4k", "squad", "sparq,ratio=1/8")
    return (r.difference_high - r.difference_low) / 2


def architectures() -> tuple[int, int]:
    """Of how many the suite of docs/architectures.md ran a model, on the first pin, and how many
    of them had sparse layers."""
    page = (ROOT / "docs" / "architectures.md").read_text("utf-8")
    said = re.findall(r"(?m)^\| `[^`]+` \| ([^|]+) \|", page)
    made = [x for x in said if not x.startswith("not made")]
    sparse = [x.strip() for x in made if x.startswith("sparse")]
    assert set(sparse) == {"sparse", "sparse, but for: sliding-window layer"}
    return len(made), len(sparse)


def sentences() -> list[str]:
    """What the README says, with the numbers of the records. Words may be wrapped anywhere."""
    whole = "prompt_time.jsonl", 32000
    fast, sparse = "ours, fast", "ours, sparse"
    assert right("off") == right("sparq,ratio=1/8")
    n_made, n_sparse = architectures()
    return [
        f"is {token(16384)} times as fast as llama.cpp's at 16k positions, {token(65536)} times "
        f"at 64k and {token(131072)} times at 128k",
        f"takes {flat()} times as long after 32,000 positions as after 4,096",
        f"At ratio 1/8 and 4,096 positions Qwen2.5-Coder-1.5B answers as many questions of SQuAD "
        f"as with all of its cache ({right('off')} of 100, give or take "
        f"{100 * right_or_wrong():.1f})",
        f"With `--no-repack`, which suits both, Qwen2.5-Coder-1.5B reads [32,000 "
        f"tokens](docs/measurements.md#time-of-a-prompt) {prompt(*whole, fast, repack=False)} "
        f"times as fast as in llama.cpp (summed from four depths), and its replies are as close "
        f"to llama.cpp's `-fa 1` as those of `-fa 0`: {rounding('q15')} the KL divergence. "
        f"`prompt=sparse` reads it {prompt(*whole, sparse, repack=False)} times as fast",
        f"Eight users with 4,096 positions each get [{users()} "
        "times](docs/measurements.md#many-users-at-once) as many tokens",
        f"Of the {n_made} architectures that llama.cpp's own test makes models of, {n_sparse} run "
        f"sparse in all layers that keep every position",
        f"attention by itself is {on_gpu(32768)}x as fast as dense at 32k positions of Llama-2-7B "
        f"and {on_gpu(131072)}x at 128k. Whole tokens gain {gpu_token(32768)}x at 32k "
        f"and {gpu_token(46080)}x at 45k, and nothing at 8k",
        f"read less than {AttentionSpec('sparq', ratio=0.5).gpu_min_mb} MB",
        f"Contexts of up to {AttentionSpec('sparq', ratio=0.5).min_ctx:,} positions run exact",
        *quality(),
    ]


def factor(folder: str, task: str, base: str, method: str) -> tuple[float, float, float]:
    """By what factor the KL of a method differs from that of another: the geometric mean over the
    texts, with its interval."""
    found = {str(s.method): s for s in series.read(EPYC / folder / f"{task}.jsonl")}
    one, other = found[base].common(found[method])
    change = np.log(other.scores / one.scores)
    return np.exp(change.mean()), *np.exp(stats.mean(change, one.texts))


def times(method: str) -> str:
    """How far a method is above SparQ with no more bytes."""
    folder, base = "q05-equal-2k", "sparq,ratio=1/10"
    of = [evaluated(folder, "answers_squad", m).share_of_dense for m in (base, method)]
    assert of[0] <= of[1]
    mean, low, high = factor(f"eval-real/{folder}", "answers_squad", base, method)
    return f"{mean:.0f} times{{}} ({low:,.0f} to {high:,.0f})"


def rounding(model: str) -> str:
    """How far our prompts are from llama.cpp's, beside its own two settings."""
    made = factor(f"eval-prompts/{model}-4k", "fidelity", "stock-fa0", "dense")
    return "{:.2f} times ({:.2f} to {:.2f})".format(*made)


def quality() -> list[str]:
    """SparQ beside other methods."""
    nearer = " as far from dense attention in KL"
    return [
        f"With no fewer bytes than SparQ, Quest is {times('quest,ratio=7/40').format(nearer)}, "
        f"and H2O {times('h2o,ratio=7/40').format('')}, over seven texts of 2,048 positions",
    ]


# what a number in the README may be beside a measurement: names, types, settings, links
NAMES = (
    r"\]\([^)]*\)|`[^`]*`|Llama-2-7B|Qwen2\.5-Coder-[\d.]+B|the 0\.5B|NVIDIA H100|q[48]_0"
    r"|b?f(16|32)|1/(8|16)|8 bits|\(.* et al., 20\d\d\)"
)


def parts(text: str, heads: tuple[str, ...]) -> str:
    """The sections of a text with these headings, its words one space apart."""
    sections = re.split(r"\n## ", text)
    return " ".join(" ".join(s.split()) for s in sections if s.startswith(heads))


def test_every_number_of_the_readme_is_one_of_the_records() -> None:
    text = parts((ROOT / "README.md").read_text("utf-8"), ("What you get", "Limits"))
    for said in sentences():
        assert said in text, f"the records say: {said}"
        text = text.replace(said, "")
    left = re.findall(r"\S*\d\S*", re.sub(NAMES, "", text))
    assert not left, "numbers that no sentence above makes from records"


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
    "eval-budgets": lambda: summary.markdown(series.read_folder(EPYC / "eval-budgets")),
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


def test_the_marked_table_of_evaluations_is_made_from_records() -> None:
    text = (ROOT / "docs" / "demo-model.md").read_text("utf-8")
    marked = text.partition("<!-- eval -->")[2].partition("<!-- /eval -->")[0]
    made = summary.markdown(series.read_folder(EPYC / "eval", ["repetition", "needle"]))
    assert marked.split() == made.split()


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
    found = INTERVAL.findall(wide((ROOT / "docs" / "quality.md").read_text("utf-8")))
    assert len(found) > 50
    assert [x for x in found if x not in made] == []


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
