"""Every pin in patches/UPSTREAM is built and passes the gate; and our sources have one way in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyorch import paths
from pyorch.native import cmake, source

OTHERS = [pin.version for pin in source.pins()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHERS)
def test_another_pin_passes_the_gate(version: str) -> None:
    """Downloads it, builds it with the series and without, and compares the two."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    argv.append("tests/e2e/test_gate.py")
    env = {**os.environ, "SPARQ_LLAMA_PIN": version}
    done = subprocess.run(argv, cwd=paths.REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_sources_are_attached_once(tmp_path: Path) -> None:
    attach = paths.data("ggml_ops") / "attach.cmake"
    top = f'cmake_minimum_required(VERSION 3.19)\nproject("llama.cpp" NONE)\ninclude("{attach}")\n'
    (tmp_path / "CMakeLists.txt").write_text(top)
    argv = [cmake.tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={cmake.tool('ninja')}"]
    argv += [f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={attach}", "-S", ".", "-B", "out"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "is included twice" in done.stderr, done.stdout + done.stderr
