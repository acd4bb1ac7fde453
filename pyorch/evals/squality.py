"""SQuALITY: questions about a long story, answered in a paragraph, ROUGE-L (Wang et al. 2022).

The answer is compared with each reference, of which a question has several, and the nearest one
counts. The first question of a story asks for its plot. Data: `dev.jsonl` of the
official repository (data/v1-3/txt), rows with `document` and `questions`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyorch.evals import data, rouge
from pyorch.evals.example import Example
from pyorch.evals.task import Setup, Task


def examples(setup: Setup) -> Iterator[Example]:
    """All questions of a story, then those of the next. Stories that do not fit are left out."""
    rouge.scorer()
    rows = data.rows("squality", setup.data)
    text = 0
    for i in setup.rng().permutation(len(rows)):
        story, questions = data.need(rows[i], ("document", "questions"), "SQuALITY")
        story_examples = [_example(setup, story, q, text) for q in questions]
        if all(len(e.prompt) + e.max_tokens <= setup.ctx for e in story_examples):
            yield from story_examples
            text += 1


def _example(setup: Setup, story: str, question: data.Row, text: int) -> Example:
    asked, number, responses = data.need(
        question, ("question_text", "question_number", "responses"), "SQuALITY"
    )
    name = f"{text}/{number}"
    said = [data.need(r, ("response_text",), "SQuALITY")[0] for r in responses]
    return Example(
        name,
        setup.prompt(f"Story: {story.strip()}\n\nQuestion: {asked}", "\nAnswer:"),
        rouge.MAX_TOKENS,
        data.some(said, f"SQuALITY question {name}"),
        about={"text": text},
    )


TASKS = (
    Task(
        "squality",
        "SQuALITY, answers of a paragraph about a story",
        "ROUGE-L",
        examples,
        rouge.score,
        options=("chat",),
        percent=True,
        data="squality",
    ),
)
