"""CNN/DailyMail 0-shot, ROUGE-L (SparQ, 5.1 and G.1.3).

Articles of 4,000 to 8,000 characters; the summary may be as long as the reference, and 128 tokens
at most. Prompt and score (F of ROUGE-L, stemmed) follow the paper's code (llm-inference-research,
tasks/summarisation.py). Data: rows with `article` and `highlights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.evals import data
from pyorch.evals.decode import Decoder
from pyorch.evals.example import Example, Outcome
from pyorch.evals.task import Setup, Task

CHARS = (4000, 8000)
MAX_TOKENS = 128


def examples(setup: Setup) -> Iterator[Example]:
    _scorer()  # reports a missing package before hours of work, not after
    rows = data.rows("cnn_dailymail", setup.data)
    found = False
    for i in setup.rng().permutation(len(rows)):
        article, summary = data.need(rows[i], ("article", "highlights"), "CNN/DailyMail")
        name = str(rows[i].get("id", i))
        (summary,) = data.some([summary], f"CNN/DailyMail article {name}")
        if not CHARS[0] <= len(article) <= CHARS[1]:
            continue
        found = True
        yield Example(
            name,
            setup.prompt("Article: " + article, "\nSummary:"),
            min(len(setup.tokens(summary)), MAX_TOKENS),
            (summary,),
        )
    if not found:
        raise SparqError(f"CNN/DailyMail: no article of {CHARS[0]} to {CHARS[1]} characters")


@cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        raise SparqError(
            "ROUGE needs the package rouge-score", paths.install_command("eval")
        ) from None
    return RougeScorer(["rougeL"], use_stemmer=True)


def score(decoder: Decoder, example: Example) -> Outcome:
    said = decoder.answer(example).decode("utf-8", errors="replace")
    return Outcome(_scorer().score(example.answers[0], said)["rougeL"].fmeasure, said)


TASKS = (
    Task(
        "cnn_dailymail",
        "CNN/DailyMail summaries",
        "ROUGE-L",
        examples,
        score,
        options=("chat",),
        percent=True,
        data="cnn_dailymail",
    ),
)
