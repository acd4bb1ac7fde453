"""Our CUDA sources compiled alone, and called by the op tests in place of the CPU op.

`host`: by the C++ compiler on host/cuda_emu.h, which runs the kernels as they are on the CPU.
`gpu`: by nvcc; the memory of a graph is copied to the device for each node, and back.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from ctypes import POINTER, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path

import numpy as np
from ggml_ctypes import Buffer, Ggml

HERE = Path(__file__).parent
OPS = HERE.parents[1] / "ggml_ops"
SOURCES = (OPS / "cuda" / "sparse-attn.cu", HERE / "host" / "main.cpp")
NAME = "sparq-cuda.so"
# as the build of ggml-cuda has it
NVCC_FLAGS = ["-std=c++17", "-use_fast_math", "-extended-lambda"]


def include_flags(headers: Path) -> list[str]:
    """headers: folder `ggml` of the source."""
    folders = [HERE / "host", OPS, OPS / "cuda", headers / "include", headers / "src"]
    return [f"-I{folder}" for folder in folders]


def host_compiler() -> list[str]:
    # kernels read bytes as vectors; the emulator jumps between stacks
    flags = ["-std=gnu++17", "-O2", "-g1", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
    return [shutil.which("g++") or "c++", *flags]


def build_host(headers: Path, folder: Path) -> None:
    out = folder / NAME
    argv = [*host_compiler(), "-fPIC", "-shared", "-x", "c++", *include_flags(headers)]
    subprocess.run([*argv, *map(str, SOURCES), "-o", str(out)], check=True)


def build_gpu(headers: Path, folder: Path) -> None:
    out = folder / NAME
    argv = ["nvcc", *NVCC_FLAGS, "-arch=native", "-O3", "-x", "cu", "-shared", "-Xcompiler=-fPIC"]
    subprocess.run([*argv, *include_flags(headers), *map(str, SOURCES), "-o", str(out)], check=True)


class CudaGgml(Ggml):
    """Ggml whose graphs run on our CUDA kernels.

    cc: compute capability as ggml numbers it.
    n_sm: multiprocessors to plan for; 0: four on the host, on a GPU those it has.
    fuse: run SCORE_SELECT and ATTEND of a layer in one launch, where that is possible.
    """

    same_bits = False

    def __init__(self, lib_dir: Path, library: Path, cc: int = 900) -> None:
        super().__init__(lib_dir)
        self.lib = ctypes.CDLL(str(library))
        self.run = self.lib.sparq_cuda_compute
        ints = [c_int] * 5
        self.run.argtypes = [c_void_p, *ints, POINTER(c_size_t), c_void_p, c_int]
        self.cc, self.n_sm, self.fuse = cc, 0, True
        self.n_fused = 0  # layers that were one launch
        self.scratch = 0  # bytes, of the node that needed the most
        self.held: list[Buffer] = []  # memory of the graph

    def graph(self):
        self.held = []
        self.current = super().graph()
        return self.current

    def buffer(self, size: int, fill: int) -> Buffer:
        self.held.append(super().buffer(size, fill))
        return self.held[-1]

    def compute(self, graph: c_void_p, nodes: list, n_threads: int) -> None:
        """n_threads 2, which is what most tests ask for: the emulator runs backwards."""
        arrays = [b.raw for b in self.held] + self.current.lazies
        table = np.array([[a.ctypes.data, a.nbytes] for a in arrays], np.uint64)
        pointer = table.ctypes.data_as(POINTER(c_uint64))
        i = 0
        while i < len(nodes):
            scratch = c_size_t()
            sizes = (self.fuse, self.cc, self.n_sm, n_threads == 2, scratch, pointer, len(table))
            n_done = self.run(graph, i, *sizes)
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


def why_no_gpu() -> str:
    """Why the kernels can not run on a GPU here; empty: they can."""
    if not shutil.which("nvcc"):
        return "no nvcc"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver"
    count = c_int()
    has_driver = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return "" if has_driver and count.value else "no CUDA device"
