"""A task: examples made from a set-up, and a score for what was decoded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyorch import engine
from pyorch.attention.spec import AttentionSpec
from pyorch.engine.chat_template import ChatTemplate
from pyorch.errors import SparqError
from pyorch.evals.decode import Decoder, Example, Outcome


@dataclass
class Setup:
    """The set-up that examples are made from.

    ctx      positions that prompt and answer may use together
    texts    books, for haystacks and passages
    data     a data file to use instead of the download
    chat     prompts go through the model's chat template
    confusion  other paragraphs beside the one that squad asks about; None: as many as fit `ctx`
    questions  how many questions squad and repetition ask about one text
    document   the tokens of a document, which take the place of the texts; () if there is none
    """

    session: engine.Session
    ctx: int
    seed: int = 1
    texts: Sequence[str] = ()
    data: Path | None = None
    chat: bool = False
    confusion: int | None = 7
    questions: int = 1
    lengths: Sequence[int] = ()
    depths: int = 11
    document: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._template = ChatTemplate(self.session) if self.chat else None
        if self._template is not None and not self._template.builtin:
            raise SparqError(
                f"{self.session.path}: this model has no chat template",
                "leave out --chat: the prompts are then plain text, for base models",
                exit_code=2,
            )
        self._books: list[list[int]] | None = None

    def rng(self, *key: int) -> np.random.Generator:
        """The random generator of an example, which depends only on the seed and on `key`."""
        return np.random.default_rng((self.seed, *key))

    def prompt(self, text: str, cue: str = "") -> list[int]:
        """The tokens of a question, and of the beginning of its answer if the task gives one."""
        if self._template is None:
            return engine.tokenize(self.session, text + cue)
        tokens = self._template.tokens([{"role": "user", "content": text}])
        return tokens + engine.tokenize(self.session, cue.lstrip(), add_special=False)

    @property
    def head(self) -> list[int]:
        """The tokens that begin every text: the model's begin token if it has one."""
        return engine.tokenize(self.session, "")

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text that continues another."""
        return engine.tokenize(self.session, text, add_special=False)

    def text(self, tokens: Sequence[int]) -> str:
        return engine.detokenize(self.session, tokens)

    def books(self, at_least: int) -> list[list[int]]:
        """The tokens of the texts that have at least this many.

        Raises:
            SparqError: no text is that long.
        """
        if self._books is None:
            self._books = [self.tokens(t) for t in self.texts]
        books = [b for b in self._books if len(b) >= at_least]
        if not books:
            raise SparqError(
                f"no text has {at_least} tokens",
                "use a longer --text or a smaller --ctx",
                exit_code=2,
            )
        return books


@dataclass(frozen=True)
class Task:
    """A task of `sparq-cpp eval`.

    examples    the i-th is the same in every run with the same set-up; there may be no end
    score       decodes an example with the method that is set, and scores it
    options     fields of `Setup` that the examples depend on, besides `ctx` and `seed`
    proportion  each score is 0 or 1
    percent     a score is a share, shown in percent
    higher      a higher score is better
    document    whether it can ask about a document in place of the texts
    data        the name of the data set that is downloaded, "" for a generated task
    reference   the attention that `score` compares with, in `Decoder.reference`. With `off`, which
                is llama.cpp alone, it reads the prompt too, and the share of the attention that
                methods read is measured
    """

    name: str
    about: str
    metric: str
    examples: Callable[[Setup], Iterator[Example]]
    score: Callable[[Decoder, Example], Outcome]
    family: str = ""
    options: tuple[str, ...] = ()
    proportion: bool = False
    percent: bool = False
    higher: bool = True
    document: bool = False
    data: str = ""
    reference: AttentionSpec | None = None


def endless(example: Callable[[Setup, int], Example]) -> Callable[[Setup], Iterator[Example]]:
    """The `examples` of a task whose i-th example can be made without those before it."""
    return lambda setup: (example(setup, i) for i in itertools.count())
