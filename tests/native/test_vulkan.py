"""Building with Vulkan: what is missing, and that all commands use it from then on."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import write

from pyorch import native
from pyorch.errors import SparqError
from pyorch.native import build, cmake, vulkan

WITH_VULKAN = build.Options(vulkan=True)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (fake := tmp_path / "cmake").write_text("#!/bin/sh\necho missing SPIRV-Headers_DIR >&2\n")
    fake.chmod(0o755)
    assert vulkan.devices(str(fake), "ninja") == ([], "missing: spirv-headers")


def test_build(world: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cmake, "vulkan_devices", lambda: ([], "no glslc"))
    with pytest.raises(SparqError, match="no glslc"):
        build.build(WITH_VULKAN)
    monkeypatch.setattr(cmake, "vulkan_devices", lambda: ([], ""))
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
