"""The GPUs on which a library computes, by whatever backend: CUDA, Vulkan or Metal."""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pyorch import children, system
from pyorch.native import probe
from pyorch.native.prototypes import declare
from pyorch.native.slots import IS_TIMED, VISIBLE
from pyorch.native.tensor import Tensor, op_number
from pyorch.progress import say

_TYPES = (1, 2)  # ggml_backend_dev_type: a GPU with memory of its own, or that of the host


@dataclass(frozen=True)
class Device:
    """A GPU. Memory is in bytes; free: what nobody has, when it was asked; integrated: it is main
    memory; backend: as ggml calls it; pointer: ggml's; arch: of CUDA, 90 for 9.0; kernels: whether
    the attention that was asked about is sparse there."""

    name: str
    memory: int
    free: int = 0
    integrated: bool = False
    backend: str = "CUDA"
    pointer: int = 0
    arch: str = ""
    kernels: bool = True


def listed(ggml: Any, but: Collection[str] = ()) -> list[Device]:
    """Those of a library whose functions are declared, without their memory: to ask for that takes
    some of it.

    Args:
        but: names to leave out, of workers, which ggml takes for GPUs.
    """
    found = []
    for pointer in map(ggml.ggml_backend_dev_get, range(ggml.ggml_backend_dev_count())):
        kind = ggml.ggml_backend_dev_type(pointer)
        name = ggml.ggml_backend_dev_description(pointer).decode(errors="replace")
        if kind in _TYPES and name not in but:
            registered = ggml.ggml_backend_dev_backend_reg(pointer)
            backend = ggml.ggml_backend_reg_name(registered).decode()
            found.append(Device(name, 0, 0, kind == _TYPES[1], backend, pointer))
    return found


def with_memory(ggml: Any, device: Device) -> Device:
    """The same device with its memory."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.ggml_backend_dev_memory(device.pointer, ctypes.byref(free), ctypes.byref(total))
    return replace(device, free=free.value, memory=total.value)


def runs_sparse(lib: Any, device: Device, asked: bool) -> bool:
    """Whether attention is sparse on a GPU of our library. Unless gpu_min_mb asks for it, only on
    those where that was timed. lib: the module with the C functions."""
    ggml = declare(lib._lib)
    node = Tensor(op=op_number(ggml, "SPARSE_ATTN"))
    node.op_params[0] = VISIBLE if asked else IS_TIMED
    return bool(ggml.ggml_backend_dev_supports_op(device.pointer, node))


@functools.cache
def of_library(folder: Path) -> list[Device]:
    """Those of a built library, asked by a process of its own: what it takes of a GPU would be
    missing to others, and a driver that is broken must not take ours with it."""
    done = probe.run(children.python("pyorch.native.devices", str(folder)))
    if done.returncode:
        say(f"no GPU is used, since asking for them failed: {children.reason(done)}")
        return []
    return [Device(**row) for row in json.loads(done.stdout)]


if __name__ == "__main__":
    library = ctypes.CDLL(str(Path(sys.argv[1]) / system.library("ggml")))
    system.with_ggml(library)
    ggml = declare(library)
    print(json.dumps([asdict(with_memory(ggml, device)) for device in listed(ggml)]))
