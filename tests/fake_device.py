"""Builds fake_device.cpp: devices that are not there, for what places work on devices."""

from __future__ import annotations

import platform
import shlex
import subprocess
from pathlib import Path

import pytest

from pyorch import paths
from pyorch.native import probe, source


def build(folder: Path, lib_dir: Path) -> Path:
    """The library, for ggml_backend_load(), beside the libraries in `lib_dir`."""
    if platform.system() != "Linux":
        pytest.skip("builds an ELF library")
    pin = source.read_pin()
    where = source.locate(pin)
    if not where.path.exists():
        pytest.skip("the source of the build is no longer in the cache")
    source.unpack(where, f"{pin.folder}/ggml", folder / "ggml", skip=("cmake",))
    file, out = Path(__file__).with_suffix(".cpp"), folder / "fake.so"
    argv = [*shlex.split(probe.need_compiler().cxx), "-std=c++17", "-O1", "-shared", "-fPIC"]
    argv += ["-w", file]
    argv += [f"-I{folder}/ggml/include", f"-I{folder}/ggml/src", f"-I{paths.data('ggml_ops')}"]
    argv += [f"-L{lib_dir}", "-lggml-base", "-lggml-cpu", f"-Wl,-rpath,{lib_dir}", "-o", out]
    # our op is in no header of the pinned source: its number is that of GGML_OP_COUNT there
    argv += ["-DGGML_OP_SPARSE_ATTN=GGML_OP_COUNT"]
    subprocess.run(argv, check=True)
    return out
