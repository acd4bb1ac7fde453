"""Several sequences in one session, decoded together, so that weights are read once for all.

A session made with `n_sequences` keeps a cache of `n_ctx` positions for each. Of each sequence one
token goes into a llama_decode, so they run sparse as a single one would: llama-sparse.h has the
rule. The functions for one sequence (`prefill`, `decode`, `rewind`) are not for such a session.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyorch.engine.decoding import abortable, cut_sequence
from pyorch.engine.model import Session
from pyorch.errors import SparqError
from pyorch.progress import Progress, silent

if TYPE_CHECKING:
    import numpy as np


def prefill_each(
    session: Session, prompts: Sequence[Sequence[int]], progress: Progress = silent
) -> None:
    """Empty the caches and read `prompts[i]` into that of sequence i.

    Only the last token of each asks for its logits, so all are prompt, and the next one is decoded.

    Args:
        progress: called with (tokens done, tokens of all prompts) after each batch.

    Raises:
        SparqError: the library failed. What the caches hold is then unknown, as after Ctrl-C.
    """
    session.lib.llama_memory_clear(session.memory, True)
    done, total = 0, sum(map(len, prompts))
    for i, prompt in enumerate(prompts):
        for at in range(0, len(prompt), session.n_batch):
            batch = prompt[at : at + session.n_batch]
            ends = at + len(batch) == len(prompt)
            needed = [False] * (len(batch) - 1) + [ends]
            _decode(session, batch, [i] * len(batch), needed)
            done += len(batch)
            progress(done, total)
    session.lib.llama_synchronize(session.ctx)


def decode_each(session: Session, tokens: Mapping[int, int]) -> np.ndarray:
    """Append `tokens[i]` to sequence i, each attending as `set_attention` says.

    Returns the logits that follow, float32 (len(tokens), n_vocab), in the order of `tokens`.

    Raises:
        SparqError: the library failed, for instance because a cache is full.
    """
    import numpy as np

    _decode(session, list(tokens.values()), list(tokens), [True] * len(tokens))
    logits = session.lib.llama_get_logits(session.ctx)
    return np.array(np.ctypeslib.as_array(logits, shape=(len(tokens), session.n_vocab)))


def rewind_each(session: Session, n: int, sequences: Sequence[int]) -> None:
    """Keep the first `n` tokens of each of these sequences.

    Raises:
        SparqError: the memory cannot be cut there, as that of a recurrent model.
    """
    for i in sequences:
        if not cut_sequence(session, i, n):
            raise SparqError(f"{session.path}: the cache of this model cannot be rewound")


def _decode(
    session: Session, tokens: Sequence[int], sequences: Sequence[int], needed: Sequence[bool]
) -> None:
    """Append each token to its sequence. needed: whether its logits are."""
    n, int32 = len(tokens), ctypes.c_int32
    batch = session.lib.llama_batch(n_tokens=n)  # llama.cpp itself counts the positions
    batch.token = (int32 * n)(*tokens)
    batch.n_seq_id = (int32 * n)(*[1] * n)
    ids = (int32 * n)(*sequences)
    batch.seq_id = (ctypes.POINTER(int32) * n)(
        *(ctypes.pointer(int32.from_buffer(ids, 4 * i)) for i in range(n))
    )
    batch.logits = (ctypes.c_int8 * n)(*needed)
    with session.library.call() as call, abortable(session, call):
        code = session.lib.llama_decode(session.ctx, batch)
    call.raise_if_it_came()
    if code != 0:
        raise SparqError(f"llama.cpp could not evaluate {n} tokens: {call.reason}")
