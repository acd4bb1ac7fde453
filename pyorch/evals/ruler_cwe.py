"""RULER's common words (arXiv 2404.06654, table 2): the ten most frequent words of a numbered list.

Below 4,096 positions the ten occur six times each and all others once; from there on they occur 30
times and three times. One worked example precedes. The score is the share of the ten in the answer.
Deviation: words are adjectives and nouns of our own lists, and adjective-noun pairs when these are
used up; RULER uses a package's list.
"""

from __future__ import annotations

import numpy as np

from pyorch.evals import ruler
from pyorch.evals.example import Example
from pyorch.evals.task import Setup
from pyorch.evals.texts import ADJECTIVES, NOUNS

ASK = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
CUE = " Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
MAX_TOKENS = 120


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i + 1}. {w}" for i, w in enumerate(words))


def _list(words: list[str], often: int, seldom: int, rng: np.random.Generator) -> str:
    """The first ten `often` times, the others `seldom` times, shuffled."""
    out = words[:COMMON] * often + words[COMMON:] * seldom
    rng.shuffle(out)
    return _numbered(out)


def _words(rng: np.random.Generator, n: int) -> list[str]:
    words = sorted({*ADJECTIVES, *NOUNS})
    rng.shuffle(words)
    pairs = [f"{a}-{b}" for a in ADJECTIVES for b in NOUNS] if n > len(words) else []
    rng.shuffle(pairs)
    return (words + pairs)[:n]


def example(setup: Setup, i: int) -> Example:
    long = setup.ctx >= 4096
    often, seldom = (30, 3) if long else (6, 1)
    rng = setup.rng(i)
    shown = _words(rng, 40 if long else 20)
    shot = ASK.format(context=_list(shown, *((10, 3) if long else (3, 1)), rng))
    shot += CUE + " " + _numbered(shown[:COMMON]) + "\n"
    words = _words(rng, setup.ctx)

    def prompt(n: int) -> list[int]:
        context = _list(words[:n], often, seldom, setup.rng(i, n))
        return setup.prompt(shot + ASK.format(context=context), CUE)

    sizes = COMMON + 1, setup.ctx // 2
    n = ruler.largest(setup, "cwe: the shortest lists", sizes, prompt, MAX_TOKENS)
    return Example(str(i), prompt(n), MAX_TOKENS, tuple(words[:COMMON]))


TASKS = (ruler.task("cwe", "the ten most common words of a list", "words", example),)
