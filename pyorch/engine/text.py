"""Turns text into tokens and back, with the vocabulary of a model or of a session's model."""

from __future__ import annotations

import codecs
import ctypes
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pyorch.engine.decoding import LONGER
from pyorch.engine.model import Model, Session
from pyorch.errors import SparqError
from pyorch.text import human_bytes

_SENTENCEPIECE = 1  # enum llama_vocab_type
_ANCHOR = "\x02"  # a character that no vocabulary joins with another
_PIECE = 1 << 16  # characters that are tokenised in a fraction of a second
# libstdc++'s std::regex calls itself for each character of a match, and takes some 330 bytes of
# stack each time: many tokenisers of llama.cpp use it
_STACK_OF_CHAR = 512
_LONGEST = 1 << 21  # characters of a match: 1 GiB of stack
_MATCH = re.compile(r"[^\n]+\s*|\s+")  # no tokeniser matches more at once
_STACK_SIZE = threading.Lock()  # it is a setting of the process


def tokenize(
    of: Model | Session, text: str, *, add_special: bool = True, parse_special: bool = False
) -> list[int]:
    """The tokens of a text.

    Args:
        add_special: begin with the model's begin token, if it has one.
        parse_special: read the names of control tokens, `<|im_end|>`, as these tokens.

    Raises:
        SparqError: the text, or a line of it, is longer than llama.cpp can take.
    """
    raw = text.encode("utf-8", errors="replace")
    if len(text) < _PIECE // 16:
        return _tokenize(of, raw, add_special, parse_special)
    n = len(text)
    if n > _LONGEST and (n := max(len(m[0]) for m in _MATCH.finditer(text))) > _LONGEST:
        raise SparqError(f"a line of {n} characters is too long", f"break it: {_LONGEST} at most")
    with _STACK_SIZE, of.library.call() as call, ThreadPoolExecutor(1) as pool:
        before = threading.stack_size((1 << 20) + n * _STACK_OF_CHAR)
        try:
            tokens = pool.submit(_tokenize, of, raw, add_special, parse_special)
        except RuntimeError as e:
            what = f"no memory to tokenise a text of {n} characters: {e}"
            raise SparqError(what, "shorten the text, or raise ulimit -v") from None
        finally:
            threading.stack_size(before)
    call.raise_if_it_came()
    return tokens.result()


def _tokenize(of: Model | Session, raw: bytes, add_special: bool, parse_special: bool) -> list[int]:
    size = len(raw) + 8
    while True:
        buf = (ctypes.c_int32 * size)()
        n = of.lib.llama_tokenize(of.vocab, raw, len(raw), buf, size, add_special, parse_special)
        if n >= 0:
            return list(buf[:n])
        if n == -(2**31):
            raise SparqError(f"a text of {human_bytes(len(raw))} is too long to tokenise")
        size = -n


def check_text(of: Model | Session, text: str, n_ctx: int, name: str = "the text") -> None:
    """Refuse a text that is certainly longer than a context. It is not tokenised to its end.

    Raises:
        SparqError: it is.
    """
    if n := count_beyond(of, text, n_ctx):
        what = f"{name} has about {n} tokens, but the context has {n_ctx} positions"
        raise SparqError(what, LONGER)


def count_beyond(of: Model | Session, text: str, n_ctx: int) -> int:
    """About how many tokens a text has, if a context certainly cannot hold them; otherwise 0."""
    if len(text) <= 4 * n_ctx:
        return 0
    n = 0
    for i in range(0, len(text), _PIECE):
        n += len(tokenize(of, text[i : i + _PIECE], add_special=False, parse_special=True))
        if n > n_ctx + n_ctx // 8:  # the cuts may have added some
            about = n * len(text) // min(i + _PIECE, len(text))
            return round(about, 2 - len(str(about)))
    return 0


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
        begun = (n for s in self.stop for n in range(1, len(s)) if self.held.endswith(s[:n]))
        keep = max(begun, default=0)
        return self._take(len(self.held) - keep), False

    def rest(self) -> str:
        """The text that was held back, for when no more tokens come."""
        self.held += self.decoder.decode(b"", final=True)
        return self._take(len(self.held))

    def _take(self, n: int) -> str:
        out, self.held = self.held[:n], self.held[n:]
        return out
