"""Chooses the next token from its logits."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pyorch.engine.model import Session

REPEAT_LAST_N = 64  # tokens that the penalty looks back, as in llama.cpp


@dataclass(frozen=True)
class Sampling:
    """The settings of sampling, by llama.cpp's names.

    temp   the temperature; 0 takes the most likely token, and only the penalty counts besides
    top_k  keeps this many of the most likely tokens; 0 keeps all
    top_p  keeps the most likely tokens whose probabilities add up to this; 1 keeps all
    min_p  keeps tokens at least this likely, as a share of the most likely one; 0 keeps all
    repeat_penalty  makes each of the last 64 tokens, of the prompt or the reply, less likely: its
           logit is divided by this if positive, else multiplied; 1 changes nothing
    seed   the seed of the draw; None takes a new one each time
    """

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None

    def drawn(self) -> Sampling:
        """The same with a seed, drawn if there is none: with it a reply can be repeated."""
        return replace(self, seed=secrets.randbits(32)) if self.seed is None else self


@contextmanager
def sampler(session: Session, sampling: Sampling) -> Iterator[Callable[[], int]]:
    """Yields what chooses the next token from the logits of the last evaluated one: llama.cpp's own
    chain of samplers."""
    lib = session.lib
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    try:
        for one in _samplers(session, sampling.drawn()):
            lib.llama_sampler_chain_add(chain, one)
        for token in session.tokens[-REPEAT_LAST_N:]:
            lib.llama_sampler_accept(chain, token)  # the penalty counts the prompt as well
        yield lambda: int(lib.llama_sampler_sample(chain, session.ctx, -1))
    finally:
        lib.llama_sampler_free(chain)


def _samplers(session: Session, s: Sampling) -> Iterator[int]:
    lib, n_vocab = session.lib, session.n_vocab
    if s.repeat_penalty != 1:
        penalties = s.repeat_penalty, 0.0, 0.0
        yield lib.llama_sampler_init_penalties(n_vocab, REPEAT_LAST_N, *penalties)
    if s.temp <= 0:
        yield lib.llama_sampler_init_greedy()
        return
    yield lib.llama_sampler_init_top_k(s.top_k)
    yield lib.llama_sampler_init_top_p(s.top_p, 1)
    yield lib.llama_sampler_init_min_p(s.min_p, 1)
    yield lib.llama_sampler_init_temp(s.temp)
    yield lib.llama_sampler_init_dist((s.seed or 0) & 0xFFFFFFFF)
