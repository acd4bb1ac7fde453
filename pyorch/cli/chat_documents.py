"""What a chat reads: files, documents, and what it keeps of them so that they are read once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch import paths
from pyorch.cli.conversation import Chat
from pyorch.cli.loading import open_document
from pyorch.cli.terminal import note
from pyorch.cli.types import Size
from pyorch.errors import SparqError
from pyorch.progress import Progress
from pyorch.text_file import read_text

if TYPE_CHECKING:
    from pyorch.engine import Document, Session
    from pyorch.engine.chat_template import ChatTemplate

WORTH_KEEPING = 1024  # tokens; less is read in a moment
LIMIT = 8 << 30  # bytes of all that /read keeps, unless a variable has another; 0 keeps nothing


def load_all(names: Sequence[str], system: str | None) -> list[Document]:
    """The documents that `--document` names, each fit for a chat.

    Raises:
        SparqError: one is none, or was read for something else.
    """
    from pyorch.engine import document_file

    found = [document_file.load(document_file.find(name)) for name in names]
    for d in found:
        if d.form != "chat":
            again = "sparq-cpp read, without --plain"
            raise SparqError(f"{d.path}: it was not read for a chat", f"read it again: {again}")
        if system is not None and system != d.system:
            said = f"{d.path}: it was read with another system message"
            raise SparqError(said, "leave out --system, or read it again with it", exit_code=2)
    return found


def saved_beside(conversation: str) -> list[Document]:
    """What `/save FILE kv` has written beside a conversation, if it can be used."""
    from pyorch.engine import document_file

    path = _beside(Path(conversation))
    if not path.is_file():
        return []
    try:
        return [document_file.load(path)]
    except SparqError as error:
        note(f"note: {error.message}: the conversation is read again", "yellow")
        return []


def save_beside(session: Session, template: ChatTemplate, conversation: Path) -> None:
    """Write K and V of a conversation beside it."""
    from pyorch import engine

    reading, path = engine.Reading(conversation.name, "", "saved"), _beside(conversation)
    engine.keep_document(session, path, reading, template, session.tokens, force=True)


def _beside(conversation: Path) -> Path:
    return conversation.with_name(conversation.name + ".kv")


def open_in(chat: Chat, document: Document) -> None:
    """Begin a new conversation about a document."""
    from pyorch import engine

    reading = engine.reading_of(document)
    is_read = open_document(chat.session, document, chat.template, reading.messages("a"))
    chat.begin(reading.opening, chat.template.now)
    chat.messages = reading.messages("")[:-1]  # the system message, if there is one
    if is_read:
        note(f"{document.name}: {document.n_tokens} tokens, read before", "dim")
    else:
        note("hint: use the chat template that it was read with, or read it again", "yellow")


def go_on(chat: Chat, document: Document) -> None:
    """Open what `/save FILE kv` has kept of the conversation: all up to its last reply."""
    asked = [i for i, m in enumerate(chat.messages) if m["role"] == "user"]
    said = chat.messages[: asked[-1] + 1] if asked else []
    try:
        open_document(chat.session, document, chat.template if asked else None, said)
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
    given = [d for d in chat.documents if name in (d.name, d.path.name, d.path.stem)]
    open_in(chat, given[0] if given else load_all([name], None)[0])


def read(chat: Chat, path: Path) -> None:
    """`/read`: put a text before the next message, after those that are there already. What was
    read before is opened."""
    from pyorch import engine
    from pyorch.engine import document_file

    try:
        text = read_text(path)
    except OSError as e:
        raise SparqError(f"{path}: {e.strerror or e}", "/read FILE") from None
    n, n_before = (
        len(engine.tokenize(chat.session, t, add_special=False)) for t in (text, chat.text)
    )
    chat.check_room(f"{path} with what comes before it" if chat.text else str(path), n_before + n)
    system = next((m["content"] for m in chat.messages if m["role"] == "system"), "")
    reading = engine.Reading(path.name, text, "chat", system)
    is_first, chat.text = not chat.text, chat.text + reading.opening
    said = f"{path}: {n} tokens, before your next message"
    if not is_first:
        said += " and after what was read for it"
    elif n >= WORTH_KEEPING and all(m["role"] == "system" for m in chat.messages):
        with suppress(SparqError):  # a cache that cannot be kept, or a damaged file: it is read
            kept = engine.kept_path(chat.session, reading, chat.template)
            chat.keep = kept, reading
            if kept.is_file() and open_document(
                chat.session, document_file.load(kept), chat.template, reading.messages("a")
            ):
                os.utime(kept)  # it was used
                chat.keep, said = None, f"{said}, read before"
    note(said, "dim")


def limit() -> int:
    """The bytes of all that `/read` may keep.

    Raises:
        SparqError: SPARQ_DOCUMENTS_LIMIT is not a size; more than somebody wanted would be kept.
    """
    given = os.environ.get("SPARQ_DOCUMENTS_LIMIT", "") or str(LIMIT)
    try:
        return 0 if given == "0" else Size().convert(given, None, None)
    except SparqError:
        said = f"SPARQ_DOCUMENTS_LIMIT {given!r} is not a size"
        raise SparqError(said, "512M or 2G; 0 keeps nothing", exit_code=2) from None


def keep_first(
    chat: Chat, prompt: Sequence[int], progress: Progress, should_stop: Callable[[], bool]
) -> None:
    """Read and keep the text of `/read` before its question, if a model has layers that forget."""
    from pyorch import engine

    if chat.keep is None or not engine.must_be_kept_first(chat.session):
        return
    tokens = chat.keep[1].tokens(chat.session, chat.template)
    if list(prompt[: len(tokens)]) == tokens:
        rest = engine.align(chat.session, tokens)
        engine.prefill(chat.session, rest, progress=progress, should_stop=should_stop, ends=False)
        if chat.session.tokens == tokens:
            keep(chat)


def keep(chat: Chat) -> None:
    """Keep what `/read` has read, now that it is in the cache."""
    from pyorch import engine

    if chat.keep is None:
        return
    (path, reading), chat.keep = chat.keep, None
    if limit() == 0 or not chat.keeps:
        return
    try:
        paths.private(path.parent)
        engine.keep_document(chat.session, path, reading, chat.template, force=True)
        engine.make_room(limit())
    except (SparqError, OSError) as error:
        note(f"note: {reading.name} is not kept: {error}", "yellow")
