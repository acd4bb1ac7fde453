"""Needle in a haystack: one sentence in a long text, asked for at its end (SparQ, A.4, Table 3).

Prompt, needle and match are those of the paper's code (llm-inference-research, tasks/needle.py),
after the Gemini 1.5 report: the question ends with the needle's first words, so a model that only
continues text can answer. The haystack is `--text` from a random place on, in place of essays by
Paul Graham, which may not be passed on.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import numpy as np

from pyorch.errors import SparqError
from pyorch.evals.decode import Decoder, Example, Outcome
from pyorch.evals.task import Setup, Task
from pyorch.evals.texts import haystack

ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"
NEEDLE = f"The best thing to do in San Francisco is to {ANSWER}.\n"
QUESTION = "\n\nWhat is the best thing to do in San Francisco?"
CUE = ' "The best thing to do in San Francisco is to'
MOST_LENGTHS = 8


def lengths(ctx: int) -> list[int]:
    """Up to eight evenly spaced lengths; all but the last are multiples of 64."""
    step = -(-ctx // (MOST_LENGTHS * 64)) * 64
    return sorted({ctx, *range(step, ctx, step)})


def examples(setup: Setup) -> Iterator[Example]:
    """Yields one example per depth and length, then another of each, without end.

    A length covers the prompt and the answer together.
    """
    room = len(setup.tokens(ANSWER)) + 5
    ends = len(setup.prompt(".\n" + NEEDLE + ".\n" + QUESTION, CUE)) + room + 2
    # at least half of the text is hay, unless other lengths are requested
    sizes = list(setup.lengths) or [n for n in lengths(setup.ctx) if n >= 2 * ends]
    if not sizes:
        raise SparqError(
            f"needle: needle and question alone take {ends} positions, --ctx is {setup.ctx}",
            f"--ctx {2 * ends}",
            exit_code=2,
        )
    if min(sizes) < ends + 16 or max(sizes) > setup.ctx:
        raise SparqError(
            f"needle: --lengths {min(sizes)} to {max(sizes)}: they can be {ends + 16} to "
            f"{setup.ctx}",
            "use other --lengths or a larger --ctx",
            exit_code=2,
        )
    books = setup.books(16)
    cells = [(n, d) for n in sizes for d in np.linspace(0, 1, setup.depths).round(4)]
    order = setup.rng().permutation(len(cells))  # any number of examples is spread over all cells
    for i in itertools.count():
        n, depth = cells[order[i % len(cells)]]
        hay, stretch = haystack(books, n - ends, setup.rng(i))
        at = int(depth * len(hay))
        text = setup.text(hay[:at]) + (".\n" if at else "") + NEEDLE + setup.text(hay[at:])
        prompt = setup.prompt(text + ".\n" + QUESTION, CUE)
        about = {"length": int(n), "depth": float(depth), "stretch": stretch}
        yield Example(f"{n}@{depth:g}#{i // len(cells)}", prompt, room, (ANSWER,), about=about)


def score(decoder: Decoder, example: Example) -> Outcome:
    reply = decoder.answer(example, stop=(".", "\n\n")).decode("utf-8", errors="replace")
    return Outcome(float(bool(re.match(r"\s*" + re.escape(ANSWER), reply))), reply)


TASKS = (
    Task(
        "needle",
        "one sentence in a haystack, by depth and length",
        "found",
        examples,
        score,
        options=("lengths", "depths", "chat"),
        proportion=True,
        percent=True,
    ),
)
