"""Rows of published data sets, from a user's file or from the hub's shared cache.

A file is JSON, JSON lines, or parquet; a download is what the hub holds, which is parquet (package
`pyarrow`). HF_HUB_OFFLINE=1 uses only the cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.progress import say
from pyorch.text import human_bytes
from pyorch.text_file import read_text

Row = Mapping[str, Any]
# data set -> its repository on the hub and the files of the split that is evaluated
HUB = {
    "squad": ("rajpurkar/squad", "plain_text/validation-*.parquet"),
    "triviaqa": ("mandarjoshi/trivia_qa", "rc/validation-*.parquet"),
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0/validation-*.parquet"),
    "wikitext": ("Salesforce/wikitext", "wikitext-103-raw-v1/validation-*.parquet"),
}


def rows(name: str, file: Path | None) -> list[Row]:
    """All rows of a data set. In a JSON file they are a list, or a list under "data".

    Raises:
        SparqError: the file has another format, or the download failed.
    """
    files = [file] if file is not None else _download(name)
    found = [row for f in files for row in _read(f)]
    if not found:
        raise SparqError(f"{files[0]}: no rows", f"--data takes the {name} data, or a download")
    return found


def _read(file: Path) -> list[Row]:
    try:
        if file.suffix == ".parquet":
            return _parquet(file)
        text = read_text(file)
    except OSError as e:
        raise SparqError(
            f"{file}: {e.strerror or e}", "--data takes JSON, JSON lines or parquet"
        ) from None
    try:
        whole = json.loads(text)
    except ValueError:
        return list(_lines(file, text))
    if isinstance(whole, dict):
        whole = whole.get("data", [whole])
    if not isinstance(whole, list) or not all(isinstance(r, dict) for r in whole):
        raise SparqError(f"{file}: not a list of rows", "--data takes JSON, JSON lines or parquet")
    return whole


def _lines(file: Path, text: str) -> Iterator[Row]:
    for i, line in enumerate(
        text.split("\n")
    ):  # U+2028, where splitlines() cuts too, may be in a string
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise SparqError(
                f"{file}: line {i + 1} is not a JSON object",
                "--data takes JSON, JSON lines or parquet",
            )
        yield row


def _parquet(file: Path) -> list[Row]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise SparqError(
            f"{file}: parquet needs the package pyarrow", paths.install_command("eval")
        ) from None
    try:
        found: list[Row] = parquet.read_table(file).to_pylist()
        return found
    except (OSError, ValueError) as e:  # pyarrow raises them too
        raise SparqError(f"{file}: {e}", "is it parquet?") from None


def _download(name: str) -> list[Path]:
    """The files of a data set, which are cached like those of a model.

    Raises:
        SparqError: as `pull.find` and `pull.download`.
    """
    from pyorch.models import pull

    if name not in HUB:
        raise SparqError(f"there is no download of the {name} data", f"--data {name}=FILE")
    repo, pattern = HUB[name]
    try:
        found = pull.find_files(pull.Spec(repo, kind="dataset"), (pattern,), say)
        if not found.complete:
            say(f"{repo}: {human_bytes(found.missing_bytes)} to download")
        found = pull.fetch(found, say)
    except SparqError as e:
        own = f"--data FILE: the {name} data as JSON, JSON lines or parquet"
        raise SparqError(e.message, "; or ".join([e.hint] * bool(e.hint) + [own])) from None
    return [f.path for f in found.files if f.path]


def need(row: Row, keys: Sequence[str], what: str) -> list[Any]:
    """The values of a row under `keys`.

    Raises:
        SparqError: one is missing, or the row is no object, so this is another data set.
    """
    if not isinstance(row, dict):
        raise SparqError(
            f"--data: {str(row)[:40]!r} is not an object with {keys[0]!r}",
            f"is this {what}?",
            exit_code=2,
        )
    missing = [k for k in keys if k not in row]
    if missing:
        raise SparqError(
            f"--data: a row has no {missing[0]!r}, it has {', '.join(sorted(row)) or 'nothing'}",
            f"is this {what}?",
            exit_code=2,
        )
    return [row[k] for k in keys]


def some(answers: Sequence[str], what: str) -> tuple[str, ...]:
    """The answers that are not empty.

    Raises:
        SparqError: there is none.
    """
    found = tuple(dict.fromkeys(a for a in answers if isinstance(a, str) and a.strip()))
    if not found:
        raise SparqError(f"{what} has no answers", "data with questions that have answers")
    return found
