"""What a measurement is, and what runs it: its options, what is recorded already, and its table.

A measurement is one file. The fields of its `Case` are the options of its command, the key of its
records and columns of its tables; `groups` makes the cases from the options, those of a group in
turns; `measure` times a group; `table` shows the records. Everything else is here, and the same for
all.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import wraps
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from pyorch import engine, table
from pyorch.attention.spec import parse_spec
from pyorch.bench import records
from pyorch.bench.records import Record, Result
from pyorch.cli import types
from pyorch.cli.groups import option, takes
from pyorch.cli.options import RopeOptions, numa_option
from pyorch.cli.terminal import note
from pyorch.errors import SparqError
from pyorch.evals.texts import read_texts
from pyorch.models.content import card_of
from pyorch.progress import progress_bar

Given = SimpleNamespace  # the options of a run, by their names
Group = Sequence[Any]  # of cases
Done = Callable[[float], None]  # called with the share of a group that is done
Row = dict[str, Any]
Column = Callable[[Row], object]

SETTINGS = {"help_option_names": ["-h", "--help"]}


# ---- fields of a case ----


def from_option(
    of: Any = None,
    *,
    default: Any = MISSING,
    to: Callable[[Given], Any] | None = None,
    where_given: bool = False,
    column: tuple[str, Column | Mapping[Any, str]] | None = None,
) -> Any:
    """A field of a case.

    Args:
        of: the option, as `groups.option` or `groups.several` make it, or a group of them. A list
            makes a case of each of its values.
        to: makes the value of the field from all options; None = it is the option's.
        where_given: the field is recorded only if it is not the default, so that cases from before
            the field keep their keys.
        column: its name in tables whose rows differ in it, and what shows it: a function of the
            row, or the words for some values.
    """
    metadata = dict(of.metadata) if isinstance(of, Field) else {"group": of} if of else {}
    metadata |= {"to": to, "where_given": where_given, "column": column}
    return field(default=default, metadata=metadata, kw_only=True)


def added(name: str, of: Any) -> Any:
    """The option of a field, by itself."""
    names, attributes = of.metadata["option"]
    return click.option(*names, name, **attributes)


def settings(kind: Any, given: Given) -> dict[str, Any]:
    """The fields that have one value in all cases of a run."""
    made = {f.name: f.metadata["to"](given) for f in fields(kind) if f.metadata.get("to")}
    values = {f.name: vars(given)[f.name] for f in fields(kind) if "option" in f.metadata}
    return {k: v for k, v in values.items() if not isinstance(v, list)} | made


def crossed(given: Given, *names: str) -> Iterator[dict[str, Any]]:
    """The fields of these names, of each combination of their values."""
    for values in product(*(vars(given)[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def differing(kind: Any, rows: Sequence[Row]) -> dict[str, Column]:
    """The columns of fields of a case that rows differ in."""
    shown: dict[str, Column] = {}
    for name, column in ((f.name, f.metadata.get("column")) for f in fields(kind)):
        if column and len({r[name] for r in rows}) > 1:
            shown[column[0]] = column[1] if callable(column[1]) else _in_words(name, column[1])
    return shown


def _in_words(name: str, words: Mapping[Any, str]) -> Column:
    return lambda row: words.get(row[name], row[name])


def text_hash(text: str) -> str:
    """What a record tells of a text; "" without one."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


# ---- options that measurements share ----

MODEL = click.option(
    "--model",
    "-m",
    metavar="FILE",
    required=True,
    type=types.File(),
    callback=lambda _, __, given: Path(given),
    help="GGUF model to measure.",
)
TEXT = click.option(
    "--text",
    metavar="FILE",
    required=True,
    type=types.File(),
    callback=lambda _, __, given: "\n\n".join(read_texts([Path(given)])),
    help="A book, long enough.",
)


def number_of(
    *names: str,
    default: int | None,
    low: int = 1,
    text: str = "",
    otherwise: Any = MISSING,
    **more: Any,
) -> Any:
    """The field of a whole number. `default` is the option's, `otherwise` the field's."""
    kind, shown = click.IntRange(low), default is not None
    of = option(*names, type=kind, default=default, show_default=shown, help=text or None)
    return from_option(of, default=otherwise, **more)


