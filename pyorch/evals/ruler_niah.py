"""RULER's eight needle tasks (arXiv 2404.06654, table 2, appendix B), with its prompts and scores.

Needles are `One of the special magic numbers for KEY is: VALUE.`; the score is the share of the
values asked for that occur in the answer. Deviations: the haystack `essay` is `--text` from a
random place on, not essays by Paul Graham; the words of keys come from our own, shorter lists.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pyorch.evals import ruler
from pyorch.evals.example import Example
from pyorch.evals.task import Setup
from pyorch.evals.texts import ADJECTIVES, NOUNS, haystack

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
MANY = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind}"
    " for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\nWhat is the special magic {kind}"
    " for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
MAX_TOKENS = 128


@dataclass(frozen=True)
class Variant:
    """A variant of the task: the kinds of haystack, keys and values, and their numbers."""

    name: str
    haystack: str  # noise, essay or needle
    keys: str = "words"
    values: str = "numbers"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1


VARIANTS = (
    Variant("single_1", "noise"),
    Variant("single_2", "essay"),
    Variant("single_3", "essay", values="uuids"),
    Variant("multikey_1", "essay", n_keys=4),
    Variant("multikey_2", "needle"),
    Variant("multikey_3", "needle", keys="uuids", values="uuids"),
    Variant("multivalue", "essay", n_values=4),
    Variant("multiquery", "essay", n_keys=4, n_queries=4),
)


def draw(kind: str, rng: np.random.Generator) -> str:
    """A key or value: `numbers` (7 digits), `words` (adjective-noun) or `uuids`."""
    if kind == "numbers":
        return str(int(rng.integers(10**6, 10**7)))
    if kind == "words":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def example(v: Variant, setup: Setup, i: int) -> Example:
    rng = setup.rng(i)
    keys: list[str] = []
    while len(keys) < v.n_keys:
        keys += [k for k in [draw(v.keys, rng)] if k not in keys]
    values = [[draw(v.values, rng) for _ in range(v.n_values)] for _ in keys]
    needles = [
        NEEDLE.format(kind=v.values, key=k, value=x)
        for k, xs in zip(keys, values, strict=True)
        for x in xs
    ]
    rng.shuffle(needles)
    asked = rng.choice(v.n_keys, v.n_queries, replace=False)
    query = listed([keys[j] for j in asked])
    many = v.n_queries * v.n_values > 1
    ask, cue = MANY if many else ONE
    kind = v.values if many else v.values[:-1]
    cue = cue.format(kind=kind, query=query)
    hay, most = with_needles(v, setup, needles, rng)

    def prompt(n: int) -> list[int]:
        return setup.prompt(ask.format(kind=kind, context=hay(n), query=query), cue)

    what = f"niah_{v.name}: question and answer alone"
    n = ruler.largest(setup, what, (len(needles), most), prompt, MAX_TOKENS)
    answers = tuple(x for j in asked for x in values[j])
    return Example(str(i), prompt(n), MAX_TOKENS, answers)


def listed(names: Sequence[str]) -> str:
    """The names as RULER lists them: `a, b, and c`."""
    return ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]


def with_needles(
    v: Variant, setup: Setup, needles: list[str], rng: np.random.Generator
) -> tuple[Callable[[int], str], int]:
    """Returns n -> a text of n sentences with the needles, from the same draws; and the most n."""
    places = np.sort(rng.random(len(needles)))[::-1]
    if v.haystack == "essay":
        text = setup.text(haystack(setup.books(16), setup.ctx, rng))
        sentences, glue = re.split(r"(?<=[.!?])\s+", text), " "
    elif v.haystack == "noise":
        sentences, glue = [NOISE] * (setup.ctx // 8), "\n"
    else:
        pairs = [(draw(v.keys, rng), draw(v.values, rng)) for _ in range(setup.ctx // 8)]
        sentences = [NEEDLE.format(kind=v.values, key=k, value=x) for k, x in pairs]
        glue = "\n"

    def text_of(n: int) -> str:
        out = sentences[:n]
        for place, needle in zip(places, needles, strict=True):
            out.insert(int(place * (n + 1)), needle)
        return glue.join(out)

    return text_of, len(sentences)


TASKS = tuple(
    ruler.task(
        f"niah_{v.name}",
        f"{v.n_queries * v.n_values} of {v.n_keys * v.n_values} {v.values} in {v.haystack}",
        "values",
        partial(example, v),
        single=v.n_queries * v.n_values == 1,
    )
    for v in VARIANTS
)
