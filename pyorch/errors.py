"""The one exception that users see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
    """The error for a name that is not among `allowed`; its hint names the closest one."""
    names = list(allowed)
    match = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {match[0]}?" if match else f"one of: {', '.join(names)}"
    return SparqError(f"unknown {what} {value!r}", hint, exit_code=2)
