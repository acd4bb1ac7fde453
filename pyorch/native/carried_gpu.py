"""CUDA or Vulkan from a package, beside the library that came with the wheel.

Where there is a GPU, a second folder of the cache gets the CPU's libraries and tools with the
package's libggml (gpu_wheel.py), and links to its backend and, for CUDA, to NVIDIA's libraries in
this environment. Where it cannot be used, each command says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

from pyorch import paths, system
from pyorch.errors import SparqError
from pyorch.native import build, cuda, smoke
from pyorch.progress import say

NAME, PACKAGE, MODULE = "sparq-carried-{}", "sparq-cpp-{}", "sparq_cpp_{}"  # of a backend
BACKENDS = ("cuda", "vulkan")  # the one that is preferred first
MAJOR = "13"  # of CUDA, with whose libraries it is linked
LOADERS = {"Linux": "libvulkan.so.1", "Windows": "vulkan-1.dll"}  # which come with drivers
NVIDIA = "nvidia"  # the link beside the backend, where that looks for NVIDIA's libraries
# llama.cpp expects code of their own on these, and launches blocks too large for any other code.
_NEED_THEIR_OWN = ("89", "121")
_NEEDED = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")


def installed(backend: str) -> Path | None:
    """The folder of the package, None where it is not."""
    spec = importlib.util.find_spec(MODULE.format(backend))
    places = spec and spec.submodule_search_locations
    return Path(places[0]) if places else None


@functools.cache
def find(backend: str, cpu: Path) -> tuple[Path | None, str]:
    """The folder of the cache that has this backend too; or None and why it is not used, which is
    also told, "" where the package is not. One that does not work is tried again by the next
    process.

    Args:
        cpu: the folder of the cache with what came with the wheel.
    """
    package = installed(backend)
    if package is None:
        return None, ""
    switch, why = f"SPARQ_{backend.upper()}", f"{PACKAGE.format(backend)} is not used: "
    if os.environ.get(switch) == "0":  # who has set it knows
        return None, f"{why}{switch}=0"
    try:
        return _made(backend, package, cpu), ""
    except SparqError as error:
        say(why + error.message)
        return None, why + error.message


def _made(backend: str, package: Path, cpu: Path) -> Path:
    """Put it into the cache, unless it is there.

    Raises:
        SparqError: it cannot be used, or does not work here.
    """
    carried: Any = build.read_stamp(package)
    options = build.Options(cuda="any" * (backend == "cuda"))
    if carried is None or carried["inputs"] != build.sources(options):
        raise SparqError("it is of other sources than these")
    backend_file, ggml = map(system.library, (f"ggml-{backend}", "ggml"))
    links = {backend_file: package / backend_file}
    if backend == "cuda":
        links |= _cuda(carried["archs"])
    else:
        try:
            ctypes.CDLL(LOADERS[platform.system()])
        except OSError as error:
            raise SparqError(str(error)) from None
    of = json.dumps([cpu.name, carried["stamp"], *map(str, links.values())])
    name = NAME.format(backend)
    target = cpu.with_name(f"{name}-{hashlib.sha256(of.encode()).hexdigest()[:12]}")

    def done() -> bool:  # what its links lead to may be gone
        return build.read_stamp(target) is not None and all(f.exists() for f in target.iterdir())

    def make(_lock: int) -> None:
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(cpu, partial)
        shutil.copyfile(package / ggml, partial / ggml)
        for link, file in links.items():
            if system.IS_WINDOWS:  # where links are for administrators
                shutil.copyfile(file, partial / link)
            else:
                (partial / link).symlink_to(file)
        say(f"trying {PACKAGE.format(backend)} once, which may take half a minute")
        if fault := smoke.fault(partial, gpu=True):
            raise SparqError(f"it does not work here: {fault}")
        of_cpu: Any = build.read_stamp(cpu)
        how = {key: carried[key] for key in ("compiler", "cuda") if key in carried}
        stamp = of_cpu | {"stamp": carried["stamp"], "time": time.time()}
        stamp["inputs"] = {**carried["inputs"], "options": name, **how}
        build.publish(partial, target, stamp)

    paths.once(paths.cache(), done, make)
    return target


def _cuda(archs: list[str]) -> dict[str, Path]:
    """The link to NVIDIA's libraries."""
    devices, why = cuda.devices()
    other = [x for x in devices if not any(_runs(x.arch, arch) for arch in archs)]
    if other:
        names = ", ".join(f"{x.name} (sm_{x.arch})" for x in other)
        why = f"it has code for sm_{', sm_'.join(archs)}, not for {names}: see CUDA_VISIBLE_DEVICES"
    folders = [folder / "lib" for folder in cuda.python_packages(MAJOR)]
    libraries = next((f for f in folders if all((f / name).is_file() for name in _NEEDED)), None)
    if why or libraries is None:
        missing = "NVIDIA's libraries are missing: pip install nvidia-cublas nvidia-cuda-runtime"
        raise SparqError(why or missing)
    return {NVIDIA: libraries}


def _runs(device: str, arch: str) -> bool:
    """Whether a device runs code for an architecture: of its generation, and not newer."""
    older = device[:-1] == arch[:-1] and device[-1] > arch[-1] and device not in _NEED_THEIR_OWN
    return device == arch or older
