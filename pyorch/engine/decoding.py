"""Puts tokens into the cache, a prompt in batches and then one by one, and takes them out again.

Not every memory can be cut: recurrent layers know a text to its end alone, and layers with a window
keep the newest positions. Before the end of each prompt such a session keeps the state of these
layers, its `checkpoint`, so that a reply can be taken back: chat templates leave out what a model
thought. Anything before that is read anew.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from typing import TYPE_CHECKING

from pyorch.engine.library import Call
from pyorch.engine.model import Session
from pyorch.errors import SparqError
from pyorch.progress import Progress

if TYPE_CHECKING:
    import numpy as np

LONGER = "raise --ctx (beyond the model's training: with --rope-scale), or shorten the text"
_ABORTED = 2  # what llama_decode returns when its callback ends it
# A checkpoint is so many tokens before the end of a prompt. The words there, which ask for a reply,
# are not always those that stand before the reply in the next prompt
_BEFORE_END = 32
_FORGETFUL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: windows and recurrent layers


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
    check_length(session, len(session.tokens) + len(tokens))
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
    i, kept_at = 0, max(len(tokens) - _BEFORE_END, 0) if ends and _forgets(session) else -1
    while i < len(tokens):
        if should_stop is not None and should_stop():
            break
        if i == kept_at:
            _keep(session)
        end = i + session.n_batch
        batch = tokens[i : min(end, kept_at) if i < kept_at else end]
        i += len(batch)
        if not _decode_tokens(session, batch, should_stop, ends and i == len(tokens)):
            break
        session.timings.prefill_tokens += len(batch)
        if progress is not None:
            progress(i, len(tokens))
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
    """Keep the first `n` tokens of the cache and forget the rest. What is forgotten of the first
    ones, because the memory cannot be cut, is read again.

    Raises:
        SparqError: as `prefill`.
    """
    lost = session.tokens[_cut(session, n) : n]
    prefill(session, lost, ends=False)


def _cut(session: Session, n: int) -> int:
    """Keep the first `n` tokens, or as many of them as can be. Returns their number."""
    if n >= len(session.tokens):
        return len(session.tokens)
    tokens, kept = session.tokens[:n], session.checkpoint
    if n > 0 and cut_sequence(session, 0, n):
        session.tokens = tokens
    elif kept and kept[0] <= n and _restored(session, *kept):
        session.tokens = tokens[: kept[0]]
    else:
        forget(session)
    if kept and kept[0] > len(session.tokens):
        session.checkpoint = None
    return len(session.tokens)


def cut_sequence(session: Session, sequence: int, n: int) -> bool:
    """Keep the first `n` positions of a sequence. False: it cannot be cut there, and stays."""
    lib, window = session.lib, _window(session)
    first = lib.llama_memory_seq_pos_min(session.memory, sequence) if window else 0
    return first <= max(n - window, 0) and lib.llama_memory_seq_rm(session.memory, sequence, n, -1)


def _window(session: Session) -> int:
    """The positions that are kept in layers with a window; 0: all, or there is no such layer."""
    return 0 if session.swa_full else int(session.lib.llama_model_n_swa(session.model.handle))


def _forgets(session: Session) -> bool:
    """Whether there are places where the memory cannot be cut."""
    lib, model = session.lib, session.model.handle
    recurrent = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
    return bool(recurrent or _window(session))


def _keep(session: Session) -> None:
    """Make a checkpoint of what is read, in place of the one before; none if llama.cpp cannot."""
    session.checkpoint = None
    if not session.tokens:
        return
    size = session.lib.llama_state_seq_get_size_ext(session.ctx, 0, _FORGETFUL)
    state = (ctypes.c_uint8 * size)()  # kept as it is: windows may take hundreds of megabytes
    if session.lib.llama_state_seq_get_data_ext(session.ctx, state, size, 0, _FORGETFUL) == size:
        session.checkpoint = len(session.tokens), state


def _restored(session: Session, n: int, state: ctypes.Array[ctypes.c_uint8]) -> bool:
    """Go back to a checkpoint after `n` tokens; False if llama.cpp cannot."""
    size = session.lib.llama_state_seq_set_data_ext(session.ctx, state, len(state), 0, _FORGETFUL)
    return size == len(state) and bool(session.lib.llama_memory_seq_rm(session.memory, 0, n, -1))


def forget(session: Session) -> None:
    """Empty the cache."""
    session.lib.llama_memory_clear(session.memory, True)
    session.tokens, session.checkpoint = [], None


def align(session: Session, tokens: Sequence[int]) -> list[int]:
    """Rewind to the common prefix of the cache and `tokens`, or before it where the memory cannot
    be cut there, and return the tokens to prefill: at least the last one, whose logits are needed.
    """
    pairs = zip(session.tokens, tokens[:-1], strict=False)
    n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return list(tokens[_cut(session, n) :])
