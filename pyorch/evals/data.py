"""Rows of published data sets, from a user's file or from the hub's shared cache.

A file is JSON, JSON lines, or parquet; a download is what the hub holds, which is parquet (package
`pyarrow`). HF_HUB_OFFLINE=1 uses only the cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    "gsm8k": ("openai/gsm8k", "main/test-*.parquet"),
    "wikitext": ("Salesforce/wikitext", "wikitext-103-raw-v1/validation-*.parquet"),
}


FORMATS = "--data takes JSON, JSON lines or parquet"


def rows(name: str, file: Path | None) -> list[Row]:
    """All rows of a data set. In a JSON file they are a list, or a list under "data".

    Raises:
        SparqError: the file has another format, or the download failed.
    """
    files = [file] if file is not None else _download(name)
    out = [row for f in files for row in _read(f)]
    if not out:
        raise SparqError(f"{files[0]}: no rows", f"--data takes the {name} data, or a download")
    return out


def _read(file: Path) -> list[Row]:
    if file.suffix == ".parquet":
        return _parquet(file)
    text = read_text(file, FORMATS)
    try:
        whole = json.loads(text)
    except ValueError:
        # not splitlines(), which also cuts at U+2028, and that may be in a string
        lines = enumerate(text.split("\n"), 1)
        return [_object(file, i, line) for i, line in lines if line.strip()]
    if isinstance(whole, dict):
        whole = whole.get("data", [whole])
    if not isinstance(whole, list) or not all(isinstance(r, dict) for r in whole):
        raise SparqError(f"{file}: not a list of rows", FORMATS)
    return whole


def _object(file: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise SparqError(f"{file}: line {number} is not a JSON object", FORMATS)
    return row


def _parquet(file: Path) -> list[Row]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise SparqError(
            f"{file}: parquet needs the package pyarrow", paths.install_command("eval")
        ) from None
    try:
        table: list[Row] = parquet.read_table(file).to_pylist()
        return table
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
        files = pull.find_files(pull.Spec(repo, kind="dataset"), (pattern,), say)
        if not files.complete:
            say(f"{repo}: {human_bytes(files.missing_bytes)} to download")
        files = pull.fetch(files, say)
    except SparqError as e:
        own = f"--data FILE: the {name} data as JSON, JSON lines or parquet"
        raise SparqError(e.message, "; or ".join([e.hint] * bool(e.hint) + [own])) from None
    return [f.path for f in files.files if f.path]


def need(row: Row, keys: Sequence[str], what: str) -> list[Any]:
    """The values of a row under `keys`.

    Raises:
        SparqError: one is missing, or the row is no object, so this is another data set.
    """
    if isinstance(row, dict) and all(k in row for k in keys):
        return [row[k] for k in keys]
    content = f"a row of {', '.join(sorted(row))}" if isinstance(row, dict) else repr(row)
    missing = next(k for k in keys if not isinstance(row, dict) or k not in row)
    raise SparqError(f"--data: {content[:99]} has no {missing!r}", f"is this {what}?", exit_code=2)


def some(answers: Sequence[str], what: str) -> tuple[str, ...]:
    """The answers that are not empty.

    Raises:
        SparqError: there is none.
    """
    out = tuple(dict.fromkeys(a for a in answers if isinstance(a, str) and a.strip()))
    if not out:
        raise SparqError(f"{what} has no answers", "data with questions that have answers")
    return out
