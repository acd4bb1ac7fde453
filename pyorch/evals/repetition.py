"""Repetition: a passage of the context, recited from its first words (SparQ, 5.1 and G.1.4).

The context is a piece of a book, then an empty line and the first tokens of a passage from
somewhere in it; the model goes on. The score is the number of characters until the first
that differs from the book: only attention to the right place can give them.

The paper cuts tiny-Shakespeare into 6,000 characters with a cue of 128 and a passage of 256. Here
the sizes follow `--ctx`, the cue is 20 tokens, and counting ends at 300 characters. With a document
the context is all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from pyorch import engine
from pyorch.errors import SparqError
from pyorch.evals.decode import Decoder, Example, Outcome
from pyorch.evals.task import Setup, Task

CUE = 20  # tokens
CHARS = 300
SPARE = 16  # the begin token and the empty line
ROOM = CUE + CHARS + SPARE  # beside the context


def examples(setup: Setup) -> Iterator[Example]:
    """Yields passages without end, from each book in turn; `questions` of them from one text."""
    session = setup.session
    n = len(setup.document) or setup.ctx - ROOM
    if n < CUE + CHARS + 64:
        need = CUE + CHARS + 64
        what, hint = f"--ctx {setup.ctx}", f"--ctx {need + ROOM} or more"
        if setup.document:
            what, hint = f"a document of {n} tokens", f"one of {need} or more"
        raise SparqError(f"{what} is too short for a passage of {CHARS} characters", hint, 2)
    books = [list(setup.document)] if setup.document else setup.books(n)
    head = [] if setup.document else setup.head
    gap = setup.tokens("\n\n")
    rng = np.random.default_rng(setup.seed)
    for i in itertools.count():
        book = books[i % len(books)]
        start = int(rng.integers(0, len(book) - n + 1))
        context = book[start : start + n]
        # at least one token per character, so the passage cannot pass the end of the context
        words = _word_starts(session, context, n - CUE - CHARS)
        for _ in range(setup.questions):
            at = words[int(rng.integers(len(words)))]
            reply = b"".join(engine.token_bytes(session, t) for t in context[at + CUE :])[:CHARS]
            yield Example(
                id=f"{i % len(books)}:{start + at}",
                prompt=head + context + gap + context[at : at + CUE],
                answers=(reply.decode("utf-8", errors="ignore"),),
                max_tokens=CHARS,
                about={"text": i, "stretch": [i % len(books), start, start + n]},
            )


def _word_starts(session: engine.Session, tokens: Sequence[int], end: int) -> list[int]:
    """The indices below `end` at which a word begins."""
    starts = [i for i in range(end) if engine.token_bytes(session, tokens[i])[:1] == b" "]
    if not starts:
        raise SparqError("a context has no words", "use another --text", exit_code=2)
    return starts


def score(decoder: Decoder, example: Example) -> Outcome:
    expected = example.answers[0].encode()
    reply = decoder.answer(example, follow=expected)
    right = 0
    for a, b in zip(reply, expected, strict=False):
        if a != b:
            break
        right += 1
    n = len(expected[:right].decode("utf-8", errors="ignore"))
    return Outcome(n, reply.decode("utf-8", errors="replace"))


TASKS = (
    Task(
        "repetition",
        "recite a passage of the context, from its first words",
        "characters until divergence",
        examples,
        score,
        options=("questions",),
        document=True,
    ),
)
