"""The state of a chat: what was said and read, and with which settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.attention.spec import AttentionSpec
from pyorch.cli.summary import Summary
from pyorch.errors import SparqError

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
        self.sparse = self.spec if self.spec.sparse else AttentionSpec("sparq")

    def begin(self, text: str = "", now: datetime | None = None) -> None:
        """Begin a new conversation, with a text before its first message. now: the time that it
        states; None is the present."""
        from pyorch.engine.chat_template import clock

        self.template.now = now or clock()
        self.messages = [m for m in self.messages if m["role"] == "system"]
        self.read.clear()
        self.text, self.keep = text, None

    def check_room(self, name: str, n_tokens: int) -> None:
        """Refuse a text that leaves no room for a reply."""
        if n_tokens + LEFT_FREE > (n_ctx := self.session.n_ctx):
            longer = "start again with a larger --ctx; --rope-scale stretches a model's own"
            raise SparqError(
                f"{name} has {n_tokens} tokens, but the context has {n_ctx} positions", longer
            )
