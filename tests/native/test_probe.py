"""What the machine can do is found out by doing it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from fakes import write

from pyorch.errors import SparqError
from pyorch.native import probe

REAL = probe.need_compiler()
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 instruction sets")


def wrapped(folder: Path, line: str) -> probe.Compiler:
    """The real compilers behind a line of shell that may change or refuse their arguments."""
    commands = []
    for name, real in (("cc", REAL.cc), ("c++", REAL.cxx)):
        write(folder, {name: f'#!/bin/sh\n{line}\nexec {real} "$@"\n'})
        commands.append(str(folder / name))
    return probe.Compiler(commands[0], commands[1], "wrapped")


@x86
def test_an_instruction_set_that_the_cpu_lacks_is_switched_off(tmp_path: Path) -> None:
    """The compiler is told that this is a Sapphire Rapids: AMX and all of AVX-512."""
    line = "for a; do shift; "
    line += '[ "$a" = -march=native ] && a=-march=sapphirerapids; set -- "$@" "$a"; done'
    cpu = probe.probe(wrapped(tmp_path, line), native=True)
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    for name, flag in (("avx2", "avx2"), ("avx512", "avx512f"), ("amx", "amx_tile")):
        assert (name in cpu.isa) != (name in cpu.off)
        if f" {flag}" not in info:
            assert "executing it fails" in cpu.off[name]
    if "amx" in cpu.off:
        assert {"-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"} <= set(cpu.flags)


@x86
def test_an_instruction_that_kills_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AMX does on some cloud machines: reported, and fatal."""
    fatal = ("bad", "__x86_64__", ["-mno-bad"], "__builtin_trap();")
    refused = ("no", "__x86_64__", ["-mno-no"], "return 1;")
    unknown = ("unknown", "__NO_SUCH_MACRO__", ["-mno-unknown"], "does not compile")
    monkeypatch.setattr(probe, "_X86", (*probe._X86[:1], fatal, refused, unknown))
    cpu = probe.probe(REAL, native=True)
    assert "was ended by SIGILL" in cpu.off["bad"] and "kernel refuses" in cpu.off["no"]
    assert {"-mno-bad", "-mno-no"} <= set(cpu.flags)
    assert "unknown" not in cpu.off and "unknown" not in cpu.isa
    assert not probe.probe(REAL, native=False).isa


def test_no_openmp(tmp_path: Path) -> None:
    line = 'for a; do [ "$a" = -fopenmp ] && { echo "error: unsupported" >&2; exit 1; }; done'
    cpu = probe.probe(wrapped(tmp_path, line), native=False)
    assert not cpu.openmp and "openmp" in cpu.off


@pytest.mark.parametrize("line", ['echo "error: no string_view" >&2; exit 1', "exit 1"])
def test_compiler_that_does_not_work(tmp_path: Path, line: str) -> None:
    with pytest.raises(SparqError, match="no string_view|no message"):
        probe.probe(wrapped(tmp_path, line), native=False)
