"""Fidelity without a task: how close the next-token distribution stays to that of dense attention.

A book is read up to some place and then decoded token by token; before each token the logits of
dense attention and of the method are compared. The score is the mean Kullback-Leibler divergence
KL(dense || method) in nats; the other numbers are the share of tokens whose most likely successor
agrees, and the share of the true attention that is read, by layer.

Prose seldom needs what stands far back. The tasks `answers_*` therefore compare over the tokens of
the right answers to questions about the text, where a fact that was not read shows at once: with
few examples they tell settings apart that still give the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pyorch.attention.spec import AttentionSpec
from pyorch.errors import SparqError
from pyorch.evals import niah, qa, repetition
from pyorch.evals.decode import Decoder, Example, Outcome, log_softmax
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
        text, stretch = haystack(books, n + TOKENS, setup.rng(i))
        forced, about = tuple(text[n:]), {"stretch": stretch}
        yield Example(str(i), head + text[:n], TOKENS, forced=forced, about=about)
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


# ---- over the right answers of other tasks ----

ANSWER_TOKENS = 32  # at most so many of an answer


def answers(task: Task) -> Task:
    """Fidelity over the tokens of the right answers to a task's questions. Dense attention and the
    methods share what our exact attention read, so that a text is read once."""

    def examples(setup: Setup) -> Iterator[Example]:
        for e in task.examples(setup):
            text = min(e.answers, key=len) if task.data else ", ".join(e.answers)
            space = "" if task.name == "repetition" else " "  # the passage goes on where it was cut
            forced = tuple(setup.tokens(space + text)[: min(ANSWER_TOKENS, e.max_tokens)])
            yield replace(e, max_tokens=len(forced), forced=forced)

    return Task(
        f"answers_{task.name}",
        f"distance from dense over the right answers of {task.name}",
        "KL to dense, nats",
        examples,
        score,
        family="answers",
        options=task.options,
        higher=False,
        document=task.document,
        data=task.data,
        reference=AttentionSpec("dense"),
    )


TASKS = (
    Task(
        "fidelity",
        "distance of the next-token distribution from dense",
        "KL to dense, nats",
        examples,
        score,
        higher=False,
        reference=AttentionSpec("off"),
    ),
    *(answers(t) for t in (niah.MANY, *repetition.TASKS, qa.SQUAD)),
)
