"""Fixtures of the tests on a device: the op tests' own, and a build with CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "ops"), str(HERE.parent / "e2e")]


@pytest.fixture(scope="session")
def cuda_lib_dir(native_lib_dir: Path) -> Path:
    """The library in use, which must be one with CUDA."""
    assert (native_lib_dir / "libggml-cuda.so").exists(), f"{native_lib_dir} is without CUDA"
    return native_lib_dir
