"""Tables as text: Markdown for people, CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Row = Mapping[str, Any]


def markdown(
    head: Sequence[str], rows: Iterable[Iterable[object]], left: Collection[str] | None = None
) -> str:
    """Columns are right-aligned except those that `left` names; None means the first."""
    left = head[:1] if left is None else left
    marks = ["---" if name in left else "---:" for name in head]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (head, marks, *rows))


def columns(
    shown: Mapping[str, Callable[[T], object]],
    rows: Iterable[T],
    left: Collection[str] | None = None,
) -> str:
    """`markdown` of rows, from the name of each column and what shows a row there."""
    cells = ([show(row) for show in shown.values()] for row in rows)
    return markdown(list(shown), cells, left)


def number(x: float, form: str) -> str:
    """The text of a cell: `-` if `x` is not a number."""
    return "-" if math.isnan(x) else form.format(x)


def plain(value: Any) -> Any:
    """Returns the value for JSON: NaN becomes None, and settings become their text."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return value if isinstance(value, bool | int | float | list | dict | None) else str(value)


def as_csv(rows: Sequence[Row]) -> str:
    """CSV with a column for every name that any row has; without the final line break."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: plain(v) for k, v in row.items()} for row in rows)
    return text.getvalue().rstrip()


def as_json(rows: Iterable[Row]) -> str:
    return json.dumps([{k: plain(v) for k, v in row.items()} for row in rows], indent=2)


def as_jsonl(rows: Iterable[Row]) -> str:
    return "\n".join(json.dumps({k: plain(v) for k, v in row.items()}) for row in rows)
