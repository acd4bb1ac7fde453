"""The one decoder of people's texts."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyorch import text_file
from pyorch.errors import SparqError
from pyorch.text_file import decoded, raw_lines, read_text

TEXT = "The red kettle\nstands in the tower.\n\nCafé is open – “now”.\n"
# how -> bytes, and what is said of them
WRITTEN = {
    "utf-8": (TEXT.encode(), ""),
    "utf-8 with a mark": (codecs.BOM_UTF8 + TEXT.encode(), ""),
    "cr lf": (TEXT.replace("\n", "\r\n").encode(), ""),
    "cr": (TEXT.replace("\n", "\r").encode(), ""),
    "windows-1252": (TEXT.encode("cp1252"), "not UTF-8, read as Windows-1252"),
    "utf-16-le": (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"), "read as UTF-16"),
    "utf-16-be": (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), "read as UTF-16"),
    "utf-32-le": (codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"), "read as UTF-32"),
    "utf-32-be": (codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"), "read as UTF-32"),
    "utf-16 with cr lf": (TEXT.replace("\n", "\r\n").encode("utf-16"), "read as UTF-16"),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_one_text_however_it_is_written(how: str) -> None:
    raw, note = WRITTEN[how]
    told: list[str] = []
    assert decoded(raw, "x.txt", told.append) == TEXT
    assert told == ([f"x.txt: {note}"] if note else [])
    lines = raw_lines(raw.splitlines(keepends=True) if "16" not in how else [raw], "x")
    assert "".join(decoded(line, "x") for line in lines) == TEXT


def test_a_line_of_a_pipe_does_not_wait_for_the_next() -> None:
    def pipe() -> Iterator[bytes]:
        yield codecs.BOM_UTF8 + b"one\n"
        raise AssertionError("it asked for more")

    assert next(raw_lines(pipe(), "x")) == b"one\n"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        b"\x1f\x8b\x08\x05\xff\x01\x02",  # gzip, without a 0 in its first bytes
        TEXT.encode("utf-16-le"),  # without its mark it could be anything
        codecs.BOM_UTF16_LE + b"a",  # half a character
        codecs.BOM_UTF16_LE + b"\x00\xd8a\0",  # half a pair
        codecs.BOM_UTF32_LE + b"\xff\xff\xff\xff",
        b"\x83e\x83X\x83g \x81\x41",  # Shift-JIS: some of its bytes are no Windows-1252
    ],
)
def test_what_is_no_text_is_refused(raw: bytes, tmp_path: Path) -> None:
    (file := tmp_path / "x.txt").write_bytes(raw)
    with pytest.raises(SparqError, match=r"x\.txt: .*not a text") as error:
        read_text(file)
    assert "iconv" in error.value.hint


def test_a_text_that_no_context_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_file, "LARGEST", 1000)
    (file := tmp_path / "x.txt").write_text("a" * 1000)
    assert len(read_text(file)) == 1000
    file.write_text("a" * 1001)
    with pytest.raises(SparqError, match=r"x\.txt: ") as error:
        read_text(file)
    assert error.value.hint


@pytest.mark.parametrize("text", ["é" * 9, "\ufffd" * 9 + "é"], ids=["whole", "repaired"])
def test_a_damaged_character_does_not_make_a_text_another_encoding(text: str) -> None:
    """As `head -c` leaves it: Windows-1252 would turn every other accent into two letters. The
    replacement characters of an earlier program are no damage."""
    told: list[str] = []
    assert decoded(text.encode() + b"\xe2\x80", "x", told.append) == text + "\ufffd"
    assert told == ["x: not UTF-8 in 1 place, which is read as U+FFFD"]
