"""ggml's numbers, against the built library and the package that reads and writes model files."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pyorch.ggml import NUMA, ROPE_SCALING, TENSOR_TYPES, TensorType
from pyorch.models import gguf_file


def test_types_are_those_of_the_library(llama_cpp: Any) -> None:
    """A type that a newer llama.cpp adds has to be added to the table."""
    library = Path(llama_cpp.llama_cpp._lib._name).parent
    ggml = ctypes.CDLL(str(next(library.glob("libggml-base.*"))))
    ggml.ggml_blck_size.restype, ggml.ggml_type_size.restype = ctypes.c_int64, ctypes.c_size_t
    ggml.ggml_type_name.restype = ctypes.c_char_p
    types = {}
    for number in range(llama_cpp.llama_cpp.GGML_TYPE_COUNT):
        per_block, name = ggml.ggml_blck_size(number), ggml.ggml_type_name(number)
        if per_block:  # 0: a type that was taken out
            size = ggml.ggml_type_size(number)
            types[number] = TensorType(number, name.decode(), per_block, size)
    assert types == TENSOR_TYPES


def test_numbers_of_calls_are_those_of_the_bindings(llama_cpp: Any) -> None:
    for prefix, ours in (("GGML_NUMA_STRATEGY", NUMA), ("LLAMA_ROPE_SCALING_TYPE", ROPE_SCALING)):
        for name, number in ours.items():
            assert getattr(llama_cpp.llama_cpp, f"{prefix}_{name.upper()}") == number


def test_values_of_metadata_are_those_of_the_gguf_package() -> None:
    theirs = gguf.GGUFReader.gguf_scalar_to_np
    assert {k: np.dtype(v) for k, v in gguf_file._SCALARS.items()} == {
        int(kind): np.dtype(of) for kind, of in theirs.items()
    }
    kinds = gguf.GGUFValueType
    assert (gguf_file._STRING, gguf_file._ARRAY) == (kinds.STRING, kinds.ARRAY)
