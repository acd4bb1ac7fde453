"""Documents of `serve`: whether what llama-server makes of a conversation begins with them.

llama-server renders conversations itself, with the present time and with control tokens wherever a
text spells their names, so that is not taken for granted: it is asked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pyorch.cli.terminal import note

if TYPE_CHECKING:
    from pyorch.engine import Document
    from pyorch.models.gguf_file import GGUFFile

ANSWER_S = 60  # to render and tokenise a long text
_THEIRS = ("--chat-template", "--chat-template-file", "--no-jinja")
_TOOLS = "tokenizer.chat_template.tool_use"  # llama-server drops it where a template is given


@contextmanager
def passed_on(
    file: GGUFFile, documents: Sequence[Document], more: Sequence[str]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yields the options and variables that tell llama-server of the documents. more: the options
    of the line."""
    from pyorch.engine import document_file

    if not documents:
        yield [], {}
        return
    with TemporaryDirectory(prefix="sparq-serve-") as folder:
        names = Path(folder, "documents.list")
        names.write_bytes(os.fsencode(document_file.listed(documents)))
        yield _their_time(file, documents, more, Path(folder)), {"SPARQ_DOCUMENTS": str(names)}


def _their_time(
    file: GGUFFile, documents: Sequence[Document], more: Sequence[str], folder: Path
) -> list[str]:
    """Options that let the model's chat template state the time at which the documents were read:
    none if it states no time, or if `more` has another template."""
    from pyorch.engine.chat_template import with_time

    own = str(file.metadata.get("tokenizer.chat_template") or "")
    options = {word.partition("=")[0].replace("_", "-") for word in more}
    name, when = next(((d.name, d.when) for d in documents if d.when), ("", None))
    source = with_time(own, when) if when else own
    if when is None or source == own or options & set(_THEIRS) or _TOOLS in file.metadata:
        return []
    template = folder / "template.jinja"
    template.write_text(source, "utf-8", newline="")
    time = f"{when:%Y-%m-%d %H:%M}, when {name} was read"
    note(f"note: the chat template states the time: for all requests it is {time}", "yellow")
    return ["--chat-template-file", str(template)]


def n_usable(documents: Sequence[Document], host: str, port: int, keys: Path | None) -> int:
    """The tokens of those documents that a prompt which asks about them begins with. Of each other
    one it is told how many could be used."""
    total = 0
    for document in documents:
        if document.form == "saved":  # a whole conversation, which is not rendered anew
            total += document.n_tokens
            continue
        try:
            why = _difference(document, host, port, _key(keys))
        except (OSError, HTTPException, ValueError, KeyError) as error:
            note(f"note: {document.name}: not compared with what is rendered: {error}", "yellow")
            why = ""
        if why:
            everything = "all of it, for its windows or recurrent layers"
            rest = everything if document.needs_whole else "the rest"
            note(f"note: {document.name}: only {why}; each prompt reads {rest}", "yellow")
            again = "use the chat template that it was read with, or read it again"
            note(f"hint: {again}; docs/serving.md has the reasons", "yellow")
        else:
            total += document.n_tokens
    return total


def _difference(document: Document, host: str, port: int, key: str) -> str:
    """Where a prompt leaves the document, as `engine.difference` says it."""
    from pyorch import engine

    def ask(path: str, **body: object) -> Any:
        connection = HTTPConnection(host, port, timeout=ANSWER_S)
        head = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        with closing(connection):
            connection.request("POST", path, json.dumps(body), head)
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"{path} answers {answer.status}")
            return json.loads(answer.read())

    reading = engine.reading_of(document)
    text = reading.text
    if reading.form == "chat":
        text = ask("/apply-template", messages=reading.messages("a"))["prompt"]
    now = ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
    read, _ = engine.content(document)
    words = lambda t: str(ask("/detokenize", tokens=t)["content"])  # noqa: E731
    return engine.difference(read, now, words)


def _key(keys: Path | None) -> str:
    """A key that the server takes."""
    lines = keys.read_text(encoding="utf-8").splitlines() if keys else []
    return next((line for line in lines if line and not line.startswith("#")), "")
