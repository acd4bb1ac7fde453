"""Fixtures of the bench tests: a synthetic model of a few hundred kilobytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyorch import native
from pyorch.models import synth

SHAPE = synth.Shape(
    n_layer=2,
    n_embd=64,
    n_head=4,
    n_head_kv=2,
    head_dim=32,
    n_ff=32,
    n_vocab=288,
    n_ctx=4096,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synth") / "small.gguf"
    synth.write(path, SHAPE)
    return path


@pytest.fixture(scope="session")
def stock(native_lib_dir: Path) -> None:
    """The unpatched library, built if need be."""
    native.built(stock=True)
