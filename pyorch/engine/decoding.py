"""Puts tokens into the cache, a prompt in batches and then one by one, and takes them out again."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from pyorch.engine.library import Call
from pyorch.engine.model import Session
from pyorch.errors import SparqError
from pyorch.progress import Progress

if TYPE_CHECKING:
    import numpy as np

LONGER = "raise --ctx (beyond the model's training: with --rope-scale), or shorten the text"
_ABORTED = 2  # what llama_decode returns when its callback ends it


def _decode_tokens(
    session: Session,
    tokens: Sequence[int],
    should_stop: Callable[[], bool] | None = None,
    ends: bool = True,
) -> bool:
    """Append `tokens` to the cache. Returns False, and appends nothing, if `should_stop` ended it.

    ends: whether logits are needed for the last token. If a prompt continues they must not be, or
        a rest of one token would count as decoded: ggml_ops/llama/llama-sparse.h has the rule.
    """
    if len(session.tokens) + len(tokens) > session.n_ctx:
        raise SparqError(
            f"context full: {len(session.tokens)} + {len(tokens)} tokens, "
            f"but the context has {session.n_ctx} positions",
            LONGER,
        )
    buf = (ctypes.c_int32 * len(tokens))(*tokens)
    batch = session.lib.llama_batch_get_one(buf, len(tokens))
    batch.logits = (ctypes.c_int8 * len(tokens))(*[0] * (len(tokens) - 1), ends)
    is_prompt = len(tokens) > 1
    with (
        session.library.call() as call,
        abortable(session, call, should_stop) if is_prompt else nullcontext(),
    ):
        code = session.lib.llama_decode(session.ctx, batch)
        if code == 0:
            session.tokens.extend(tokens)
        elif session.lib.llama_memory_seq_pos_max(session.memory, 0) != len(session.tokens) - 1:
            forget(session)  # recurrent models cannot take a batch back
    if session.watch is not None:
        session.watch.done(len(session.tokens) - (len(tokens) if code == 0 else 0))
    call.raise_if_it_came()
    if code == _ABORTED:
        return False
    if code != 0:
        raise SparqError(f"llama.cpp could not evaluate {len(tokens)} tokens: {call.reason}")
    return True


@contextmanager
def abortable(
    session: Session, call: Call, should_stop: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Ctrl-C and `should_stop` end llama_decode after the node at hand, on the CPU only.

    Python handles signals only between steps of its own, so some have to run during C code.
    """

    def on_node(_: object) -> bool:
        try:
            return call.came or (should_stop is not None and should_stop())
        except KeyboardInterrupt:
            call.note()
            return True

    callback = session.lib.ggml_abort_callback(on_node)
    session.lib.llama_set_abort_callback(session.ctx, callback, None)
    try:
        yield
    finally:
        none = session.lib.ggml_abort_callback(0)
        session.lib.llama_set_abort_callback(session.ctx, none, None)


def check_length(session: Session, n: int) -> None:
    """Refuse a text of `n` tokens, those that are read already included.

    Raises:
        SparqError: the context is too small.
    """
    if n > session.n_ctx:
        raise SparqError(
            f"the text has {n} tokens, but the context has {session.n_ctx} positions", LONGER
        )


def prefill(
    session: Session,
    tokens: Sequence[int],
    *,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
    ends: bool = True,
) -> None:
    """Append `tokens` to the cache, `n_batch` at a time; the logits of the last are then ready.

    Args:
        progress: called with (tokens done, total) after each batch.
        should_stop: asked before and during each batch; True ends it, and whole batches stay.
        ends: False if the prompt goes on in another call: there are no logits then.

    Raises:
        SparqError: the context is too small, or the library failed.
    """
    check_length(session, len(session.tokens) + len(tokens))
    started = time.perf_counter()
    for i in range(0, len(tokens), session.n_batch):
        if should_stop is not None and should_stop():
            break
        batch = tokens[i : i + session.n_batch]
        if not _decode_tokens(session, batch, should_stop, ends and i + len(batch) == len(tokens)):
            break
        session.timings.prefill_tokens += len(batch)
        if progress is not None:
            progress(i + len(batch), len(tokens))
    session.lib.llama_synchronize(session.ctx)
    session.timings.prefill_s += time.perf_counter() - started


def decode(session: Session, token: int) -> None:
    """Append one token, attending as `set_attention` says; its logits are then ready.

    Raises:
        SparqError: the context is full, or the library failed.
    """
    started = time.perf_counter()
    _decode_tokens(session, [token])
    session.lib.llama_synchronize(session.ctx)
    session.timings.decode_s.append(time.perf_counter() - started)


def logits(session: Session) -> np.ndarray:
    """The logits of the last token: a copy, numpy float32 (n_vocab,).

    Raises:
        SparqError: no token has been evaluated yet.
    """
    import numpy as np

    pointer = session.lib.llama_get_logits_ith(session.ctx, -1) if session.tokens else None
    if not pointer:
        raise SparqError("no logits: no token has been evaluated")
    return np.array(np.ctypeslib.as_array(pointer, shape=(session.n_vocab,)))


def rewind(session: Session, n: int) -> None:
    """Keep the first `n` tokens of the cache and forget the rest.

    A model whose memory cannot be cut, such as a recurrent one, forgets everything.
    """
    if n >= len(session.tokens):
        return
    if n > 0 and session.lib.llama_memory_seq_rm(session.memory, 0, n, -1):
        del session.tokens[n:]
        return
    forget(session)


def forget(session: Session) -> None:
    """Empty the cache."""
    session.lib.llama_memory_clear(session.memory, True)
    session.tokens.clear()


def align(session: Session, tokens: Sequence[int]) -> list[int]:
    """Rewind to the common prefix of the cache and `tokens`, and return the tokens to prefill: at
    least the last one, whose logits are needed.
    """
    n = 0
    for a, b in zip(session.tokens, tokens[:-1], strict=False):
        if a != b:
            break
        n += 1
    rewind(session, n)
    return list(tokens[len(session.tokens) :])
