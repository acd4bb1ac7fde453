"""Documents of `serve`: whether what llama-server makes of a conversation begins with them.

llama-server renders conversations itself, with the present time and with control tokens wherever a
text spells their names, so that is not taken for granted: it is asked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch.cli.terminal import note

if TYPE_CHECKING:
    from pyorch.engine import Document
    from pyorch.models.gguf_file import GGUFFile

ANSWER_S = 60  # to render and tokenise a long text
_TEMPLATES = {"--chat-template", "--chat-template-file", "--no-jinja"}
# llama-server gives a template today in these, unless a request does; `read` does so only with
# --chat-template-kwargs
_DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}
_DIRECTIVE = re.compile("%[-_0^#]?[A-Za-z]")  # of strftime
# they change K and V, and llama-server does not use a document that was read without them
_CHANGES = re.compile(
    "--(lora|control-vector|override-kv|model-draft|spec-draft-(model|hf)).*|-md|-hfd"
)
_TOOLS = "tokenizer.chat_template.tool_use"  # llama-server drops it where a template is given


def passed_on(
    file: GGUFFile, documents: Sequence[Document], more: Sequence[str], folder: Path
) -> tuple[list[str], dict[str, str]]:
    """The options and variables that tell llama-server of the documents, and let the model's chat
    template state the time at which they were read, as `read` let it: unless it states no time, or
    `more`, the options of the line, has another template. folder: for files that it reads when it
    begins."""
    from pyorch.engine import document_file

    if not documents:
        return [], {}
    listed = folder / "documents.list"
    listed.write_bytes(os.fsencode(document_file.listed(documents)))
    variables = {"SPARQ_DOCUMENTS": str(listed)}
    # the page makes no file of a text that is pasted: a prompt with a file does not begin with it
    options = ["--ui-config", json.dumps({"pasteLongTextToFileLen": 0})]
    own = str(file.metadata.get("tokenizer.chat_template") or "")
    name, when = next(((d.name, d.when) for d in documents if d.when), (documents[0].name, None))
    words = " ".join(more)
    source = "".join(
        f"{{%- if {date} == strftime_now({format!r}) -%}}"
        f"{{%- set {date} = sparq_undefined -%}}{{%- endif -%}}"
        for date, format in _DATES.items()
        if date in own and date not in words
    )
    if when and "strftime_now" in own:
        # a macro in place of the function that tells a template the time: it tells this one
        parts = sorted(set(_DIRECTIVE.findall(own)))
        filters = "".join(f" | replace({part!r}, {when.strftime(part)!r})" for part in parts)
        source += f"{{%- macro strftime_now(format) -%}}{{{{ format{filters} }}}}{{%- endmacro -%}}"
    if not source or names(more) & _TEMPLATES or _TOOLS in file.metadata:
        return options, variables
    template = folder / "template.jinja"
    template.write_text(source + own, "utf-8", newline="")
    time = f"{when:%Y-%m-%d %H:%M}" if when else "its default"
    note(f"note: the time that the chat template states is {time}, as in {name}", "yellow")
    return [*options, "--chat-template-file", str(template)], variables


def names(more: Sequence[str]) -> set[str]:
    """The options of llama-server in its line, which takes _ for - in long ones: it has no others,
    from variables or files."""
    words = (word.partition("=")[0] for word in more)
    return {word.replace("_", "-") if word.startswith("--") else word for word in words}


def n_usable(
    documents: Sequence[Document], host: str, port: int, key: str, more: Sequence[str] = ()
) -> int:
    """The tokens of those documents that a prompt which asks about them begins with. Of each other
    one it is told how many could be used. key: one that the server takes."""
    total = 0
    if not documents:
        return 0
    if changes := sorted(filter(_CHANGES.fullmatch, names(more))):
        why = f"{', '.join(changes)}: prompts whose K and V it changes are read anew"
        note(f"note: documents beside {why}", "yellow")
        return 0
    for document in documents:
        if document.form == "saved":  # a whole conversation, which is not rendered anew
            total += document.n_tokens
            continue
        try:
            why = _difference(document, host, port, key)
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
