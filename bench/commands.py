"""Options and decorators that the command lines of the measurements share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from pyorch import paths
from pyorch.bench import records
from pyorch.cli import types
from pyorch.cli.terminal import note
from pyorch.engine import usable_cores
from pyorch.models.content import card_of
from pyorch.progress import progress_bar

SETTINGS = {"help_option_names": ["-h", "--help"]}
OUT = click.option(
    "--out",
    "folder",
    metavar="DIR",
    callback=lambda _, __, given: Path(given) if given else records.default_folder(),
    help="Folder of the records.  [default: bench/results/<kind of machine>]",
)
FORCE = click.option("--force", is_flag=True, help="Measure again what is recorded already.")
THREADS = click.option(
    "--threads",
    "-t",
    type=types.Numbers(1, types.THREADS.high),
    callback=lambda _, __, given: given or sorted({1, usable_cores()}),
    help="Numbers of threads.  [default: 1 and all cores]",
)
_OF_A_MODEL = (
    click.option(
        "--model", "-m", metavar="FILE", help="GGUF model to measure.  [default: the demo model]"
    ),
    click.option(
        "--text",
        "texts",
        multiple=True,
        required=True,
        metavar="FILE|DIR",
        callback=lambda _, __, given: [Path(x) for x in given],
        help="Books that the model has not seen.",
    ),
    click.option("--threads", "-t", type=types.THREADS, default=1, show_default=True),
)


def samples(default: int) -> Any:
    """The option for how often each case is timed."""
    return click.option("--samples", type=types.Number(int, 1), default=default, show_default=True)


def command(*options: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command with `options`; its help is the docstring."""

    def decorate(body: Callable[..., Any]) -> click.Command:
        for option in reversed(options):
            body = option(body)
        return click.command(context_settings=SETTINGS)(body)

    return decorate


def measurement(*own: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command with the options of all measurements of a model over books, and its own.

    It is called with `model`, `texts` and `folder` as paths, and everything else as in click.
    """

    def decorate(body: Callable[..., Any]) -> click.Command:
        def given(model: str | None, **options: Any) -> None:
            body(model=Path(model or paths.data("models") / "demo" / "demo.gguf"), **options)

        given.__doc__ = body.__doc__
        return command(*_OF_A_MODEL, OUT, FORCE, *own)(given)

    return decorate


def recorded(
    bench: str,
    path: Path,
    groups: Sequence[Sequence[Any]],
    measure: Callable[[Sequence[Any], records.Done], list[records.Result]],
    folder: Path,
    **options: Any,
) -> list[records.Record]:
    """`records.resume` with the file of `bench` in `folder` and a progress bar; each result says
    the name of the model at `path`."""
    card = card_of(path)
    name = {"model_name": card.title if card else path.name}

    def named(group: Sequence[Any], done: records.Done) -> list[records.Result]:
        return [r | name for r in measure(group, done)]

    options = {"cost": lambda _: 1000, **options}
    with progress_bar(bench) as progress:
        return records.resume(bench, groups, named, folder / f"{bench}.jsonl", progress, **options)


def show(text: str, file: Path) -> None:
    """Print a table, and write it beside its records."""
    file.with_suffix(".md").write_text(text + "\n", "utf-8")
    print(text)
    note(f"records: {file}", "dim")
