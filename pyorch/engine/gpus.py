"""The GPUs of this machine, and what is free there."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from pyorch.engine.library import Library
from pyorch.errors import SparqError


@dataclass(frozen=True)
class Gpu:
    """A GPU with memory of its own. free: bytes that nobody has, when it was asked."""

    name: str
    free: int
    device: int  # llama.cpp's pointer


def gpus(library: Library) -> list[Gpu]:
    """Those that llama.cpp puts layers on. `SPARQ_GPU_LIMIT` (bytes) is free at most on each.

    Raises:
        SparqError: the variable is no number.
    """
    limit = os.environ.get("SPARQ_GPU_LIMIT") or str(2**63)
    if not limit.isdecimal():
        raise SparqError(f"SPARQ_GPU_LIMIT is {limit!r}, not a number of bytes", exit_code=2)
    ggml = library.lib._lib
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    ggml.ggml_backend_dev_memory.argtypes = [pointer, ctypes.POINTER(size), ctypes.POINTER(size)]
    res = []
    for device in library.gpu_devices(shared=False):
        free, total = size(), size()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = ggml.ggml_backend_dev_description(device).decode(errors="replace")
        res.append(Gpu(name, min(free.value, int(limit)), device))
    return res
