"""Building with Vulkan: what is missing, and that all commands use it from then on."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import write

from pyorch import native
from pyorch.errors import SparqError
from pyorch.native import build, cmake, vulkan

WITH_VULKAN = build.Options(vulkan=True)


@pytest.mark.parametrize(
    ("glslc", "version", "why"),
    [
        ("/bin/glslc", "0309", ""),
        ("Vulkan_GLSLC_EXECUTABLE-NOTFOUND", "0309", "missing: glslc"),
        ("/bin/glslc", "0239", "1.3.239"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, glslc: str, version: str, why: str) -> None:
    found = f"Vulkan_INCLUDE_DIR /i\nVulkan_LIBRARY /l\nSPIRV-Headers_DIR /s\nversion {version}"
    text = f"#!/bin/sh\necho '{found}\nVulkan_GLSLC_EXECUTABLE {glslc}' >&2\n"
    (fake := tmp_path / "cmake").write_text(text)
    fake.chmod(0o755)
    assert why in (said := vulkan.parts(str(fake), "ninja")[1]) and bool(said) == bool(why)


def test_build(world: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cmake, "vulkan_parts", lambda: ({}, "no glslc"))
    with pytest.raises(SparqError, match="no glslc"):
        build.build(WITH_VULKAN)
    monkeypatch.setattr(cmake, "vulkan_parts", lambda: ({}, ""))
    plain = native.built()
    monkeypatch.setenv("FAKE_CMAKE", f'echo "$@" > {world}/cmake.args')
    folder = Path(run("build", "--vulkan").out.strip())
    assert "-DGGML_VULKAN=ON" in (world / "cmake.args").read_text()
    assert native.find() == folder != plain and build.backends(folder) == ["vulkan"]
    assert folder in build.used()
    assert run("build", "--vulkan", "--cuda", "90").code == 2

    write(world, {"ggml_ops/cpu/op.cpp": "edited"})
    assert native.find() is None and build.usual() == WITH_VULKAN
    monkeypatch.setenv("SPARQ_VULKAN", "0")
    assert build.usual() == build.Options()
