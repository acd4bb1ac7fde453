"""The state of a chat: its messages, what it has read, and with which settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.attention.spec import AttentionSpec
from pyorch.cli.summary import Summary

if TYPE_CHECKING:
    from pyorch.engine import Document, Reading, Sampling, Session
    from pyorch.engine.chat_template import ChatTemplate

LEFT_FREE = 64  # positions kept free for a reply when old messages are dropped


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
    summary: Summary | None = None  # the summary of the last reply
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

    def oldest(self) -> int | None:
        """The index of the question to drop first, those with a text of /read last; None if there
        is only the one to answer."""
        first = 1 if self.messages[0]["role"] == "system" else 0
        questions = range(first, len(self.messages) - 1, 2)
        return min(questions, key=lambda i: (self.has_text(i), i), default=None)

    def most_tokens(self, n_prompt: int) -> int:
        """The most tokens of a reply. If a reply filled the context, the next message would push
        out the text that was read, so it gets half of the room."""
        if self.max_tokens is not None:
            return self.max_tokens
        room = self.session.n_ctx - n_prompt
        has_text = any(map(self.has_text, range(len(self.messages))))
        return max(room // 2, LEFT_FREE) if has_text else self.session.n_ctx
