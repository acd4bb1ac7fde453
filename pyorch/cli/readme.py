"""A table between two marks in a README, which `--update-readme FILE` replaces."""

from __future__ import annotations

from pathlib import Path

from pyorch.errors import SparqError

_MARKS = "--update-readme takes a file with such marks"


def update_marked(file: Path, name: str, text: str) -> None:
    """Replace what is between `<!-- name -->` and `<!-- /name -->` in a file.

    Raises:
        SparqError: the file has no such marks, or cannot be read or written.
    """
    from pyorch.models.new_file import new_file

    before, after = around(file, name)
    try:
        with new_file(file, force=True) as (partial, _):
            partial.write_text(f"{before}\n{text}\n{after}", "utf-8")
    except OSError as e:
        raise SparqError(f"{file}: {e.strerror or e}", _MARKS) from None


def around(file: Path, name: str) -> tuple[str, str]:
    """Returns the text up to the first mark, and the text from the second one on.

    Raises:
        SparqError: the file has no such marks, or cannot be read.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    try:
        before, found, rest = file.read_text("utf-8").partition(begin)
    except OSError as e:
        raise SparqError(f"{file}: {e.strerror or e}", _MARKS) from None
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        hint = "put both lines where the table should be"
        raise SparqError(f"{file}: no {begin} ... {end} to put the table in", hint)
    return before + begin, end + after
