"""The generator of models, compiled once for all workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import suite


@pytest.fixture(scope="session")
def generator(native_lib_dir: Path, made_once: Callable[..., Path]) -> Path:
    return made_once("generator", suite.build_generator) / "generate"
