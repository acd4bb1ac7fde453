"""The GPUs of this machine: what is free there, and how fast they read."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyorch.engine.library import Library
from pyorch.errors import SparqError
from pyorch.ggml import BY_NAME
from pyorch.native.tensor import Tensor

_BYTES = 128 << 20  # that are copied: far above any cache of a GPU
_TIMES = 5


@dataclass(frozen=True)
class Gpu:
    """A GPU with memory of its own. free: bytes that nobody has, when it was asked."""

    name: str
    free: int
    device: int  # llama.cpp's pointer


def gpus(found: Library) -> list[Gpu]:
    """Those that llama.cpp puts layers on. `SPARQ_GPU_LIMIT` (bytes) is free at most on each.

    Raises:
        SparqError: the variable is no number.
    """
    limit = os.environ.get("SPARQ_GPU_LIMIT") or str(2**63)
    if not limit.isdecimal():
        raise SparqError(f"SPARQ_GPU_LIMIT is {limit!r}, not a number of bytes", exit_code=2)
    ggml = found.lib._lib
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    ggml.ggml_backend_dev_memory.argtypes = [pointer, ctypes.POINTER(size), ctypes.POINTER(size)]
    res = []
    for device in found.gpu_devices(shared=False):
        free, total = size(), size()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = ggml.ggml_backend_dev_description(device).decode(errors="replace")
        res.append(Gpu(name, min(free.value, int(limit)), device))
    return res


def measure(found: Library, gpu: Gpu) -> tuple[float, float]:
    """The bytes per second that a GPU reads and writes in a copy of its own, and those that reach
    it from memory: medians of a few copies.

    Raises:
        SparqError: it has no memory for that.
    """
    ggml, pointer, size = found.lib._lib, ctypes.c_void_p, ctypes.c_size_t
    tensor = ctypes.POINTER(Tensor)
    for name, result, *arguments in (
        ("ggml_backend_dev_buffer_type", pointer, pointer),
        ("ggml_backend_buft_alloc_buffer", pointer, pointer, size),
        ("ggml_backend_buffer_get_base", pointer, pointer),
        ("ggml_backend_buffer_free", None, pointer),
        ("ggml_backend_tensor_set", None, tensor, pointer, size, size),
        ("ggml_backend_tensor_copy", None, tensor, tensor),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    n = min(_BYTES, gpu.free // 8) // 4096 * 4096
    kind = ggml.ggml_backend_dev_buffer_type(gpu.device)
    buffer = ggml.ggml_backend_buft_alloc_buffer(kind, 2 * n) if n else None
    if not buffer:
        raise SparqError(f"{gpu.name} has no memory left to be measured in")
    base = ggml.ggml_backend_buffer_get_base(buffer)
    source, target = (
        Tensor(
            type=BY_NAME["i8"].number, buffer=buffer, ne=(n, 1, 1, 1), nb=(1, n, n, n), data=data
        )
        for data in (base, base + n)
    )
    here = np.ones(n, np.uint8)
    try:
        link = _rate(n, lambda: ggml.ggml_backend_tensor_set(source, here.ctypes.data, 0, n))
        return _rate(2 * n, lambda: ggml.ggml_backend_tensor_copy(source, target)), link
    finally:
        ggml.ggml_backend_buffer_free(buffer)


def _rate(n_bytes: int, copy: Callable[[], object]) -> float:
    copy()
    samples = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        copy()
        samples.append(time.perf_counter() - started)
    return n_bytes / sorted(samples)[_TIMES // 2]
