"""The wheel with CUDA: what nvcc's compiler is asked, and what the package has and needs."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyorch import __version__, system
from pyorch.native import carried_cuda, cuda, cuda_wheel, probe, wheel

LINUX = wheel.TARGETS["linux-x86_64"]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that nvcc and cmake call, on a GCC and a Zig that print what they were asked."""
    folder = tmp_path / "it's a folder"
    for name in ("zig", "g++"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        (folder / name).chmod(0o755)
    zig = SimpleNamespace(root=folder, folder=folder, target=LINUX)
    gcc = probe.Compiler("gcc", f'"{folder / "g++"}" -m64', "GCC")
    return cuda_wheel._host(zig, gcc, folder / "tree")  # type: ignore[arg-type]


def asked(host: Path, *argv: str) -> list[str]:
    return subprocess.run([host, *argv], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )[:-1]


@pytest.mark.parametrize("does", ["-c", "-E"])
def test_gcc_compiles(host: Path, does: str) -> None:
    hidden = f"-ffile-prefix-map={host.parent / 'tree'}=."
    assert asked(host, does, "a file.cpp") == ["g++", "-m64", hidden, does, "a file.cpp"]


def test_zig_links_for_the_glibc_of_the_other_wheel(host: Path) -> None:
    argv = asked(host, "a.o", "-shared", "-o", "x.so")
    assert argv[:4] == ["zig", "cc", "-target", LINUX.zig]
    # of GCC's library, which comes last, nobody outside sees anything
    exports = f"-Wl,-z,defs,--gc-sections,--version-script={host.parent / 'exports.map'}"
    assert argv[4:9] == ["a.o", "-shared", "-o", "x.so", exports]
    assert argv[-3:] == [
        "-print-file-name=libstdc++.a",
        str(host.parent / "older-glibc.c"),
        "-lunwind",
    ]
    assert (host.parent / "exports.map").read_text() == "{ global: ggml_*; local: *; };\n"
    assert exports not in asked(host, "a.o", "-o", "program")


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


def test_its_architectures_are_those_that_a_build_may_name() -> None:
    assert set(cuda_wheel.ARCHS) < set(cuda.ARCHS)
    assert all(carried_cuda._runs(arch, arch) for arch in cuda_wheel.ARCHS)


@pytest.mark.parametrize(("release", "why"), [("12.9", "nvcc is of 12.9"), ("", "no nvcc on PATH")])
def test_another_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, why: str
) -> None:
    found = cuda.Toolkit("nvcc", release, (), (), {}) if release else None
    monkeypatch.setattr(cuda, "toolkit", lambda compiler: (found, "" if found else why))
    monkeypatch.setattr(sys, "argv", ["cuda_wheel", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"error: CUDA 13 cannot be used: {why}\nhint: "):
        cuda_wheel.main()
    assert not list(tmp_path.iterdir())
