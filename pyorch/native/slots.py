"""The ops of our nodes, and the slots of their sources in `src[]`, for code that reads nodes while
they run.

This mirrors ggml_ops/ggml-sparse.h, sparse-params.h and ggml-sparse-nodes.h; tests compare them.
"""

from __future__ import annotations

import ctypes
from typing import Any

from pyorch.native.tensor import Tensor, source

# ggml_sparse_attn_op, the first of a node's op_params
STEPS = ("SEAL", "VISIBLE", "SCORE", "SELECT", "SCORE_SELECT", "ATTEND", "PREFILL")
SEAL, VISIBLE, SCORE, SELECT, SCORE_SELECT, ATTEND, PREFILL = range(7)

_SCORE = {"q": 0, "k": 1, "mask": 2, "stats": 4, "sealed": 5, "k_t": 6, "k_range": 7}
_PREFILL = {"q": 0, "k": 1, "mask": 2, "sinks": 3, "stats": 4, "v": 6}
_SEAL = {"list": 0, "k": 1, "stats": 4, "sealed": 5, "k_t": 6, "k_range": 7, "v": 8, "v_sum": 9}

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
