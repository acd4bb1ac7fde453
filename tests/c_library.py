"""Shared libraries out of a few lines of C or C++: what tests preload into programs."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from pyorch.native import probe


def compiled(code: str | Path, out: Path, *flags: str) -> Path:
    """`out`, made of C code, or of a file of C or C++."""
    source = code if isinstance(code, Path) else out.with_suffix(".c")
    if isinstance(code, str):
        source.write_text(code)
    compiler = probe.need_compiler()
    tool = compiler.cxx if source.suffix == ".cpp" else compiler.cc
    argv = [*shlex.split(tool), "-shared", "-fPIC", str(source), "-o", str(out), *flags]
    subprocess.run(argv, check=True)
    return out
