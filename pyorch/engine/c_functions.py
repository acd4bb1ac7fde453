"""Our C functions in the patched library, for raw contexts. `attention` has them for sessions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

from pyorch.attention.cost import per_token
from pyorch.attention.spec import AttentionSpec
from pyorch.errors import SparqError
from pyorch.native.prototypes import declare

Json = Mapping[str, Any]  # an object from the library


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
    n_layer: int = 0  # this and what follows is missing while attention is off
    layers_sparse: int = 0
    shadow_bytes: int = 0
    layers: Sequence[Json] = ()  # `il`, `reason`, `state`: "sparse" (our code) or "dense"
    counters: Json = field(default_factory=dict)
    raw: Json = field(default_factory=dict, repr=False)  # the whole JSON

    @classmethod
    def of(cls, raw: Json) -> AttentionInfo:
        """The account that the library has written."""
        return cls(**{f.name: raw[f.name] for f in fields(cls) if f.name in raw}, raw=raw)

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
        reasons = [self.reason] if not self.active else []
        reasons += [layer["reason"] for layer in self.layers if layer["state"] != "sparse"]
        return list(dict.fromkeys(filter(None, reasons)))


def is_ours(lib: ModuleType) -> bool:
    """Whether a library has sparse attention; a stock build has none. lib: its C functions."""
    return hasattr(lib._lib, "llama_set_sparse_attn")


def ours(lib: ModuleType) -> Any:
    """The library with our C functions, whose types are set.

    Raises:
        SparqError: it is a stock library.
    """
    if not is_ours(lib):
        what = "this libllama has no sparse attention: it is a stock build"
        raise SparqError(what, "run `sparq-cpp build`")
    return declare(lib._lib)


def set_spec(lib: ModuleType, ctx: int | None, spec: AttentionSpec) -> None:
    """Switch attention of a context.

    Raises:
        SparqError: the library refuses the settings, or they are not `off` in a stock library.
    """
    if spec.method == "off" and not is_ours(lib):
        return
    err = ctypes.create_string_buffer(1024)
    if ours(lib).llama_set_sparse_attn(ctx, str(spec).encode(), err, len(err)) < 0:
        message, _, hint = err.value.decode("utf-8", errors="replace").partition("\n")
        raise SparqError(f"attention {str(spec)!r}: {message or 'refused'}", hint.strip())


@contextmanager
def environment(kv_in_memory: Sequence[int]) -> Iterator[None]:
    """While this is active, new contexts ignore SPARQ_ATTN, and keep K and V of these layers in
    memory, and no others but those whose weights are there."""
    values = {"SPARQ_ATTN": "", "SPARQ_KV_IN_MEMORY": ",".join(map(str, kv_in_memory))}
    before = {name: os.environ.get(name, "") for name in values}  # "" says nothing
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.update(before)
