"""Fixtures of the end-to-end tests: sessions on the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny as tiny_models
from llama import Model

from pyorch import engine


@pytest.fixture(scope="session", autouse=True)
def library(native_lib_dir: Path) -> None:
    """All tests of this folder run it."""


@pytest.fixture
def session(tiny: Path) -> Iterator[engine.Session]:
    with engine.load(tiny, n_threads=1) as s:
        yield s


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A loaded tiny Llama of three layers."""
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    with Model(tiny_models.write(path, "llama", n_layer=3)) as m:
        yield m
