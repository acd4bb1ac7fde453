"""The one exception that users see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MANY = 20  # names, of which a line shows the nearest alone


class SparqError(Exception):
    """A failure that is reported in one line, with a second line on what to do about it.

    `exit_code` is 1 for a failure and 2 for a wrong request.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


def nearest(what: str, value: str, allowed: Iterable[str]) -> SparqError:
    """The error for a name that is not among `allowed`; its hint names the closest ones, or all of
    a few."""
    names = list(allowed)
    cutoff = 0.5 if len(names) <= MANY else 0
    near = difflib.get_close_matches(value.lower(), names, n=3, cutoff=cutoff)
    hint = f"did you mean {' or '.join(near)}?" if near else f"one of: {', '.join(names)}"
    return SparqError(f"unknown {what} {value!r}", hint, exit_code=2)
