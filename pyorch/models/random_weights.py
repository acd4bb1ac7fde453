"""Random weights for synthetic models: any number of them, from a small pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import gguf
import numpy as np

from pyorch.ggml import BY_NAME

_BLOCK = BY_NAME["q8_0"].per_block  # elements that share a scale
_SUPER = BY_NAME["q4_K"].per_block  # as q6_K has
_POOL_BLOCKS = 32_771  # a prime: rows of a power of two never start at the same block
_CHUNK = 4 << 20  # bytes per piece


class Pools:
    """Random weights: one pool of blocks for each type and input width, which tensors repeat."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.made: dict[tuple[str, int], memoryview] = {}

    def data(self, shape: tuple[int, ...], kind: str) -> Iterator[bytes | memoryview]:
        """The bytes of a tensor, in pieces. It begins at a block of its own in the pool. Experts
        are copies of one, since rounding decides which of them a random router takes."""
        if len(shape) == 1:
            yield np.ones(shape, np.float32).tobytes()
            return
        pool = self._pool(kind, shape[-1])
        unit = len(pool) // _POOL_BLOCKS
        first = int(self.rng.integers(_POOL_BLOCKS)) * unit
        for _ in range(shape[0] if len(shape) == 3 else 1):
            at, left = first, BY_NAME[kind].n_bytes(math.prod(shape[-2:]))
            while left:
                piece = pool[at : at + min(left, len(pool) - at, _CHUNK)]
                yield piece
                left -= len(piece)
                at = (at + len(piece)) % len(pool)

    def _pool(self, kind: str, width: int) -> memoryview:
        if (kind, width) not in self.made:
            # variance 1/width, so that activations keep their size through a layer
            blocks = BLOCKS[kind](self.rng, 1 / math.sqrt(width))
            self.made[kind, width] = memoryview(blocks.tobytes())
        return self.made[kind, width]


# Blocks of random codes and valid scales, with mean 0 and standard deviation `std`.


def _quantized(kind: str, rng: np.random.Generator, std: float) -> np.ndarray:
    x = rng.standard_normal((_POOL_BLOCKS, _BLOCK), np.float32) * np.float32(std)
    return gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind])


def _q4_k(rng: np.random.Generator, std: float) -> np.ndarray:
    """d*sc*q - dmin*m with m = sc and dmin = 7.5*d: d*sc*(q - 7.5). 8 sc and 8 m of 6 bits."""
    form = [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", _SUPER // 2)]
    block = np.zeros(_POOL_BLOCKS, np.dtype(form))
    sc = rng.integers(40, 64, (_POOL_BLOCKS, 8), dtype=np.uint8)
    low, high = sc[:, :4], sc[:, 4:]
    first = low | (high >> 4 << 6)
    block["scales"] = np.concatenate([first, first, (high & 15) | (high & 15) << 4], axis=1)
    block["qs"] = rng.integers(0, 256, (_POOL_BLOCKS, _SUPER // 2), dtype=np.uint8)
    block["d"] = std / math.sqrt((16**2 - 1) / 12) / 51.5  # the mean of sc
    block["dmin"] = 7.5 * block["d"].astype(np.float32)
    return block


def _q6_k(rng: np.random.Generator, std: float) -> np.ndarray:
    """d*sc*(q - 32), where sc has either sign."""
    form = [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]
    block = np.zeros(_POOL_BLOCKS, np.dtype(form))
    for part in ("ql", "qh"):
        block[part] = rng.integers(0, 256, block[part].shape, dtype=np.uint8)
    sc = rng.integers(80, 127, (_POOL_BLOCKS, 16), dtype=np.int8)
    block["scales"] = sc * rng.choice(np.array([-1, 1], np.int8), sc.shape)
    block["d"] = std / math.sqrt((64**2 - 1) / 12) / 103  # the mean of |sc|
    return block


BLOCKS: dict[str, Callable[[np.random.Generator, float], np.ndarray]] = {
    kind: partial(_quantized, kind.upper()) for kind in ("f32", "f16", "q8_0", "q4_0", "mxfp4")
}
BLOCKS |= {"q4_K": _q4_k, "q6_K": _q6_k}
