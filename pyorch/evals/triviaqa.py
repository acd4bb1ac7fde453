"""TriviaQA 0-shot, open book (SparQ, 5.1 and G.1.2).

The question comes after one of its search results, 4,000 to 8,000 characters long. Prompt and match
follow the paper's code (llm-inference-research, tasks/qa.py). Data: the hub's rows, as parquet or
JSON lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyorch.evals import data, qa
from pyorch.evals.example import Example
from pyorch.evals.task import Setup, Task

CHARS = (4000, 8000)
KEYS = ("question_id", "question", "answer", "search_results")


def examples(setup: Setup) -> Iterator[Example]:
    rows = data.rows("triviaqa", setup.data)
    for i in setup.rng().permutation(len(rows)):
        rng = setup.rng(int(i))
        name, question, answer, results = data.need(rows[i], KEYS, "TriviaQA (rc)")
        (aliases,) = data.need(answer, ("aliases",), "TriviaQA (rc)")
        answers = data.some(aliases, f"TriviaQA question {name}")
        (texts,) = data.need(results, ("search_context",), "TriviaQA (rc)")
        contexts = [c for c in texts if CHARS[0] <= len(c) <= CHARS[1]]
        if not contexts:
            continue
        context = contexts[int(rng.integers(len(contexts)))]
        longest = max(len(setup.tokens(a)) for a in answers)
        yield Example(
            name,
            setup.prompt(f"{context}\nQuestion: {question}", "\nAnswer:"),
            min(qa.MAX_TOKENS, longest + 5),
            answers,
        )


TASKS = (
    Task(
        "triviaqa",
        "TriviaQA 0-shot, open book",
        "exact match",
        examples,
        qa.score,
        options=("chat",),
        proportion=True,
        percent=True,
        data="triviaqa",
    ),
)