def numa_field(*, where_given: bool) -> Any:
    """The field of llama.cpp's strategy for NUMA nodes."""
    return from_option(
        numa_option(),
        default="",
        where_given=where_given,
        to=lambda given: given.numa or "",
        column=("numa", {"": "none"}),
    )


def rope_field() -> Any:
    """The field of the settings of RoPE, `engine.Rope` as text."""
    return from_option(
        RopeOptions,
        default="",
        where_given=True,
        to=lambda given: str(given.rope.settings() or ""),
        column=("RoPE", {"": "the model's own"}),
    )


def threads() -> Any:
    """The field of the number of threads."""
    return from_option(
        option(
            "--threads",
            "-t",
            type=types.THREADS,
            callback=lambda _, __, given: given or engine.usable_cores(),
            help="Number of threads.  [default: all cores]",
        )
    )


def specs(*default: str) -> Any:
    """The option for settings of attention."""
    return click.option(
        "-a",
        "--attn",
        "specs",
        multiple=True,
        metavar="SPEC",
        default=default,
        show_default=True,
        callback=lambda _, __, given: list(dict.fromkeys(map(parse_spec, given))),
        help="Settings of attention; repeatable.",
    )


OUT = click.option(
    "--out",
    "folder",
    metavar="DIR",
    type=types.File(),
    callback=lambda _, __, given: Path(given) if given else records.default_folder(),
    help="Folder of the records.  [default: bench/results in a clone, else the user's data]",
)
FORCE = click.option("--force", is_flag=True, help="Measure again what is recorded already.")


# ---- measurements ----


@dataclass(frozen=True)
class Measurement:
    """What a file measures.

    Attributes:
        name: of the records and the table, NAME.jsonl and NAME.md, and of the command.
        about: what is measured, in a sentence.
        case: the dataclass of its cases.
        groups: makes the groups of cases from the options.
        measure: returns one result for each case of a group, in order.
        table: makes markdown of records, which may be of several runs.
        options: those of click beside the fields of `case`, --out and --force.
        libraries: those that it runs, `stock` or `sparq`.
        rows: flat rows of records, for formats other than Markdown.
        summary: a shorter table.
    """

    name: str
    about: str
    case: Any
    groups: Callable[[Given], Sequence[Group]]
    measure: Callable[[Given, Group, Done], list[Result]]
    table: Callable[[Sequence[Record]], str]
    options: tuple[Any, ...] = ()
    libraries: tuple[str, ...] = ("sparq",)
    rows: Callable[[Sequence[Record]], list[Row]] | None = None
    summary: Callable[[Sequence[Record]], str] | None = None

    @property
    def file(self) -> str:
        return f"{self.name}.jsonl"


def with_options(*of: Measurement) -> Callable[[Any], Any]:
    """Add the options of measurements to a function, those of one name once."""

    def decorate(body: Any) -> Any:
        every = list(dict.fromkeys(x for m in of for x in m.options))
        known: set[str] = set()
        for f in (f for m in of for f in fields(m.case) if f.name not in known):
            known.add(f.name)
            if "option" in f.metadata:
                every.append(added(f.name, f))
            elif "group" in f.metadata:
                every.append(takes(**{f.name: f.metadata["group"]}))
        for one in reversed([*every, OUT, FORCE]):
            body = one(body)
        return body

    return decorate


def command(of: Measurement) -> click.Command:
    """The command line of a measurement."""

    @click.command(of.name, context_settings=SETTINGS, help=of.about)
    @with_options(of)
    def body(**options: Any) -> None:
        run(of, Given(**options))

    return body


def run(of: Measurement, given: Given) -> None:
    """Measure what is not recorded yet, write the table of all records beside them, and print that
    of this run.

    Raises:
        SparqError: a group could not be measured; the others have been.
    """
    file: Path = given.folder / of.file
    groups = of.groups(given)
    recs, n_failed = measured(of, given, groups, file)
    if recs:
        file.with_suffix(".md").write_text(whole_table(of, given.folder) + "\n", "utf-8")
        print(_shown(of, recs, getattr(given, "output", "md")))
    note(f"records: {file}", "dim")
    if n_failed:
        hint = "run it again: what is recorded is left out"
        raise SparqError(f"{n_failed} of {len(groups)} groups not measured, see above", hint)


