"""The library that came with the wheel, in `pyorch/_built`; `pyorch/native/wheel.py` makes it.

It has the backend of the CPU once for each set of instructions. What llama.cpp gives the
highest score, and that works (smoke.py), goes to `lib/` of the cache at the first use, with the
other libraries, the tools and the bindings: the same as after a build made here.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from pyorch import children, paths, system
from pyorch.errors import SparqError
from pyorch.native import build, carried_gpu, probe, smoke, source
from pyorch.progress import say

FOLDER = paths.PACKAGE / "_built"
NAME = "sparq-carried"
_CPU = system.library("ggml-cpu")  # the one that libggml loads
_VARIANT = f"{Path(_CPU).stem}-"  # the beginning of their files' names
_MODULE = ".dll" if system.IS_WINDOWS else ".so"  # and the end


def find() -> Path | None:
    """The folder of the cache that has it for this machine, with CUDA or Vulkan if a package of
    either can be used (carried_gpu.py); None if none came.

    Raises:
        SparqError: as in `find_cpu`.
    """
    cpu = find_cpu()
    if cpu is None:
        return None
    for backend in carried_gpu.BACKENDS:
        if with_gpu := carried_gpu.find(backend, cpu)[0]:
            return with_gpu
    return cpu


def find_cpu() -> Path | None:
    """The folder that has it for the CPU alone, made if necessary; None if none came.

    Raises:
        SparqError: no variant works here, or the cache cannot be written.
    """
    stamp = build.read_stamp(FOLDER)
    if stamp is None or stamp["inputs"] != build.sources(build.Options()):
        return None  # another pin (SPARQ_LLAMA_PIN) or another source is not in it
    target = paths.cache() / "lib" / f"{NAME}-{stamp['stamp']}-{probe.cpu()[1]}"
    paths.once(
        paths.cache(),
        lambda: build.read_stamp(target) is not None and build.has_bindings(),
        lambda _: _unpack(stamp, target),
    )
    return target


def scores() -> dict[str, int]:
    """What llama.cpp says of each variant for this CPU, the best first; it runs none that has 0.

    Raises:
        SparqError: they do not load.
    """
    done = children.run(children.python("pyorch.native.carried"))
    if done.returncode:
        why = children.reason(done)
        raise SparqError(f"the library of the wheel does not load: {why}", "sparq-cpp build")
    scores: dict[str, int] = json.loads(done.stdout)
    return dict(sorted(scores.items(), key=lambda item: item[1], reverse=True))


def _unpack(carried: dict[str, Any], target: Path) -> None:
    """Copy what works here to the cache, whose lock is held."""
    paths.check_exec(target)
    build.unpack_bindings(source.Source(FOLDER, "", False), "python/llama_cpp")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in (FOLDER / "lib").iterdir():
        if not file.name.startswith(_VARIANT):
            _copy(file, partial / file.name)
    ranked = [name for name, score in scores().items() if score]
    off: dict[str, str] = {}
    for name in ranked:
        _copy(FOLDER / "lib" / f"{_VARIANT}{name}{_MODULE}", partial / _CPU)
        try:
            fault: object = smoke.fault(partial)
        except SparqError as error:
            fault = error.message
        if not fault:
            stamp = carried | {"time": time.time(), "off": off, "isa": [name], "ranked": ranked}
            stamp["inputs"] |= {"options": NAME, "compiler": carried["compiler"]}
            build.publish(partial, target, stamp)
            return
        off[name] = f"it does not work here: {fault}"
        say(f"the wheel's library for {name} is not used: {off[name]}")
    raise SparqError(
        f"none of the wheel's libraries works on this CPU: {', '.join(ranked) or 'it is too old'}",
        "sparq-cpp build makes one that does, with a compiler",
    )


def _copy(file: Path, to: Path) -> None:
    """A wheel need not keep who may run a file."""
    shutil.copyfile(file, to)
    to.chmod(0o755)


def main() -> None:
    """Print the scores. A process of its own, since each variant that is asked stays loaded."""
    scores = {}
    for file in (FOLDER / "lib").glob(f"{_VARIANT}*"):
        library = ctypes.CDLL(str(file))
        scores[file.stem.removeprefix(_VARIANT)] = int(library.ggml_backend_score())
    json.dump(scores, sys.stdout)


if __name__ == "__main__":
    main()
