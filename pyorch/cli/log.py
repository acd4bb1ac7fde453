"""llama.cpp's messages on stderr, for -v."""

from __future__ import annotations

import logging

import click


class _OnStderr(logging.Handler):
    """Shows the lines of a log as they come."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(record.getMessage(), err=True)


_LOG = logging.getLogger("pyorch.llama")
_ON_STDERR = _OnStderr()


def show_log(verbose: bool) -> None:
    """Show the messages from now on, or no longer: a process may run several commands."""
    _LOG.setLevel(logging.INFO if verbose else logging.WARNING)
    (_LOG.addHandler if verbose else _LOG.removeHandler)(_ON_STDERR)


def shows_log() -> bool:
    """Whether --verbose was given."""
    return _ON_STDERR in _LOG.handlers
