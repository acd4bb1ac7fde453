"""GSM8K: sums in words, answered by a chain of thought.

As many worked examples as fill `--ctx` stand before each question, the same for all questions, so
that they are read once. A reply ends with the number after ####, which must be the right one. Data:
openai/grade-school-math, without the calculator's marks (<<...>>).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pyorch.errors import SparqError
from pyorch.evals import data
from pyorch.evals.decode import Decoder, Example, Outcome
from pyorch.evals.task import Setup, Task

MAX_TOKENS = 256
ROOM = 192  # positions of a question, besides those of the reply
KEYS = ("question", "answer")
_MARK = re.compile(r"<<.*?>>")
_NUMBER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")


def number(reply: str) -> str:
    """The number of a worked answer, without commas; "" if there is none."""
    found = _NUMBER.search(reply)
    return found[1].replace(",", "") if found else ""


def score(decoder: Decoder, example: Example) -> Outcome:
    raw = decoder.answer(example, stop=("\n\n", "Question:"))
    reply = raw.decode("utf-8", errors="replace")
    n_tokens = len(decoder.session.tokens) - len(example.prompt) + 1
    return Outcome(float(number(reply) == example.answers[0]), reply, {"tokens": n_tokens})


def examples(setup: Setup) -> Iterator[Example]:
    rows = [data.need(row, KEYS, "GSM8K") for row in data.rows("gsm8k", setup.data)]
    if wrong := [question for question, answer in rows if not number(answer)]:
        raise SparqError(f"no number after #### for {wrong[0]!r:.60}", "GSM8K's data as published")
    order = setup.rng().permutation(len(rows)).tolist()
    shots, room = "", setup.ctx - MAX_TOKENS - ROOM
    while order:
        question, answer = rows[order[-1]]
        shot = f"Question: {question}\nAnswer: {_MARK.sub('', answer)}\n\n"
        room -= len(setup.tokens(shot))
        if room < 0:
            break
        shots += shot
        order.pop()
    for i in order:
        question, answer = rows[i]
        prompt = setup.prompt(f"{shots}Question: {question}", "\nAnswer:")
        if len(prompt) + MAX_TOKENS <= setup.ctx:
            yield Example(str(i), prompt, MAX_TOKENS, (number(answer),))


TASKS = (
    Task(
        "gsm8k",
        "GSM8K, worked examples up to the context, then a chain of thought",
        "exact number",
        examples,
        score,
        proportion=True,
        percent=True,
        data="gsm8k",
    ),
)
