"""docs/environment.md names the variables that are read, and no others."""

from __future__ import annotations

import re

import pytest

from pyorch import paths

pytestmark = pytest.mark.skipif(not paths.in_checkout(), reason="the documents are not installed")
READ = re.compile(r'(?:environ(?:\.get\(|\[)|getenv\(|envvar=)\s*"(SPARQ_\w+)"')
SOURCES = ("pyorch", "ggml_ops", "tests", "bench")


def test_every_variable_is_in_the_table() -> None:
    read: set[str] = set()
    for folder in SOURCES:
        for file in (paths.REPOSITORY / folder).rglob("*.*"):
            if file.suffix in {".py", ".c", ".cpp", ".h", ".cu", ".cuh"}:
                read |= set(READ.findall(file.read_text("utf-8")))
    assert len(read) > 10  # the pattern still fits the way we read them
    page = (paths.REPOSITORY / "docs" / "environment.md").read_text("utf-8")
    named = set(re.findall(r"`(SPARQ_[A-Z_]+[A-Z])`", page))
    assert {"SPARQ_TEST_LIB_DIR", "SPARQ_TEST_STOCK_DIR"} <= named  # read through one expression
    assert read | {"SPARQ_TEST_STOCK_DIR"} == named
