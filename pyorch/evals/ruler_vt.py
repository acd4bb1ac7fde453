"""RULER's variable tracking (arXiv 2404.06654, table 2): a chain of assignments among noise.

As in RULER's `vt`, there is one chain of four hops, after one worked example; the score is the
share of the five variables that occur in the answer.
"""

from __future__ import annotations

import string

import numpy as np

from pyorch.evals import ruler
from pyorch.evals.example import Example
from pyorch.evals.task import Setup

ASK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
CUE = (  # the spelling is RULER's
    " Answer: According to the chain(s) of variable assignment in the text above, {n} variables are"
    " assgined the value {value}, they are: "
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS = 4
MAX_TOKENS = 30


def _chain(rng: np.random.Generator, n_letters: int) -> tuple[list[str], list[str], int]:
    """The names of the variables, their assignments, and the value."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choice(list(string.ascii_uppercase), n_letters))
        names += [name] if name not in names else []
    value = int(rng.integers(10000, 99999))
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)]
    return names, lines, value


def _text(lines: list[str], places: np.ndarray, n: int) -> str:
    """`n` sentences of noise, with the assignments among them in order."""
    out = [NOISE + "\n"] * n
    for place, line in zip(np.sort(places)[::-1], reversed(lines), strict=True):
        out.insert(int(place * (n + 1)), line)
    return " ".join(out).replace(". \n", ".\n")


def example(setup: Setup, i: int) -> Example:
    rng = setup.rng(i)
    shown, lines, value = _chain(rng, 3)
    shot = ASK.format(context=_text(lines, rng.random(len(lines)), 5), value=value)
    shot += CUE.format(n=HOPS + 1, value=value) + " ".join(shown) + "\n\n\n"
    names, lines, value = _chain(rng, 5)
    places = rng.random(len(lines))
    cue = CUE.format(n=HOPS + 1, value=value)

    def prompt(n: int) -> list[int]:
        return setup.prompt(shot + ASK.format(context=_text(lines, places, n), value=value), cue)

    sizes = 1, setup.ctx // 8
    n = ruler.largest(setup, "vt: question and answer alone", sizes, prompt, MAX_TOKENS)
    return Example(str(i), prompt(n), MAX_TOKENS, tuple(names))


TASKS = (ruler.task("vt", "follow a chain of five variables", "variables", example),)
