"""Structs of the pinned ggml.h, and the values of tensors as numpy arrays.

llama.cpp's evaluation callback passes the address of every tensor that was computed.
"""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

import numpy as np

from pyorch.ggml import BY_NAME, MAX_DIMS, MAX_NAME, MAX_SRC, TENSOR_TYPES

_BF16 = BY_NAME["bf16"].number
_DTYPES = {
    BY_NAME[name].number: dtype
    for name, dtype in {
        "f32": np.float32,
        "f16": np.float16,
        "bf16": np.uint16,
        "i8": np.int8,
        "i32": np.int32,
        "i64": np.int64,
    }.items()
}


class Tensor(ctypes.Structure):
    """Sizes `ne` and strides in bytes `nb` with the fastest dimension first."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * MAX_DIMS),
    ("nb", ctypes.c_size_t * MAX_DIMS),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * MAX_SRC),
    ("view_src", ctypes.POINTER(Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * MAX_NAME),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]


class InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


def op_number(ggml: Any, name: str) -> int:
    """The number of an op in this build of ggml, whose functions are declared."""
    return next(i for i in count() if ggml.ggml_op_name(i) == name.encode())


def source(t: Tensor, i: int) -> Tensor | None:
    """The i-th source of a tensor."""
    return t.src[i].contents if t.src[i] else None


def view(t: Tensor) -> np.ndarray:
    """A view of a tensor in host memory, not a copy, with numpy's axes (slowest first).

    bf16 comes as its bits (uint16), block types such as q8_0 as the bytes of their rows (uint8).
    """
    shape, strides = list(t.ne[::-1]), list(t.nb[::-1])
    dtype: Any = _DTYPES.get(t.type, np.uint8)
    if _in_blocks(t.type):
        shape[-1], strides[-1] = row_bytes(t), 1
    elif t.type not in _DTYPES:
        raise TypeError(f"no numpy type for ggml type {t.type}")
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    raw = np.frombuffer((ctypes.c_char * size).from_address(t.data), dtype, count=1)
    return np.lib.stride_tricks.as_strided(raw, shape, strides)


def floats(stored: np.ndarray, kind: int) -> np.ndarray:
    """An f32 copy of the values of a `view` or a part of one. kind: the tensor's `type`."""
    if _in_blocks(kind):
        import gguf

        of = gguf.GGMLQuantizationType(kind)
        return gguf.quants.dequantize(np.ascontiguousarray(stored), of)
    if kind == _BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def row_bytes(t: Tensor) -> int:
    """The bytes of a row, the fastest dimension."""
    return TENSOR_TYPES[t.type].n_bytes(t.ne[0])


def _in_blocks(kind: int) -> bool:
    return kind in TENSOR_TYPES and TENSOR_TYPES[kind].per_block > 1
