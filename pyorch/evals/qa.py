"""Judges the answers of question answering (SparQ, 5.1: exact string match)."""

from __future__ import annotations

import re

from pyorch.evals.decode import Decoder
from pyorch.evals.example import Example, Outcome

MAX_TOKENS = 30  # but at most five more than the longest answer
_TRIM = re.compile(r"^[\s\n\"'_.,]*(the |a |an )?|[\s\n\"'_.,]*$")


def matches(said: str, answers: tuple[str, ...]) -> bool:
    """Whether `said` begins with an answer, apart from case, articles and punctuation.

    This follows llm-inference-research, tasks/qa.py.
    """
    said = _TRIM.sub("", said.lower())
    wanted = [_TRIM.sub("", a.lower()) for a in answers]
    return any(said.startswith(w) for w in wanted if w)


def score(decoder: Decoder, example: Example) -> Outcome:
    answer = decoder.answer(example, enough=lambda said: matches(said, example.answers))
    said = answer.decode("utf-8", errors="replace")
    return Outcome(float(matches(said, example.answers)), said)
