"""Turns text into tokens and back, with the vocabulary of a model or of a session's model."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Sequence

from pyorch.engine.model import Model, Session
from pyorch.errors import SparqError
from pyorch.text import human_bytes

_SENTENCEPIECE = 1  # enum llama_vocab_type
_ANCHOR = "\x02"  # a character that no vocabulary joins with another


def tokenize(
    of: Model | Session, text: str, *, add_special: bool = True, parse_special: bool = False
) -> list[int]:
    """The tokens of a text.

    Args:
        add_special: begin with the model's begin token, if it has one.
        parse_special: read the names of control tokens, `<|im_end|>`, as these tokens.

    Raises:
        SparqError: the text is longer than llama.cpp can count.
    """
    raw = text.encode("utf-8", errors="replace")
    size = len(raw) + 8
    while True:
        buf = (ctypes.c_int32 * size)()
        n = of.lib.llama_tokenize(of.vocab, raw, len(raw), buf, size, add_special, parse_special)
        if n >= 0:
            return list(buf[:n])
        if n == -(2**31):
            raise SparqError(f"a text of {human_bytes(len(raw))} is too long to tokenise")
        size = -n


def inner(of: Model | Session, text: str, *, parse_special: bool = False) -> list[int]:
    """The tokens of a text that goes on within a line: SentencePiece puts a blank before others."""
    if of.lib.llama_vocab_type(of.vocab) != _SENTENCEPIECE:
        return tokenize(of, text, add_special=False, parse_special=parse_special)
    n = len(tokenize(of, _ANCHOR, add_special=False))
    return tokenize(of, _ANCHOR + text, add_special=False, parse_special=parse_special)[n:]


def token_bytes(of: Model | Session, token: int, *, special: bool = False) -> bytes:
    """The bytes of a token, which may be part of a character. A control token has none, unless
    `special` asks for its name."""
    size = 64
    while True:
        buf = ctypes.create_string_buffer(size)
        n = of.lib.llama_token_to_piece(of.vocab, token, buf, size, 0, special)
        if n >= 0:
            return buf.raw[:n]
        size = -n


def detokenize(of: Model | Session, tokens: Sequence[int], *, special: bool = False) -> str:
    """The text of tokens. Invalid UTF-8 becomes U+FFFD; `special` shows control tokens."""
    raw = b"".join(token_bytes(of, t, special=special) for t in tokens)
    return raw.decode("utf-8", errors="replace")


def is_eog(of: Model | Session, token: int) -> bool:
    """Whether the model ends its text with this token."""
    return bool(of.lib.llama_vocab_is_eog(of.vocab, token))


class TextStream:
    """Takes tokens and gives text as soon as it is certain: whole characters, and nothing that may
    be the beginning of a stop string."""

    def __init__(self, of: Model | Session, stop: Sequence[str]) -> None:
        self.of, self.stop = of, [s for s in stop if s]
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Returns the text that is now certain, and whether a stop string, now cut off, was met."""
        self.held += self.decoder.decode(token_bytes(self.of, token))
        cuts = [i for i in (self.held.find(s) for s in self.stop) if i >= 0]
        if cuts:
            return self._take(min(cuts)), True
        keep = max((_overlap(self.held, s) for s in self.stop), default=0)
        return self._take(len(self.held) - keep), False

    def rest(self) -> str:
        """The text that was held back, for when no more tokens come."""
        self.held += self.decoder.decode(b"", final=True)
        return self._take(len(self.held))

    def _take(self, n: int) -> str:
        out, self.held = self.held[:n], self.held[n:]
        return out


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
