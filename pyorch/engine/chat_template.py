"""A conversation as the tokens that a model was trained to see.

llama-cpp-python's formatter renders it from the template in the GGUF file, or from one of the
user's. A model without a template gets a plain transcript, which base models continue well enough.

llama.cpp finds the names of control tokens, `<|im_end|>`, anywhere in a rendered conversation. A
template's own must be found. Those in a message must not, or a web page could end the user's turn
and begin a system message. The parts of a conversation are not tokenised apart, because words may
be other tokens at the borders: only where a message spells a name is the prompt cut, around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch.engine.model import Model, Session
from pyorch.engine.text import inner, tokenize
from pyorch.errors import SparqError
from pyorch.text_file import read_text

if TYPE_CHECKING:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}

_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}
_PROBE = "zqprobeqz"
_AROUND = {  # role -> the roles of a short conversation in which a message of it can stand
    "user": ("user",),
    "system": ("system", "user"),
    "assistant": ("user", "assistant", "user"),
}

# enum llama_token_attr. Names of the first two are found where a prompt may have them. The third
# are words of a tokeniser, found in every text; in some models the marks of turns are such words.
_UNKNOWN, _CONTROL, _WORD = 1 << 0, 1 << 3, 1 << 4


def clock() -> datetime:
    """The time that a new conversation states."""
    return datetime.now()


class ChatTemplate:
    """The template of a model, or of a file.

    builtin  False if there is none
    source   its text
    now      the time that the template is told if it asks for it. It stays as it is, so that the
             beginning of a conversation stays the same tokens, also past midnight
    """

    def __init__(
        self,
        of: Model | Session,
        *,
        file: Path | None = None,
        variables: Mapping[str, object] | None = None,
        now: datetime | None = None,
    ) -> None:
        """Make it.

        Args:
            file: a template in jinja, in place of the model's own.
            variables: what the template may ask for beside the messages, say enable_thinking.
            now: the time that it states; None is the present.

        Raises:
            SparqError: the file cannot be read, or the template is broken.
        """
        self.model = model = of.model if isinstance(of, Session) else of
        self.now = now or clock()
        self._asked_time = False
        self._variables = dict(variables or {})
        self._where = file or model.path
        raw = model.lib.llama_model_chat_template(model.handle, None)
        own = None if raw is None else raw.decode("utf-8", errors="replace")
        source = read_text(file, "a chat template in jinja") if file else own
        self.source = source or ""
        # what a conversation depends on beside its messages and the model
        parts = [self.source, json.dumps(self._variables, sort_keys=True)]
        self.identity = "\0".join(parts) if file or variables else ""
        self.builtin = source is not None
        self.stop: list[str] = [] if self.builtin else ["\nUser:", "\nSystem:"]
        self._formatter = None if source is None else self._make(source)
        # what the template takes as the content of a role's messages: a "string", or a list of
        # "parts". If the text is in the prompt neither way, it is "lost"
        self._forms: dict[str, str] = {}
        for role in _AROUND if self._formatter else ():
            forms = (form for form in ("string", "parts") if self._shows(role, form))
            self._forms[role] = next(forms, "lost")

    def _make(self, template: str) -> Jinja2ChatFormatter:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        try:
            formatter = Jinja2ChatFormatter(
                template, eos_token=self._text("eos"), bos_token=self._text("bos")
            )
        except Exception as e:  # a template is code by the model's author and may raise anything
            raise SparqError(f"{self._where}: its chat template is broken: {e}") from None
        formatter.strftime_now = self._strftime_now
        return formatter

    def _text(self, which: str) -> str:
        lib, vocab = self.model.lib, self.model.vocab
        token = getattr(lib, f"llama_vocab_{which}")(vocab)
        text = lib.llama_vocab_get_text(vocab, token) if token >= 0 else b""
        return str((text or b"").decode("utf-8", errors="replace"))

    def _strftime_now(self, format: str) -> str:  # templates name it
        self._asked_time = True
        return self.now.strftime(format)

    @property
    def stated_time(self) -> str:
        """The time that what was rendered states, in ISO 8601; "" if it states none."""
        return self.now.isoformat(timespec="seconds") if self._asked_time else ""

    @property
    def takes_system(self) -> bool:
        """Whether the template has a place for a system message. If it has none, the text stands
        before that of the first message, as in llama.cpp."""
        return self._forms.get("system") != "lost"

    def render(self, messages: Sequence[Message]) -> str:
        """The text up to where the assistant's next reply begins.

        Raises:
            SparqError: the template refuses these messages, or leaves out what the user says.
        """
        if self._formatter is None:
            lines = [f"{_NAMES[m['role']]}: {m['content']}\n" for m in messages]
            return "".join(lines) + "Assistant:"
        if any(m["role"] == "system" for m in messages) and not self.takes_system:
            messages = _without_system(messages)
        try:
            text = self._formatted([_as(m, self._forms.get(m["role"], "string")) for m in messages])
        except Exception as e:
            raise SparqError(f"the model's chat template refuses this conversation: {e}") from None
        if self._forms.get("user") == "lost" and not all(
            m["content"].strip() in text for m in messages if m["role"] == "user"
        ):
            raise SparqError(
                f"{self._where}: its chat template leaves out what the user says",
                "--chat-template-file FILE takes another one",
            )
        return text

    def _formatted(self, messages: Sequence[Mapping[str, object]]) -> str:
        formatter: Any = self._formatter
        return str(formatter(messages=messages, **self._variables).prompt)

    def _shows(self, role: str, form: str) -> bool:
        forms, texts = {**self._forms, role: form}, {role: _PROBE}
        probe = ({"role": r, "content": texts.get(r, "x")} for r in _AROUND[role])
        try:
            return _PROBE in self._formatted(
                [_as(m, forms.get(m["role"], "string")) for m in probe]
            )
        except Exception:  # it may raise anything, and then does not take this form
            return False

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """`render` as tokens, with the begin token if the model wants one. Only the template can
        write control tokens: a message that spells their names holds text."""
        lib, vocab = self.model.lib, self.model.vocab
        out = self._tokens(messages)
        names = self._names_spelled(messages, out)
        if any(names):
            contents = [m["content"] for m in messages]
            texts, placeholders = _hidden(list(zip(contents, names, strict=True)))
            out = _tokens_of_pieces(self.model, self.render(_with(messages, texts)), placeholders)
        bos = lib.llama_vocab_bos(vocab)
        if lib.llama_vocab_get_add_bos(vocab) and bos >= 0 and out[:1] != [bos]:
            out.insert(0, bos)
        return out

    def _tokens(self, messages: Sequence[Message]) -> list[int]:
        text = self.render(messages)
        return tokenize(self.model, text, add_special=False, parse_special=self.builtin)

    def _names_spelled(self, messages: Sequence[Message], tokens: Sequence[int]) -> list[set[str]]:
        """The names that each message spells of control tokens, and of words that are marks of this
        template. A model may say such a word, so replies have none. tokens: of the conversation."""
        if not self.builtin:
            return []
        control, words = _names_of(self.model, tokens), _names_of(self.model, tokens, words=True)
        asked = [m["content"] for m in messages if m["role"] != "assistant"]
        if words := {w for w in words if any(w in text for text in asked)}:
            empty = self._tokens(_with(messages, ["x"] * len(messages)))
            words &= _names_of(self.model, empty, words=True)
        names = {"assistant": control}
        return [
            {n for n in names.get(m["role"], control | words) if n in m["content"]}
            for m in messages
        ]


def _as(message: Message, form: str) -> dict[str, object]:
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}] if form == "parts" else text}


def _with(messages: Sequence[Message], texts: Sequence[str]) -> list[Message]:
    return [{**m, "content": text} for m, text in zip(messages, texts, strict=True)]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """A system message before the text of the one after it, as llama.cpp puts it."""
    out, before = [], ""
    for m in messages:
        if m["role"] == "system":
            before += m["content"] + "\n"
        else:
            out.append({**m, "content": before + m["content"]})
            before = ""
    return out


def _names_of(of: Model, tokens: Iterable[int], *, words: bool = False) -> set[str]:
    """The names of the control tokens among these, or of the words that could be marks."""
    kinds, names = _WORD if words else _UNKNOWN | _CONTROL, set()
    for token in set(tokens):
        if of.lib.llama_vocab_get_attr(of.vocab, token) & kinds:
            names.add(
                (of.lib.llama_vocab_get_text(of.vocab, token) or b"").decode("utf-8", "replace")
            )
    return {n for n in names if n and not (words and n.isspace())}


def _hidden(messages: Sequence[tuple[str, set[str]]]) -> tuple[list[str], dict[str, str]]:
    """Texts, each with the names to hide in it, with a placeholder for each name that they spell.
    Returns the texts, and placeholders with the names that they stand for."""
    mark = "zqname"
    while any(mark in text for text, _ in messages):
        mark += "q"
    every = sorted(set().union(*(names for _, names in messages)))
    placeholders = {name: f"{mark}{i}{mark}" for i, name in enumerate(every)}
    texts = []
    for text, names in messages:
        longest = sorted(names, key=lambda n: (-len(n), n))
        pattern = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        texts.append(pattern.sub(lambda m: placeholders[m[0]], text))
    return texts, {p: name for name, p in placeholders.items()}


def _tokens_of_pieces(of: Model, text: str, placeholders: Mapping[str, str]) -> list[int]:
    """The tokens of a rendered text with placeholders. Names outside of them are control tokens,
    and those that they stand for are text."""
    first, *others = re.split(f"({'|'.join(placeholders)})", text)
    out = tokenize(of, first, add_special=False, parse_special=True)
    for piece in others:
        name = placeholders.get(piece)
        tokens = inner(of, name or piece, parse_special=name is None)
        if name and len(tokens) < 2:
            tokens = inner(of, name[:1]) + inner(of, name[1:])
        out += tokens
    return out
