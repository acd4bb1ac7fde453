"""Fixtures of the end-to-end tests: a tiny model file and sessions on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_gguf import write_tiny_gguf

from pyorch import engine


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GQA, 2 layers, 4096 positions."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def session(tiny: Path) -> Iterator[engine.Session]:
    with engine.load(tiny, n_threads=1) as s:
        yield s