def measured(
    of: Measurement, given: Given, groups: Sequence[Group], file: Path
) -> tuple[list[Record], int]:
    """Measure the groups that `file` lacks, each once, and add them there.

    Returns:
        All records in the order of the groups, and how many groups could not be measured.

    Raises:
        SparqError: the only group could not be measured.
    """
    from pyorch import native

    env = records.environment({x: native.built(stock=x == "stock") for x in of.libraries})
    recs = [] if given.force else records.load_all(file, keyed=True)
    # a folder may be that of several machines
    runs = records.by_run(rec for rec in recs if _kind(rec["env"]) == _kind(env))
    groups = [g for i, g in enumerate(groups) if g not in groups[:i]]

    def known(group: Group) -> list[Record] | None:
        """The latest run that has all cases of a group, since ratios are within one run."""
        keys = [records.key(of.name, records.case_of(c), env["stamps"][c.library]) for c in group]
        whole = (run for run in reversed(runs) if all(k in run for k in keys))
        return next(([run[k] for k in keys] for run in whole), None)

    todo = [g for g in groups if known(g) is None]
    if todo:
        records.check_writable(file)  # measure nothing that cannot be kept
    total, spent, n_failed = sum(map(_cost, todo)), 0, 0
    with progress_bar(of.name) as progress:
        for group in todo:
            share = _cost(group)

            def done(x: float, spent: int = spent, share: int = share) -> None:
                progress(int(spent + x * share), total)

            spent += share
            try:
                results = of.measure(given, group, done)
            except SparqError as error:
                if len(groups) == 1:
                    raise
                n_failed += 1
                note(f"{_name(group, groups)}: not measured: {error.message} ({error.hint})")
                continue
            run, made = secrets.token_hex(4), []
            for case, result in zip(group, results, strict=True):
                stamp, more = env["stamps"][case.library], {**result, "run": run, "env": env}
                made.append(records.record(of.name, records.case_of(case), stamp, **more))
                records.append(file, made[-1])
            runs += records.by_run(made)
    return [rec for group in groups for rec in known(group) or []], n_failed


def _name(group: Group, groups: Sequence[Group]) -> str:
    """What tells a group from the others."""
    case, others = records.case_of(group[0]), [records.case_of(g[0]) for g in groups]
    return ", ".join(f"{k} {v}" for k, v in case.items() if any(c.get(k) != v for c in others))


def _kind(env: records.Environment) -> list[Any]:
    """What two machines of a kind have in common."""
    return [env["machine"].get(x) for x in ("cpu", "cores", "gpu")]


def _cost(group: Group) -> int:
    """How long a group takes, in any unit, for the estimate of the time left: a cache
    takes longer the larger it is."""
    return len(group) * (4096 + int(getattr(group[0], "n_depth", 0)))


def _shown(of: Measurement, recs: Sequence[Record], form: str) -> str:
    """Records in one of the formats of `-o`."""
    if form == "md" or not of.rows:
        return of.table(recs)
    if form == "summary" and of.summary:
        return of.summary(recs)
    rows = of.rows(recs)
    if form == "csv":
        return table.as_csv(rows, quoted=True)
    pairs = zip(rows, recs, strict=True)
    more = [r | {x: rec[x] for x in ("counters", "samples_ns")} for r, rec in pairs]
    return table.as_json(more) if form == "json" else table.as_jsonl(more)


def whole_table(of: Measurement, folder: Path) -> str:
    """The table of the last records of all cases in a folder, with how many of them are old."""
    recs = records.latest(records.load_all(folder / of.file))
    text, old = of.table(recs), records.about_old(recs).strip()
    return text if old in text else f"{text}\n\n{old}"


def tables(of_run: Callable[[Sequence[Record]], str]) -> Callable[[Sequence[Record]], str]:
    """Make a function of records show those of each run by themselves."""

    @wraps(of_run)
    def of_all(recs: Sequence[Record]) -> str:
        return "\n\n".join(of_run([*run.values()]) for run in records.by_run(recs))

    return of_all


def model_name(model: Path) -> str:
    """The title of a model's card, or the name of its file."""
    card = card_of(model)
    return card.title if card else model.name
