"""SQuAD 1-shot with confusion contexts (SparQ, 5.1 and G.1.1).

The paragraph of a question stands among seven others (up to 63: `--confusion`); one more question
about it comes with its answer. Prompt, choice of the example and match follow the paper's code
(llm-inference-research, tasks/qa.py). Data: SQuAD v1.1, official JSON or the hub's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyorch.errors import SparqError
from pyorch.evals import data, qa
from pyorch.evals.example import Example
from pyorch.evals.task import Setup, Task

_KEYS = ("id", "title", "context", "question", "answers")


@dataclass(frozen=True)
class Question:
    id: str
    title: str
    context: str
    text: str
    answers: tuple[str, ...]

    @property
    def background(self) -> str:
        return f"Title: {self.title}. Background: {self.context}"


def _questions(rows: list[data.Row]) -> Iterator[Question]:
    for row in rows:
        if "paragraphs" not in row:
            name, title, context, text, answers = data.need(row, _KEYS, "SQuAD v1.1")
            yield _question(name, title, context, text, answers["text"])
            continue
        for p in row["paragraphs"]:  # the official file: one row is one article
            context, found = data.need(p, ("context", "qas"), "SQuAD v1.1")
            for q in found:
                name, text, answers = data.need(q, ("id", "question", "answers"), "SQuAD v1.1")
                texts = [a["text"] for a in answers]
                yield _question(name, row.get("title", ""), context, text, texts)


def _question(name: str, title: str, context: str, text: str, answers: list[str]) -> Question:
    some = data.some(answers, f"SQuAD question {name}")
    return Question(name, title.replace("_", " "), context, text, some)


def examples(setup: Setup) -> Iterator[Example]:
    questions = list(_questions(data.rows("squad", setup.data)))
    contexts = sorted({q.background for q in questions})
    if len(contexts) <= setup.confusion:
        raise SparqError(
            f"{setup.confusion} confusion contexts asked for, but there are {len(contexts)} "
            "paragraphs",
            "use more data or a smaller --confusion",
            exit_code=2,
        )
    by_context: dict[str, list[Question]] = {}
    for q in questions:
        by_context.setdefault(q.context, []).append(q)
    for i in setup.rng().permutation(len(questions)):
        q, rng = questions[i], setup.rng(int(i))
        others = [c for c in contexts if c != q.background]
        chosen = [others[j] for j in rng.choice(len(others), setup.confusion, replace=False)]
        chosen.insert(int(rng.integers(len(chosen) + 1)), q.background)
        near = [x for x in by_context[q.context] if x is not q] or [
            x for x in questions if x is not q
        ]
        shot = near[int(rng.integers(len(near)))] if near else None
        text = "\n".join(chosen) + f"\nFrom what you've just read about {q.title}"
        text += ", please answer the following questions.\n"
        if shot:
            answer = min(shot.answers, key=len)
            text += f"Question: {shot.text}\nAnswer: {answer}\n"
        text += f"Question: {q.text}"
        longest = max(len(setup.tokens(a)) for a in q.answers)
        yield Example(
            q.id,
            setup.prompt(text, "\nAnswer:"),
            min(qa.MAX_TOKENS, longest + 5),
            q.answers,
        )


TASKS = (
    Task(
        "squad",
        "SQuAD 1-shot, the paragraph among seven others",
        "exact match",
        examples,
        qa.score,
        options=("confusion", "chat"),
        proportion=True,
        percent=True,
        data="squad",
    ),
)
