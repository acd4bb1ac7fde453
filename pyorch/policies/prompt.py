"""The attention of a prompt, for methods that keep the positions it attended to most.

`Queries` captures each layer's q from the nodes that attend in prefill (one copy, in f16), and
`Prompt` computes its softmax in numpy from them and K in the cache, in blocks, when a method
first asks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar, cast

import numpy as np

from pyorch.errors import SparqError
from pyorch.native.slots import FLASH_ATTN, source_of
from pyorch.native.tensor import Tensor, floats, source, view

_ROWS = 128  # rows of a block
T = TypeVar("T")


@dataclass
class _Layer:
    q: np.ndarray  # (room, n_head, d_k) f16; room grows
    logit: tuple[float, float, float]  # scale, ALiBi's max_bias, soft-cap
    known: int = 0  # how many of the first positions have rows, without a gap
    # the values of `once`, by its key and the number of positions
    cache: dict[tuple[tuple[Hashable, ...], int], object] = field(default_factory=dict)

    def put(self, rows: np.ndarray, first: int) -> None:
        """Set the rows of the positions from `first` on, and drop all older ones from there on."""
        n = first + len(rows)
        if n > len(self.q):
            grown = np.empty((max(n, 2 * len(self.q)), *rows.shape[1:]), np.float16)
            grown[: self.known] = self.q[: self.known]
            self.q = grown
        self.q[first:n] = np.clip(rows, -65504, 65504)
        self.cut(first)
        if first == self.known:
            self.known = n

    def cut(self, n: int) -> None:
        """Forget the positions from n on."""
        self.known = min(self.known, n)
        for key in [key for key in self.cache if key[1] > n]:
            del self.cache[key]


@dataclass
class Queries:
    """The queries of all layers, by the address of the layer's K."""

    layers: dict[int, _Layer] = field(default_factory=dict)
    seen: bool = False  # whether this llama_decode captured any

    def add(self, t: Tensor, n_past: int, ours: bool) -> None:
        """Capture a node whose tokens follow `n_past` others: PREFILL if `ours`, or FLASH_ATTN_EXT.

        Raises:
            SparqError: there is more than one sequence.
        """
        if ours:
            q, k, sinks = (source_of(t, name) for name in ("q", "k", "sinks"))
        else:
            q, k, sinks = (source(t, FLASH_ATTN[name]) for name in ("q", "k", "sinks"))
        assert q is not None and k is not None
        if q.ne[3] != 1 or sinks is not None:
            raise SparqError("capturing a prompt: one sequence, and no model with learned sinks")
        rows = view(q)[0] if ours else view(q)[0].swapaxes(0, 1)  # (n_tok, n_head, d_k)
        params = np.array(t.op_params[ours : ours + 3], np.int32)  # our first is the step
        scale, max_bias, softcap = params.view(np.float32).tolist()
        self.put(k.data, rows, n_past, (scale, max_bias, softcap))

    def put(
        self, layer: int, rows: np.ndarray, first: int, logit: tuple[float, float, float] | None
    ) -> None:
        """Set the rows (n, n_head, d_k) of the positions from `first` on."""
        if layer not in self.layers:
            if logit is None:
                return
            self.layers[layer] = _Layer(np.empty((0, *rows.shape[1:]), np.float16), logit)
        self.layers[layer].put(rows, first)
        self.seen = True

    def done(self, n_past: int) -> None:
        """Call this after each llama_decode: if it captured nothing, later queries are unknown."""
        if not self.seen:
            for layer in self.layers.values():
                layer.cut(n_past)
        self.seen = False

    def prompt(self, k: Tensor, n: int, name: str) -> Prompt:
        """The attention of the first n positions.

        Raises:
            SparqError: they were not captured.
        """
        layer = self.layers.get(k.data)
        if layer is None or layer.known < n:
            raise SparqError(
                f"{name} needs the attention of the prompt, which was read before it was asked for",
                "switch to the method before prefill, or open the session with keep_queries=True",
            )
        return Prompt(layer, n, view(k)[0, :n], k.type)


@dataclass
class Prompt:
    """The attention of one layer's n positions before the first one that a method decides on.

    stored: K of the cache (n, n_head_kv, ..), of the given ggml type.
    """

    layer: _Layer
    n: int
    stored: np.ndarray
    kind: int = 0

    @cached_property
    def k(self) -> np.ndarray:
        """(n, n_head_kv, d_k) f32"""
        return floats(self.stored, self.kind)

    def once(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """What `make` returns, which all methods and ratios share by this key."""
        full = key, self.n
        if full not in self.layer.cache:
            self.layer.cache[full] = make()
        return cast(T, self.layer.cache[full])

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """The logits of the rows from `start` to `stop` (to the end), a few at a time: (n_head_kv,
        n_group_q, rows, cols) f32 over positions 0 .. cols-1, -inf above the diagonal, which ends
        at the last row and column."""
        stop = self.n if stop is None else stop
        for first in range(start, stop, _ROWS):
            last = min(first + _ROWS, stop)
            q = self.layer.q[first:last].astype(np.float32)
            yield causal_logits(q, self.k[:last], *self.layer.logit)


def causal_logits(
    q: np.ndarray, k: np.ndarray, scale: float, max_bias: float, softcap: float
) -> np.ndarray:
    """(n_head_kv, n_group_q, rows, cols): logits of the last `rows` positions of `cols`.

    q (rows, n_head, d_k), k (cols, n_head_kv, d_k); -inf above the diagonal.
    """
    (rows, n_head, d), (cols, n_head_kv, _) = q.shape, k.shape
    # (n_head_kv, n_group_q*rows, d) @ (n_head_kv, d, cols)
    by_head = q.reshape(rows, n_head_kv, -1, d).transpose(1, 2, 0, 3).reshape(n_head_kv, -1, d)
    x: np.ndarray = (by_head * np.float32(scale)) @ k.transpose(1, 2, 0)
    x = x.reshape(n_head_kv, -1, rows, cols)
    if softcap > 0:
        x = np.float32(softcap) * np.tanh(x / np.float32(softcap))
    distance = np.arange(cols - rows, cols)[:, None] - np.arange(cols)
    if max_bias > 0:
        slopes = alibi_slopes(n_head, max_bias).reshape(n_head_kv, -1, 1, 1)
        x -= (slopes * distance).astype(np.float32)
    x[..., distance < 0] = -np.inf
    return x


def alibi_slopes(n_head: int, max_bias: float) -> np.ndarray:
    """The slopes (n_head,), as ggml computes them."""
    power = 2 ** int(np.log2(n_head))
    h = np.arange(n_head)
    slopes: np.ndarray = np.where(
        h < power,
        2.0 ** (-max_bias / power * (h + 1)),
        2.0 ** (-max_bias / 2 / power * (2 * (h - power) + 1)),
    )
    return slopes
