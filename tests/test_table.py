"""The table writer: what Markdown, CSV and JSON make of the same rows."""

from __future__ import annotations

import csv
import json
import math

from pyorch import table
from pyorch.attention.spec import AttentionSpec

ROWS = [
    {"name": "it's, a", "n": 1, "ms": 0.5, "flag": True, "spec": AttentionSpec("dense")},
    {"name": 'say "b"', "n": 2, "ms": math.nan, "flag": False, "spec": AttentionSpec("off")},
]


def test_markdown_aligns_columns_by_name() -> None:
    rows = [("a", 1, "x"), ("b", 22, "")]
    assert table.markdown(("name", "n", "note"), rows).splitlines() == [
        "| name | n | note |",
        "| --- | ---: | ---: |",
        "| a | 1 | x |",
        "| b | 22 |  |",
    ]
    assert "| ---: | ---: | --- |" in table.markdown(("name", "n", "note"), rows, left=("note",))
    assert "| ---: | ---: |" in table.markdown(("name", "n"), [], left=())
    assert (table.number(math.nan, "{:.1f}"), table.number(2, "{:.1f}")) == ("-", "2.0")


def test_every_format_has_the_same_rows() -> None:
    """NaN, which JSON lacks, and a column that a row lacks are nothing; settings are their line."""
    plain = [row | {"spec": str(row["spec"])} for row in ROWS]
    plain[1]["ms"] = None
    assert json.loads(table.as_json(ROWS)) == plain
    assert [json.loads(line) for line in table.as_jsonl(ROWS).splitlines()] == plain
    assert list(csv.DictReader(table.as_csv(ROWS).splitlines())) == [
        {k: "" if v is None else str(v) for k, v in row.items()} for row in plain
    ]
    assert table.as_csv([{"a": 1}, {"b": 2}]) == "a,b\n1,\n,2"
