from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fakes

from pyorch import paths
from pyorch.native import cmake, probe, smoke

ENVIRONMENT = ("CFLAGS", "CXXFLAGS", "LDFLAGS", "CC", "CXX", "SPARQ_CUDA", "SPARQ_VULKAN")
ENVIRONMENT += ("CUDAFLAGS", "SPARQ_LIBRARY")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a build takes milliseconds (see fakes.py)."""
    replaced = ((paths, "data"), (cmake, "tool"), (probe, "probe"), (smoke, "fault"))
    for module, name in replaced:
        monkeypatch.setattr(module, name, getattr(module, name))  # to be restored
    for name in ("SPARQ_CACHE", "SPARQ_LLAMA_SOURCE"):
        monkeypatch.setenv(name, "")
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert "FAKE_NINJA" not in os.environ
    fakes.world(tmp_path)
    fakes.use(tmp_path)
    return tmp_path
