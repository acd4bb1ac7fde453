"""Examples, and how they are decoded: greedy answers and teacher-forced texts, by real steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyorch import engine


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
    """The outcome of an example. `reply` is the answer, or empty if the text is given; `more` has
    further numbers, or one per layer."""

    score: float
    reply: str = ""
    more: Mapping[str, float | Sequence[float]] = field(default_factory=dict)


class Decoder:
    """A session that has read all of a prompt but its last token, with a method set.

    reference  log-probabilities (n_forced, n_vocab) of dense attention, for tasks that compare
    """

    def __init__(self, session: engine.Session, reference: np.ndarray | None = None) -> None:
        self.session, self.reference = session, reference

    def answer(
        self,
        example: Example,
        *,
        stop: Sequence[str] = (),
        follow: bytes | None = None,
        enough: Callable[[str], bool] | None = None,
    ) -> bytes:
        """Decode greedily up to `max_tokens` tokens, an end token, or a stop string.

        follow: the expected answer; decoding then ends at the first token that differs.
        enough: whether what was said decides the score, so that nothing more need be decoded.
        """
        s, reply = self.session, b""
        stops = [x.encode() for x in stop]
        token = example.prompt[-1]
        for _ in range(example.max_tokens):
            engine.decode(s, token)
            token = int(np.argmax(engine.logits(s)))
            if engine.is_eog(s, token):
                break
            reply += engine.token_bytes(s, token)
            ends = [at for at in (reply.find(x) for x in stops) if at >= 0]
            if ends:
                return reply[: min(ends)]
            if enough is not None and enough(reply.decode("utf-8", errors="ignore")):
                break
            if follow is not None and (
                len(reply) >= len(follow) or not reply or not follow.startswith(reply)
            ):
                break
        return reply

    def forced(self, example: Example) -> Iterator[np.ndarray]:
        """Yields the logits [n_vocab] before each of the forced tokens, one decode step each."""
        for token in (example.prompt[-1], *example.forced[:-1]):
            engine.decode(self.session, token)
            yield engine.logits(self.session)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """The logarithm of the softmax over the last axis, in double precision."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x
