"""The CUDA sources compile for every architecture we name, and the hot kernels spill nothing.

Needs nvcc; a GPU is not needed.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import cuda_lib
import pytest

from pyorch.native import cuda

QUICK = "sm_90"
ARCHS = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]

# registers of a multiprocessor (by sm_75 and later), threads of a block: what the launches ask for
N_REGISTER, MAX_STATIC_SHARED = 65536, 48 * 1024


@pytest.fixture(scope="module", autouse=True)
def usable() -> None:
    """A compiler that our own build would use."""
    if not cuda.find_nvcc() or cuda.release(cuda.find_nvcc()).partition(".")[0] != "13":
        pytest.skip("no nvcc 13, of which the limits on spills are")


@dataclass(frozen=True)
class Resources:
    """Of one kernel: registers per thread; bytes per block, per thread, and stored by spills."""

    registers: int
    shared: int
    stack: int
    spilled: int


def parse_report(text: str) -> dict[str, Resources]:
    """ptxas -v, by the kernel's name and template arguments, as in `attend<4,1,1,128>`."""
    kernels = {}
    for part in re.split(r"Compiling entry function '", text)[1:]:
        mangled = part.partition("'")[0]
        stack, stores, loads = (
            int(re.search(rf"(\d+) bytes {what}", part)[1])
            for what in ("stack frame", "spill stores", "spill loads")
        )
        shared = re.search(r"(\d+) bytes smem", part)
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        kernels[kernel_name(mangled)] = Resources(
            registers, int(shared[1]) if shared else 0, stack, stores + loads
        )
    return kernels


def kernel_name(mangled: str) -> str:
    """Of a mangled function of our namespace, with whole numbers among its template arguments."""
    length, rest = re.search(r"sparse_cuda(\d+)(.*)", mangled).groups()
    name, rest = rest[: int(length)], rest[int(length) :]
    numbers = re.match(r"I((?:Li(?:n?\d+)E)+)E", rest)
    if not numbers:
        return name
    return f"{name}<{','.join(re.findall(r'Li(n?[0-9]+)E', numbers[1])).replace('n', '-')}>"


# Bytes that kernels of these names may spill and load again, which is what nvcc 13.0 makes of them
# for Hopper. A layer has few registers, so that 2 or 3 blocks fit on a multiprocessor; few use the
# shadows of 8 and 16 bits.
SPILLS = {"layer<4,1,1>": 184, "layer<4,1,-1>": 168, "layer<4,4,1>": 48, "layer<4,4,-1>": 304}
SPILLS |= {"layer<8,1,": 32, "layer<8,4,": 2336, "layer<16,1,": 128, "layer<16,4,": 1324}
SPILLS |= {"score<8,1": 16, "score<16,1": 16}
# and what nvcc 13.0 makes of these scans for Blackwell
MORE = {("sm_100", "score<8,1"): 24, ("sm_120", "score<16,1"): 32}


def is_hot(name: str) -> bool:
    """The kernels of a decoded token with K and V in f16: not exact scores, not other types."""
    cold = ("seal", "visible", "score<0", "sum_runs", *SPILLS)
    return not name.startswith(cold) and ",-1,-1," not in name


def compile_for(arch: str, headers: Path, folder: Path) -> dict[str, Resources]:
    argv = ["nvcc", *cuda_lib.NVCC_FLAGS, f"-arch={arch}", "-Xptxas=-v", "-cubin"]
    argv += [*cuda_lib.include_flags(headers), str(cuda_lib.SOURCES[0]), "-o", str(folder / arch)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr, done.stderr
    return parse_report(done.stderr)


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[] if a == QUICK else pytest.mark.slow) for a in ARCHS]
)
def test_hot_kernels_spill_nothing(arch: str, ggml_headers: Path, tmp_path: Path) -> None:
    kernels = compile_for(arch, ggml_headers, tmp_path)
    hot = {name: r for name, r in kernels.items() if is_hot(name)}
    assert {"select<1024,8>", "merge", "attend<4,1,1,128>", "score<4,1,-1,128>"} <= set(hot)
    for name, r in hot.items():
        assert (r.stack, r.spilled) == (0, 0), f"{name}: {r}"
    for prefix, most in SPILLS.items():
        spills = {name: r.spilled for name, r in kernels.items() if name.startswith(prefix)}
        assert spills and max(spills.values()) <= MORE.get((arch, prefix), most), spills
    for name, r in kernels.items():
        n_thread = 1024 if name.startswith("select<1024") else 256
        assert r.registers * n_thread <= N_REGISTER, f"{name}: {r}"
        assert r.shared <= MAX_STATIC_SHARED, f"{name}: {r}"


@pytest.mark.parametrize("waits", [True, False])
def test_launches_overlap_only_where_kernels_wait(
    waits: bool, ggml_headers: Path, tmp_path: Path
) -> None:
    """With old versions of MSVC and CUDA ggml_cuda_pdl_sync() is empty."""
    undefine = "" if waits else "#undef GGML_CUDA_USE_PDL\n"
    source = tmp_path / "x.cu"
    source.write_text(f'#include "common.cuh"\n{undefine}#include "sparse-device.cuh"\n')
    argv = ["nvcc", "-E", *cuda_lib.include_flags(ggml_headers), str(source)]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    (body,) = re.findall(r"^void launch_cluster\(.*?^}", text, re.MULTILINE | re.DOTALL)
    assert ("GGML_CUDA_PDL" in body) == waits
