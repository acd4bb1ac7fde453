"""Control tokens that a text spells, `<|im_end|>`, as text.

llama.cpp finds the names of control tokens anywhere in a rendered conversation. A template's own
must be found. Those in a message must not, or a web page could end the user's turn and begin a
system message.

The parts of a conversation are not tokenised apart, because words may be other tokens at the
borders: a text that spells no such name has the tokens it always had. Only where a message spells
one is the prompt cut, around the name alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pyorch.engine.model import Model
from pyorch.engine.text import tokenize

_UNKNOWN, _CONTROL = 1 << 0, 1 << 3  # enum llama_token_attr; llama.cpp finds these by their names
_SENTENCEPIECE = 1  # enum llama_vocab_type
_ANCHOR = "\x02"  # a character that no vocabulary joins with another


def names_spelled(of: Model, tokens: Iterable[int], texts: Sequence[str]) -> list[str]:
    """The names of control tokens that texts spell, the longest first.

    Args:
        tokens: those of a prompt with all the texts, in which their names were found.
    """
    lib, names = of.lib, set()
    for token in set(tokens):
        if lib.llama_vocab_get_attr(of.vocab, token) & (_UNKNOWN | _CONTROL):
            names.add((lib.llama_vocab_get_text(of.vocab, token) or b"").decode("utf-8", "replace"))
    spelled = (n for n in names if n and any(n in text for text in texts))
    return sorted(spelled, key=lambda n: (-len(n), n))


def hidden(texts: Sequence[str], names: Sequence[str]) -> tuple[list[str], str]:
    """The texts with a placeholder for each name, and the word that placeholders are made of."""
    mark = "zqname"
    while any(mark in text for text in texts):
        mark += "q"
    pattern = re.compile("|".join(map(re.escape, names)))
    return [pattern.sub(lambda m: f"{mark}{names.index(m[0])}{mark}", text) for text in texts], mark


def tokens_of_pieces(of: Model, text: str, names: Sequence[str], mark: str) -> list[int]:
    """The tokens of a rendered text with placeholders. Names outside of them are control tokens,
    and those that they stand for are text."""
    pieces = re.split(f"{mark}(\\d+){mark}", text)
    out = tokenize(of, pieces[0], add_special=False, parse_special=True)
    for i, piece in enumerate(pieces[1:]):
        is_name = i % 2 == 0
        out += _inner(of, names[int(piece)] if is_name else piece, parse_special=not is_name)
    return out


def _inner(of: Model, text: str, *, parse_special: bool) -> list[int]:
    """The tokens of a text that goes on within a line: SentencePiece puts a blank before others."""
    if of.lib.llama_vocab_type(of.vocab) != _SENTENCEPIECE:
        return tokenize(of, text, add_special=False, parse_special=parse_special)
    n = len(tokenize(of, _ANCHOR, add_special=False))
    return tokenize(of, _ANCHOR + text, add_special=False, parse_special=parse_special)[n:]
