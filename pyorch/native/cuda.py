"""CUDA on this machine: a toolkit whose program links with cuBLAS and runs on the devices, if there
are any. What it lacks comes from NVIDIA's Python packages (`nvidia-cublas`, `nvidia-cuda-cccl`)."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyorch import children
from pyorch.errors import SparqError
from pyorch.native import probe
from pyorch.native.devices import Device

ARCHS = ("75", "80", "86", "89", "90", "100", "120")  # sm_75: Turing ... sm_120: Blackwell
RELEASES = ("12", "13")

# It runs in a process of its own, since a driver that is broken must not take ours with it.
_DEVICES = """
import ctypes
c = ctypes.CDLL("libcuda.so.1")
code = c.cuInit(0)
if code: raise SystemExit(f"cuInit: error {code}")
n = ctypes.c_int()
c.cuDeviceGetCount(ctypes.byref(n))
for i in range(n.value):
    name, x, cc = ctypes.create_string_buffer(256), ctypes.c_int(), []
    c.cuDeviceGetName(name, 256, i)
    for attribute in (75, 76):
        c.cuDeviceGetAttribute(ctypes.byref(x), attribute, i)
        cc.append(x.value)
    size = ctypes.c_size_t()
    c.cuDeviceTotalMem_v2(ctypes.byref(size), i)
    c.cuDeviceGetAttribute(ctypes.byref(x), 18, i)
    print(f"{cc[0]}{cc[1]}\\t{name.value.decode()}\\t{size.value}\\t{x.value}")
"""

_PROGRAM = """
#include <cub/version.cuh>
#include <cublas_v2.h>
__global__ void add(int * x) { *x += 1; }
int main(int n, char **) {
    if (n == 1) return 0; // no device: that it links is all there is to see
    int * x = nullptr, y = 41;
    cublasHandle_t handle;
    if (cudaMalloc(&x, sizeof(y)) || cudaMemcpy(x, &y, sizeof(y), cudaMemcpyDefault)) return 2;
    add<<<1, 1>>>(x);
    if (cudaMemcpy(&y, x, sizeof(y), cudaMemcpyDefault) || y != 42) return 3;
    return cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS ? 0 : 4;
}
"""


@dataclass(frozen=True)
class Toolkit:
    nvcc: str
    release: str  # "13.0"
    include: tuple[str, ...]  # folders outside the toolkit
    lib: tuple[str, ...]  # folders of the libraries at run time; the toolkit's own comes first
    libraries: dict[str, str]  # name, such as cublas -> file, for those outside the toolkit

    @property
    def flags(self) -> list[str]:
        # they come after the toolkit's own headers, since they may be of another release
        return [f"-isystem={folder}" for folder in self.include]


def nvcc() -> str:
    """The CUDA compiler and its release in one line, "" where there is none."""
    nvcc = find_nvcc()
    return f"{nvcc} (release {release(nvcc) or 'unknown'})" if nvcc else ""


def find_nvcc() -> str:
    """The path of the CUDA compiler, or an empty string."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [f"{home}/bin" for home in homes if home]
    program = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders))
    return program or ""


def release(nvcc: str) -> str:
    """The release of a compiler, such as `13.0`; an empty string if it does not say."""
    match = re.search(r"release (\d+\.\d+)", probe.run([nvcc, "--version"]).stdout)
    return match.group(1) if match else ""


@functools.cache
def devices() -> tuple[tuple[Device, ...], str]:
    """The devices, or why there are none. Costs nothing if the kernel knows of no GPU."""
    if not any(Path(file).exists() for file in ("/dev/nvidiactl", "/dev/dxg")):
        return (), "the system has no NVIDIA device"
    done = probe.run([sys.executable, "-c", _DEVICES])
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    if done.returncode != 0 or not rows:
        reason = (done.stderr.strip().splitlines() or ["the driver lists none"])[-1]
        return (), f"no CUDA device: {reason}"
    return tuple(Device(x[1], int(x[2]), 0, x[3] == "1", arch=x[0]) for x in rows), ""


def is_preferred() -> bool:
    """Whether a library with CUDA is preferred: there is a device, and SPARQ_CUDA is not 0."""
    return os.environ.get("SPARQ_CUDA") != "0" and bool(devices()[0])


def archs(text: str | None) -> str:
    """`75;90` from `native`, `all` or `75,90`. None means native where there is a device, else all.

    Raises:
        SparqError: another architecture; native without a device.
    """
    own = sorted({device.arch for device in devices()[0]})
    if text is None:
        text = "native" if own else "all"
    if text == "native" and not own:
        raise SparqError(f"no CUDA device here: {devices()[1]}", "--cuda all, or --cuda 80,90", 2)
    chosen = {"native": own, "all": [*ARCHS]}.get(text) or re.split("[,;]", text)
    wrong = [arch for arch in chosen if arch not in ARCHS and arch not in own]
    if wrong:
        raise SparqError(
            f"unsupported CUDA architecture: {wrong[0]}", "one of " + ", ".join(ARCHS), 2
        )
    return ";".join(chosen)


