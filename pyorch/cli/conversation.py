"""A chat: its messages and settings, what it reads, and what it keeps so that it is read once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch import paths
from pyorch.attention.spec import AttentionSpec
from pyorch.cli.loading import open_document
from pyorch.cli.summary import Summary
from pyorch.cli.terminal import note
from pyorch.errors import SparqError
from pyorch.progress import Progress
from pyorch.text_file import read_text

if TYPE_CHECKING:
    from pyorch.engine import Document, Reading, Sampling, Session
    from pyorch.engine.chat_template import ChatTemplate

LEFT_FREE = 64  # positions kept free for a reply when old messages are dropped
WORTH_KEEPING = 1024  # tokens; less is read in a moment
LIMIT = 8 << 30  # bytes of all that /read keeps, unless a variable has another; 0 keeps nothing


@dataclass
class Chat:
    """A conversation with a model."""

    session: Session
    template: ChatTemplate
    spec: AttentionSpec
    sampling: Sampling
    max_tokens: int | None
    as_json: bool
    interactive: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""  # the text of /read, for the next message
    read: list[str] = field(default_factory=list)  # with what messages begin that have such a text
    documents: list[Document] = field(default_factory=list)  # those of the command line
    keep: tuple[Path, Reading] | None = None  # what /read keeps after a reply
    keeps: bool = True  # whether it does
    files: set[Path] = field(default_factory=set)  # what /save may replace
    summary: Summary | None = None  # the summary of the last reply
    leaves: bool = False  # whether a second Ctrl-C ends the program
    end: int = 0  # the signal that ends it after the reply, which is kept
    chosen: bool = True  # whether somebody asked for this attention
    dense_note: str = ""  # the note on why attention is dense, which is shown once

    def __post_init__(self) -> None:
        # the last sparse settings, which /ratio goes back to after /dense
        self.sparse = self.spec if self.spec.sparse else replace(self.spec, method="sparq")

    def begin(self, text: str = "", now: datetime | None = None) -> None:
        """Begin a new conversation, with a text before its first message. now: the time that it
        states; None is the present."""
        from pyorch.engine.chat_template import clock

        self.template.now = now or clock()
        self.messages = [m for m in self.messages if m["role"] == "system"]
        self.read.clear()
        self.text, self.keep = text, None

    def has_text(self, i: int) -> bool:
        """Whether message i begins with a text from /read."""
        return self.messages[i]["content"].startswith(tuple(self.read))

    def oldest(self) -> list[int]:
        """The indices of the questions before the one to answer, in the order in which they are
        dropped: those with a text of /read last."""
        first = 1 if self.messages[0]["role"] == "system" else 0
        return sorted(range(first, len(self.messages) - 1, 2), key=self.has_text)

    def without(self, questions: Iterable[int]) -> list[dict[str, str]]:
        """The messages without these questions and their answers."""
        dropped = {i for question in questions for i in (question, question + 1)}
        return [m for i, m in enumerate(self.messages) if i not in dropped]

    def most_tokens(self, n_prompt: int) -> int:
        """The most tokens of a reply. A text that was read stays as long as the first reply to it,
        which may fill no more than half of the room."""
        if self.max_tokens is not None:
            return self.max_tokens
        room = self.session.n_ctx - n_prompt
        is_first = self.has_text(len(self.messages) - 1)
        return max(room // 2, LEFT_FREE) if is_first else self.session.n_ctx


def load_all(names: Sequence[str], system: str | None) -> list[Document]:
    """The documents that `--document` names, each fit for a chat.

    Raises:
        SparqError: one is none, or was read for something else.
    """
    from pyorch.engine import document_file

    documents = [document_file.named(name) for name in names]
    for d in documents:
        if d.form != "chat":
            again = "sparq-cpp read, without --plain"
            raise SparqError(f"{d.path}: it was not read for a chat", f"read it again: {again}")
        if system is not None and system != d.system:
            why = f"{d.path}: it was read with another system message"
            raise SparqError(why, "leave out --system, or read it again with it", exit_code=2)
    return documents


def saved_beside(conversation: str) -> list[Document]:
    """What `/save FILE kv` has written beside a conversation, if it can be used."""
    from pyorch.engine import document_file

    path = beside(Path(conversation))
    try:
        return [document_file.load(path)] if path.is_file() else []
    except SparqError as error:
        note(f"note: {error.message}: the conversation is read again", "yellow")
        return []


def beside(conversation: Path) -> Path:
    """Where K and V of a saved conversation are."""
    return conversation.with_name(conversation.name + ".kv")


def open_in(chat: Chat, document: Document) -> None:
    """Begin a new conversation about a document."""
    from pyorch import engine

    reading = engine.reading_of(document)
    used = open_document(chat.session, document, chat.template, reading.messages("a"))
    chat.begin(reading.opening, chat.template.now)
    chat.messages = reading.messages("")[:-1]  # the system message, if there is one
    if used:
        note(f"{document.name}: {document.n_tokens} tokens, read before", "dim")


def go_on(chat: Chat, document: Document) -> None:
    """Open what `/save FILE kv` has kept of the conversation: all up to its last reply."""
    questions = [i for i, m in enumerate(chat.messages) if m["role"] == "user"]
    messages = chat.messages[: questions[-1] + 1] if questions else []
    try:
        open_document(chat.session, document, chat.template if questions else None, messages)
    except SparqError as error:
        note(f"note: {error.message}: the conversation is read again", "yellow")


def choose(chat: Chat, name: str) -> None:
    """`/document`: list those of the command line, or begin with one of them or another."""
    if not name:
        for d in chat.documents:
            note(f"{d.name}: {d.n_tokens} tokens, {d.path}")
        if not chat.documents:
            note("no --document was given; /document FILE opens one")
        return
    matches = [d for d in chat.documents if name in (d.name, d.path.name, d.path.stem)]
    open_in(chat, matches[0] if matches else load_all([name], None)[0])


def read(chat: Chat, path: Path) -> None:
    """`/read`: put a text before the next message, after those that are there already. What was
    read before is opened."""
    from pyorch import engine
    from pyorch.engine import document_file

    text = read_text(path)
    if not text.strip():
        raise SparqError(f"{path}: there is no text", "/read FILE")
    n_ctx = chat.session.n_ctx
    engine.check_text(chat.session, text, n_ctx, str(path))
    n, n_before = (
        len(engine.tokenize(chat.session, t, add_special=False)) for t in (text, chat.text)
    )
    if n_before + n + LEFT_FREE > n_ctx:
        longer = "start again with a larger --ctx; --rope-scale stretches a model's own"
        what = f"{path} has {n} tokens" + f" after {n_before} of earlier texts" * bool(chat.text)
        raise SparqError(f"{what}, but the context has {n_ctx} positions", longer)
    system = next((m["content"] for m in chat.messages if m["role"] == "system"), "")
    reading = engine.Reading(path.name, text, "chat", system)
    is_first, chat.text = not chat.text, chat.text + reading.opening
    comment = f"{path}: {n} tokens, before your next message"
    if not is_first:
        comment += " and after what was read for it"
    elif n >= WORTH_KEEPING and all(m["role"] == "system" for m in chat.messages):
        with suppress(SparqError):  # a cache that cannot be kept, or a damaged file: it is read
            kept = engine.kept_path(chat.session, reading, chat.template)
            chat.keep = kept, reading
            if kept.is_file() and open_document(
                chat.session, document_file.load(kept), chat.template, reading.messages("a")
            ):
                os.utime(kept)  # it was used
                chat.keep, comment = None, f"{comment}, read before"
    note(comment, "dim")


def limit() -> int:
    """The bytes of all that `/read` may keep.

    Raises:
        SparqError: SPARQ_DOCUMENTS_LIMIT is not a size; more than somebody wanted would be kept.
    """
    size = os.environ.get("SPARQ_DOCUMENTS_LIMIT", "") or str(LIMIT)
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", size, re.IGNORECASE)
    if match is None:
        what = f"SPARQ_DOCUMENTS_LIMIT {size!r} is not a size"
        raise SparqError(what, "512M or 2G; 0 keeps nothing", exit_code=2)
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def keep_first(
    chat: Chat, prompt: Sequence[int], progress: Progress, should_stop: Callable[[], bool]
) -> None:
    """Read and keep the text of `/read` before its question, if a model has layers that forget."""
    from pyorch import engine

    if chat.keep is None or not engine.must_be_kept_first(chat.session):
        return
    try:
        tokens = chat.keep[1].tokens(chat.session, chat.template)
    except SparqError:
        return  # `keep` tells of it
    if list(prompt[: len(tokens)]) == tokens:
        rest = engine.align(chat.session, tokens)
        engine.prefill(chat.session, rest, progress=progress, should_stop=should_stop, ends=False)
        if chat.session.tokens == tokens:
            keep(chat)


def keep(chat: Chat) -> None:
    """Keep what `/read` has read, now that it is in the cache."""
    from pyorch import engine

    if chat.keep is None or limit() == 0 or not chat.keeps:
        return
    (path, reading), chat.keep = chat.keep, None
    try:
        paths.private(path.parent)
        engine.keep_document(chat.session, path, reading, chat.template)
        engine.make_room(limit())
    except (SparqError, OSError) as error:
        note(f"note: {reading.name} is not kept: {error}", "yellow")
