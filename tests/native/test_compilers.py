"""What compilers get wrong in llama.cpp's files is put right, in every kind of build."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes import write

from pyorch import paths
from pyorch.native import build, cmake, probe

HEADER = paths.data("ggml_ops") / "compilers" / "amx-config.h"
# the compiler that builds, and all others of these names that are here
NAMES = [f"{kind}-{i}" for kind in ("g++", "clang++") for i in range(11, 24)]
COMPILERS = [probe.need_compiler().cxx, *filter(shutil.which, NAMES)]

# As ggml_tile_config_init() of amx/mmq.cpp. `seen` gets the bytes that the instruction would read.
PROGRAM = """
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>

extern "C" { unsigned char seen[64]; }

struct tile_config_t {
    uint8_t palette_id = 0, start_row = 0, reserved_0[14] = {0};
    uint16_t colsb[16] = {0};
    uint8_t rows[16] = {0};
};

inline void init(void) {
    static thread_local bool done = false;
    if (done) return;
    alignas(64) tile_config_t tc = {};
    tc.palette_id = 1;
    tc.rows[0] = 8;  tc.colsb[0] = 64;
    tc.rows[1] = 8;  tc.colsb[1] = 64;
    tc.rows[2] = 16; tc.colsb[2] = 32;
    tc.rows[3] = 16; tc.colsb[3] = 32;
    tc.rows[4] = 16; tc.colsb[4] = 64;
    tc.rows[5] = 16; tc.colsb[5] = 64;
    tc.rows[6] = 16; tc.colsb[6] = 64;
    tc.rows[7] = 16; tc.colsb[7] = 64;
    _tile_loadconfig(&tc);
    done = true;
}

__attribute__((noinline)) void work(void) { init(); }

int main() {
    work();
    for (unsigned char byte : seen) printf("%d ", byte);
}
"""
COLUMNS = [64, 64, 32, 32, 64, 64, 64, 64]
EXPECTED = [1, *[0] * 15, *[b for n in COLUMNS for b in (n, 0)], *[0] * 16]
EXPECTED += [8, 8, *[16] * 6, *[0] * 8]
# in the place of ldtilecfg, which few CPUs have: a copy of its 64 bytes
COPY = r"leaq \1, %rsi\n leaq seen(%rip), %rdi\n movl $64, %ecx\n rep movsb\n"


def loaded(compiler: str, folder: Path, *more: str) -> list[int]:
    """The 64 bytes that `_tile_loadconfig` hands to the CPU."""
    (folder / "tile.cpp").write_text(PROGRAM)
    argv = [*shlex.split(compiler), "-O3", "-std=c++17", "-mamx-tile"]
    done = subprocess.run([*argv, *more, "-S", "tile.cpp", "-o", "tile.s"], cwd=folder,
                          capture_output=True, text=True)  # fmt: skip
    if "unrecognized" in done.stderr or "unknown argument" in done.stderr:
        pytest.skip(f"{compiler} does not know AMX")
    assert done.returncode == 0, done.stderr
    text, n = re.subn(r"ldtilecfg\s+(.*)\n", COPY, (folder / "tile.s").read_text())
    assert n == 1
    (folder / "copy.s").write_text(text)
    subprocess.run([*shlex.split(compiler), "copy.s", "-o", "copy"], cwd=folder, check=True)
    done = subprocess.run([folder / "copy"], capture_output=True, text=True, check=True)
    return [int(byte) for byte in done.stdout.split()]


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="AMX is of x86"
)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_whole_configuration_of_tiles_is_loaded(compiler: str, tmp_path: Path) -> None:
    """GCC 12 drops the stores of rows and columns; the first tile then ends in SIGILL."""
    assert loaded(compiler, tmp_path, "-include", str(HEADER)) == EXPECTED


@pytest.mark.parametrize("options", [build.Options(stock=stock) for stock in (False, True)])
@pytest.mark.parametrize("kind", ["native", "variants"])
def test_all_builds_compile_that_file_with_the_header(
    options: build.Options, kind: str, tmp_path: Path
) -> None:
    """And no other file. The variants are those of GGML_CPU_ALL_VARIANTS."""
    names = {"native": ["ggml-cpu"], "variants": ["ggml-cpu-x64", "ggml-cpu-sapphirerapids"]}[kind]
    src, ops = tmp_path / "src", tmp_path / "ops"
    project = 'cmake_minimum_required(VERSION 3.14...3.28)\nproject("llama.cpp" C CXX)\n'
    targets = [f"add_library({t} STATIC ggml-cpu/amx/mmq.cpp ggml-cpu/b.cpp)" for t in names]
    files = {
        "CMakeLists.txt": project + "add_subdirectory(ggml/src)\nadd_library(llama STATIC l.cpp)\n",
        "l.cpp": "",
        "ggml/src/CMakeLists.txt": "\n".join(["add_library(ggml-base STATIC b.c)", *targets]),
        "ggml/src/b.c": "",
        "ggml/src/ggml-cpu/amx/mmq.cpp": "",
        "ggml/src/ggml-cpu/b.cpp": "",
    }
    write(src, files)
    shutil.copytree(HEADER.parents[1], ops)
    chain = cmake.Toolchain(probe.need_compiler(), probe.Probe((), (), {}, True))
    argv = [cmake.tool("cmake"), "-G", "Ninja", "-S", str(src), "-B", "out"]
    argv += ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    argv += [f"-DCMAKE_MAKE_PROGRAM={cmake.tool('ninja')}"]
    argv += cmake._definitions(tmp_path, options, False, chain)
    subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True)
    lines = (tmp_path / "out" / "compile_commands.json").read_text().splitlines()
    commands = [line for line in lines if '"command"' in line]
    has = [line for line in commands if f"-include {ops}/compilers/amx-config.h" in line]
    assert len(has) == len(names) and all("amx/mmq.cpp" in line for line in has)
    assert len(commands) > len(has)
