"""`python -m bench numbers`, so `make numbers`: fills the numbers of the documents from records.

A mark says where the numbers up to `<!--/-->` come from; each keeps its digits after the point:

    <!--n:speed;16384;n_layer=8;1/8;speedup-->2.1<!--/--> times as fast

One word is a file below results/MACHINE: of records, or a table (.md) that nothing makes any
more. COLUMN=VALUE, or a VALUE of any column, chooses rows; of several runs the last that has one
counts. The other words are columns, each a number; `x*` stands for x, x_low and x_high. Methods of
an evaluation are compared with the first one, or with that of `base=METHOD`.

Bars separate words for all numbers from those of each. In a mark on a line of its own, before a
table, they are for the cells of each column: in `=` or `=COLUMN` a cell is a word itself, an empty
one that of the row above. A comment in a row has more words for it, and for those below it whose
first cell is empty.

What is of an earlier version of the measurement, or of changed code, needs `history:` for `n:`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.gpu import kernels, tokens
from bench.users import prompt_time, serving
from pyorch import paths
from pyorch.attention.spec import EXACT
from pyorch.cli.bench import attention_time, measurement, speed
from pyorch.errors import SparqError
from pyorch.evals import series, stats, table, tasks
from pyorch.measure import records
from pyorch.measure.records import Record

RESULTS = Path(__file__).parent / "results"
MARK = re.compile(r"<!--(n|history):(\S*?)-->(.*?)<!--/-->", re.S)
NOTE = re.compile(r"<!--(\S+?)-->")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.(\d+))?")
NAMES = {"exact": "dense", "ours,_exact": "dense", "SparQ_1/8": "sparq,ratio=1/8"}

Row = dict[str, Any]  # with `run`, its number within the file, and `old`


def documents() -> list[Path]:
    return [paths.REPOSITORY / "README.md", *sorted((paths.REPOSITORY / "docs").glob("*.md"))]


def fill(text: str, results: Path = RESULTS) -> tuple[str, list[str], list[str]]:
    """The text with the numbers of the records, what is wrong with marks, and which are history."""
    wrong, history = list[str](), list[str]()

    def filled(mark: re.Match[str]) -> str:
        kind, words, inner = mark.groups()
        before, of_table = text[: mark.start()].split("\n"), inner.startswith("\n")
        at = f"{len(before)}: {words}"
        if not before[-1].strip(" >-") and not of_table:
            wrong.append(f"{at}: begins a line, which hides its text")
        try:
            inner, old = (_table if of_table else _text)(words, inner, results)
        except SparqError as e:
            wrong.append(f"{at}: {e.message} ({e.hint})")
            return mark[0]
        if old:
            (wrong if kind == "n" else history).append(f"{at}: of an old version or changed code")
        return f"<!--{kind if old else 'n'}:{words}-->{inner}<!--/-->"

    new, n_marks = MARK.subn(filled, text)
    if n_marks != len(re.findall("<!--(?:n|history):", text)):
        wrong.append("0: a mark does not end, or has spaces")
    return new, wrong, history


def _text(words: str, text: str, results: Path, cell: bool = False) -> tuple[str, bool]:
    """The text with the numbers that the words choose, and whether they are old. In the cell of a
    table they may be fewer, the first ones."""
    common, *parts = words.split("|")
    chosen = [_numbers(f"{common};{part}".split(";"), results) for part in parts or [""]]
    numbers = [x for some, _ in chosen for x in some]
    n = len(NUMBER.findall(text))
    if n > len(numbers) or (n < len(numbers) and not cell):
        raise SparqError(f"{len(numbers)} numbers for {text!r}", "a column for each number")
    if any(math.isnan(x) for _, x in numbers[:n]):
        raise SparqError("a number is missing", "an interval needs six texts, not all alike")
    values = iter(numbers)
    return NUMBER.sub(lambda m: _in_form(*next(values), m), text), any(old for _, old in chosen)


def _in_form(column: str, value: float, form: re.Match[str]) -> str:
    """A number with as many digits as stand there, with a sign if it is a difference."""
    digits, comma = len(form[1] or ""), "" if re.match(r"[-+]?\d{4}", form[0]) else ","
    value = round(value, digits) + 0.0  # no "-0.0"
    sign = "+" if value and column.startswith("difference") else ""
    return f"{value:{sign}{comma}.{digits}f}"


def _table(words: str, text: str, results: Path) -> tuple[str, bool]:
    common, *columns = words.split("|")
    lines, above, notes, any_old = text.split("\n"), dict[int, str](), list[str](), False
    for n, line in enumerate(lines[3:], 3):  # after the mark's own line, the head and the dashes
        cells = line.split("|")[1:-1]
        notes = NOTE.findall(line) or (notes if cells and not cells[0].strip() else [])
        row = [common, *notes]
        for i, (column, cell) in enumerate(zip(columns, cells, strict=False)):
            if column.startswith("="):
                above[i] = _plain(NOTE.sub("", cell)) or above[i]
                row.append(f"{column[1:]}={above[i]}".removeprefix("="))
        for i, (column, cell) in enumerate(zip(columns, cells, strict=False)):
            if column and not column.startswith("=") and NUMBER.search(cell):
                cells[i], old = _text(";".join([*row, column]), cell, results, True)
                any_old |= old
        lines[n] = "|".join(["", *cells, ""]) if cells else line
    return "\n".join(lines), any_old


# ---- rows of the records ----


def _numbers(words: Sequence[str], results: Path) -> tuple[list[tuple[str, float]], bool]:
    """The columns that the words name and their values, and whether their record is old.

    Raises:
        SparqError: no record is it, or several are.
    """
    words = list(filter(None, words))
    name = next((w for w in words if _files(w, results)), words[0])
    if len(files := _files(name, results)) != 1:
        raise SparqError(f"{len(files)} files are {name}", "MACHINE*/NAME names the machine")
    base = next((w for w in words if w.startswith("base=")), "")
    rows = _rows(files[0], base.partition("=")[2])
    columns = list[str]()
    for word in words:
        column, _, value = word.partition("=")
        if word in (name, base):
            continue
        if with_column := [r for r in rows if word.rstrip("*") in r]:
            rows = with_column
            columns.append(word)
        elif value and any(column in r for r in rows):
            rows = [r for r in rows if _plain(r.get(column)) == _plain(value)]
        else:
            rows = [r for r in rows if _plain(word) in map(_plain, r.values())]
        if not rows:
            raise SparqError(f"no record has {word}", f"see {name}")
    last = [r for r in rows if r["run"] == rows[-1]["run"]]
    if len(last) > 1:
        raise SparqError(f"{len(last)} records are that", "more words choose one of them")
    return [x for c in columns for x in _values(last[0], c)], last[0]["old"]


def _values(row: Row, column: str) -> list[tuple[str, float]]:
    """The column's value; with a star also its low and high, or all numbers of a cell."""
    name, star = column.rstrip("*"), column.endswith("*")
    if isinstance(row[name], str):
        figures = [float(m[0].replace(",", "")) for m in NUMBER.finditer(row[name])]
        return [(name, x) for x in figures[: None if star else 1]]
    names = [name, f"{name}_low", f"{name}_high"] if star else [name]
    return [(x, float(row.get(x, math.nan))) for x in names]


