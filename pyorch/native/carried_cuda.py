"""CUDA from the package `sparq-cpp-cuda`, beside the library that came with the wheel.

The package has the backend and a libggml that is linked with it (cuda_wheel.py makes it). Where
there is a GPU for it, a second folder of the cache gets the CPU's libraries and tools with that
libggml, and links to the backend and to NVIDIA's libraries in this environment. Where it cannot be
used, each command says why.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from pyorch import paths, system
from pyorch.errors import SparqError
from pyorch.native import build, cuda, smoke
from pyorch.progress import say

NAME = "sparq-carried-cuda"
PACKAGE = "sparq-cpp-cuda"
MODULE = "sparq_cpp_cuda"
MAJOR = "13"  # of CUDA, with whose libraries it is linked
NVIDIA = "nvidia"  # the link beside the backend, where that looks for NVIDIA's libraries
# llama.cpp expects code of their own on these, and launches blocks too large for any other code.
_NEED_THEIR_OWN = ("89", "121")
_NEEDED = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")


def installed() -> Path | None:
    """The folder of the package, None where it is not."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _usable() -> tuple[Path | None, str]:
    """The package's folder; or None and why CUDA is not used, "" where the package is not."""
    folder = installed()
    if folder is None:
        return None, ""
    stamp = build.read_stamp(folder)
    if stamp is None or stamp["inputs"] != build.sources(build.Options(cuda="any")):
        return None, "it is of other sources than these"
    if os.environ.get("SPARQ_CUDA") == "0":
        return None, "SPARQ_CUDA=0"
    devices, why = cuda.devices()
    if why:
        return None, why
    usable = [i for i, x in enumerate(devices) if any(_runs(x.arch, a) for a in stamp["archs"])]
    other = [f"{x.name} is of sm_{x.arch}" for i, x in enumerate(devices) if i not in usable]
    why = f"it has code for sm_{', sm_'.join(stamp['archs'])}, and {', '.join(other)}"
    if not usable:
        return None, why
    if _libraries() is None:
        return None, "NVIDIA's libraries are missing: pip install nvidia-cublas nvidia-cuda-runtime"
    if other:
        say(f"{PACKAGE} does not use all GPUs: {why}")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(len(devices))]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in usable)
        cuda.devices.cache_clear()
    return folder, ""


def find(cpu: Path) -> tuple[Path | None, str]:
    """The folder of the cache that has CUDA too; or None and why CUDA is not used, "" where the
    package is not. One that does not work is tried again by the next command.

    Args:
        cpu: the folder of the cache with what came with the wheel.

    Raises:
        SparqError: the cache cannot be written.
    """
    package, why = _usable()
    nvidia = _libraries()
    if package is None or nvidia is None:
        return None, why
    carried: Any = build.read_stamp(package)
    of = json.dumps([cpu.name, carried["stamp"], str(package), str(nvidia)])
    target = cpu.with_name(f"{NAME}-{hashlib.sha256(of.encode()).hexdigest()[:12]}")

    def done() -> bool:  # what its links lead to may be gone
        return build.read_stamp(target) is not None and all(f.exists() for f in target.iterdir())

    try:
        paths.once(paths.cache(), done, lambda _: _make(cpu, package, nvidia, target))
    except SparqError as error:
        return None, f"it does not work here: {error.message}"
    return target, ""


def _make(cpu: Path, package: Path, nvidia: Path, target: Path) -> None:
    """Put it into the cache, whose lock is held."""
    of_cpu: Any = build.read_stamp(cpu)
    carried: Any = build.read_stamp(package)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(cpu, partial)
    backend = system.library("ggml-cuda")
    shutil.copyfile(package / system.library("ggml"), partial / system.library("ggml"))
    (partial / backend).symlink_to(package / backend)
    (partial / NVIDIA).symlink_to(nvidia)
    if fault := smoke.fault(partial, gpu=True):
        raise SparqError(str(fault))
    stamp = of_cpu | {"stamp": carried["stamp"], "time": time.time(), "inputs": carried["inputs"]}
    stamp["inputs"] |= {"options": NAME, "compiler": carried["compiler"], "cuda": carried["cuda"]}
    build.publish(partial, target, stamp)


def _runs(device: str, arch: str) -> bool:
    """Whether a device runs code for an architecture: of its generation, and not newer."""
    older = device[:-1] == arch[:-1] and device[-1] > arch[-1] and device not in _NEED_THEIR_OWN
    return device == arch or older


def _libraries() -> Path | None:
    """The folder of NVIDIA's libraries in this environment, if all are there."""
    folders = [folder / "lib" for folder in cuda.python_packages(MAJOR)]
    return next((f for f in folders if all((f / name).is_file() for name in _NEEDED)), None)
