"""Fixtures of what concerns models: the bytes of a small one."""

from __future__ import annotations

import pytest
from tiny import write_tiny_gguf


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", n_layer=1).read_bytes()
