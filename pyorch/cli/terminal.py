"""Notes and questions for people, on stderr; data for programs goes to stdout."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress

import click

from pyorch import system
from pyorch.errors import SparqError
from pyorch.text import human_bytes

_LOG = logging.getLogger("pyorch.llama")  # llama.cpp's messages


def show_log(verbose: bool) -> None:
    """Show llama.cpp's messages from now on, or no longer: a process may run several commands."""
    _LOG.setLevel(logging.INFO if verbose else logging.WARNING)
    _LOG.handlers = [logging.StreamHandler() if verbose else logging.NullHandler()]


def shows_log() -> bool:
    """Whether --verbose was given."""
    return _LOG.level == logging.INFO


def note(text: str, style: str = "") -> None:
    """Print a line on stderr, after all earlier output; it is coloured only on a terminal and
    without NO_COLOR. Nothing ends because nobody reads it."""
    from rich.console import Console

    sys.stdout.flush()

    class Stderr(Console):
        def on_broken_pipe(self) -> None:
            """rich would end the program, and close stdout."""

    with suppress(OSError):
        console = Stderr(stderr=True, highlight=False, soft_wrap=True)
        console.print(text, style=style, markup=False)


def note_if_busy() -> None:
    """Warn if other programs make times long and uneven, now or in the last minute."""
    if system.is_busy():
        note("note: this machine is busy: times will be off", "yellow")


def note_if_beyond(n_ctx: int, n_ctx_train: int, then: str = "the text may get worse") -> None:
    """Warn if a context is longer than the model was trained on, and of what happens `then`."""
    if n_ctx_train and n_ctx > n_ctx_train:
        note(
            f"note: context {n_ctx} is beyond the {n_ctx_train} positions this model was trained"
            f" on; {then}",
            "yellow",
        )


def confirm(question: str, yes: bool, otherwise: str, hint: str) -> None:
    """Ask on the terminal, and exit with 1 after a no; without a terminal, and without --yes, fail
    with `otherwise` and `hint`."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise SparqError(otherwise, hint)
    if not click.confirm(question, err=True):
        raise click.exceptions.Exit(1)


def confirm_removal(what: str, n_bytes: int, yes: bool) -> None:
    """Ask as `confirm` does before something of that size is removed."""
    what = f"{what} ({human_bytes(n_bytes)})"
    confirm(f"Remove {what}?", yes, f"{what} would be removed", "remove it with --yes")


def print_freed(n_bytes: int) -> None:
    print(f"{human_bytes(n_bytes)} freed ({n_bytes} bytes)")


def print_json(value: object, indent: int | None = 2) -> None:
    """Print one JSON object on stdout: in ASCII, which every stream takes, and in which a name that
    is not UTF-8 stays what it is."""
    print(json.dumps(value, indent=indent), flush=True)
