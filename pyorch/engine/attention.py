"""Sets how a session attends, and reports what it did."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from pyorch.attention.spec import AttentionSpec
from pyorch.engine import c_functions
from pyorch.engine.model import Session, Timings
from pyorch.engine.settings import attention_for
from pyorch.errors import SparqError
from pyorch.models.memory import check_more

T = TypeVar("T")


def set_attention(session: Session, spec: AttentionSpec | str) -> None:
    """Attend as `spec` says from the next decoded token on; the cache stays as it is.

    If this switches SparQ on, the cache is sealed now.

    Raises:
        SparqError: the settings do not fit the model, its transposed K does not fit the memory, or
            the library refuses them.
    """
    spec = attention_for(spec, session.path, session.geometry)
    shadow = replace(session.settings, spec=spec).shadow_bytes()
    if shadow and c_functions.is_ours(session.lib):
        more = int((shadow - info(session).shadow_bytes) * session.share_here)
        check_more(session.path, "transposed K", more)
    c_functions.set_spec(session.lib, session.ctx, spec)


def info(session: Session) -> c_functions.AttentionInfo:
    """The library's report on attention since the counters were reset.

    Raises:
        SparqError: it is a stock library, which keeps no account.
    """
    call = c_functions.ours(session.lib).llama_get_sparse_attn_info
    size = call(session.ctx, None, 0) + 4096  # counters may gain a digit meanwhile
    text = ctypes.create_string_buffer(size)
    call(session.ctx, text, size)
    return c_functions.AttentionInfo.of(json.loads(text.value))


def reset_counters(session: Session) -> None:
    """Set the library's counters, if it has any, and `session.timings` to zero."""
    session.timings = Timings()
    if session.watch is not None:
        session.watch.reset()
    if c_functions.is_ours(session.lib):
        c_functions.ours(session.lib).llama_sparse_attn_reset_counters(session.ctx)


def measure_mass(session: Session, work: Callable[[], T]) -> tuple[T, list[float]]:
    """Do `work`, and measure the share of the true attention that what it decodes reads, which
    ggml_ops/llama/llama-sparse.h explains. Decoding takes longer meanwhile.

    Returns:
        the result of `work`; by layer, the mean share of the softmax over all that a token sees
        that lies in the positions it reads, from 0 to 1. It is 1 for a layer that reads all.

    Raises:
        SparqError: attention is computed on a GPU, or it is a stock library.
    """
    lib = c_functions.ours(session.lib)
    masses = (ctypes.c_double * session.geometry.n_layer)()
    if not (handle := lib.llama_sparse_measure_begin(session.ctx)):
        raise SparqError("the library cannot measure attention here: no memory")
    try:
        result = work()
    finally:
        lib.llama_sparse_measure_end(handle, masses)
    if any(map(math.isnan, masses)):
        raise SparqError(
            "what share of the attention is read could not be measured: it runs on a GPU",
            "load the model with n_gpu_layers=0",
        )
    return result, list(masses)
