"""RULER's frequent words (arXiv 2404.06654, table 2): the three most frequent of made-up words.

Frequencies fall as rank^-2 (a zeta distribution); the first rank is the noise `...`. The score is
the share of the next three in the answer.
"""

from __future__ import annotations

import string

import numpy as np

from pyorch.evals import ruler
from pyorch.evals.example import Example
from pyorch.evals.task import Setup

ASK = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?"
)
CUE = " Answer: According to the coded text above, the three most frequently appeared words are:"
LETTERS = 6
ALPHA = 2.0
ZETA = np.pi**2 / 6  # zeta(2)
MAX_TOKENS = 50
FEWEST = 32  # words: the fourth rank then occurs once


def example(setup: Setup, i: int) -> Example:
    rng = setup.rng(i)
    vocabulary: list[str] = ["..."]
    while len(vocabulary) < max(setup.ctx // 50, 8):
        word = "".join(rng.choice(list(string.ascii_lowercase), LETTERS))
        vocabulary += [word] if word not in vocabulary else []

    def prompt(n: int) -> list[int]:
        rank = np.arange(1, len(vocabulary) + 1)
        counts = (n * rank**-ALPHA / ZETA).astype(int)
        words = [w for w, c in zip(vocabulary, counts, strict=True) for _ in range(c)]
        setup.rng(i, n).shuffle(words)
        return setup.prompt(ASK.format(context=" ".join(words)), CUE)

    sizes = FEWEST, setup.ctx
    n = ruler.largest(setup, "fwe: the shortest texts", sizes, prompt, MAX_TOKENS)
    return Example(str(i), prompt(n), MAX_TOKENS, tuple(vocabulary[1:4]))


TASKS = (ruler.task("fwe", "the three most frequent of made-up words", "words", example),)