def toolkit(compiler: probe.Compiler) -> tuple[Toolkit | None, str]:
    """The toolkit, or why it cannot be used. Compiles and runs a program: some seconds."""
    nvcc = find_nvcc()
    if not nvcc:
        return None, "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda"
    number = release(nvcc)
    major = number.partition(".")[0]
    if major not in RELEASES:
        supported = " and ".join(RELEASES)
        return None, f"{nvcc} is of release {number or 'unknown'}; {supported} are supported"
    root = _root(nvcc)
    own = [folder for folder in (root / "lib64", root / "lib") if folder.is_dir()]
    packages = python_packages(major)
    include = [f for p in packages for f in (p / "include", p / "include" / "cccl") if f.is_dir()]
    lib = [p / "lib" for p in packages if (p / "lib").is_dir()]
    libraries = {}
    for name in ("cublas", "cublasLt", "cudart"):
        files = [f for folder in lib for f in sorted(folder.glob(f"lib{name}.so*"))]
        if files and not any((folder / f"lib{name}.so").exists() for folder in own):
            libraries[name] = str(files[0])
    # the loader does not find every toolkit by itself
    lib = [*own, *(lib if libraries else ())]
    toolkit = Toolkit(nvcc, number, tuple(map(str, include)), tuple(map(str, lib)), libraries)
    gpus = devices()[0]
    with tempfile.TemporaryDirectory(prefix="sparq-probe-") as temp:
        file, program = Path(temp) / "cuda.cu", Path(temp) / "cuda"
        file.write_text(_PROGRAM, "utf-8")
        # of `ccache g++ -m64` the compiler
        host = [word for word in shlex.split(compiler.cxx) if not word.startswith("-")][-1]
        argv = [nvcc, str(file), "-o", str(program), "-ccbin", host]
        argv += [f"-arch=sm_{gpus[0].arch if gpus else ARCHS[1]}", *toolkit.flags]
        for name in ("cublas", "cublasLt"):
            argv.append(f"-Xlinker={libraries[name]}" if name in libraries else f"-l{name}")
        done = probe.run([*argv, *(f"-Xlinker=-rpath={folder}" for folder in lib)])
        if done.returncode != 0:
            why = probe.first_error(done.stdout + done.stderr)
            return None, f"nvcc cannot build a program with cuBLAS: {why}"
        if gpus and (code := probe.run([str(program), "run"]).returncode) != 0:
            return None, f"a CUDA program compiled here {children.ended(code)} on {gpus[0].name}"
    return toolkit, ""


def _root(nvcc: str) -> Path:
    """The folder of the toolkit; nvcc may be a link, or a script that calls the real one."""
    content = Path(nvcc).read_bytes()[:4096] if Path(nvcc).is_file() else b""
    match = re.search(rb"exec (\S+)/bin/nvcc", content) if content.startswith(b"#!") else None
    return Path(match.group(1).decode()) if match else Path(nvcc).resolve().parent.parent


def python_packages(major: str) -> list[Path]:
    """Folders of NVIDIA's packages: `nvidia/cu13` for 13, `nvidia/cublas` and so on for 12."""
    names = [f"cu{major}"]
    if major == "12":
        names += ["cublas", "cuda_cccl", "cuda_runtime"]
    folders = (Path(entry) / "nvidia" / name for entry in sys.path for name in names)
    return [folder for folder in folders if folder.is_dir()]


def cmake_options(toolkit: Toolkit, arch: str) -> dict[str, str]:
    """The CMake variables of a build with CUDA."""
    values = {
        "GGML_CUDA": "ON",
        "GGML_CUDA_NCCL": "OFF",
        "CMAKE_CUDA_COMPILER": toolkit.nvcc,
        "CMAKE_CUDA_ARCHITECTURES": arch,
    }
    values |= {f"CUDA_{name}_LIBRARY": file for name, file in toolkit.libraries.items()}
    root = _root(toolkit.nvcc)
    stubs = [*root.glob("lib*/stubs/libcuda.so"), *root.glob("targets/*/lib/stubs/libcuda.so")]
    if not stubs and "libcuda.so " not in probe.run(["/sbin/ldconfig", "-p"]).stdout:
        values["GGML_CUDA_NO_VMM"] = "ON"  # the driver's library, which it would link, is missing
    return values
