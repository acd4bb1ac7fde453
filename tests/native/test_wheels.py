"""Wheels with the library inside: their variants, and what the package with CUDA has and needs."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pyorch import __version__, system
from pyorch.native import cuda_wheel, wheel

LINUX = wheel.TARGETS["linux-x86_64"]


@pytest.mark.parametrize("target", wheel.TARGETS.values(), ids=wheel.TARGETS)
def test_llama_cpp_has_the_variants(target: wheel.Target, unpacked: Callable[[str], Path]) -> None:
    text = (unpacked("ggml/src") / "CMakeLists.txt").read_text()
    known = re.findall(r"ggml_add_cpu_backend_variant\(([\w.]+)", text)
    assert len(known) > 5 and set(target.variants) <= set(known)


def test_what_the_package_has_and_needs(tmp_path: Path) -> None:
    libraries = [tmp_path / system.library(name) for name in ("ggml", "ggml-cuda")]
    for file in libraries:
        file.write_text(file.name)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "LICENSE").write_text("MIT")
    stamp = {"archs": ["80", "90"]}
    licenses = {"llama.cpp": tmp_path / "source"}
    file = cuda_wheel.pack(tmp_path / "p", libraries, licenses, stamp, LINUX.tag, tmp_path / "dist")
    assert file.name == f"sparq_cpp_cuda-{__version__}-{LINUX.tag}.whl"
    with zipfile.ZipFile(file) as archive:
        has = {name: archive.read(name).decode() for name in archive.namelist()}
    about = {name.split("/")[1]: text for name, text in has.items() if ".dist-info/" in name}
    assert {
        "Requires-Dist: " + of for of in (f"sparq-cpp=={__version__}", "nvidia-cublas<14,>=13.0")
    } < set(about["METADATA"].splitlines())
    assert "sm_80, sm_90" in about["METADATA"] and "Root-Is-Purelib: false" in about["WHEEL"]
    assert has["sparq_cpp_cuda/libggml-cuda.so"] == "libggml-cuda.so"
    assert json.loads(has["sparq_cpp_cuda/stamp.json"]) == stamp
    assert has["sparq_cpp_cuda/licenses/llama.cpp/LICENSE"] == "MIT"
