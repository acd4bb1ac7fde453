"""Fixtures of the policy tests: sessions on the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyorch import engine, policies

N_CTX = 512


@pytest.fixture(scope="module")
def demo(native_lib_dir: Path, demo_model: Path) -> Iterator[engine.Session]:
    """One session for a module; tests switch it and rewind to 0."""
    with policies.open_session(demo_model, n_ctx=N_CTX, n_threads=1) as session:
        yield session


@pytest.fixture(scope="session")
def text(demo_model: Path) -> str:
    return demo_model.with_name("document.txt").read_text()
