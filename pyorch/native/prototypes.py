"""The C functions of ggml, and ours, that Python calls: one table of their types."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any

from pyorch.native import slots
from pyorch.native.tensor import InitParams, Tensor

TensorPtr = POINTER(Tensor)
_T, _P, _U32 = TensorPtr, c_void_p, ctypes.c_uint32
_TEXT = c_char_p, c_size_t  # a buffer that the library writes to
_AT = _P, c_int, c_int, ctypes.c_uint64, _U32  # context, sequence, file, offset, positions


class Plan(ctypes.Structure):
    """struct ggml_cplan of ggml-cpu.h."""

    _fields_ = [
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("n_threads", c_int),
        ("threadpool", c_void_p),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("use_ref", c_bool),
    ]


CONSTRUCTORS = {  # of our nodes from named sources; the last two make several
    "sparse_attn_seal": slots.SealParams,
    "sparse_attn_score": slots.ScoreParams,
    "sparse_attn_select": slots.SelectParams,
    "sparse_attn_score_select": slots.ScoreSelectParams,
    "sparse_attn_attend": slots.AttendParams,
    "sparse_attn_prefill": slots.PrefillParams,
    "sparq_attn": slots.ScoreSelectParams,
    "topk_attn": slots.ScoreSelectParams,
}

# the result and the arguments of each
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "ggml_init": (_P, InitParams),
    "ggml_free": (None, _P),
    "ggml_op_name": (c_char_p, c_int),
    "ggml_set_abort_callback": (_P, _P),
    "ggml_quantize_chunk": (c_size_t, c_int, _P, _P, c_int64, c_int64, c_int64, _P),
    # tensors and graphs
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_new_tensor": (_T, _P, c_int, c_int, POINTER(c_int64)),
    "ggml_new_tensor_4d": (_T, _P, c_int, *[c_int64] * 4),
    "ggml_nbytes": (c_size_t, _T),
    "ggml_cpy": (_T, _P, _T, _T),
    "ggml_mul_mat": (_T, _P, _T, _T),
    "ggml_permute": (_T, _P, _T, c_int, c_int, c_int, c_int),
    "ggml_flash_attn_ext": (_T, _P, _T, _T, _T, _T, c_float, c_float, c_float),
    "ggml_new_graph": (_P, _P),
    "ggml_build_forward_expand": (None, _P, _T),
    "ggml_graph_n_nodes": (c_int, _P),
    "ggml_graph_node": (_T, _P, c_int),
    # our ops
    "ggml_sparse_attn_visible": (_T, _P, _T),
    **{f"ggml_{name}": (_T, _P, POINTER(slots.Sources), of) for name, of in CONSTRUCTORS.items()},
    # ours of llama.cpp, see ggml_ops/llama/llama-sparse.h
    "llama_set_sparse_attn": (c_int, _P, c_char_p, *_TEXT),
    "llama_get_sparse_attn_info": (c_int, _P, *_TEXT),
    "llama_sparse_attn_reset_counters": (None, _P),
    "llama_sparse_measure_begin": (_P, _P),
    "llama_sparse_measure_end": (None, _P, POINTER(ctypes.c_double)),
    "llama_sparse_document_bytes": (c_int64, _P, _U32, *_TEXT),
    "llama_sparse_document_kind": (c_int64, _P, *_TEXT),
    "llama_sparse_document_write": (c_int64, *_AT, _U32, _U32, *_TEXT),
    "llama_sparse_document_write_shadow": (c_int64, *_AT, *_TEXT),
    "llama_sparse_document_open": (c_int64, *_AT, _U32, c_char_p, *_TEXT),
    # the CPU
    "ggml_cpu_init": (None,),
    "ggml_graph_plan": (Plan, _P, c_int, _P),
    "ggml_graph_compute": (c_int, _P, POINTER(Plan)),
    "ggml_backend_cpu_init": (_P,),
    "ggml_backend_cpu_reg": (_P,),
    "ggml_backend_cpu_set_n_threads": (None, _P, c_int),
    # devices and their memory
    "ggml_backend_cuda_reg": (_P,),
    "ggml_backend_init": (_P,),  # of a library that is a backend
    "ggml_backend_rpc_add_server": (_P, c_char_p),
    "ggml_backend_reg_name": (c_char_p, _P),
    "ggml_backend_reg_dev_count": (c_size_t, _P),
    "ggml_backend_reg_dev_get": (_P, _P, c_size_t),
    "ggml_backend_reg_get_proc_address": (_P, _P, c_char_p),
    "ggml_backend_dev_count": (c_size_t,),
    "ggml_backend_dev_get": (_P, c_size_t),
    "ggml_backend_dev_backend_reg": (_P, _P),
    "ggml_backend_dev_name": (c_char_p, _P),
    "ggml_backend_dev_description": (c_char_p, _P),
    "ggml_backend_dev_type": (c_int, _P),
    "ggml_backend_dev_memory": (None, _P, _P, _P),
    "ggml_backend_dev_init": (_P, _P, c_char_p),
    "ggml_backend_dev_supports_op": (c_bool, _P, _T),
    "ggml_backend_dev_buffer_type": (_P, _P),
    "ggml_backend_free": (None, _P),
    "ggml_backend_get_device": (_P, _P),
    "ggml_backend_get_default_buffer_type": (_P, _P),
    "ggml_backend_buft_name": (c_char_p, _P),
    "ggml_backend_buft_alloc_buffer": (_P, _P, c_size_t),
    "ggml_backend_alloc_ctx_tensors": (_P, _P, _P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
    "ggml_backend_buffer_free": (None, _P),
    "ggml_backend_buffer_get_base": (_P, _P),
    "ggml_backend_buffer_is_host": (c_bool, _P),
    "ggml_backend_tensor_set": (None, _T, _P, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, _T, _P, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, _P, _P),
}


def declare(library: Any) -> Any:
    """Set the types of all functions of the table that a library has. Returns the library."""
    for name, (result, *arguments) in PROTOTYPES.items():
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library