def _plain(value: Any) -> str:
    """The word for a value or the text of a cell."""
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    text = re.sub(r"(?<=\d),(?=\d{3})", "", str(value)).replace("`", "").strip().replace(" ", "_")
    return f"sparq,ratio={text}" if re.fullmatch(r"1/\d+", text) else NAMES.get(text, text)


@cache
def _files(name: str, results: Path) -> list[Path]:
    """The files of that name, which may begin with a pattern for the machine."""
    name = name if name.endswith(".md") else f"{name}.jsonl"
    return [*results.glob(f"*/{name}"), *results.glob(f"*{name}")]


@cache
def _rows(file: Path, base: str) -> list[Row]:
    """All rows of a file, with `run` and `old`."""
    if file.suffix == ".md":
        return list(_rows_of_text(file.read_text("utf-8")))
    recs = records.load_all(file)
    if "task" in recs[0]["case"]:
        return list(_evaluated(file, base))
    runs = [list(run.values()) for run in records.by_run(recs)]
    if recs[0]["bench"].startswith("gpu"):
        runs = [recs]  # their rows find by themselves what was measured in turns
    out = []
    for i, some in enumerate(runs):
        old = any(records.is_old(r) or r["env"]["dirty"] for r in some)
        cases = [r["case"] for r in some]
        same = {k: v for k, v in cases[0].items() if all(c.get(k) == v for c in cases)}
        same |= {"model_name": some[0].get("model_name", "")}
        rows = READERS[some[0]["bench"]](some)
        out += [same | r | {"run": i, "old": old} for r in rows]
    return out


