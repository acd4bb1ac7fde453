"""Wheels with the library inside: their variants, and what the packages for GPUs have and need."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pyorch import __version__, system
from pyorch.native import gpu_wheel, wheel

LINUX = wheel.TARGETS["linux-x86_64"]


@pytest.mark.parametrize("target", wheel.TARGETS.values(), ids=wheel.TARGETS)
def test_llama_cpp_has_the_variants(target: wheel.Target, unpacked: Callable[[str], Path]) -> None:
    text = (unpacked("ggml/src") / "CMakeLists.txt").read_text()
    known = re.findall(r"ggml_add_cpu_backend_variant\(([\w.]+)", text)
    assert len(known) > 5 and set(target.variants) <= set(known)


@pytest.mark.parametrize(
    ("backend", "stamp", "needs", "about"),
    [
        ("cuda", {"archs": ["80", "90"]}, ["nvidia-cublas<14,>=13.0"], "sm_80, sm_90"),
        ("vulkan", {}, [], "Vulkan"),
    ],
)
def test_what_a_package_has_and_needs(
    backend: str, stamp: dict[str, object], needs: list[str], about: str, tmp_path: Path
) -> None:
    libraries = [tmp_path / system.library(name) for name in ("ggml", f"ggml-{backend}")]
    for file in libraries:
        file.write_text(file.name)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "LICENSE").write_text("MIT")
    licenses, into = {"llama.cpp": tmp_path / "source"}, tmp_path / "dist"
    file = gpu_wheel.pack(backend, tmp_path / "p", libraries, licenses, stamp, LINUX.tag, into)
    module = f"sparq_cpp_{backend}"
    assert file.name == f"{module}-{__version__}-{LINUX.tag}.whl"
    with zipfile.ZipFile(file) as archive:
        has = {name: archive.read(name).decode() for name in archive.namelist()}
    texts = {name.split("/")[1]: text for name, text in has.items() if ".dist-info/" in name}
    lines = texts["METADATA"].splitlines()
    assert {f"Requires-Dist: {x}" for x in (f"sparq-cpp=={__version__}", *needs)} < set(lines)
    assert about in texts["METADATA"] and "Root-Is-Purelib: false" in texts["WHEEL"]
    assert has[f"{module}/libggml-{backend}.so"] == f"libggml-{backend}.so"
    assert json.loads(has[f"{module}/stamp.json"]) == stamp
    assert has[f"{module}/licenses/llama.cpp/LICENSE"] == "MIT"
