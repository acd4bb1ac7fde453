"""One question of a task, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """One question. All of `prompt` but its last token is read densely, before any method runs.

    answers     what is right, as texts; what has to be met is the task's affair
    max_tokens  of the answer; for teacher-forced tasks the number of `forced`
    forced      tokens whose probability is asked for, in place of an answer
    about       what a table or a figure sorts by, `{"length": 2048, "depth": 0.5}`
    """

    id: str
    prompt: list[int]
    max_tokens: int
    answers: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """`said` is the answer, or empty where the text is given; `more`: further numbers, or one of
    each layer."""

    score: float
    said: str = ""
    more: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
