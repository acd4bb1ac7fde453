"""Fixtures of the tests on a device: the op tests' own, and a build with CUDA."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "ops"), str(HERE.parent / "e2e")]


@pytest.fixture(scope="session")
def cuda_lib_dir(native_lib_dir: Path) -> Path:
    """The library in use, which must be one with CUDA."""
    folder = Path(os.environ.get("SPARQ_TEST_LIB_DIR") or native_lib_dir)
    assert (folder / "libggml-cuda.so").exists(), f"{folder} is a build without CUDA"
    return folder
