"""Fidelity without a task: how close the next-token distribution stays to that of dense attention.

A book is read up to some place and then decoded token by token; before each token the logits of
dense attention and of the method are compared. The score is the mean Kullback-Leibler divergence
KL(dense || method) in nats; the other numbers are the share of tokens whose most likely successor
agrees, and the share of the true attention that is read, by layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyorch.errors import SparqError
from pyorch.evals.decode import Decoder, log_softmax
from pyorch.evals.example import Example, Outcome
from pyorch.evals.task import Setup, Task
from pyorch.evals.texts import haystack

TOKENS = 64  # tokens that are decoded as given


def examples(setup: Setup) -> Iterator[Example]:
    head = setup.head
    n = setup.ctx - len(head) - TOKENS
    if n < TOKENS:
        raise SparqError(
            f"fidelity: --ctx {setup.ctx} is too short", f"--ctx {4 * TOKENS} or more", 2
        )
    books = setup.books(n + TOKENS)
    i = 0
    while True:
        text = haystack(books, n + TOKENS, setup.rng(i))
        yield Example(str(i), head + text[:n], TOKENS, forced=tuple(text[n:]))
        i += 1


def divergence(log_p: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The mean KL(dense || other) in nats and the top-1 agreement.

    Args:
        log_p: the `log_softmax` of dense, (n, n_vocab).
        other: logits (n, n_vocab).
    """
    kl = (np.exp(log_p) * (log_p - log_softmax(other))).sum(1)
    return float(kl.mean()), float((log_p.argmax(1) == other.argmax(1)).mean())


def score(decoder: Decoder, example: Example) -> Outcome:
    assert decoder.reference is not None
    kl, agree = divergence(decoder.reference, np.stack(list(decoder.forced(example))))
    return Outcome(kl, more={"top1_agreement": agree})


TASKS = (
    Task(
        "fidelity",
        "distance of the next-token distribution from dense",
        "KL to dense, nats",
        examples,
        score,
        higher=False,
        reference=True,
    ),
)
