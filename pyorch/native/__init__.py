"""The patched llama.cpp: get the pinned source, patch, build, load.

folder = native.built()            # the folder of libllama, for a C program; builds if necessary
llama_cpp = native.load()          # the Python bindings on it; never builds
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from pyorch import children, paths, system
from pyorch.errors import SparqError
from pyorch.progress import say

if TYPE_CHECKING:
    from pyorch.native.devices import Device


def find(stock: bool = False, tools: tuple[str, ...] = ()) -> Path | None:
    """The folder with libllama and the tools, built for the present inputs; None = not built.

    A build with CUDA is preferred where there is a device, also the one of the package
    sparq-cpp-cuda, then one with Vulkan or Metal if any was made or sparq-cpp-vulkan is there; and
    one for this CPU to a portable one, which `sparq-cpp build --portable` makes. Where none was
    made, the library that came with the wheel is unpacked to the cache. A build of another machine
    that SPARQ_LIBRARY names is taken as it is.

    Args:
        stock: the same pin without our patches.
        tools: programs of llama.cpp that must be there too, from `build.TOOLS`.

    Raises:
        SparqError: SPARQ_LIBRARY names no finished build, or one without these tools.
    """
    from pyorch.native import build, carried, carried_gpu, cuda

    if not stock and (folder := build.from_environment()):
        if missing := [tool for tool in tools if not (folder / system.program(tool)).is_file()]:
            raise SparqError(
                f"SPARQ_LIBRARY={folder} has no {missing[0]}", "build it there with --tools"
            )
        return folder
    usual = build.usual(stock)
    plain = build.Options(stock)
    kinds = (usual, replace(usual, portable=True), plain, replace(plain, portable=True))
    finished = (build.find(options, tools) for options in kinds if build.has_bindings())
    built_here = next(filter(None, finished), None)
    backends = build.backends(built_here) if built_here else []
    if "cuda" in backends:
        return built_here
    came = None
    if any(map(carried_gpu.installed, carried_gpu.BACKENDS)) or not (built_here or stock):
        came = carried.find()
    better = [x for x in build.backends(came) if x == "cuda" or not backends] if came else []
    if stock:
        if built_here and better:
            off = f"SPARQ_{better[0].upper()}=0"
            say(f"stock llama.cpp is for the CPU here, and ours is not, unless {off}")
        return built_here
    if better:
        return came
    lacking = [name for name in usual.backends if name not in backends]
    if (built_here or came) and lacking and (lacking != ["cuda"] or cuda.find_nvcc()):
        say(f"this build is for the CPU: run sparq-cpp build, which makes one with {lacking[0]}")
    return built_here or came


def gpus() -> list[Device]:
    """The GPUs of the library that is used here, or that would be built here."""
    from pyorch.native import build, cuda, devices

    folder = find()
    backends = build.backends(folder) if folder else ["cuda"] * bool(cuda.find_nvcc())
    if "cuda" not in backends:
        return devices.of_library(folder) if folder and backends else []
    return [*cuda.devices()[0]] if cuda.is_preferred() else []


def has_gpu_memory() -> bool:
    """Whether one of them does not share the main memory."""
    return not all(device.integrated for device in gpus())


def lib_dir(stock: bool = False, tools: tuple[str, ...] = ()) -> Path:
    """The same folder as `find` returns, but it must exist. Nothing is compiled.

    Raises:
        SparqError: it is not built.
    """
    folder = find(stock, tools)
    if folder is None:
        more = " --stock" * stock + " --tools" * bool(tools)
        kind = "the stock library" if stock else "the library"
        raise SparqError(f"{kind} is not built for these sources", f"sparq-cpp build{more}")
    paths.check_exec(folder)
    return folder


def built(stock: bool = False, tools: tuple[str, ...] = ()) -> Path:
    """The same folder as `find` returns. What is missing is built, with a note on stderr.

    Raises:
        SparqError: it cannot be built.
    """
    from pyorch.native import build

    folder = find(stock, tools)
    if folder is not None:
        paths.check_exec(folder)
        return folder
    options = build.working(build.usual(stock))
    what = " and ".join(tools) or f"the {options.name} library"
    say(f"{what} is not built for these sources and settings; building it, once, for some minutes")
    return build.build(options, tools)


def check_compiler(tools: tuple[str, ...] = ()) -> None:
    """Refuse early what `built` would refuse late.

    Raises:
        SparqError: the library, or one of the tools, is not built, and cannot be built here.
    """
    from pyorch.native import cmake

    if find(tools=tools) is None:
        cmake.need_tools()


def environment(stock: bool = False) -> dict[str, str]:
    """Variables that make another process, say `python -m llama_cpp.server`, use our library."""
    from pyorch.native import build

    folder = str(lib_dir(stock))
    return {
        "PYTHONPATH": str(build.bindings()),
        "LLAMA_CPP_LIB_PATH": folder,
        "MTMD_CPP_LIB": folder,
        **waiting(),
    }


SPINS = 4000
_MOST_CORES = 16  # a guess: only two cores were measured


def waiting() -> dict[str, str]:
    """Variables that let ggml's threads sleep soon where they wait for each other, unless there are
    many cores, or the user has set them.

    GNU's OpenMP lets them spin 300,000 times, several milliseconds. On a busy machine that takes
    the core from the thread for which they wait: with 4,000 it reads prompts 1.5 times as fast, and
    an idle one as fast (docs/measurements.md).
    """
    from pyorch.native import probe

    made = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    return {} if made or probe.cores() > _MOST_CORES else {"GOMP_SPINCOUNT": str(SPINS)}


# Set by our own programs: when they die by a signal, they say so. A library leaves signals alone.
reports_crashes = False
_HINT = children.HINT.encode()  # the library keeps its address
_loaded: tuple[bool, Path] | None = None  # (stock, folder) of the library in this process


def load(stock: bool = False) -> ModuleType:
    """Import the pinned bindings `llama_cpp` with our library. A process has only one library.

    An installed llama-cpp-python is left alone and not used.

    Raises:
        SparqError: `llama_cpp` was imported before with another library, or ours is not built.
    """
    global _loaded
    module = sys.modules.get("llama_cpp")
    if module is not None:
        library = Path(module.llama_cpp._lib._name).parent
        if _loaded != (stock, library):
            raise SparqError(
                f"llama_cpp is already imported in this process, on the library in {library}",
                "one library per process: call pyorch.native.load() before others import llama_cpp",
            )
        return module
    variables = environment(stock)
    packages, library = variables.pop("PYTHONPATH"), Path(variables["LLAMA_CPP_LIB_PATH"])
    os.environ |= variables
    sys.path.insert(0, packages)
    try:
        if reports_crashes and not stock:
            base = ctypes.CDLL(str(library / system.library("ggml-base")))
            base.ggml_sparse_report_fatal_signals(ctypes.c_char_p(_HINT))
        module = importlib.import_module("llama_cpp")
        system.with_ggml(module.llama_cpp._lib)
    except (OSError, RuntimeError, AttributeError) as error:
        for name in [n for n in sys.modules if n.split(".")[0] == "llama_cpp"]:
            del sys.modules[name]
        raise SparqError(
            f"the built library does not load: {error}", "sparq-cpp build --force"
        ) from error
    finally:
        sys.path.remove(packages)
    _loaded = (stock, library)
    return module
