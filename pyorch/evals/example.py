"""A question of a task, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """A question. All of `prompt` but its last token is read densely, before any method runs.

    answers     the right answers; the task decides how they are matched
    max_tokens  the limit of the answer; for teacher-forced tasks the number of `forced`
    forced      tokens whose probabilities are measured, instead of an answer
    about       what tables and figures sort by, such as `{"length": 2048, "depth": 0.5}`; "stretch"
                is the part of a book that stands in the prompt: its number, begin and end. Without
                one, examples of one "text" are about the same
    """

    id: str
    prompt: list[int]
    max_tokens: int
    answers: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of an example. `said` is the answer, or empty if the text is given; `more` has
    further numbers, or one per layer."""

    score: float
    said: str = ""
    more: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
