"""RULER's needles in a long text (arXiv 2404.06654, table 2, appendix B), its prompts and score.

Needles are `One of the special magic numbers for KEY is: VALUE.`; the score is the share of the
values asked for that occur in the answer. Of RULER's eight tasks these two ask the most:
`single_3`, a uuid in a book, since 32 digits are harder to copy than seven, and `multikey_3`, a
uuid among nothing but such needles, so that no other kind of text marks the place.

`niah_many` (ours) has the rest in one text that is read only once: the numbers of six keys, the
uuids of two, the four numbers of one more, and at once those of four of the six. The needles of a
question are the distractors of the others.

Deviations: the book is `--text` from a random place on, not essays by Paul Graham; the words of
keys come from our own, shorter lists. The introduction of `niah_many` cannot name the question.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from pyorch.evals import ruler
from pyorch.evals.decode import Example
from pyorch.evals.task import Setup, Task
from pyorch.evals.texts import ADJECTIVES, NOUNS, haystack

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
INTRO = (
    "A special magic uuid is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the uuid afterwards.\n{context}\n"
)
INTRO_MANY = (
    "Some special magic numbers and uuids are hidden within the following text. Make sure to "
    "memorize them. I will quiz you about them afterwards.\n{context}\n"
)
ONE = (
    "What is the special magic {kind} for {keys} mentioned in the provided text?",
    " The special magic {kind} for {keys} mentioned in the provided text is",
)
SEVERAL = (
    "What are all the special magic {kind}s for {keys} mentioned in the provided text?",
    " The special magic {kind}s for {keys} mentioned in the provided text are",
)
MAX_TOKENS = 128
NUMBERS, UUIDS, VALUES = 6, 2, 4  # keys with one number, keys with a uuid, numbers of the last key
QUERIES = 4  # keys that the last question asks for


def draw(kind: str, rng: np.random.Generator) -> str:
    """A key or a value: a `number` of 7 digits, a `word` (adjective-noun) or a `uuid`."""
    if kind == "number":
        return str(int(rng.integers(10**6, 10**7)))
    if kind == "word":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def needle(kind: str, key: str, value: str) -> str:
    return NEEDLE.format(kind=kind + "s", key=key, value=value)


def question(kind: str, keys: Sequence[str], n_values: int) -> tuple[str, str]:
    """The question that follows the text, and the first words of its answer."""
    names = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
    ask, cue = SEVERAL if n_values > 1 else ONE
    return ask.format(kind=kind, keys=names), cue.format(kind=kind, keys=names)


def sentences(setup: Setup, rng: np.random.Generator) -> tuple[list[str], list[int]]:
    """A piece of a book, and its stretch."""
    tokens, stretch = haystack(setup.books(16), setup.ctx, rng)
    return re.split(r"(?<=[.!?])\s+", setup.text(tokens)), stretch


def text_with(
    needles: Sequence[str], places: np.ndarray, hay: Sequence[str], glue: str
) -> Callable[[int], str]:
    """Returns n -> a text of n sentences of hay with needles at these places, 0 to 1."""

    def text_of(n: int) -> str:
        out = list(hay[:n])
        for place, needle in zip(np.sort(places)[::-1], needles, strict=True):
            out.insert(int(place * (n + 1)), needle)
        return glue.join(out)

    return text_of


def example(name: str, setup: Setup, i: int) -> Example:
    rng = setup.rng(i)
    key, value = draw("word" if name == "single_3" else "uuid", rng), draw("uuid", rng)
    places, about = rng.random(1), {}
    if name == "single_3":
        hay, about["stretch"] = sentences(setup, rng)
        glue = " "
    else:
        others = [(draw("uuid", rng), draw("uuid", rng)) for _ in range(setup.ctx // 8)]
        hay, glue = [needle("uuid", *pair) for pair in others], "\n"
    text_of = text_with([needle("uuid", key, value)], places, hay, glue)
    ask, cue = question("uuid", [key], 1)

    def prompt(n: int) -> list[int]:
        return setup.prompt(INTRO.format(context=text_of(n)) + ask, cue)

    what = f"niah_{name}: question and answer alone"
    n = ruler.largest(setup, what, (1, len(hay)), prompt, MAX_TOKENS)
    return Example(str(i), prompt(n), MAX_TOKENS, (value,), about=about)


def examples_of_many(setup: Setup) -> Iterator[Example]:
    """Yields the ten questions of a text, then those of the next, without end."""
    for text in itertools.count():
        rng = setup.rng(text)
        kinds = ["number"] * NUMBERS + ["uuid"] * UUIDS + ["number"]
        keys: list[str] = []
        while len(keys) < len(kinds):
            keys += [k for k in [draw("word", rng)] if k not in keys]
        values = [[draw(kind, rng)] for kind in kinds]
        values[-1] += [draw("number", rng) for _ in range(VALUES - 1)]
        needles = [
            needle(kind, key, x)
            for kind, key, xs in zip(kinds, keys, values, strict=True)
            for x in xs
        ]
        rng.shuffle(needles)
        places = rng.random(len(needles))
        hay, stretch = sentences(setup, rng)
        text_of = text_with(needles, places, hay, " ")
        asked = [[j] for j in range(len(keys))] + [list(range(QUERIES))]
        answers = [tuple(x for j in js for x in values[j]) for js in asked]
        questions = [
            question(kinds[js[0]], [keys[j] for j in js], len(xs))
            for js, xs in zip(asked, answers, strict=True)
        ]

        def prompt(n: int, ask: str, cue: str, text_of: Callable[[int], str]) -> list[int]:
            return setup.prompt(INTRO_MANY.format(context=text_of(n)) + ask, cue)

        longest = max(questions, key=lambda x: len(setup.tokens("".join(x))))
        shown = partial(prompt, ask=longest[0], cue=longest[1], text_of=text_of)
        what = "niah_many: question and answer alone"
        n = ruler.largest(setup, what, (1, len(hay)), shown, MAX_TOKENS)
        for js, xs, (ask, cue) in zip(asked, answers, questions, strict=True):
            yield Example(
                f"{text}:{js[0]}:{len(js)}",
                prompt(n, ask, cue, text_of),
                MAX_TOKENS,
                xs,
                about={
                    "text": text,
                    "asked": f"{len(xs)} {kinds[js[0]]}s of {len(js)} keys",
                    "stretch": stretch,
                },
            )


MANY = Task(
    "niah_many",
    "RULER's needles, ten questions about one text",
    "share of the values found",
    examples_of_many,
    ruler.score,
    options=("chat",),
    percent=True,
)
TASKS = (
    *(
        ruler.task(f"niah_{name}", f"1 of 1 uuids in {hay}", "values", partial(example, name), True)
        for name, hay in (("single_3", "essay"), ("multikey_3", "needle"))
    ),
    MANY,
)
