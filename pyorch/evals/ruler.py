"""Code that RULER's tasks (arXiv 2404.06654) share: the largest context that fits, and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyorch.errors import SparqError
from pyorch.evals.decode import Decoder
from pyorch.evals.example import Example, Outcome
from pyorch.evals.task import Setup, Task, endless


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

    def found(said: str) -> int:
        return sum(a.lower() in said.lower() for a in example.answers)

    answer = decoder.answer(example, stop=stop, enough=lambda x: found(x) == len(example.answers))
    said = answer.decode("utf-8", errors="replace")
    return Outcome(found(said) / len(example.answers), said)


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
