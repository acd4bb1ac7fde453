"""Our CUDA sources compiled alone, and called by the op tests in place of the CPU op.

The C++ compiler compiles them on host/cuda_emu.h, which runs the kernels as they are on the CPU,
and stops at a race or at undefined behaviour.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from ctypes import POINTER, c_int, c_size_t, c_void_p
from pathlib import Path

from ggml_ctypes import Ggml

HERE = Path(__file__).parent
OPS = HERE.parents[1] / "ggml_ops"
SOURCES = (OPS / "cuda" / "sparse-attn.cu", HERE / "host" / "main.cpp")
NAME = "sparq-cuda.so"
CHECKS = "thread,alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero"
# as the build of ggml-cuda has it
NVCC_FLAGS = ["-std=c++17", "-use_fast_math", "-extended-lambda"]


def include_flags(headers: Path, kernels: Path = OPS / "cuda") -> list[str]:
    """headers: folder `ggml` of the source."""
    folders = [HERE / "host", OPS, kernels, headers / "include", headers / "src"]
    return [f"-I{folder}" for folder in folders]


def build_host(headers: Path, folder: Path, kernels: Path = OPS / "cuda") -> None:
    objects = [folder / "kernels.o", folder / "main.o"]
    compile_host(kernels / SOURCES[0].name, objects[0], include_flags(headers, kernels))
    compile_host(SOURCES[1], objects[1], include_flags(headers, kernels), checked=False)
    link_host(headers, [*objects, "-shared"], folder / NAME)


def compile_host(source: Path, out: Path, includes: list[str], checked: bool = True) -> None:
    # kernels read bytes as vectors; the emulator jumps between stacks
    argv = [_host(), "-std=gnu++17", "-O2", "-w", "-fno-strict-aliasing", "-fPIC"]
    argv += ["-U_FORTIFY_SOURCE", *includes]
    if checked:
        argv += [f"-fsanitize={CHECKS}", "-fno-sanitize-recover", "-fno-threadsafe-statics"]
    subprocess.run([*argv, "-x", "c++", "-c", source, "-o", out], check=True)


def link_host(headers: Path, parts: list[Path | str], out: Path) -> None:
    """With what finds races in place of the compiler's own library."""
    races = out.with_name("races.o")
    compile_host(HERE / "host" / "races.cpp", races, include_flags(headers), checked=False)
    subprocess.run([_host(), *parts, races, "-lubsan", "-o", out], check=True)


def _host() -> str:
    return shutil.which("g++") or "c++"


class CudaGgml(Ggml):
    """Ggml whose graphs run on our CUDA kernels.

    cc: compute capability as ggml numbers it.
    n_sm: multiprocessors to plan for; 0: four.
    fuse: run SCORE_SELECT and ATTEND of a layer in one launch, where that is possible.
    """

    same_bits = False

    def __init__(self, lib_dir: Path, library: Path, cc: int = 900) -> None:
        super().__init__(lib_dir)
        self.lib = ctypes.CDLL(str(library))
        self.run = self.lib.sparq_cuda_compute
        self.run.argtypes = [c_void_p, *[c_int] * 5, POINTER(c_size_t)]
        self.cc, self.n_sm, self.fuse = cc, 0, True
        self.n_fused = 0  # layers that were one launch
        self.scratch = 0  # bytes, of the node that needed the most

    def threads(self, *numbers: int) -> tuple[int, ...]:
        return (1, 2)  # both orders

    def compute(self, graph: c_void_p, nodes: list, n_threads: int) -> None:
        """n_threads 2, which is what most tests ask for: the emulator runs backwards."""
        i = 0
        while i < len(nodes):
            scratch = c_size_t()
            n_done = self.run(graph, i, self.fuse, self.cc, self.n_sm, n_threads == 2, scratch)
            if n_done == 0:
                raise NotImplementedError(f"sub-operation {nodes[i].contents.op_params[0]}")
            self.scratch = max(self.scratch, scratch.value)
            self.n_fused += n_done > 1
            i += n_done


def why_no_host() -> str:
    """Why the emulator can not run here; empty: it can."""
    if not shutil.which("g++") and not shutil.which("c++"):
        return "no C++ compiler"
    return "" if os.uname().sysname == "Linux" else "the emulator of CUDA needs Linux"
