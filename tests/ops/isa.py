"""Our op compiled alone, for another instruction set or for a sanitizer, and called by the tests.

The sources of the op need ggml headers only. For a CPU of this machine's kind it becomes a
shared library; for arm64 a program that an emulator runs: tensors and buffers then live in a file
that both processes map at one address.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import weakref
from ctypes import c_int, c_long, c_size_t, c_void_p
from pathlib import Path

import numpy as np
from ggml_ctypes import CONTEXT, UNWRITTEN, Buffer, Ggml

from pyorch.native.prototypes import declare

HERE = Path(__file__).parent
OPS = HERE.parents[1] / "ggml_ops"

# stretches of positions so short that even small prompts have some
_PARTS = ["-DSPARQ_STRETCH=128"]
# name: prefix of the compilers, flags, emulator. The other files of this folder test the kernels as
# they are built for this machine
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVXVNNI = ["-mavxvnni"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
TARGETS = {
    "scalar": ("", ["-DSPARQ_SCALAR", "-DSPARQ_SCALAR_FAST", *_PARTS], ""),
    "avx2": ("", _AVX2, ""),
    "avx2-vnni": ("", [*_AVX2, *_AVXVNNI], ""),
    "avx512-without-vnni": ("", [*_AVX2, *_AVX512], ""),
    "avx512-without-bf16": ("", [*_AVX2, *_AVX512, "-mavx512vnni"], ""),
    "neon": ("aarch64-linux-gnu-", [], "qemu-aarch64"),
    "neon-dotprod": ("aarch64-linux-gnu-", ["-march=armv8.2-a+dotprod"], "qemu-aarch64"),
    "neon-i8mm": ("aarch64-linux-gnu-", ["-march=armv8.2-a+i8mm"], "qemu-aarch64"),
    "neon-bf16": ("aarch64-linux-gnu-", ["-march=armv8.2-a+dotprod+bf16"], "qemu-aarch64"),
}
FAST = ("scalar", "avx2-vnni", "avx512-without-bf16", "neon-dotprod", "neon-bf16")  # prompt=fast
# tests/ops/test_sanitize.py loads their runtime into Python; every access is seen in scalar code,
# with vectors not those under a mask
_UB = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
SANITIZED = {
    "address": ("", ["-march=native", *_PARTS, *_UB], ""),
    "address-scalar": ("", ["-DSPARQ_SCALAR", "-DSPARQ_SCALAR_FAST", *_PARTS, *_UB], ""),
    "thread": ("", ["-march=native", *_PARTS, "-fsanitize=thread"], ""),
}
# the thread sanitizer's calls at each access, to functions that count: see test_partition.py
COUNTED = {"count": ("", ["-DSPARQ_SCALAR", "-fsanitize=thread"], "")}


def why_not(target: str) -> str:
    """Why this machine can not run the target; empty: it can."""
    prefix, flags, emulator = TARGETS[target]
    for tool in (f"{prefix}gcc", f"{prefix}g++", emulator):
        if tool and not shutil.which(tool):
            return f"no {tool}"
    probe = [f"{prefix}g++", *flags, "-E", "-x", "c++", os.devnull]
    if subprocess.run(probe, capture_output=True).returncode:
        return f"{probe[0]} is too old"
    info = Path("/proc/cpuinfo")
    has = {x.replace("_", "") for x in info.read_text().split()} if info.exists() else set()
    needs = [
        f.removeprefix("-m") for f in flags if f in (*_AVX2, *_AVX512, "-mavx512vnni", *_AVXVNNI)
    ]
    lacks = [f for f in needs if f not in has]
    return f"no {lacks[0]}" if lacks else ""


class IsaGgml(Ggml):
    """Ggml whose graphs run on kernels compiled for `target`, and in the same library its ops.

    headers: folder `ggml` of the source.
    """

    def __init__(self, lib_dir: Path, target: str, headers: Path, folder: Path) -> None:
        super().__init__(lib_dir)
        prefix, flags, emulator = (TARGETS | SANITIZED | COUNTED)[target]
        out = folder / f"isa-{target}"
        include = ["include", "src", "src/ggml-cpu"]
        # the scalar code, which is that of the quick tests, compiles in half the time
        level = "-O1" if target == "scalar" else "-O2"
        flags = [*flags, "-g1", "-w", level, "-fPIC", f"-I{OPS}", f"-I{OPS / 'cpu'}"]
        flags += [f"-I{headers / i}" for i in include]
        objects = []
        sources = [*sorted((OPS / "cpu").glob("*.cpp")), HERE / "isa_main.c"]
        self.target, self.poison = target, None
        if target in TARGETS:
            self.has_fast = target in FAST
        elif "-DSPARQ_SCALAR" in flags:
            self.has_fast = "-DSPARQ_SCALAR_FAST" in flags
        if target in SANITIZED:
            sources.append(OPS / "ggml-sparse.c")
            flags.append("-DGGML_OP_SPARSE_ATTN=GGML_OP_COUNT")  # as the patched header numbers it
        if target in COUNTED:
            objects.append(f"{out}-count.o")
            argv = ["gcc", "-O2", "-fPIC", "-c", str(HERE / "count_reads.c"), "-o", objects[0]]
            subprocess.run(argv, check=True)
        for source in sources:
            cpp = source.suffix == ".cpp"
            tool, standard = ("g++", "-std=gnu++17") if cpp else ("gcc", "-std=gnu11")
            objects.append(f"{out}-{source.stem}.o")
            argv = [prefix + tool, standard, *flags, "-c", str(source), "-o", objects[-1]]
            subprocess.run(argv, check=True)
        link = ["-static" if emulator else "-shared", "-pthread"]
        if target in SANITIZED:
            link += [flag for flag in flags if "sanitize" in flag]
        subprocess.run([f"{prefix}g++", *objects, *link, "-o", str(out)], check=True)
        self.program = [emulator, str(out)] if emulator else []
        self.arena = Arena(folder / f"{target}.arena") if emulator else None
        if not emulator:
            self.lib = ctypes.CDLL(str(out))
            self.lib.ggml_sparse_attn_work_size.restype = c_size_t
            self.lib.ggml_sparse_attn_work_size.argtypes = [c_void_p, c_int]
            self.lib.isa_compute.argtypes = [c_void_p, c_void_p, c_size_t, c_int]
        if target in SANITIZED:
            declare(self.lib)
            self.ops = self.lib
        if target.startswith("address"):
            self.poison = self.lib["__asan_poison_memory_region"]
            self.unpoison = self.lib["__asan_unpoison_memory_region"]
            self.poison.argtypes = self.unpoison.argtypes = [c_void_p, c_size_t]

    def memory(self, size: int) -> np.ndarray:
        return self.arena.take(size) if self.arena else super().memory(size)

    def buffer(self, size: int, fill: int) -> Buffer:
        """Its guards must not even be read, if the sanitizer can tell."""
        buffer = super().buffer(size, fill)
        if self.poison:
            whole = buffer.raw.ctypes.data, len(buffer.raw)
            self.poison(*whole)
            self.unpoison(buffer.address, size)
            weakref.finalize(buffer, self.unpoison, *whole)
        return buffer

    def compute(self, graph: c_void_p, nodes: list, n_threads: int) -> None:
        if self.target == "thread" and not self.n_planned:
            n_threads = max(n_threads, 3)
        for node in nodes:
            address = ctypes.addressof(node.contents)
            if self.arena:
                subprocess.run([*self.program, str(self.arena.file), f"{address:x}"], check=True)
                continue
            size = self.lib.ggml_sparse_attn_work_size(address, self.n_planned or n_threads)
            work = self.buffer(size, UNWRITTEN)
            self.lib.isa_compute(address, work.address, size, n_threads)
            assert work.guards_intact(), "an op wrote outside its work buffer"


class Arena:
    """Memory in a file, at the address that isa_main.c maps it to. A new context starts anew."""

    ADDRESS = 0x2000_0000_0000
    SIZE = 128 << 20

    def __init__(self, file: Path) -> None:
        self.file = file
        self.used = 0
        with open(file, "wb") as f:
            f.truncate(self.SIZE)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = c_void_p
        libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
        prot_read_write, map_shared_fixed_noreplace = 3, 0x100001
        fd = os.open(file, os.O_RDWR)
        flags = map_shared_fixed_noreplace
        got = libc.mmap(self.ADDRESS, self.SIZE, prot_read_write, flags, fd, 0)
        os.close(fd)
        if got != self.ADDRESS:
            raise OSError(ctypes.get_errno(), "no memory at the address of the arena")
        libc.munmap.argtypes = [c_void_p, c_size_t]
        self.close = lambda: libc.munmap(self.ADDRESS, self.SIZE)  # for the next
        self.bytes = np.frombuffer((ctypes.c_uint8 * self.SIZE).from_address(got), np.uint8)

    def take(self, size: int) -> np.ndarray:
        if size == CONTEXT:
            self.used = 0
        start = self.used
        self.used += -(-size // 64) * 64
        assert self.used <= self.SIZE, "the case is too large for the arena"
        return self.bytes[start : start + size]
