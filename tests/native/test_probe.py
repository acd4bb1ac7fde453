"""What the machine can do is found out by doing it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from pyorch.errors import SparqError
from pyorch.native import probe

REAL = probe.need_compiler()
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 instruction sets")


def wrapped(folder: Path, line: str) -> probe.Compiler:
    """The real compilers behind a line of shell that may change or refuse their arguments."""
    commands = []
    for name, real in (("cc", REAL.cc), ("c++", REAL.cxx)):
        file = folder / name
        file.write_text(f'#!/bin/sh\n{line}\nexec {real} "$@"\n')
        file.chmod(0o755)
        commands.append(str(file))
    return probe.Compiler(commands[0], commands[1], "wrapped")


@x86
def test_an_instruction_set_that_the_cpu_lacks_is_switched_off(tmp_path: Path) -> None:
    """The compiler is told that this is a Sapphire Rapids: AMX and all of AVX-512."""
    line = "for a; do shift; "
    line += '[ "$a" = -march=native ] && a=-march=sapphirerapids; set -- "$@" "$a"; done'
    found = probe.probe(wrapped(tmp_path, line), native=True)
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    for name, flag in (("avx2", "avx2"), ("avx512", "avx512f"), ("amx", "amx_tile")):
        assert (name in found.isa) != (name in found.off)
        if f" {flag}" not in info:
            assert "executing it fails" in found.off[name]
    if "amx" in found.off:
        assert {"-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"} <= set(found.flags)


@x86
def test_an_instruction_that_kills_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AMX does on some cloud machines: reported, and fatal."""
    fatal = ("bad", "__x86_64__", ["-mno-bad"], "__builtin_trap();")
    refused = ("no", "__x86_64__", ["-mno-no"], "return 1;")
    unknown = ("unknown", "__NO_SUCH_MACRO__", ["-mno-unknown"], "does not compile")
    monkeypatch.setattr(probe, "_X86", (*probe._X86[:1], fatal, refused, unknown))
    found = probe.probe(REAL, native=True)
    assert "was ended by SIGILL" in found.off["bad"] and "kernel refuses" in found.off["no"]
    assert {"-mno-bad", "-mno-no"} <= set(found.flags)
    assert "unknown" not in found.off and "unknown" not in found.isa
    assert not probe.probe(REAL, native=False).isa


def test_no_openmp(tmp_path: Path) -> None:
    line = 'for a; do [ "$a" = -fopenmp ] && { echo "error: unsupported" >&2; exit 1; }; done'
    found = probe.probe(wrapped(tmp_path, line), native=False)
    assert not found.openmp and "openmp" in found.off


@pytest.mark.parametrize("line", ['echo "error: no string_view" >&2; exit 1', "exit 1"])
def test_compiler_that_does_not_work(tmp_path: Path, line: str) -> None:
    with pytest.raises(SparqError, match="no string_view|no message"):
        probe.probe(wrapped(tmp_path, line), native=False)
