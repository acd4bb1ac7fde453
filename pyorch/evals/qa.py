"""Question answering by exact match (SparQ, 5.1): SQuAD 1-shot and TriviaQA 0-shot.

SQuAD (G.1.1): the paragraph of a question stands among seven others (`--confusion`, in the paper up
to 63); one more question about it comes with its answer. `--questions` asks about several
paragraphs of a text, which is then read only once. Data: SQuAD v1.1, official JSON or the hub's
rows.

TriviaQA (G.1.2), open book: the question comes after one of its search results, 4,000 to 8,000
characters long. Data: the hub's rows, as parquet or JSON lines.

Prompts, choice of the example and match follow the paper's code (llm-inference-research,
tasks/qa.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyorch.errors import SparqError
from pyorch.evals import data
from pyorch.evals.decode import Decoder, Example, Outcome
from pyorch.evals.task import Setup, Task

MAX_TOKENS = 30  # but at most five more than the longest answer
_TRIM = re.compile(r"^[\s\n\"'_.,]*(the |a |an )?|[\s\n\"'_.,]*$")
ROOM = 384  # positions of the question, its example and the answer, where paragraphs fill a text
SQUAD_KEYS = ("id", "title", "context", "question", "answers")
CHARS = (4000, 8000)
TRIVIA_KEYS = ("question_id", "question", "answer", "search_results")


def matches(reply: str, answers: tuple[str, ...]) -> bool:
    """Whether `reply` begins with an answer, apart from case, articles and punctuation.

    This follows llm-inference-research, tasks/qa.py.
    """
    reply = _TRIM.sub("", reply.lower())
    keys = [_TRIM.sub("", a.lower()) for a in answers]
    return any(reply.startswith(key) for key in keys if key)


def score(decoder: Decoder, example: Example) -> Outcome:
    answer = decoder.answer(example, enough=lambda reply: matches(reply, example.answers))
    reply = answer.decode("utf-8", errors="replace")
    return Outcome(float(matches(reply, example.answers)), reply)


# ---- SQuAD ----


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
            name, title, context, text, answers = data.need(row, SQUAD_KEYS, "SQuAD v1.1")
            (texts,) = data.need(answers, ("text",), "SQuAD v1.1")
            yield _question(name, title, context, text, texts)
            continue
        for p in row["paragraphs"]:  # the official file: one row is one article
            context, questions = data.need(p, ("context", "qas"), "SQuAD v1.1")
            for q in questions:
                name, text, answers = data.need(q, ("id", "question", "answers"), "SQuAD v1.1")
                texts = [data.need(a, ("text",), "SQuAD v1.1")[0] for a in answers]
                yield _question(name, row.get("title", ""), context, text, texts)


def _question(name: str, title: str, context: str, text: str, answers: list[str]) -> Question:
    some = data.some(answers, f"SQuAD question {name}")
    return Question(name, title.replace("_", " "), context, text, some)


def squad(setup: Setup) -> Iterator[Example]:
    questions = list(_questions(data.rows("squad", setup.data)))
    by_paragraph: dict[str, list[Question]] = {}
    for q in questions:
        by_paragraph.setdefault(q.background, []).append(q)
    if setup.confusion is not None and len(by_paragraph) <= setup.confusion:
        raise SparqError(
            f"{setup.confusion} confusion contexts asked for, but there are {len(by_paragraph)} "
            "paragraphs",
            "use more data or a smaller --confusion",
            exit_code=2,
        )
    if setup.confusion is None or setup.questions > 1:
        yield from _several(setup, by_paragraph)
        return
    paragraphs = sorted(by_paragraph)
    for i in setup.rng().permutation(len(questions)):
        q, rng = questions[i], setup.rng(int(i))
        others = [c for c in paragraphs if c != q.background]
        chosen = [others[j] for j in rng.choice(len(others), setup.confusion, replace=False)]
        chosen.insert(int(rng.integers(len(chosen) + 1)), q.background)
        near = [x for x in by_paragraph[q.background] if x is not q]
        near = near or [x for x in questions if x is not q]
        shot = near[int(rng.integers(len(near)))] if near else None
        yield _example(setup, chosen, q, shot)


def _several(setup: Setup, by_paragraph: dict[str, list[Question]]) -> Iterator[Example]:
    """`questions` examples about different paragraphs of a text, then those of the next text.

    A text is paragraphs in random order, and no paragraph comes again before all have been used.
    """
    paragraphs = sorted(by_paragraph)
    sizes = {p: len(setup.tokens(p + "\n")) for p in paragraphs}
    rng, order = setup.rng(), list[str]()
    for text in itertools.count():
        chosen: list[str] = []
        room = setup.ctx - ROOM
        while setup.confusion is None or len(chosen) <= setup.confusion:
            if not order:
                order = [p for p in rng.permutation(paragraphs).tolist() if p not in chosen]
            room -= sizes[order[-1]] if order else room + 1
            if room < 0 and setup.confusion is None:
                break
            chosen.append(order.pop())
        able = [p for p in chosen if len(by_paragraph[p]) > 1]
        if len(able) < setup.questions:
            raise SparqError(
                f"squad: a text of {setup.ctx} positions has {len(able)} paragraphs to ask about, "
                f"but --questions is {setup.questions}",
                "a larger --ctx or --confusion, or fewer --questions",
                exit_code=2,
            )
        for j in rng.choice(len(able), setup.questions, replace=False):
            q, shot = rng.permutation(len(by_paragraph[able[j]]))[:2]
            about = by_paragraph[able[j]]
            yield replace(_example(setup, chosen, about[q], about[shot]), about={"text": text})


def _example(setup: Setup, chosen: list[str], q: Question, shot: Question | None) -> Example:
    text = "\n".join(chosen) + f"\nFrom what you've just read about {q.title}"
    text += ", please answer the following questions.\n"
    if shot:
        answer = min(shot.answers, key=len)
        text += f"Question: {shot.text}\nAnswer: {answer}\n"
    text += f"Question: {q.text}"
    longest = max(len(setup.tokens(a)) for a in q.answers)
    prompt = setup.prompt(text, "\nAnswer:")
    return Example(q.id, prompt, min(MAX_TOKENS, longest + 5), q.answers)


# ---- TriviaQA ----


def triviaqa(setup: Setup) -> Iterator[Example]:
    rows = data.rows("triviaqa", setup.data)
    for i in setup.rng().permutation(len(rows)):
        rng = setup.rng(int(i))
        name, question, answer, results = data.need(rows[i], TRIVIA_KEYS, "TriviaQA (rc)")
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
            min(MAX_TOKENS, longest + 5),
            answers,
        )


SQUAD = Task(
    "squad",
    "SQuAD 1-shot, the paragraph among seven others",
    "exact match",
    squad,
    score,
    options=("confusion", "questions", "chat"),
    proportion=True,
    percent=True,
    data="squad",
)
TASKS = (
    SQUAD,
    Task(
        "triviaqa",
        "TriviaQA 0-shot, open book",
        "exact match",
        triviaqa,
        score,
        options=("chat",),
        proportion=True,
        percent=True,
        data="triviaqa",
    ),
)
