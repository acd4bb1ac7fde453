"""A conversation as the tokens that a model was trained to see.

llama-cpp-python's formatter renders it from the template in the GGUF file. A model without a
template gets a plain transcript, which base models continue well enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyorch.engine.model import Model, Session
from pyorch.engine.text import tokenize
from pyorch.errors import SparqError

if TYPE_CHECKING:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}

_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}


class ChatTemplate:
    """The template of a model. `builtin` is False if the model has none."""

    def __init__(self, of: Model | Session) -> None:
        self.model = model = of.model if isinstance(of, Session) else of
        raw = model.lib.llama_model_chat_template(model.handle, None)
        self.builtin = raw is not None
        self.stop: list[str] = [] if self.builtin else ["\nUser:", "\nSystem:"]
        self._formatter = self._make(raw.decode("utf-8", errors="replace")) if raw else None

    def _make(self, template: str) -> Jinja2ChatFormatter:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        try:
            return Jinja2ChatFormatter(
                template, eos_token=self._text("eos"), bos_token=self._text("bos")
            )
        except Exception as e:  # a template is code by the model's author and may raise anything
            raise SparqError(f"{self.model.path}: its chat template is broken: {e}") from None

    def _text(self, which: str) -> str:
        lib, vocab = self.model.lib, self.model.vocab
        token = getattr(lib, f"llama_vocab_{which}")(vocab)
        text = lib.llama_vocab_get_text(vocab, token) if token >= 0 else b""
        return str((text or b"").decode("utf-8", errors="replace"))

    def render(self, messages: Sequence[Message]) -> str:
        """The text up to where the assistant's next reply begins.

        Raises:
            SparqError: the template refuses these messages (some take no system message).
        """
        if self._formatter is None:
            lines = [f"{_NAMES[m['role']]}: {m['content']}\n" for m in messages]
            return "".join(lines) + "Assistant:"
        try:
            return str(self._formatter(messages=list(messages)).prompt)
        except Exception as e:
            raise SparqError(f"the model's chat template refuses this conversation: {e}") from None

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """`render` as tokens, with the begin token if the model wants one."""
        lib, vocab = self.model.lib, self.model.vocab
        out = tokenize(
            self.model, self.render(messages), add_special=False, parse_special=self.builtin
        )
        bos = lib.llama_vocab_bos(vocab)
        if lib.llama_vocab_get_add_bos(vocab) and bos >= 0 and out[:1] != [bos]:
            out.insert(0, bos)
        return out
