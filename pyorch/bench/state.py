"""Fill a KV cache with S positions in seconds, without evaluating S tokens.

llama.cpp restores a sequence from a blob of bytes (`llama_state_seq_set_data`). We let it write the
blob of one real token, learn the layout from that, and make a blob of the same layout with S
positions of random K and V. llama.cpp checks types, row sizes and lengths when it reads it.

    blob      magic u32, sequence i32, streams u32 (1), cells u32
    cell      position i32, number of sequences u32 (1), sequence i32
    K, V      transposed V u32, layers u32; per layer of K: type i32, row bytes u64, rows;
              then per layer of V the same, or if transposed: type i32, element bytes u32,
              width u32, columns
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pyorch.errors import SparqError

if TYPE_CHECKING:
    from pyorch.engine import Session

F16 = 1  # ggml's number of the type
_POOL = 8_388_593  # a prime: no two rows are alike, though all are cut from one random pool


@dataclass(frozen=True)
class Layout:
    """What the blob of one token says. `k_width`, `v_width`: elements per position, by layer."""

    magic: int
    transposed_v: bool
    k_width: tuple[int, ...]
    v_width: tuple[int, ...]


def layout(session: Session) -> Layout:
    """The layout of this session's blobs. The session must hold exactly one token.

    Raises:
        SparqError: the blob is not what this module knows, or the cache is not f16.
    """
    blob = _get(session)
    at = 0

    def take(fmt: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + fmt, blob, at)
        at += struct.calcsize("<" + fmt)
        return int(value)

    try:
        magic, _, n_stream, n_cell = take("I"), take("i"), take("I"), take("I")
        _expect("streams and cells", (n_stream, n_cell), (1, 1))
        _expect("position, sequences, sequence", (take("i"), take("I"), take("i")), (0, 1, 0))
        transposed, n_layer = bool(take("I")), take("I")
        widths: list[int] = []
        for i in range(2 * n_layer):
            _expect("type of the cache", take("i"), F16)
            if i >= n_layer and transposed:
                _expect("bytes of an element of V", take("I"), 2)
                width = take("I")
            else:
                width = take("Q") // 2
            widths.append(width)
            at += 2 * width
    except struct.error:
        raise SparqError("the state of the cache ends early: its layout is unknown") from None
    _expect("bytes of the state", len(blob), at)
    return Layout(magic, transposed, tuple(widths[:n_layer]), tuple(widths[n_layer:]))


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SparqError(f"unknown state of the cache: {what} {found}, expected {wanted}")


def blob(form: Layout, n_pos: int, seed: int = 0) -> np.ndarray:
    """The state of a sequence with positions 0 .. n_pos-1, normally distributed f16 K and V.

    The same seed gives the same K and V whether or not V is transposed.
    """
    pool = np.random.default_rng(seed).standard_normal(_POOL, np.float32).astype(np.float16)
    pool = np.concatenate([pool, pool])  # a row that passes the end goes on at the start
    n_layer = len(form.k_width)
    cells = np.zeros(n_pos, np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")]))
    cells["pos"], cells["n_seq"] = np.arange(n_pos), 1
    head = struct.pack("<IiII", form.magic, 0, 1, n_pos) + cells.tobytes()
    head += struct.pack("<II", form.transposed_v, n_layer)
    row_head, column_head = struct.Struct("<iQ"), struct.Struct("<iII")
    v_head = column_head if form.transposed_v else row_head
    size = len(head) + n_layer * (row_head.size + v_head.size)
    size += 2 * n_pos * (sum(form.k_width) + sum(form.v_width))
    out = np.empty(size, np.uint8)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    at = len(head)

    for i, width in enumerate(form.k_width + form.v_width):
        transposed = i >= n_layer and form.transposed_v
        mark = column_head.pack(F16, 2, width) if transposed else row_head.pack(F16, 2 * width)
        out[at : at + len(mark)] = np.frombuffer(mark, np.uint8)
        at += len(mark)
        n = 2 * n_pos * width
        _fill(out[at : at + n], pool, i * 7_919_123, n_pos, width, transposed)
        at += n
    return out


def _fill(
    out: np.ndarray, pool: np.ndarray, start: int, n_pos: int, width: int, transposed: bool
) -> None:
    """Rows of f16 as bytes into `out`: (n_pos, width), or (width, n_pos) if transposed."""
    step = 1024  # positions at once: the unaligned target is written through a small buffer
    target = out.reshape(width, n_pos, 2) if transposed else out.reshape(n_pos, width, 2)
    for p in range(0, n_pos, step):
        n = min(step, n_pos - p)
        rows = np.empty((n, width), np.float16)
        flat, done = rows.reshape(-1), 0
        while done < flat.size:
            at = (start + p * width + done) % _POOL
            piece = pool[at : at + min(_POOL, flat.size - done)]
            flat[done : done + piece.size] = piece
            done += piece.size
        if transposed:
            target[:, p : p + n] = np.ascontiguousarray(rows.T).view(np.uint8).reshape(width, n, 2)
        else:
            target[p : p + n] = rows.view(np.uint8).reshape(n, width, 2)


def fill(session: Session, n_pos: int, seed: int = 0) -> None:
    """Make the session hold `n_pos` positions of random K and V, whatever it held before.

    Raises:
        SparqError: they do not fit, or llama.cpp refuses them.
    """
    from pyorch import engine

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


def seal(session: Session) -> int:
    """Decode, at the same position, until no more groups of positions are sealed.

    Returns how many were sealed, counted per layer. Resets the counters.
    """
    from pyorch import engine

    n_pos = len(session.tokens)
    engine.reset_counters(session)
    sealed = -1
    while (now := engine.info(session).counter("groups_sealed")) != sealed:
        sealed = now
        engine.decode(session, 3)
        engine.rewind(session, n_pos)
    return sealed


def _get(session: Session) -> bytes:
    lib = session.lib
    size = lib.llama_state_seq_get_size(session.ctx, 0)
    buf = (ctypes.c_uint8 * size)()
    return bytes(buf[: lib.llama_state_seq_get_data(session.ctx, buf, size, 0)])
