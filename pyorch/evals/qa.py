"""How answers of question answering are judged (SparQ, 5.1: exact string match)."""

from __future__ import annotations

import re

from pyorch.evals.decode import Decoder
from pyorch.evals.example import Example, Outcome

MAX_TOKENS = 30  # and no more than the longest answer and five
_TRIM = re.compile(r"^[\s\n\"'_.,]*(the |a |an )?|[\s\n\"'_.,]*$")


def matches(said: str, answers: tuple[str, ...]) -> bool:
    """Whether an answer begins what was said, apart from case, articles and punctuation.

    As llm-inference-research, tasks/qa.py.
    """
    said = _TRIM.sub("", said.lower())
    wanted = [_TRIM.sub("", a.lower()) for a in answers]
    return any(said.startswith(w) for w in wanted if w)


def score(decoder: Decoder, example: Example) -> Outcome:
    said = decoder.answer(example).decode("utf-8", errors="replace")
    return Outcome(float(matches(said, example.answers)), said)
