"""llama.cpp's messages on stderr, for -v."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("pyorch.llama")


def show_log(verbose: bool) -> None:
    """Show the messages from now on, or no longer: a process may run several commands."""
    _LOG.setLevel(logging.INFO if verbose else logging.WARNING)
    _LOG.handlers = [logging.StreamHandler() if verbose else logging.NullHandler()]


def shows_log() -> bool:
    """Whether --verbose was given."""
    return _LOG.level == logging.INFO
