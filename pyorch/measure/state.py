"""Fill a KV cache with S positions in seconds, without evaluating S tokens.

llama.cpp restores a sequence from a blob of bytes (`llama_state_seq_set_data`). We let it write the
blob of one real token, learn the layout from that, and make a blob of the same layout with S
positions of random K and V. llama.cpp checks types, row sizes and lengths when it reads it.

    blob      magic u32, sequence i32; the cache; one of layers with windows, if any
    cache     streams u32 (1), cells u32, the cells, K, V
    cell      position i32, number of sequences u32 (1), sequence i32
    K, V      transposed V u32, layers u32; per layer of K: type i32, row bytes u64, rows;
              then per layer of V the same, or if transposed: type i32, element bytes u32,
              width u32, columns
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import numpy as np

from pyorch import engine
from pyorch.errors import SparqError
from pyorch.ggml import CACHE_TYPES, TENSOR_TYPES, TensorType

_POOL = 8_388_593  # elements or
_POOL_BLOCKS = 262_139  # blocks; both are primes, so that no two rows from the pool are alike


@dataclass(frozen=True)
class Part:
    """K or V of one layer: its type, and elements per position."""

    type: TensorType
    width: int

    @property
    def row_bytes(self) -> int:
        return self.type.n_bytes(self.width)


@dataclass(frozen=True)
class Cache:
    """The parts of a cache by layer, as learned from the blob of one token."""

    transposed_v: bool
    k: tuple[Part, ...]
    v: tuple[Part, ...]


@dataclass(frozen=True)
class Layout:
    """The layout of a blob. All caches but the first keep the last `window` positions."""

    magic: int
    caches: tuple[Cache, ...]
    window: int


def layout(session: engine.Session) -> Layout:
    """The layout of this session's blobs. The session must hold exactly one token.

    Raises:
        SparqError: the blob has an unknown layout, or the cache has an unsupported type.
    """
    blob = _get(session)
    at = 0

    def take(fmt: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + fmt, blob, at)
        at += struct.calcsize("<" + fmt)
        return int(value)

    def cache() -> Cache:
        nonlocal at
        _expect("streams and cells", (take("I"), take("I")), (1, 1))
        _expect("position, sequences, sequence", (take("i"), take("I"), take("i")), (0, 1, 0))
        transposed, n_layer = bool(take("I")), take("I")
        parts: list[Part] = []
        for i in range(2 * n_layer):
            number = take("i")
            kind = TENSOR_TYPES.get(number) or TensorType(number, f"type {number}", 1, 1)
            if kind.name not in CACHE_TYPES:
                raise SparqError(
                    f"a cache of {kind.name} cannot be filled", f"only {', '.join(CACHE_TYPES)}"
                )
            if i >= n_layer and transposed:
                _expect("bytes of an element of V", take("I"), kind.block_bytes)
                width = take("I")
            else:
                width = take("Q") // kind.block_bytes * kind.per_block
            parts.append(Part(kind, width))
            at += parts[-1].row_bytes
        return Cache(transposed, tuple(parts[:n_layer]), tuple(parts[n_layer:]))

    window = int(session.lib.llama_model_n_swa(session.model.handle))
    try:
        magic, _ = take("I"), take("i")
        caches = tuple(cache() for _ in range(2 if window else 1))
    except struct.error:
        raise SparqError("the state of the cache ends early: its layout is unknown") from None
    _expect("bytes of the state", len(blob), at)
    return Layout(magic, caches, window)


def _expect(what: str, value: object, expected: object) -> None:
    if value != expected:
        raise SparqError(
            f"unknown state of the cache: {what} {value}, expected {expected}",
            "`-d 0 -p N` measures a prompt without positions before it",
        )


def blob(form: Layout, n_pos: int, seed: int = 0) -> np.ndarray:
    """The state of a sequence with positions 0 .. n_pos-1, normally distributed K and V.

    The same seed gives the same K and V whether or not V is transposed.
    """
    counts = [min(n_pos, form.window) if i else n_pos for i in range(len(form.caches))]
    caches = list(zip(form.caches, counts, strict=True))
    pools = {kind: _pool(kind, seed) for c in form.caches for kind in {p.type for p in c.k + c.v}}
    size, at = 8, 0
    for c, n in caches:
        size += 16 + 12 * (n + len(c.k) + len(c.v))
        size += n * sum(p.row_bytes for p in c.k + c.v)
    out = np.empty(size, np.uint8)

    def put(data: bytes) -> None:
        nonlocal at
        out[at : at + len(data)] = np.frombuffer(data, np.uint8)
        at += len(data)

    put(struct.pack("<Ii", form.magic, 0))
    for c, n in caches:
        cells = np.zeros(n, np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")]))
        cells["pos"], cells["n_seq"] = np.arange(n_pos - n, n_pos), 1
        put(struct.pack("<II", 1, n) + cells.tobytes())
        put(struct.pack("<II", c.transposed_v, len(c.k)))
        for i, part in enumerate(c.k + c.v):
            pool = pools[part.type]
            transposed = i >= len(c.k) and c.transposed_v
            mark = struct.pack("<iQ", part.type.number, part.row_bytes)
            if transposed:
                mark = struct.pack("<iII", part.type.number, pool.shape[1], part.width)
            put(mark)
            end = at + n * part.row_bytes
            _fill(out[at:end], pool, i * 7_919_123, n, part.row_bytes, transposed)
            at = end
    return out


def _pool(of: TensorType, seed: int) -> np.ndarray:
    """Normally distributed values of a type, as bytes (blocks, bytes per block)."""
    import gguf

    n = _POOL if of.per_block == 1 else _POOL_BLOCKS * of.per_block
    values = np.random.default_rng(seed).standard_normal(n, np.float32)
    blocks = gguf.quantize(values, gguf.GGMLQuantizationType(of.number))
    return blocks.view(np.uint8).reshape(-1, of.block_bytes)


def _fill(
    out: np.ndarray, pool: np.ndarray, start: int, n_pos: int, row_bytes: int, transposed: bool
) -> None:
    """Write rows of blocks to `out`: (n_pos, blocks of a row), or the reverse if transposed."""
    step = 1024  # positions per step: the unaligned target is written through a small buffer
    unit = pool.shape[1]
    n_row = row_bytes // unit
    target = out.reshape(n_row, n_pos, unit) if transposed else out.reshape(n_pos, n_row, unit)
    for p in range(0, n_pos, step):
        n = min(step, n_pos - p)
        rows = np.empty((n * n_row, unit), np.uint8)
        done = 0
        while done < len(rows):
            at = (start + p * n_row + done) % len(pool)
            piece = pool[at : at + len(rows) - done]
            rows[done : done + len(piece)] = piece
            done += len(piece)
        rows = rows.reshape(n, n_row, unit)
        if transposed:
            target[:, p : p + n] = rows.transpose(1, 0, 2)
        else:
            target[p : p + n] = rows


def fill(session: engine.Session, n_pos: int, seed: int = 0) -> None:
    """Make the session hold `n_pos` positions of random K and V, whatever it held before.

    Raises:
        SparqError: they do not fit, or llama.cpp refuses them.
    """
    if n_pos > session.n_ctx:
        raise SparqError(f"{n_pos} positions do not fit in a context of {session.n_ctx}")
    engine.rewind(session, 0)
    engine.decode(session, 3)
    data = blob(layout(session), n_pos, seed)
    read = session.lib.llama_state_seq_set_data(
        session.ctx, data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), data.size, 0
    )
    last = session.lib.llama_memory_seq_pos_max(session.memory, 0)
    if read != data.size or last != n_pos - 1:
        raise SparqError(f"llama.cpp took {read} of {data.size} bytes of a state, up to {last}")
    session.tokens[:] = [3] * n_pos


def _get(session: engine.Session) -> bytes:
    lib = session.lib
    size = lib.llama_state_seq_get_size(session.ctx, 0)
    buf = (ctypes.c_uint8 * size)()
    return bytes(buf[: lib.llama_state_seq_get_data(session.ctx, buf, size, 0)])
