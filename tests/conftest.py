"""What all tests share: the built library, its Python bindings, the demo model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from pyorch import native, paths


@pytest.fixture(scope="session")
def native_lib_dir() -> Path:
    """Folder of the patched library, built if need be."""
    return native.lib_dir()


@pytest.fixture(scope="session")
def llama_cpp() -> ModuleType:
    """The Python bindings on the patched library."""
    return native.load()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small model that is in the repository."""
    files = sorted((paths.data("models") / "demo").glob("*.gguf"))
    assert files, "models/demo holds no .gguf file"
    return files[0]
