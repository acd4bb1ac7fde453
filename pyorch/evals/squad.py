"""SQuAD 1-shot with confusion contexts (SparQ, 5.1 and G.1.1).

The paragraph of a question stands among seven others (up to 63: `--confusion`); one more question
about it comes with its answer. Prompt, choice of the example and match follow the paper's code
(llm-inference-research, tasks/qa.py). Data: SQuAD v1.1, official JSON or the hub's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyorch.errors import SparqError
from pyorch.evals import data, qa
from pyorch.evals.example import Example
from pyorch.evals.task import Setup, Task


def _flat(rows: list[data.Row]) -> list[dict[str, Any]]:
    """One dict per question: id, title, context, question, answers."""
    out = []
    for row in rows:
        if "paragraphs" in row:  # the official file: one row is one article
            for p in row["paragraphs"]:
                context, questions = data.need(p, ("context", "qas"), "SQuAD v1.1")
                for q in questions:
                    name, text, answers = data.need(q, ("id", "question", "answers"), "SQuAD v1.1")
                    texts = [a["text"] for a in answers]
                    about = (name, row.get("title", ""), context, text, texts)
                    out.append(dict(zip(_KEYS, about, strict=True)))
        else:
            values = data.need(row, _KEYS, "SQuAD v1.1")
            values[-1] = values[-1]["text"]
            out.append(dict(zip(_KEYS, values, strict=True)))
    for q in out:
        q["answers"] = data.some(q["answers"], f"SQuAD question {q['id']}")
        q["title"] = q["title"].replace("_", " ")
    return out


_KEYS = ("id", "title", "context", "question", "answers")


def _background(q: dict[str, Any]) -> str:
    return f"Title: {q['title']}. Background: {q['context']}"


def examples(setup: Setup) -> Iterator[Example]:
    questions = _flat(data.rows("squad", setup.data))
    contexts = sorted({_background(q) for q in questions})
    if len(contexts) <= setup.confusion:
        raise SparqError(
            f"{setup.confusion} confusion contexts asked for, but there are {len(contexts)} "
            "paragraphs",
            "more data, or a smaller --confusion",
            exit_code=2,
        )
    by_context: dict[str, list[dict[str, Any]]] = {}
    for q in questions:
        by_context.setdefault(q["context"], []).append(q)
    for i in setup.rng().permutation(len(questions)):
        q, rng = questions[i], setup.rng(int(i))
        others = [c for c in contexts if c != _background(q)]
        chosen = [others[j] for j in rng.choice(len(others), setup.confusion, replace=False)]
        chosen.insert(int(rng.integers(len(chosen) + 1)), _background(q))
        near = [x for x in by_context[q["context"]] if x is not q] or [
            x for x in questions if x is not q
        ]
        shot = near[int(rng.integers(len(near)))] if near else None
        text = "\n".join(chosen) + f"\nFrom what you've just read about {q['title']}"
        text += ", please answer the following questions.\n"
        if shot:
            answer = min(shot["answers"], key=len)
            text += f"Question: {shot['question']}\nAnswer: {answer}\n"
        text += f"Question: {q['question']}"
        longest = max(len(setup.tokens(a)) for a in q["answers"])
        yield Example(
            q["id"],
            setup.prompt(text, "\nAnswer:"),
            min(qa.MAX_TOKENS, longest + 5),
            q["answers"],
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
