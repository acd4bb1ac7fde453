"""What the command lines of the measurements share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pyorch import paths
from pyorch.bench import records
from pyorch.cli.types import THREADS

SETTINGS = {"help_option_names": ["-h", "--help"]}
_OPTIONS = (
    click.option(
        "--model", "-m", metavar="FILE", help="GGUF model to measure.  [default: the demo model]"
    ),
    click.option(
        "--text",
        multiple=True,
        required=True,
        metavar="FILE|DIR",
        help="Books that the model has not seen.",
    ),
    click.option("--threads", "-t", type=THREADS, default=1, show_default=True),
    click.option(
        "--out",
        metavar="DIR",
        help="Folder of the records.  [default: bench/results/<kind of machine>]",
    ),
    click.option("--force", is_flag=True, help="Measure again what is recorded already."),
)


def measurement(*own: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command with the options of all measurements of a model over books, and its own.

    It is called with `model`, `texts` and `folder` as paths; all else as click has it.
    """

    def decorate(body: Callable[..., Any]) -> click.Command:
        def command(model: str, text: tuple[str, ...], out: str, **options: Any) -> None:
            body(
                model=Path(model or paths.data("models") / "demo" / "demo.gguf"),
                texts=[Path(t) for t in text],
                folder=Path(out) if out else records.default_folder(),
                **options,
            )

        for option in reversed((*_OPTIONS, *own)):
            command = option(command)
        return click.command(context_settings=SETTINGS, help=body.__doc__)(command)

    return decorate
