"""The ops of our nodes, their parameters, and the slots of their sources in `src[]`, for code that
makes nodes, or reads them while they run.

This mirrors ggml_ops/ggml-sparse.h, sparse-params.h and ggml-sparse-nodes.h; tests compare them.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32
from typing import Any

from pyorch.native.tensor import Tensor, source

# ggml_sparse_attn_op, the first of a node's op_params
STEPS = ("SEAL", "VISIBLE", "SCORE", "SELECT", "SCORE_SELECT", "ATTEND", "PREFILL")
SEAL, VISIBLE, SCORE, SELECT, SCORE_SELECT, ATTEND, PREFILL = range(7)
IS_TIMED = len(STEPS)  # no step: a device that supports it is known to be faster with ours

_SCORE = {"q": 0, "k": 1, "mask": 2, "stats": 4, "sealed": 5, "k_t": 6, "k_range": 7}
_PREFILL = {"q": 0, "k": 1, "mask": 2, "sinks": 3, "stats": 4, "v": 6}
_SEAL = {"list": 0, "k": 1, "stats": 4, "k_t": 6, "k_range": 7, "v": 8, "v_sum": 9}

SLOTS: dict[int, dict[str, int]] = {
    SEAL: _SEAL,
    VISIBLE: {"mask": 2},
    SCORE: _SCORE | {"visible": 9},
    SELECT: {"logits": 0, "wanted": 8},
    SCORE_SELECT: _SCORE | {"wanted": 8},
    ATTEND: _PREFILL | {"sealed": 5, "v_sum": 7, "sel": 8, "visible": 9},
    PREFILL: _PREFILL,
}

# GGML_OP_FLASH_ATTN_EXT, llama.cpp's own attention
FLASH_ATTN = {"q": 0, "k": 1, "v": 2, "mask": 3, "sinks": 4}

I_FORCED = 7  # in the op_params of SELECT: the place in a row of `wanted` where its cells begin


class Sources(ctypes.Structure):
    """`struct ggml_sparse_src`, from which a constructor takes the tensors that its op has."""

    NAMES = (
        *("q", "k", "v", "mask", "sinks", "stats", "sealed", "k_t", "k_range", "v_sum"),
        *("visible", "wanted", "logits", "sel", "list"),
    )
    _fields_ = [(name, ctypes.c_void_p) for name in NAMES]  # noqa: RUF012


def sources(**tensors: Any) -> Sources:
    """The tensors by name: pointers or addresses, None where there is none."""
    return Sources(
        **{
            name: t if isinstance(t, int) else ctypes.addressof(t.contents)
            for name, t in tensors.items()
            if t is not None
        }
    )


def source_of(t: Tensor, name: str) -> Tensor | None:
    """A source of one of our nodes; None if it was not given. KeyError: the op has none of it."""
    return source(t, SLOTS[t.op_params[0]][name])


# ---- parameters ----

# the counters of `stats`, in their order
STATS = (
    *("attend_sparse", "attend_dense", "pos_visible", "pos_read"),
    *("bytes_score", "bytes_attend", "bytes_dense", "groups_sealed"),
    *("prefill", "prefill_fast", "cut_passes"),
)


def _params(name: str, **types: type) -> Any:
    """A struct of these fields, in their order."""
    return type(name, (ctypes.Structure,), {"_fields_": list(types.items())})


_LOGIT = {"scale": c_float, "max_bias": c_float, "softcap": c_float}
_BITS = {"n_bit": c_int32, "n_rot": c_int32}

SealParams = _params("SealParams", **_BITS)
ScoreParams = _params("ScoreParams", rank=c_int32, **_LOGIT, **_BITS, i_rank=c_int32)
AttendParams = _params("AttendParams", **_LOGIT, mean_v=c_int32)
PrefillParams = _params("PrefillParams", **_LOGIT, fast=c_int32)


class SelectParams(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        *((name, c_int32) for name in ("topk_max", "n_head_kv", "n_local_max", "rest")),
        ("top_p", c_float),
        *((name, c_int32) for name in ("i_k", "i_forced")),
    ]

    def __init__(self, *args: Any, i_forced: int = 2, **kwargs: Any) -> None:
        """By default `wanted` is k, l and the forced cells, as for a model of one layer."""
        super().__init__(*args, i_forced=i_forced, **kwargs)


ScoreSelectParams = _params("ScoreSelectParams", score=ScoreParams, select=SelectParams)
