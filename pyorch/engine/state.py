"""Saves a session's cache to a file and restores it."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from pyorch.engine.decoding import forget
from pyorch.engine.model import Session
from pyorch.errors import SparqError


def save_state(session: Session, path: str | os.PathLike[str]) -> None:
    """Write the cache and its tokens to a file that `load_state` and stock llama.cpp read. If it is
    new, it is for this user alone: whoever has it has the text.

    Raises:
        SparqError: the file cannot be written.
    """
    buf = (ctypes.c_int32 * len(session.tokens))(*session.tokens)
    if not Path(path).absolute().parent.is_dir():
        raise SparqError(f"{path}: there is no folder for the session", "make it first")
    with suppress(OSError):  # llama.cpp tells what is wrong
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    with session.library.call() as call:
        ok = session.lib.llama_state_save_file(
            session.ctx, os.fsencode(path), buf, len(session.tokens)
        )
    call.raise_if_it_came()
    if not ok:
        hint = "is the folder writable, and is there room?"
        raise SparqError(f"{path}: cannot write the session: {call.reason}", hint)


def load_state(session: Session, path: str | os.PathLike[str]) -> None:
    """Restore the cache that `save_state` wrote; it is sealed at once if SparQ needs it.

    Raises:
        SparqError: the file does not exist, or is not a session of this model and context. The
            cache is then empty.
    """
    if not Path(path).is_file():
        raise SparqError(f"{path}: no such file")
    buf, n = (ctypes.c_int32 * session.n_ctx)(), ctypes.c_size_t()
    with session.library.call() as call:
        ok = session.lib.llama_state_load_file(
            session.ctx, os.fsencode(path), buf, session.n_ctx, ctypes.byref(n)
        )
    if not ok or call.came:
        forget(session)
        call.raise_if_it_came()
        raise SparqError(
            f"{path}: not a saved session of this model: {call.reason}",
            "a session needs the same model, cache types and at least the same --ctx",
        )
    session.tokens, session.checkpoint = list(buf[: n.value]), None
