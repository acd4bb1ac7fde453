"""Wheels with the library inside: what the maker asks of llama.cpp's build, and of the compiler."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyorch.native import wheel


@pytest.mark.parametrize("target", wheel.TARGETS.values(), ids=wheel.TARGETS)
def test_llama_cpp_has_the_variants(target: wheel.Target, unpacked: Callable[[str], Path]) -> None:
    text = (unpacked("ggml/src") / "CMakeLists.txt").read_text()
    known = re.findall(r"ggml_add_cpu_backend_variant\(([\w.]+)", text)
    assert len(known) > 5 and set(target.variants) <= set(known)
    windows = target.system is wheel.WINDOWS  # which calls it so
    assert target.tag.endswith("win_amd64" if windows else target.processor)
    assert target.zig.split("-")[0] == target.processor.replace("arm64", "aarch64")


@pytest.fixture(params=["macos-arm64"])
def compilers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder of the compilers of a wheel, on a Zig that prints what it was asked."""
    tmp_path = tmp_path / "it's a folder"
    (folder := tmp_path / "zig").mkdir(parents=True)
    (folder / "zig").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "zig").chmod(0o755)
    monkeypatch.setitem(sys.modules, "ziglang", SimpleNamespace(__file__=str(folder / "x.py")))
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    wheel.Zig(wheel.TARGETS[request.param], tmp_path).toolchain(tmp_path, {})
    return tmp_path


def asked(compiler: Path, *argv: str) -> list[str]:
    """What Zig is to do, without the target and the folders that it is not to name."""
    done = subprocess.run([compiler, *argv], capture_output=True, text=True, check=True)
    driver, option, target, *rest = done.stdout.splitlines()
    assert option == "-target" and target in ("aarch64-macos.11.0", "x86_64-windows-gnu")
    hidden = [f"-ffile-prefix-map={compiler.parent}{of}" for of in ("=.", "/zig=zig")]
    assert rest[:2] == hidden
    return [driver, *rest[2:]]


@pytest.mark.parametrize(
    ("cmake", "zig"),
    [
        ("armv8-a", "generic+v8a"),
        ("armv8.2-a+dotprod+fp16", "generic+v8_2a+dotprod+fullfp16"),
        ("armv8.6-a+dotprod+fp16+sve+i8mm", "generic+v8_6a+dotprod+fullfp16+sve+i8mm"),
    ],
)
def test_instruction_sets_of_arm_have_the_names_of_zig(
    compilers: Path, cmake: str, zig: str
) -> None:
    argv = [f"-march={cmake}", "-c", "a file.c"]
    assert asked(compilers / "cc", *argv) == ["cc", f"-mcpu={zig}", "-c", "a file.c"]
    assert asked(compilers / "c++", *argv) == ["c++", f"-mcpu={zig}", "-c", "a file.c"]


def test_all_that_is_linked_shares_one_c_plus_plus_library(compilers: Path) -> None:
    library = str(compilers / "libc++.dylib")
    assert asked(compilers / "c++", "x.o", "-bundle") == ["cc", "x.o", "-dynamiclib", library]
    assert asked(compilers / "cc", "x.o", "-dynamiclib") == ["cc", "x.o", "-dynamiclib"]


@pytest.mark.parametrize("compilers", ["windows-x86_64"], indirect=True)
def test_libraries_of_windows_do_not_export_what_zig_links_into_each(compilers: Path) -> None:
    linked = [str(compilers / name) for name in ("libc++.dll.a", "hidden.o")]
    assert asked(compilers / "c++", "x.o", "-shared") == ["cc", "x.o", "-shared", *linked]
    assert " -exclude-symbols:atexit," in (compilers / "hidden.s").read_text()
