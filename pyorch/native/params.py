"""The parameters of our ops and the counters that they write, for code that makes nodes itself.

This mirrors ggml_ops/sparse-params.h; the tests of the ops call through it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32
from typing import Any

# the counters of `stats`, in their order
STATS = (
    "attend_sparse",
    "attend_dense",
    "pos_visible",
    "pos_read",
    "bytes_score",
    "bytes_attend",
    "bytes_dense",
    "groups_sealed",
    "prefill",
    "prefill_fast",
    "prefill_visible",
    "prefill_read",
)


class SealParams(ctypes.Structure):
    _fields_ = [("n_bit", c_int32), ("n_rot", c_int32)]


class ScoreParams(ctypes.Structure):
    _fields_ = [
        ("rank", c_int32),
        ("scale", c_float),
        ("max_bias", c_float),
        ("softcap", c_float),
        ("n_bit", c_int32),
        ("n_rot", c_int32),
        ("i_rank", c_int32),
    ]


class SelectParams(ctypes.Structure):
    _fields_ = [
        ("topk_max", c_int32),
        ("n_head_kv", c_int32),
        ("n_local_max", c_int32),
        ("rest", c_int32),
        ("top_p", c_float),
        ("i_k", c_int32),
        ("i_forced", c_int32),
    ]

    def __init__(self, *args: Any, i_forced: int = 2, **kwargs: Any) -> None:
        """By default `wanted` is k, l and the forced cells, as for a model of one layer."""
        super().__init__(*args, i_forced=i_forced, **kwargs)


class ScoreSelectParams(ctypes.Structure):
    _fields_ = [("score", ScoreParams), ("select", SelectParams)]


class AttendParams(ctypes.Structure):
    _fields_ = [
        ("scale", c_float),
        ("max_bias", c_float),
        ("softcap", c_float),
        ("mean_v", c_int32),
    ]


class PrefillParams(ctypes.Structure):
    _fields_ = [
        ("scale", c_float),
        ("max_bias", c_float),
        ("softcap", c_float),
        ("fast", c_int32),
        ("keep", c_float),
    ]
