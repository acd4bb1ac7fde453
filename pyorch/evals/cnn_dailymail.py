"""CNN/DailyMail 0-shot, ROUGE-L (SparQ, 5.1 and G.1.3).

Articles of 4,000 to 8,000 characters; the summary may be as long as the reference, and 128 tokens
at most. Prompt and score (F of ROUGE-L, stemmed) follow the paper's code (llm-inference-research,
tasks/summarisation.py). Data: rows with `article` and `highlights`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyorch.evals import data, rouge
from pyorch.evals.example import Example
from pyorch.evals.task import Setup, Task

CHARS = (4000, 8000)


def examples(setup: Setup) -> Iterator[Example]:
    rouge.scorer()
    rows = data.rows("cnn_dailymail", setup.data)
    for i in setup.rng().permutation(len(rows)):
        article, summary = data.need(rows[i], ("article", "highlights"), "CNN/DailyMail")
        name = str(rows[i].get("id", i))
        (summary,) = data.some([summary], f"CNN/DailyMail article {name}")
        if not CHARS[0] <= len(article) <= CHARS[1]:
            continue
        yield Example(
            name,
            setup.prompt("Article: " + article, "\nSummary:"),
            min(len(setup.tokens(summary)), rouge.MAX_TOKENS),
            (summary,),
        )


TASKS = (
    Task(
        "cnn_dailymail",
        "CNN/DailyMail summaries",
        "ROUGE-L",
        examples,
        rouge.score,
        options=("chat",),
        percent=True,
        data="cnn_dailymail",
    ),
)