def _rows_of_text(text: str) -> Iterator[Row]:
    """The rows of all tables of a document, by the first words of their heads."""
    n, head = 0, list[str]()
    for line in text.splitlines():
        cells = line.split("|")[1:-1]
        if not cells:
            head = []
        elif not head:
            n, head = n + 1, [_plain(re.split("[,(]", x)[0]) for x in cells]
        elif "---" not in cells[0]:
            yield dict(zip(head, cells, strict=True)) | {"table": n, "run": 0, "old": True}


def _evaluated(file: Path, base: str) -> Iterator[Row]:
    """The rows of an evaluation, in percent where it counts answers. `times` is the geometric mean
    of the scores over those of `base`."""
    for i, group in enumerate(series.by_setting(series.read(file))):
        first = [s for s in group if base and _plain(s.method) == _plain(base)]
        group = [*first, *(s for s in group if s not in first)]
        for s, r in zip(group, table.rows(group), strict=True):
            of = 100 if tasks()[r.task].percent else 1
            row = table.flat(r) | {
                "share": 100 * r.share_of_dense,
                "ratio": table.ratio_of(r.method),
            }
            row["line"] = r.method.line(("ratio", *EXACT))
            row |= {k: of * v for k, v in row.items() if k.startswith(("score", "difference"))}
            if first and first[0].scores.all() and s.scores.all():
                one, other = first[0].common(s)
                change = np.log(other.scores / one.scores)
                times = np.exp([change.mean(), *stats.mean(change, one.texts)])
                row |= dict(zip(("times", "times_low", "times_high"), times, strict=True))
            yield row | {"run": i, "old": s.old or s.env["dirty"]}


def _tokens(recs: Sequence[Record]) -> list[Row]:
    rows = speed.rows(recs)
    fastest = {r["library"]: r for r in sorted(rows, key=lambda r: float(r["speedup"]))}
    return [
        r
        | {
            "attention": speed.label(r),
            "fastest": r["library"] if fastest[r["library"]] is r else "",
            "like": r["model_type"].split(" ")[0],
            "ms": r["median_ns"] / 1e6,
            "stock_ms": r["median_ns"] * r["speedup"] / 1e6,
            "rate": 1e9 / r["median_ns"],
            "share": 100 * r["roofline_share"],
            "chunk_s": r["median_ns"] / 1e9,
        }
        for r in rows
    ]


def _attention(recs: Sequence[Record]) -> list[Row]:
    return [r | {"share": 100 * r["roofline"]} for r in attention_time.rows(recs)]


READERS: dict[str, Callable[[Sequence[Record]], Sequence[Row]]] = {
    "speed": _tokens,
    "attention": _attention,
    "prompt_time": prompt_time.rows,
    "serving": serving.rows,
    "gpu_attention": lambda recs: [r | {"us": 1e3 * r["layer_ms"]} for r in kernels.rows(recs)],
    "gpu_tokens": tokens.rows,
}


@click.command("numbers", context_settings=measurement.SETTINGS)
def command() -> None:
    """Fill the numbers of README.md and docs/ from the committed records.

    Prints which numbers are history: of an earlier version of their measurement, or of changed
    code.
    """
    n_wrong = 0
    for file in documents():
        text = file.read_text("utf-8")
        new, wrong, history = fill(text)
        if new != text:
            file.write_text(new, "utf-8")
        name = file.relative_to(paths.REPOSITORY)
        for mark in history:
            print(f"history: {name}:{mark}")
        for mark in wrong:
            click.echo(f"error: {name}:{mark}", err=True)
        n_wrong += len(wrong)
    if n_wrong:
        raise SparqError(f"{n_wrong} marks not filled", "bench/numbers.py says how to write one")
