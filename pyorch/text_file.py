"""The text of people's files and pipes: one decoder for every way in.

A text must have the same tokens whichever way it came, so nothing else in this package decodes what
people give. A byte order mark says how a text is written. Without one it is UTF-8, or else
Windows-1252, the commonest of the old encodings; a line on stderr tells what was assumed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pyorch.errors import SparqError
from pyorch.progress import Say, say
from pyorch.text import human_bytes

_MARKS = (  # those of UTF-32 come first: one of them begins with a mark of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32-le", "UTF-32"),
    (codecs.BOM_UTF32_BE, "utf-32-be", "UTF-32"),
    (codecs.BOM_UTF16_LE, "utf-16-le", "UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16-be", "UTF-16"),
)
_ALL_MARKS = tuple(mark for mark, *_ in _MARKS)
LARGEST = 64 << 20  # bytes of a text: more than any model's context holds
_HEAD = 65536  # bytes by which a binary is known
_CONTROL = re.compile(rb"[\x00-\x06\x0e-\x19\x1c-\x1f]")  # what no text in Windows-1252 has
_HINT = "a text in UTF-8, or in UTF-16 with a byte order mark: iconv -f ENCODING -t UTF-8 makes it"


def read_text(path: Path, hint: str = "check that it exists, and its permissions") -> str:
    """The text of a file, as `decoded`.

    Raises:
        SparqError: it is no text; or, with the `hint` and an OSError as its cause, it cannot be
            read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
            if not head.startswith(_ALL_MARKS) and b"\0" in head:
                raise _binary(str(path))  # a model's file, say, is not read to its end to say so
            return decoded(head + file.read(LARGEST), str(path))
    except OSError as e:
        raise SparqError(f"{path}: {e.strerror or e}", hint) from e


def decoded(raw: bytes, name: str, say: Say = say) -> str:
    """The text of bytes, without a byte order mark and with line feeds alone as line ends.

    Args:
        name: what messages call it.
        say: is told what had to be assumed.

    Raises:
        SparqError: it is too long, no text, or in an encoding that neither a mark nor the bytes
            tell.
    """
    if len(raw) > LARGEST:
        raise SparqError(f"{name}: a text of more than {human_bytes(LARGEST)}", "give a part of it")
    text, assumed = _decoded(raw, name)
    if assumed:
        say(f"{name}: {assumed}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def raw_lines(chunks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """The lines of a pipe as they come, each in bytes for `decoded`, without a byte order mark.
    What is in UTF-16 or UTF-32 is read to its end first, and becomes UTF-8.

    Args:
        chunks: the pipe, cut after each byte 10, as a binary file yields it.

    Raises:
        SparqError: UTF-16 or UTF-32 that cannot be decoded.
    """
    pipe = iter(chunks)
    first = next(pipe, b"")
    if first.startswith(_ALL_MARKS):
        yield from decoded(b"".join([first, *pipe]), name).encode().splitlines(keepends=True)
        return
    yield first.removeprefix(codecs.BOM_UTF8)
    yield from pipe


def _decoded(raw: bytes, name: str) -> tuple[str, str]:
    """The text, and what was assumed about it."""
    for mark, codec, encoding in _MARKS:
        if raw.startswith(mark):
            text = raw[len(mark) :].decode(codec, errors="ignore")
            if "\0" in text or mark + text.encode(codec) != raw:
                raise SparqError(f"{name}: it begins as {encoding}, but is not a text in it", _HINT)
            return text, f"read as {encoding}"
    marked = raw.startswith(codecs.BOM_UTF8)
    raw = raw.removeprefix(codecs.BOM_UTF8)
    if b"\0" in raw:
        raise _binary(name)
    try:
        return raw.decode("utf-8"), ""
    except UnicodeDecodeError:
        return _not_utf8(raw, name, marked)


def _not_utf8(raw: bytes, name: str, marked: bool) -> tuple[str, str]:
    """A text of which some bytes are not UTF-8. If most of its other characters beyond ASCII are,
    it was damaged, or cut within a character; otherwise it was never UTF-8."""
    text = raw.decode("utf-8", errors="replace")
    n_bad = text.count("\ufffd") - raw.count("\ufffd".encode())  # its own are no mistakes
    n_beyond = len(text) - len(text.encode("ascii", errors="ignore"))
    if marked or n_beyond - n_bad > n_bad:
        places = "1 place, which is" if n_bad == 1 else f"{n_bad} places, which are"
        return text, f"not UTF-8 in {places} read as U+FFFD"
    try:
        if _CONTROL.search(raw):
            raise ValueError
        return raw.decode("cp1252"), "not UTF-8, read as Windows-1252"
    except ValueError:
        raise SparqError(f"{name}: not a text, or in an unknown encoding", _HINT) from None


def _binary(name: str) -> SparqError:
    return SparqError(f"{name}: not a text, it has bytes that are 0", _HINT)
