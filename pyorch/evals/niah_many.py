"""Many needles in one long text, asked for one after the other, so that it is read only once.

Needles, questions and scores are RULER's (arXiv 2404.06654): the number of each of six keys, the
uuid of each of two, the four numbers of one more key, and at once those of four of the six. So the
needles of a question are the distractors of the others, and a text of 32k positions, which takes
minutes to read, answers ten questions. What differs from RULER is the introduction, which cannot
name the question, and that a text has needles of several kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pyorch.evals import ruler
from pyorch.evals.example import Example
from pyorch.evals.ruler_niah import (
    MANY,
    MAX_TOKENS,
    NEEDLE,
    ONE,
    Variant,
    draw,
    listed,
    with_needles,
)
from pyorch.evals.task import Setup, Task

INTRO = (
    "Some special magic numbers and uuids are hidden within the following text. Make sure to "
    "memorize them. I will quiz you about them afterwards.\n{context}\n"
)
NUMBERS, UUIDS, VALUES = 6, 2, 4  # keys with one number, keys with a uuid, numbers of the last key
QUERIES = 4  # keys that the last question asks for


def examples(setup: Setup) -> Iterator[Example]:
    """Yields the ten questions of a text, then those of the next, without end."""
    for text in itertools.count():
        rng = setup.rng(text)
        kinds = ["numbers"] * NUMBERS + ["uuids"] * UUIDS + ["numbers"]
        keys: list[str] = []
        while len(keys) < len(kinds):
            keys += [k for k in [draw("words", rng)] if k not in keys]
        values = [[draw(kind, rng)] for kind in kinds]
        values[-1] += [draw("numbers", rng) for _ in range(VALUES - 1)]
        needles = [
            NEEDLE.format(kind=kind, key=key, value=x)
            for kind, key, xs in zip(kinds, keys, values, strict=True)
            for x in xs
        ]
        rng.shuffle(needles)
        hay, most = with_needles(Variant("many", "essay"), setup, needles, rng)
        asked = [[j] for j in range(len(keys))] + [list(range(QUERIES))]
        questions = [_question(kinds[js[0]], [keys[j] for j in js], values[js[0]]) for js in asked]
        longest = max(questions, key=lambda x: len(setup.tokens("".join(x))))

        def prompt(n: int, ask: str, cue: str) -> list[int]:
            return setup.prompt(INTRO.format(context=hay(n)) + ask, cue)  # noqa: B023

        n = ruler.largest(
            setup,
            "niah_many: question and answer alone",
            (1, most),
            lambda n: prompt(n, *longest),  # noqa: B023
            MAX_TOKENS,
        )
        for js, (ask, cue) in zip(asked, questions, strict=True):
            answers = tuple(x for j in js for x in values[j])
            name = f"{len(answers)} {kinds[js[0]]} of {len(js)} keys"
            yield Example(
                f"{text}:{js[0]}:{len(js)}",
                prompt(n, ask, cue),
                MAX_TOKENS,
                answers,
                about={"text": text, "asked": name},
            )


def _question(kind: str, names: list[str], values: list[str]) -> tuple[str, str]:
    """The question that follows the text, and the first words of its answer."""
    many = len(names) * len(values) > 1
    ask, cue = MANY if many else ONE
    ask = ask.partition("{context}\n")[2]
    what = {"kind": kind if many else kind[:-1], "query": listed(names)}
    return ask.format(**what), cue.format(**what)


TASKS = (
    Task(
        "niah_many",
        "RULER's needles, ten questions about one text",
        "share of the values found",
        examples,
        ruler.score,
        options=("chat",),
        percent=True,
    ),
)
