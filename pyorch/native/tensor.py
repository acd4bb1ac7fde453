"""`struct ggml_tensor` of the pinned ggml.h, and its values as numpy arrays.

For the evaluation callback of llama.cpp, which hands out the address of every tensor it computed.
"""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

import numpy as np

_BLOCK = {2: ("Q4_0", 18), 8: ("Q8_0", 34)}  # (name in gguf, bytes of 32 elements)
_BF16 = 30
_DTYPES = {0: np.float32, 1: np.float16, _BF16: np.uint16, 24: np.int8, 26: np.int32, 27: np.int64}


class Tensor(ctypes.Structure):
    """Sizes `ne` and strides in bytes `nb` with the fastest dimension first."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.POINTER(Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]


def op_number(lib: Any, name: str) -> int:
    """The value of an op in this build of ggml. lib: the module of C functions."""
    call = lib._lib.ggml_op_name
    call.restype, call.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return next(i for i in count() if call(i) == name.encode())


def source(t: Tensor, i: int) -> Tensor | None:
    """The i-th source of a tensor."""
    return t.src[i].contents if t.src[i] else None


def view(t: Tensor) -> np.ndarray:
    """The memory of a tensor in host memory, numpy axes (slowest first), not a copy.

    bf16 comes as its bits (uint16), q8_0 and q4_0 as the bytes of their rows (uint8).
    """
    shape, strides = list(t.ne[::-1]), list(t.nb[::-1])
    dtype: Any = _DTYPES.get(t.type, np.uint8)
    if t.type in _BLOCK:
        shape[-1], strides[-1] = shape[-1] // 32 * _BLOCK[t.type][1], 1
    elif t.type not in _DTYPES:
        raise TypeError(f"no numpy type for ggml type {t.type}")
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    raw = np.frombuffer((ctypes.c_char * size).from_address(t.data), dtype, count=1)
    return np.lib.stride_tricks.as_strided(raw, shape, strides)


def floats(stored: np.ndarray, kind: int) -> np.ndarray:
    """What (part of) `view` stands for, as f32: a copy. kind: the tensor's `type`."""
    if kind in _BLOCK:
        import gguf

        name = gguf.GGMLQuantizationType[_BLOCK[kind][0]]
        return gguf.quants.dequantize(np.ascontiguousarray(stored), name)
    if kind == _BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def row_bytes(t: Tensor) -> float:
    """Bytes of the fastest dimension."""
    size = np.dtype(_DTYPES.get(t.type, np.uint8)).itemsize
    return t.ne[0] / 32 * _BLOCK[t.type][1] if t.type in _BLOCK else t.ne[0] * size
