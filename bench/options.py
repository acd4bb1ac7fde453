"""What measurements of this folder share: their options, names of models, and tables of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from pyorch import engine
from pyorch.attention.spec import parse_spec
from pyorch.cli import types
from pyorch.cli.groups import option
from pyorch.evals.texts import read_texts
from pyorch.measure import records
from pyorch.measure.records import Record
from pyorch.models.content import card_of


@dataclass(frozen=True, kw_only=True)
class BookOptions:
    """A model, and a text that it reads."""

    model: Path = option(
        "--model",
        "-m",
        metavar="FILE",
        required=True,
        type=types.File(),
        callback=lambda _, __, name: Path(name),
        help="GGUF model to measure.",
    )
    text: str = option(
        "--text",
        metavar="FILE",
        required=True,
        type=types.File(),
        callback=lambda _, __, name: "\n\n".join(read_texts([Path(name)])),
        help="A book, long enough.",
    )
    n_threads: int = option(
        "--threads",
        "-t",
        type=types.THREADS,
        callback=lambda _, __, n: n or engine.usable_cores(),
        help="Number of threads.  [default: one per core]",
    )


def number_option(*names: str, default: int, low: int = 1, text: str = "") -> Any:
    kind = click.IntRange(low)
    return option(*names, type=kind, default=default, show_default=True, help=text or None)


def specs_option(*default: str) -> Any:
    return option(
        "-a",
        "--attn",
        multiple=True,
        metavar="SPEC",
        default=default,
        show_default=True,
        callback=lambda _, __, lines: tuple(dict.fromkeys(map(parse_spec, lines))),
        help="Settings of attention; repeatable.",
    )


def model_name(model: Path) -> str:
    """The title of a model's card, or the name of its file."""
    card = card_of(model)
    return card.title if card else model.name


def tables(of_run: Callable[[Sequence[Record]], str]) -> Callable[[Sequence[Record]], str]:
    """Make a function of records show those of each run by themselves."""

    @wraps(of_run)
    def of_all(recs: Sequence[Record]) -> str:
        return "\n\n".join(of_run([*run.values()]) for run in records.by_run(recs))

    return of_all
