"""TriviaQA 0-shot, open book (SparQ, 5.1 and G.1.2).

The question comes after one of its search results, 4,000 to 8,000 characters long. Prompt and match
follow the paper's code (llm-inference-research, tasks/qa.py). Data: the hub's rows (parquet or JSON
lines), or an official `qa/web-*.json` with the folder `evidence` beside `qa`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pyorch.errors import SparqError
from pyorch.evals import data, qa
from pyorch.evals.example import Example
from pyorch.evals.task import Setup, Task
from pyorch.text_file import read_text

CHARS = (4000, 8000)


def _contexts(row: data.Row, file: Path | None) -> list[str]:
    if "search_results" in row:
        return list(row["search_results"]["search_context"])
    (results,) = data.need(row, ("SearchResults",), "TriviaQA (rc)")
    folder = (file or Path()).resolve().parent.parent / "evidence" / "web"
    if not folder.is_dir():
        raise SparqError(
            f"{file}: the evidence is missing: no {folder}",
            "unpack the official archive whole: qa/ and evidence/ side by side",
        )
    return [
        read_text(folder / r["Filename"]) for r in results if (folder / r["Filename"]).is_file()
    ]


def _question(row: data.Row) -> tuple[str, str, tuple[str, ...]]:
    keys = ("question_id", "question", "answer")
    if "QuestionId" in row:
        keys = ("QuestionId", "Question", "Answer")
    name, text, answer = data.need(row, keys, "TriviaQA (rc)")
    answers = answer.get("aliases", answer.get("Aliases", ()))
    return name, text, data.some(answers, f"TriviaQA question {name}")


def examples(setup: Setup) -> Iterator[Example]:
    rows = data.rows("triviaqa", setup.data)
    found = False
    for i in setup.rng().permutation(len(rows)):
        row, rng = rows[i], setup.rng(int(i))
        name, question, answers = _question(row)
        contexts = [c for c in _contexts(row, setup.data) if CHARS[0] <= len(c) <= CHARS[1]]
        if not contexts:
            continue
        found = True
        context = contexts[int(rng.integers(len(contexts)))]
        longest = max(len(setup.tokens(a)) for a in answers)
        yield Example(
            name,
            setup.prompt(f"{context}\nQuestion: {question}", "\nAnswer:"),
            min(qa.MAX_TOKENS, longest + 5),
            answers,
        )
    if not found:
        raise SparqError(
            f"TriviaQA: no question has a search result of {CHARS[0]} to {CHARS[1]} characters",
            "the rc data with search results, not rc.nocontext",
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
