"""Summaries and answers of a paragraph, by ROUGE-L (SparQ, 5.1 and G.1.3: F, stemmed).

CNN/DailyMail 0-shot: articles of 4,000 to 8,000 characters; the summary may be as long as the
reference, and 128 tokens at most. Prompt and score follow the paper's code (llm-inference-research,
tasks/summarisation.py). Data: rows with `article` and `highlights`.

SQuALITY (Wang et al. 2022): questions about a long story, the first one asks for its plot. The
answer is compared with each reference, of which a question has several, and the nearest one counts.
Data: `dev.jsonl` of the official repository (data/v1-3/txt), rows with `document` and `questions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.evals import data
from pyorch.evals.decode import Decoder, Example, Outcome
from pyorch.evals.task import Setup, Task

CHARS = (4000, 8000)  # of an article
MAX_TOKENS = 128


@cache
def scorer() -> Any:
    """The scorer of the package rouge-score.

    Raises:
        SparqError: the package is missing. A task asks for it first, before hours of work.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        raise SparqError(
            "ROUGE needs the package rouge-score", paths.install_command("eval")
        ) from None
    return RougeScorer(["rougeL"], use_stemmer=True)


def score(decoder: Decoder, example: Example) -> Outcome:
    """F of the reference that the answer is nearest to."""
    reply = decoder.answer(example).decode("utf-8", errors="replace")
    scores = [scorer().score(answer, reply)["rougeL"].fmeasure for answer in example.answers]
    return Outcome(max(scores), reply)


def cnn_dailymail(setup: Setup) -> Iterator[Example]:
    scorer()
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
            min(len(setup.tokens(summary)), MAX_TOKENS),
            (summary,),
        )


def squality(setup: Setup) -> Iterator[Example]:
    """All questions of a story, then those of the next. Stories that do not fit are left out."""
    scorer()
    rows = data.rows("squality", setup.data)
    text = 0
    for i in setup.rng().permutation(len(rows)):
        story, questions = data.need(rows[i], ("document", "questions"), "SQuALITY")
        story_examples = [_question(setup, story, q, text) for q in questions]
        if all(len(e.prompt) + e.max_tokens <= setup.ctx for e in story_examples):
            yield from story_examples
            text += 1


def _question(setup: Setup, story: str, question: data.Row, text: int) -> Example:
    asked, number, responses = data.need(
        question, ("question_text", "question_number", "responses"), "SQuALITY"
    )
    name = f"{text}/{number}"
    reply = [data.need(r, ("response_text",), "SQuALITY")[0] for r in responses]
    return Example(
        name,
        setup.prompt(f"Story: {story.strip()}\n\nQuestion: {asked}", "\nAnswer:"),
        MAX_TOKENS,
        data.some(reply, f"SQuALITY question {name}"),
        about={"text": text},
    )


TASKS = (
    Task(
        "cnn_dailymail",
        "CNN/DailyMail summaries",
        "ROUGE-L",
        cnn_dailymail,
        score,
        options=("chat",),
        percent=True,
        data="cnn_dailymail",
    ),
    Task(
        "squality",
        "SQuALITY, answers of a paragraph about a story",
        "ROUGE-L",
        squality,
        score,
        options=("chat",),
        percent=True,
        data="squality",
    ),
)
