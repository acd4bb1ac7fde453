"""Runs a measurement: its options, what is recorded already, its records, and its table.

A measurement is one file. It says what a `Case` is; `groups` makes the cases from the options,
those of a group in turns; `measure` times a group; `table` shows the records; and a `FIGURE`, if it
has one, draws them. Everything else is here, and the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from pyorch import engine
from pyorch.attention.spec import parse_spec
from pyorch.bench import records
from pyorch.bench.plan import Synthetic
from pyorch.bench.records import Done, Record, Result
from pyorch.cli import types
from pyorch.cli.terminal import note
from pyorch.errors import SparqError
from pyorch.evals.texts import read_texts
from pyorch.models.content import card_of
from pyorch.progress import progress_bar

Given = SimpleNamespace  # the options of a run, by their names
Group = Sequence[Any]  # of cases

SETTINGS = {"help_option_names": ["-h", "--help"]}
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
THREADS = click.option(
    "--threads",
    "-t",
    type=types.THREADS,
    callback=lambda _, __, given: given or engine.usable_cores(),
    help="Number of threads.  [default: all cores]",
)
SOME_MODEL = click.option(
    "--model",
    "-m",
    metavar="FILE",
    type=types.File(),
    callback=lambda _, __, given: Path(given) if given else None,
    help="GGUF model to measure.  [default: llama2-7b q8_0, synthetic]",
)
_ALWAYS = (
    click.option(
        "--out",
        "folder",
        metavar="DIR",
        callback=lambda _, __, given: Path(given) if given else records.default_folder(),
        help="Folder of the records.  [default: bench/results/<kind of machine>]",
    ),
    click.option("--force", is_flag=True, help="Measure again what is recorded already."),
)


def layers(default: int) -> Any:
    """The option for the layers of the model that `model_of` writes."""
    text = "Layers of the synthetic model."
    kind = types.LAYERS
    return click.option("--layers", type=kind, default=default, show_default=True, help=text)


def model_of(given: Given) -> Path:
    """The model of --model, or a synthetic one, written if it is not there."""
    return given.model or Synthetic("llama2-7b", given.layers, "q8_0").written()


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


def samples(default: int) -> Any:
    """The option for how often each case is timed."""
    return click.option("--samples", type=types.Number(int, 1), default=default, show_default=True)


@dataclass(frozen=True)
class Measurement:
    """What a file measures.

    Attributes:
        name: of the records and the table, NAME.jsonl and NAME.md, and of the command.
        about: what is measured, in a sentence.
        options: those of click that it has beside --out and --force.
        groups: makes the groups of cases from the options.
        measure: returns one result for each case of a group, in order.
        table: makes markdown of records, which may be of several runs.
        libraries: those that it runs, `stock` or `sparq`.
        cost: how long a group takes, in any unit, for the estimate of the time left.
    """

    name: str
    about: str
    options: tuple[Any, ...]
    groups: Callable[[Given], Sequence[Group]]
    measure: Callable[[Given, Group, Done], list[Result]]
    table: Callable[[Sequence[Record]], str]
    libraries: tuple[str, ...] = ("sparq",)
    cost: Callable[[Group], int] = lambda _: 1000

    @property
    def file(self) -> str:
        return f"{self.name}.jsonl"


def command(of: Measurement) -> click.Command:
    """The command line of a measurement."""

    def body(**options: Any) -> None:
        run(of, Given(**options))

    for option in reversed((*of.options, *_ALWAYS)):
        body = option(body)
    return click.command(of.name, context_settings=SETTINGS, help=of.about)(body)


def run(of: Measurement, given: Given) -> None:
    """Measure what is not recorded yet, print its table, and write that of all records beside them.

    Raises:
        SparqError: a group could not be measured; the others have been.
    """
    file = given.folder / of.file
    groups = of.groups(given)
    n_failed = 0

    def failed(group: Group, error: SparqError) -> None:
        nonlocal n_failed
        if len(groups) == 1:
            raise error
        n_failed += 1
        note(f"{group[0]}: not measured: {error.message} ({error.hint})")

    def named(group: Group, done: Done) -> list[Result]:
        return [result | _name(given) for result in of.measure(given, group, done)]

    with progress_bar(of.name) as progress:
        found = records.resume(
            of.name,
            groups,
            named,
            file,
            progress,
            cost=of.cost,
            force=given.force,
            libraries=of.libraries,
            failed=failed,
        )
    if found:
        print(of.table(found))
        file.with_suffix(".md").write_text(whole_table(of, given.folder) + "\n", "utf-8")
    note(f"records: {file}", "dim")
    if n_failed:
        hint = "run it again: what is recorded is left out"
        raise SparqError(f"{n_failed} of {len(groups)} groups not measured, see above", hint)


def whole_table(of: Measurement, folder: Path) -> str:
    """The table of the last records of all cases in a folder."""
    recs = records.latest(records.load_all(folder / of.file))
    old = records.about_old(recs).strip()
    return of.table(recs) + (f"\n\n{old}" if old else "")


def _name(given: Given) -> Result:
    """The name of the model that was given, if one was."""
    if not getattr(given, "model", None):
        return {}
    card = card_of(given.model)
    return {"model_name": card.title if card else given.model.name}
