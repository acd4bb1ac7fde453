"""The one exception that users see."""

from __future__ import annotations


class SparqError(Exception):
    """A failure that is told in one line, with a second line on what to do about it.

    `exit_code` is 1 for a failure and 2 for a wrong request.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
