"""WikiText in bits per character, one teacher-forced token at a time (SparQ, 5.1 and G.1.5).

About 6,000 characters of an article are read densely, then about 400 more are given token by
token; both end before white space. This follows the paper's code (llm-inference-research,
tasks/bpc.py), but with the validation split instead of a part of the training split. With a short
`--ctx` the first part is shorter. The data is `wiki.valid.raw` or another text of that form, or the
hub's rows (`text`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from pyorch.errors import SparqError
from pyorch.evals import data
from pyorch.evals.decode import Decoder, Example, Outcome, log_softmax
from pyorch.evals.task import Setup, Task
from pyorch.text_file import read_text

READ, GIVEN = 6000, 400  # characters
MAX_TOKENS = 256
_TITLE = re.compile(r"^ = [^=].*[^=] = ?$", re.M)


def articles(file: Path | None) -> list[str]:
    """The pages of a text, which is cut at its first-level headings.

    Raises:
        SparqError: the data cannot be read.
    """
    if file is not None and file.suffix not in (".json", ".jsonl", ".parquet"):
        text = read_text(file, "--data takes wiki.valid.raw")
    else:
        rows = data.rows("wikitext", file)
        text = "".join(data.need(r, ("text",), "WikiText")[0] for r in rows)
    starts = [m.start() for m in _TITLE.finditer(text)]
    return [text[a:b] for a, b in pairwise([*starts, len(text)])] or [text]


def examples(setup: Setup) -> Iterator[Example]:
    pages = articles(setup.data)
    for i in setup.rng().permutation(len(pages)):
        cut = _cut(pages[i], setup)
        if cut:
            read, scored = cut
            about = {"chars": len(scored)}
            forced = tuple(setup.tokens(scored)[:MAX_TOKENS])
            if len(forced) == MAX_TOKENS:  # the characters of the scored tokens
                about["chars"] = len(setup.text(forced))
            prompt = setup.prompt(read)
            yield Example(str(i), prompt, len(forced), forced=forced, about=about)


def _cut(page: str, setup: Setup) -> tuple[str, str] | None:
    """Returns the part to read and the part to decode, or None if the page is too short."""
    n = READ
    while True:
        m = re.search(rf"^(.{{{n}}}.*?)(\s.{{{GIVEN - 1}}}.*?)(?:\s|$)", page, re.S)
        if m is None:
            return None
        size = len(setup.prompt(m[1])) + min(len(setup.tokens(m[2])), MAX_TOKENS)
        if size <= setup.ctx:
            return m[1], m[2]
        n = n * (setup.ctx - MAX_TOKENS - 8) // size
        if n < GIVEN:
            raise SparqError(
                f"wikitext: --ctx {setup.ctx} leaves no room to read", "--ctx 1024 or more", 2
            )


def score(decoder: Decoder, example: Example) -> Outcome:
    nats = sum(
        -log_softmax(logits)[token]
        for logits, token in zip(decoder.forced(example), example.forced, strict=True)
    )
    return Outcome(float(nats) / math.log(2) / example.about["chars"])


TASKS = (
    Task(
        "wikitext",
        "WikiText, a text given token by token",
        "bits per character",
        examples,
        score,
        higher=False,
        data="wikitext",
    ),
)
