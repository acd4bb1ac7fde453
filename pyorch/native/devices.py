"""The GPUs on which a library computes, by whatever backend: CUDA, Vulkan or Metal."""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyorch import children, system
from pyorch.ggml import BY_NAME
from pyorch.native import probe
from pyorch.native.prototypes import declare
from pyorch.native.tensor import InitParams

_TYPES = (1, 2)  # ggml_backend_dev_type: a GPU with memory of its own, or that of the host


@dataclass(frozen=True)
class Device:
    backend: str  # as ggml calls it, "CUDA"
    name: str
    memory: int  # bytes
    integrated: bool = False  # they are main memory
    kernels: bool = False  # our attention runs there


def pointers(ggml: Any) -> list[int]:
    """ggml's pointers to the devices of a library whose functions are declared."""
    devices = map(ggml.ggml_backend_dev_get, range(ggml.ggml_backend_dev_count()))
    return [device for device in devices if ggml.ggml_backend_dev_type(device) in _TYPES]


def device(ggml: Any, pointer: int) -> Device:
    """What such a pointer stands for."""
    free, total = memory(ggml, pointer)
    registered = ggml.ggml_backend_dev_backend_reg(pointer)
    return Device(
        ggml.ggml_backend_reg_name(registered).decode(),
        ggml.ggml_backend_dev_description(pointer).decode(errors="replace"),
        total,
        ggml.ggml_backend_dev_type(pointer) == _TYPES[1],
        has_kernels(ggml, pointer),
    )


def memory(ggml: Any, pointer: int) -> tuple[int, int]:
    """Its free bytes, and all of them."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.ggml_backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def has_kernels(ggml: Any, pointer: int) -> bool:
    """Whether it runs VISIBLE, which all of our attention needs."""
    if not hasattr(ggml, "ggml_sparse_attn_visible"):
        return False
    context = ggml.ggml_init(InitParams(1 << 16, None, True))
    mask = ggml.ggml_new_tensor_4d(context, BY_NAME["f16"].number, 64, 1, 1, 1)
    node = ggml.ggml_sparse_attn_visible(context, mask)
    runs = bool(ggml.ggml_backend_dev_supports_op(pointer, node))
    ggml.ggml_free(context)
    return runs


@functools.cache
def of_library(folder: Path) -> tuple[Device, ...]:
    """Those of a built library, asked by a process of its own: what it takes of a GPU would be
    missing to others, and a driver that is broken must not take ours with it."""
    done = probe.run(children.python("pyorch.native.devices", str(folder)))
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return tuple(Device(**json.loads(line)) for line in lines)


def main() -> None:
    """Print what `of_library` returns, a line of JSON each."""
    library = ctypes.CDLL(str(Path(sys.argv[1]) / system.library("ggml")))
    system.with_ggml(library)
    ggml = declare(library)
    for pointer in pointers(ggml):
        print(json.dumps(asdict(device(ggml, pointer))))


if __name__ == "__main__":
    main()
