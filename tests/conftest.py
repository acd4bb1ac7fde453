"""What all tests share: the built library, its Python bindings, the demo model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from pyorch import native, paths
from pyorch.native import source


@pytest.fixture(scope="session")
def native_lib_dir() -> Path:
    """Folder of the patched library, built if need be."""
    return native.lib_dir()


@pytest.fixture(scope="session")
def llama_cpp() -> ModuleType:
    """The Python bindings on the patched library."""
    return native.load()


@pytest.fixture(scope="session")
def ggml_headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder `ggml` of the source that the library is built from."""
    pin = source.read_pin()
    where = source.locate(pin)
    if not where.path.exists():
        pytest.skip("the source of the build is no longer in the cache")
    into = tmp_path_factory.mktemp("ggml")
    source.unpack(where, f"{pin.folder}/ggml", into, skip=("cmake",))
    return into


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small model that is in the repository."""
    files = sorted((paths.data("models") / "demo").glob("*.gguf"))
    assert files, "models/demo holds no .gguf file"
    return files[0]
