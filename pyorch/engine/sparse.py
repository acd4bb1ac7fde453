"""Our C functions in the patched library, for raw contexts. `attention` has them for sessions."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypedDict

from pyorch.attention.bytes import per_token
from pyorch.attention.spec import AttentionSpec
from pyorch.errors import SparqError

Json = Mapping[str, Any]  # an object from the library


class LayerState(TypedDict):
    """What serves a layer: `sparse` is our code; `dense` is llama.cpp's, for the given reason."""

    il: int
    state: str
    reason: str


@dataclass(frozen=True)
class AttentionInfo:
    """The library's own account of attention since its counters were reset.

    `counters` has those that `llama_get_sparse_attn_info` writes, which stand in one table in
    ggml_ops/llama/sparse-context.cpp; `layers` has one entry per layer; `shadow_bytes` is memory.
    """

    spec: str
    active: bool
    reason: str  # why attention is dense though something sparse was asked for
    method: str
    n_layer: int
    layers_sparse: int
    shadow_bytes: int
    shadow_type: str
    layers: Sequence[LayerState]
    counters: Json
    raw: Json = field(repr=False)  # the whole JSON

    def counter(self, name: str) -> int:
        """The counter of that name, or 0 if the library has none."""
        return int(self.counters.get(name, 0))

    @property
    def bytes_per_token(self) -> tuple[int, int]:
        """What a decoded token read, and what dense attention would, of the layers that are ours;
        0 if no token was decoded."""
        read, dense = per_token(self.counters)
        return int(read), int(dense)

    @property
    def sparse_share(self) -> float:
        """The share of the attention calls of decoded tokens that ran sparse, from 0 to 1; 0 if no
        token was decoded."""
        total = self.counter("steps") * len(self.layers)
        return self.counter("calls_sparse") / total if total > 0 else 0.0

    @property
    def dense_reasons(self) -> list[str]:
        """Why attention, or some of its layers, is left to llama.cpp; each reason only once."""
        found = [self.reason] if not self.active else []
        found += [layer["reason"] for layer in self.layers if layer["state"] != "sparse"]
        return list(dict.fromkeys(r for r in found if r))


def is_ours(lib: ModuleType) -> bool:
    """Whether a library has sparse attention; a stock build has none. lib: its C functions."""
    return hasattr(lib._lib, "llama_set_sparse_attn")


def function(
    lib: ModuleType, name: str, result: type | None, *arguments: type
) -> Callable[..., Any]:
    """Returns a function of our C API, with its types set.

    Raises:
        SparqError: it is a stock library.
    """
    try:
        found = getattr(lib._lib, name)
    except AttributeError:
        raise SparqError(
            "this libllama has no sparse attention: it is a stock build", "run `sparq-cpp build`"
        ) from None
    found.restype, found.argtypes = result, list(arguments)
    call: Callable[..., Any] = found
    return call


_CTX, _TEXT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t


def set_spec(lib: ModuleType, ctx: int | None, spec: AttentionSpec) -> None:
    """Switch attention of a context.

    Raises:
        SparqError: the library refuses the settings, or they are not `off` in a stock library.
    """
    if spec.method == "off" and not is_ours(lib):
        return
    call = function(lib, "llama_set_sparse_attn", ctypes.c_int32, _CTX, _TEXT, _TEXT, _SIZE)
    err = ctypes.create_string_buffer(1024)
    if call(ctx, str(spec).encode(), err, len(err)) < 0:
        message, _, hint = err.value.decode("utf-8", errors="replace").partition("\n")
        raise SparqError(f"attention {str(spec)!r}: {message or 'refused'}", hint.strip())


@contextmanager
def environment_ignored(lib: ModuleType) -> Iterator[None]:
    """While this is active, contexts that this thread makes ignore SPARQ_ATTN."""
    if not is_ours(lib):
        yield
        return
    call = function(lib, "llama_sparse_attn_default", ctypes.c_int32, _TEXT)
    call(b"off")
    try:
        yield
    finally:
        call(None)


@contextmanager
def kv_in_memory(layers: Sequence[int]) -> Iterator[None]:
    """While this is active, new contexts keep K and V of these layers in memory, and no others but
    those whose weights are there."""
    name = "SPARQ_KV_IN_MEMORY"
    before = os.environ.get(name)
    os.environ[name] = ",".join(map(str, layers))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def get_info(lib: ModuleType, ctx: int | None) -> AttentionInfo:
    """The library's account of a context since its counters were reset.

    Raises:
        SparqError: a stock library, which keeps no account.
    """
    call = function(lib, "llama_get_sparse_attn_info", ctypes.c_int32, _CTX, _TEXT, _SIZE)
    size = call(ctx, None, 0) + 1
    buf = ctypes.create_string_buffer(size + 4096)  # counters may gain a digit meanwhile
    call(ctx, buf, len(buf))
    raw = json.loads(buf.value)
    n_layer = lib.llama_model_n_layer(lib.llama_get_model(ctx))
    return AttentionInfo(
        spec=raw["spec"],
        active=raw["active"],
        reason=raw["reason"],
        method=raw["method"],
        n_layer=raw.get("n_layer", n_layer),  # the rest is missing while attention is off
        layers_sparse=raw.get("layers_sparse", 0),
        shadow_bytes=raw.get("shadow_bytes", 0),
        shadow_type=raw.get("shadow_type", ""),
        layers=raw.get("layers", []),
        counters=raw.get("counters", {}),
        raw=raw,
    )


def reset_counters(lib: ModuleType, ctx: int | None) -> None:
    """Set the counters of a context to zero; a stock library has none."""
    if is_ours(lib):
        function(lib, "llama_sparse_attn_reset_counters", None, _CTX)(ctx)


def seal(lib: ModuleType, ctx: int | None) -> int:
    """Seal the groups of positions that are not sealed, and return their number, summed over
    layers; a number below 0 is a failure.

    Raises:
        SparqError: a stock library.
    """
    return int(function(lib, "llama_sparse_attn_seal", ctypes.c_int64, _CTX)(ctx))


class Measure:
    """Measures by layer which share of the true attention a context reads, from here to `end`.

    ggml_ops/llama/llama-sparse.h says what it is. Decoding takes longer meanwhile.

    Raises:
        SparqError: a stock library.
    """

    def __init__(self, lib: ModuleType, ctx: int | None, n_layer: int) -> None:
        pointer = ctypes.POINTER(ctypes.c_double)
        self._end = function(lib, "llama_sparse_measure_end", None, ctypes.c_void_p, pointer)
        begin = function(lib, "llama_sparse_measure_begin", ctypes.c_void_p, _CTX)
        self._mass = (ctypes.c_double * n_layer)()
        self._handle = begin(ctx)
        if not self._handle:
            raise SparqError("the library cannot measure attention here: no memory")

    def end(self) -> list[float]:
        """The means by layer; 1 where nothing ran over a selection, NaN on a GPU."""
        self._end(self._handle, self._mass)
        return list(self._mass)
