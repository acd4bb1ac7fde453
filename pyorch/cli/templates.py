"""The options of chat templates, by llama.cpp's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyorch.cli.groups import option, takes
from pyorch.cli.terminal import note
from pyorch.cli.types import File
from pyorch.errors import SparqError

if TYPE_CHECKING:
    from pyorch.engine import Model, Session
    from pyorch.engine.chat_template import ChatTemplate


def _json_object(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> dict[str, object] | None:
    with suppress(ValueError):
        variables = json.loads("{}" if text is None else text)
        if isinstance(variables, dict):
            return variables if text else None
    hint = """--chat-template-kwargs '{"enable_thinking": false}'"""
    raise SparqError(f"--chat-template-kwargs {text!r} is not a JSON object", hint, exit_code=2)


@dataclass(frozen=True)
class TemplateOptions:
    """How a conversation is written."""

    chat_template_file: str | None = option(
        "--chat-template-file", type=File(), help="In jinja.  [default: the model's own]"
    )
    chat_template_kwargs: Mapping[str, object] | None = option(
        "--chat-template-kwargs",
        callback=_json_object,
        metavar="JSON",
        help="Variables of the chat template, as an object.",
    )
    reasoning: str | None = option(
        "-rea",
        "--reasoning",
        type=click.Choice(["on", "off", "auto"]),
        help="Let the model think before it replies, where its chat template has that switch."
        "  [default: auto, what the template does by itself]",
    )

    @property
    def variables(self) -> dict[str, object]:
        """What the template may ask for beside the messages."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning in ("on", "off"):
            variables["enable_thinking"] = self.reasoning == "on"
        return variables

    def template(self, of: Model | Session, now: datetime | None = None) -> ChatTemplate:
        """The template, with a note on variables that it does not know.

        Raises:
            SparqError: the file cannot be read, or the template is broken.
        """
        from pyorch.engine.chat_template import ChatTemplate

        file = Path(self.chat_template_file) if self.chat_template_file else None
        template = ChatTemplate(of, file=file, variables=self.variables, now=now)
        for name in self.variables:
            if name not in template.source:
                note(f"note: the chat template has no {name}: it changes nothing", "yellow")
        return template

    def check_unused(self, why: str) -> None:
        """Refuse the options where no template is used.

        Raises:
            SparqError: one was given; `why` says what is without a template.
        """
        if self != TemplateOptions():
            options = "leave out --chat-template-file, --chat-template-kwargs and --reasoning"
            raise SparqError(f"{why}, so no chat template is used", options, exit_code=2)


template_options = takes(templates=TemplateOptions)


def note_system(template: ChatTemplate, messages: Sequence[Mapping[str, str]]) -> None:
    """Say where a system message goes if the template has no place for it."""
    if any(m["role"] == "system" for m in messages) and not template.takes_system:
        where = "it stands before the first message, as in llama.cpp"
        note(f"note: this model's chat template takes no system message: {where}", "yellow")
