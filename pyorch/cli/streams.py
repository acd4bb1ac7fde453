"""The three streams of the program: open, and able to carry whatever a name or a text holds."""

from __future__ import annotations

import codecs
import io
import os
import sys
from array import array
from contextlib import suppress
from typing import BinaryIO

from pyorch import system
from pyorch.errors import SparqError
from pyorch.text_file import LARGEST, decoded

_NAMES = ("stdin", "stdout", "stderr")
_closed: set[str] = set()


def prepare() -> None:
    """Make stdin, stdout and stderr usable, before anything else is opened.

    A stream that the caller closed becomes /dev/null: otherwise the next file that we open would
    take its number, and be read as the prompt or written into. Letters that a stream cannot encode
    become ?, but stdout has a file's name in its own bytes: `$(sparq-cpp read ...)` must find it.
    """
    for fd, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            _closed.add(name)
            null = os.open(os.devnull, os.O_RDWR)  # it takes the number, if nobody has it yet
            os.set_inheritable(null, True)
            setattr(sys, name, open(null, "w" if fd else "r", closefd=False))  # noqa: SIM115
    codecs.register_error("shown", _shown)
    for name, errors in zip(_NAMES, ("surrogateescape", "shown", "replace"), strict=True):
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            # on Windows a pipe has the letters of one language otherwise
            stream.reconfigure(encoding="utf-8" if system.IS_WINDOWS else None, errors=errors)


def stdin() -> BinaryIO:
    """What comes through the pipe.

    Raises:
        SparqError: the caller closed it.
    """
    if "stdin" in _closed:
        raise SparqError("stdin is closed", "give it a file or a pipe: sparq-cpp ... < FILE", 2)
    return sys.stdin.buffer


def stdin_text() -> str:
    """The text that comes through the pipe, decoded.

    Raises:
        SparqError: the caller closed it, or it is no text.
    """
    return decoded(stdin().read(LARGEST + 1), "stdin")


def text_waits() -> bool:
    """Whether a pipe or a redirected file has text for us that nobody has read. It is not read: in
    a loop of a shell it is for others."""
    n = array("i", [0])
    with suppress(ImportError, OSError, ValueError):
        import fcntl
        import termios

        fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, n)
        return n[0] > 0 and not sys.stdin.isatty()
    return False


def _shown(error: UnicodeError) -> tuple[str | bytes, int]:
    """The handler of characters that a stream cannot encode."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    chars = error.object[error.start : error.end]
    shown = (os.fsencode(c) if "\udc80" <= c <= "\udcff" else b"?" for c in chars)
    return b"".join(shown), error.end
