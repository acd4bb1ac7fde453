"""RULER's tasks without needles (arXiv 2404.06654, table 2), and what all tasks of RULER share.

`vt`, variable tracking: a chain of assignments among noise. There is one chain of four hops, after
one worked example; the score is the share of the five variables that occur in the answer.

`cwe`, common words: the ten most frequent words of a numbered list. Below 4,096 positions the ten
occur six times each and all others once; from there on they occur 30 times and three times. One
worked example precedes. The score is the share of the ten in the answer. Deviation: words are
adjectives and nouns of our own lists, and adjective-noun pairs when these are used up; RULER uses a
package's list.

`fwe`, frequent words: the three most frequent of made-up words. Frequencies fall as rank^-2 (a zeta
distribution); the first rank is the noise `...`. The score is the share of the next three in the
answer.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import numpy as np

from pyorch.errors import SparqError
from pyorch.evals.decode import Decoder, Example, Outcome
from pyorch.evals.task import Setup, Task, endless
from pyorch.evals.texts import ADJECTIVES, NOUNS


def largest(
    setup: Setup,
    what: str,
    sizes: tuple[int, int],
    prompt: Callable[[int], list[int]],
    max_tokens: int,
) -> int:
    """The largest n of sizes = (low, high) with which `prompt(n)`, growing, and an answer fit.

    Raises:
        SparqError: not even `low` fits. `what` begins the message: `vt: question and answer alone`.
    """
    low, high = sizes
    room = setup.ctx - max_tokens
    shortest = len(prompt(low))
    if shortest > room:
        # other examples may be longer
        need = -(-(shortest + shortest // 16 + max_tokens + 64) // 256) * 256
        raise SparqError(
            f"{what} take up to {need} positions, --ctx is {setup.ctx}",
            f"--ctx {need} or more",
            exit_code=2,
        )
    while low < high:
        mid = (low + high + 1) // 2
        low, high = (mid, high) if len(prompt(mid)) <= room else (low, mid - 1)
    return low


def score(decoder: Decoder, example: Example, stop: Sequence[str] = ()) -> Outcome:
    """string_match_all: the share of the answers that occur, whatever their case."""

    def n_found(reply: str) -> int:
        return sum(a.lower() in reply.lower() for a in example.answers)

    answer = decoder.answer(example, stop=stop, enough=lambda x: n_found(x) == len(example.answers))
    reply = answer.decode("utf-8", errors="replace")
    return Outcome(n_found(reply) / len(example.answers), reply)


def task(
    name: str,
    about: str,
    answers: str,
    example: Callable[[Setup, int], Example],
    single: bool = False,
) -> Task:
    """single: each example has one answer."""
    return Task(
        name,
        f"RULER: {about}",
        f"share of the {answers} found",
        endless(example),
        score,
        family="ruler",
        options=("chat",),
        proportion=single,
        percent=True,
    )


# ---- vt ----

VT_ASK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
VT_CUE = (  # the spelling is RULER's
    " Answer: According to the chain(s) of variable assignment in the text above, {n} variables are"
    " assgined the value {value}, they are: "
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS = 4
VT_MAX_TOKENS = 30


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


def vt(setup: Setup, i: int) -> Example:
    rng = setup.rng(i)
    shown, lines, value = _chain(rng, 3)
    shot = VT_ASK.format(context=_text(lines, rng.random(len(lines)), 5), value=value)
    shot += VT_CUE.format(n=HOPS + 1, value=value) + " ".join(shown) + "\n\n\n"
    names, lines, value = _chain(rng, 5)
    places = rng.random(len(lines))
    cue = VT_CUE.format(n=HOPS + 1, value=value)

    def prompt(n: int) -> list[int]:
        return setup.prompt(shot + VT_ASK.format(context=_text(lines, places, n), value=value), cue)

    sizes = 1, setup.ctx // 8
    n = largest(setup, "vt: question and answer alone", sizes, prompt, VT_MAX_TOKENS)
    return Example(str(i), prompt(n), VT_MAX_TOKENS, tuple(names))


# ---- cwe ----

CWE_ASK = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
CWE_CUE = " Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
CWE_MAX_TOKENS = 120


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


def cwe(setup: Setup, i: int) -> Example:
    long = setup.ctx >= 4096
    often, seldom = (30, 3) if long else (6, 1)
    rng = setup.rng(i)
    shown = _words(rng, 40 if long else 20)
    shot = CWE_ASK.format(context=_list(shown, *((10, 3) if long else (3, 1)), rng))
    shot += CWE_CUE + " " + _numbered(shown[:COMMON]) + "\n"
    words = _words(rng, setup.ctx)

    def prompt(n: int) -> list[int]:
        context = _list(words[:n], often, seldom, setup.rng(i, n))
        return setup.prompt(shot + CWE_ASK.format(context=context), CWE_CUE)

    sizes = COMMON + 1, setup.ctx // 2
    n = largest(setup, "cwe: the shortest lists", sizes, prompt, CWE_MAX_TOKENS)
    return Example(str(i), prompt(n), CWE_MAX_TOKENS, tuple(words[:COMMON]))


# ---- fwe ----

FWE_ASK = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?"
)
FWE_CUE = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
LETTERS = 6
ALPHA = 2.0
ZETA = np.pi**2 / 6  # zeta(2)
FWE_MAX_TOKENS = 50
FWE_FEWEST = 32  # words: the fourth rank then occurs once


def fwe(setup: Setup, i: int) -> Example:
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
        return setup.prompt(FWE_ASK.format(context=" ".join(words)), FWE_CUE)

    sizes = FWE_FEWEST, setup.ctx
    n = largest(setup, "fwe: the shortest texts", sizes, prompt, FWE_MAX_TOKENS)
    return Example(str(i), prompt(n), FWE_MAX_TOKENS, tuple(vocabulary[1:4]))


TASKS = (
    task("vt", "follow a chain of five variables", "variables", vt),
    task("cwe", "the ten most common words of a list", "words", cwe),
    task("fwe", "the three most frequent of made-up words", "words", fwe),
)
