"""What a measurement is, and what runs it: its command, what is recorded already, and its table.

A measurement is one file. `options` are those of its command. The fields of a `case` are the key of
its record. `groups` makes the cases from the options, those of a group in turns; `measure` times a
group; `table` shows the records. Everything else is here, and the same for all.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from pyorch import table
from pyorch.cli import types
from pyorch.cli.groups import option, takes
from pyorch.cli.terminal import note
from pyorch.errors import SparqError
from pyorch.measure import records
from pyorch.measure.records import Record, Result
from pyorch.progress import progress_bar

Group = Sequence[Any]  # of cases
Done = Callable[[float], None]  # called with the share of a group that is done
Row = dict[str, Any]
Column = Callable[[Row], object]

BOTH = ("stock", "sparq")
SETTINGS = {"help_option_names": ["-h", "--help"]}


# ---- options that measurements share ----


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Where the records of a run are, and whether they count."""

    folder: Path = option(
        "--out",
        metavar="DIR",
        type=types.File(),
        callback=lambda _, __, name: Path(name) if name else records.default_folder(),
        help="Folder of the records.  [default: bench/results in a clone, else the user's data]",
    )
    force: bool = option("--force", is_flag=True, help="Measure again what is recorded already.")


# ---- cases ----


def same(options: Any, kind: type) -> dict[str, Any]:
    """The fields of a kind of case that the options have by the same name."""
    return {f.name: getattr(options, f.name) for f in fields(kind) if hasattr(options, f.name)}


def text_hash(text: str) -> str:
    """What a record tells of a text; "" without one."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


def differing(columns: Mapping[str, Column], rows: Sequence[Row]) -> dict[str, Column]:
    """The columns that rows differ in."""
    return {name: show for name, show in columns.items() if len({show(r) for r in rows}) > 1}


# ---- measurements ----


@dataclass(frozen=True)
class Measurement:
    """What a file measures.

    Attributes:
        name: of the records and the table, NAME.jsonl and NAME.md, and of the command.
        options: the group of its options, to which --out and --force are added.
        case: the dataclass of its cases.
        groups: makes the groups of cases from the options.
        measure: returns one result for each case of a group, in order.
        table: makes markdown of records, which may be of several runs.
        libraries: those that it runs, `stock` or `sparq`.
        rows: makes a flat row of each record, for the other formats of `-o`.
    """

    name: str
    options: Any
    case: Any
    groups: Callable[[Any], Sequence[Group]]
    measure: Callable[[Any, Group, Done], list[Result]]
    table: Callable[[Sequence[Record]], str]
    libraries: tuple[str, ...] = ("sparq",)
    rows: Callable[[Sequence[Record]], Sequence[Row]] | None = None

    @property
    def about(self) -> str:
        """What is measured: the first line of its file."""
        return str(sys.modules[self.measure.__module__].__doc__).partition("\n")[0]

    @property
    def file(self) -> str:
        return f"{self.name}.jsonl"


def command(of: Measurement) -> click.Command:
    """The command line of a measurement."""

    @click.command(of.name, context_settings=SETTINGS, help=of.about)
    @takes(options=of.options, to=RecordOptions)
    def body(options: Any, to: RecordOptions) -> None:
        run(of, options, to)

    return body


def run(of: Measurement, options: Any, to: RecordOptions) -> None:
    """Measure what is not recorded yet, write the table of all records beside them, and print that
    of this run.

    Raises:
        SparqError: a group could not be measured; the others have been.
    """
    file = to.folder / of.file
    groups = of.groups(options)
    recs, n_failed = measured(of, options, groups, file, force=to.force)
    if recs:
        file.with_suffix(".md").write_text(whole_table(of, to.folder) + "\n", "utf-8")
        print(_printed(of, recs, getattr(options, "output", "md")))
    note(f"records: {file}", "dim")
    if n_failed:
        hint = "run it again: what is recorded is left out"
        raise SparqError(f"{n_failed} of {len(groups)} groups not measured, see above", hint)


def _printed(of: Measurement, recs: Sequence[Record], form: str) -> str:
    if of.rows is None or form == "md":
        return of.table(recs)
    flat = of.rows(recs)
    if form == "csv":
        return table.as_csv(flat)
    pairs = zip(flat, recs, strict=True)
    more = [r | {x: rec[x] for x in ("counters", "samples_ns")} for r, rec in pairs]
    return table.as_json(more) if form == "json" else table.as_jsonl(more)


def measured(
    of: Measurement, options: Any, groups: Sequence[Group], file: Path, *, force: bool
) -> tuple[list[Record], int]:
    """Measure the groups that `file` lacks, each once, and add them there.

    Returns:
        All records in the order of the groups, and how many groups could not be measured.

    Raises:
        SparqError: the only group could not be measured.
    """
    from pyorch import native

    env = records.environment({x: native.built(stock=x == "stock") for x in of.libraries})
    recs = [] if force else records.load_all(file, keyed=True)
    # a folder may be that of several machines
    kind = records.kind_of(env)
    runs = records.by_run(rec for rec in recs if records.kind_of(rec["env"]) == kind)
    groups = [g for i, g in enumerate(groups) if g not in groups[:i]]

    def stamp(case: Any) -> str:
        """What tells a library from its others; the name of a rival has its version."""
        return str(env["stamps"].get(case.library, case.library))

    def known(group: Group) -> list[Record] | None:
        """The latest run that has all cases of a group, since ratios are within one run."""
        keys = [records.key(of.name, records.case_of(c), stamp(c)) for c in group]
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
                results = of.measure(options, group, done)
            except SparqError as error:
                if len(groups) == 1:
                    raise
                n_failed += 1
                note(f"{_name(group, groups)}: not measured: {error.message} ({error.hint})")
                continue
            run, made = secrets.token_hex(4), []
            for case, result in zip(group, results, strict=True):
                more = {**result, "run": run, "env": env}
                made.append(records.record(of.name, records.case_of(case), stamp(case), **more))
                records.append(file, made[-1])
            runs += records.by_run(made)
    return [rec for group in groups for rec in known(group) or []], n_failed


def _name(group: Group, groups: Sequence[Group]) -> str:
    """What tells a group from the others."""
    case, others = records.case_of(group[0]), [records.case_of(g[0]) for g in groups]
    return ", ".join(f"{k} {v}" for k, v in case.items() if any(c.get(k) != v for c in others))


def _cost(group: Group) -> int:
    """How long a group takes, in any unit, for the estimate of the time left: a cache
    takes longer the larger it is."""
    return len(group) * (4096 + int(getattr(group[0], "n_depth", 0)))


def whole_table(of: Measurement, folder: Path) -> str:
    """The table of the last records of all cases in a folder, with how many of them are old."""
    recs = records.latest(records.load_all(folder / of.file))
    text, old = of.table(recs), records.about_old(recs).strip()
    return text if old in text else f"{text}\n\n{old}"
