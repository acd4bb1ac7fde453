"""Tables of evaluations: Markdown for people, CSV and JSON for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyorch import table as tables
from pyorch.attention.spec import BOUNDS, EXACT, AttentionSpec
from pyorch.evals import stats, tasks
from pyorch.evals.series import Series, by_setting
from pyorch.policies import OFF, STOCK_FA0, Method, parse


@dataclass(frozen=True)
class Row:
    """A method on a task. `difference` is from the first method, example by example.

    texts: how many independent texts the examples ask about
    missing: examples that were asked for and have no score yet
    more: the means of the task's further numbers; by_layer: their means for each layer
    """

    task: str
    metric: str
    method: Method
    model: str
    ctx: int
    n: int
    texts: int
    missing: int
    score: float
    score_low: float
    score_high: float
    standard_error: float
    difference: float
    difference_low: float
    difference_high: float
    bytes_per_token: float
    share_of_dense: float
    tokens_per_s: float
    more: dict[str, float]
    by_layer: dict[str, list[float]]


def rows(group: Sequence[Series]) -> list[Row]:
    """The rows of a setting, each compared with the first on the examples that both have.

    A method that was calibrated anew in between has several, named by what it stood for.
    """
    base, task = group[0], tasks()[group[0].task]
    same = Counter(s.method for s in group)
    counted = next((s for s in group if s.counters.get("steps")), base)
    out = []
    for s in group:
        low, high = stats.interval(s.scores, task.proportion, s.texts)
        mine, theirs = s.common(base)
        gap = mine.scores - theirs.scores
        gap_low, gap_high = stats.mean(gap, mine.texts)
        # llama.cpp's own attention keeps no account: it reads all of K and V
        is_stock = s.method in (OFF, STOCK_FA0)
        read, dense = (counted if is_stock else s).token_bytes
        read = dense if is_stock else read
        out.append(
            Row(
                task=task.name,
                metric=task.metric,
                method=s.method if same[s.method] == 1 else parse(s.meaning or str(s.method)),
                model=s.case["model"]["name"],
                ctx=s.case["ctx"],
                n=len(s.scores),
                texts=stats.n_groups(s.scores, s.texts),
                missing=s.missing,
                score=float(s.scores.mean()),
                score_low=low,
                score_high=high,
                standard_error=stats.standard_error(s.scores, s.texts),
                difference=float(gap.mean()) if len(gap) else math.nan,
                difference_low=gap_low,
                difference_high=gap_high,
                bytes_per_token=read,
                share_of_dense=read / dense if dense else math.nan,
                tokens_per_s=s.tokens_per_s,
                more={name: float(values.mean()) for name, values in s.more.items()},
                by_layer={n: v.mean(0).tolist() for n, v in s.more.items() if v.ndim > 1},
            )
        )
    return out


# ---- names of methods ----


def _exact(method: Method) -> bool:
    if not (isinstance(method, AttentionSpec) and method.sparse):
        return False
    return all(getattr(method, name) == value for name, value in EXACT.items())


def label(method: Method, without: Collection[str] = ()) -> str:
    """The name of a method's row, in Markdown: its spec, without the bounds that make a ratio
    exact, which the line below a table has. A native method whose ratio is not exact, and whose
    line names no bounds, gets a note."""
    if method == STOCK_FA0:
        return "`llama.cpp -fa 0`"
    native = isinstance(method, AttentionSpec) and method.sparse
    bounds = any(f"{name}=" in str(method) for name in EXACT)
    note = " with default bounds" if native and not bounds else ""
    return f"`{method.line((*without, *(EXACT if _exact(method) else ())))}`{note}"


def line_of(method: Method, also: Sequence[str] = ()) -> str:
    """The name of a method's line: its spec without the ratio, the bounds and `also`.

    Two methods of one line differ in `ratio_of`, or in a setting that `also` names.
    """
    return label(method, ("ratio", *also)).replace("`", "")


def ratio_of(method: Method) -> float:
    """The requested ratio; 0 means none."""
    return method.ratio or 0.0


# ---- a table per setting ----


def markdown(series: Sequence[Series]) -> str:
    """A table per setting, with a line that describes the setting."""
    return "\n\n".join(_table(group) for group in by_setting(series))


def _table(group: Sequence[Series]) -> str:
    lines, task = rows(group), tasks()[group[0].task]
    factor = 100 if task.percent else 1
    digits = 1 if task.percent or max(r.score for r in lines) >= 10 else 4
    unit = ", %" if task.percent else ""

    def text(x: float, sign: str = "") -> str:
        form = f"{{:{sign}.{digits}f}}"
        return tables.number(round(factor * x, digits) + 0.0, form)  # + 0.0: no "-0.0"

    def score(r: Row) -> str:
        known = not math.isnan(r.score_low)
        return text(r.score) + known * f" ({text(r.score_low)}-{text(r.score_high)})"

    def gap(r: Row) -> str:
        if r.method == lines[0].method:
            return ""
        low, high = text(r.difference_low, "+"), text(r.difference_high, "+")
        known = not math.isnan(r.difference_low)
        return text(r.difference, "+") + known * f" ({low} to {high})"

    def mean_of(name: str) -> Callable[[Row], object]:
        return lambda r: f"{r.more[name]:.3f}"

    shown: dict[str, Callable[[Row], object]] = {
        "attention": lambda r: label(r.method),
        f"{task.metric}{unit} (95 % CI)": score,
        f"against `{lines[0].method}` (95 % CI)": gap,
        **{name.replace("_", " "): mean_of(name) for name in lines[0].more},
        "KB read per token": lambda r: tables.number(r.bytes_per_token / 1e3, "{:.0f}"),
        "share of dense": lambda r: tables.number(100 * r.share_of_dense, "{:.1f} %"),
        "tokens/s": lambda r: tables.number(r.tokens_per_s, "{:.0f}"),
    }
    title = f"**{task.name}**: {task.about}"
    return "\n\n".join([title, tables.columns(shown, lines), _about(group, lines)])


def _about(group: Sequence[Series], lines: Sequence[Row]) -> str:
    """The line below a table."""
    case, env = group[0].case, group[0].env
    parts = [f"{_span([r.n for r in lines])} examples of up to {case['ctx']} positions"]
    parts += [group[0].model]
    if {case["type_k"], case["type_v"]} != {"f16"}:
        parts += [f"cache {case['type_k']}/{case['type_v']}"]
    parts += [f"{case['threads']} thread{'s' * (case['threads'] > 1)}"]
    parts += [f"numa {case['numa']}"] if "numa" in case else []
    parts += [f"{case['n_workers']} workers"] if "n_workers" in case else []
    parts += [env["machine"]["cpu"], env["commit"][:9] or f"version {env['version']}"]
    better = "higher" if tasks()[case["task"]].higher else "lower"
    text = f"{', '.join(parts)}; {better} is better."
    n_texts = [r.texts for r in lines]
    many = f"{_span(n_texts)} text{'s' * (max(n_texts) > 1)}"
    if min(n_texts) < stats.FEWEST:
        text += f" n = {many}: no interval below {stats.FEWEST}."
    elif any(r.texts < r.n for r in lines):
        text += f" They ask about {many}."
    text += about_state(group, lines)
    if any(_exact(s.method) for s in group):
        text += (
            f" Ratios of `sparq` and `topk` with `{BOUNDS}`, which makes them exact at this length."
        )
    return text


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low} to {high}" if low < high else str(low)


def about_state(series: Sequence[Series], lines: Sequence[Row]) -> str:
    """What an interrupted or running evaluation lacks, and which code made it."""
    lacking = [f"{label(r.method)} {r.missing} of {r.n + r.missing}" for r in lines if r.missing]
    text = f" **Incomplete**, examples missing: {', '.join(lacking)}." if lacking else ""
    text += any(s.old for s in series) * " Measured by an earlier version of the evaluation."
    return text + any(s.env["dirty"] for s in series) * " Of code with changes after its commit."


# ---- for programs ----


def of_folder(folder: Path, text: Callable[[Path], str]) -> str:
    """The text of a folder of records, or of each folder with records in it below its name."""
    inner = sorted({file.parent for file in folder.glob("*/*.jsonl")})
    if any(folder.glob("*.jsonl")) or not inner:
        return text(folder)
    return "\n\n".join(f"## {f.name}\n\n{text(f)}" for f in inner)


def as_csv(series: Sequence[Series]) -> str:
    out = []
    for row in (r for group in by_setting(series) for r in rows(group)):
        values = flat(row)
        more, by_layer = values.pop("more"), values.pop("by_layer")
        more |= {f"{n}_{i}": x for n, xs in by_layer.items() for i, x in enumerate(xs)}
        out.append(values | more)
    return tables.as_csv(out)


def as_json(series: Sequence[Series]) -> str:
    """The rows, each with its scores and the numbers of their examples."""
    out: list[dict[str, Any]] = []
    for group in by_setting(series):
        for row, s in zip(rows(group), group, strict=True):
            own = {"scores": s.scores.tolist(), "numbers": s.numbers.tolist()}
            out.append(flat(row) | own | {"about": list(s.about)})
    return tables.as_json(out)


def flat(row: Row) -> dict[str, Any]:
    """A row for output, with the method as its line."""
    return vars(row) | {"method": str(row.method)}


FORMATS = {"md": markdown, "csv": as_csv, "json": as_json}
