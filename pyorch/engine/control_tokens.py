"""Control tokens that a message spells, `<|im_end|>`, as text.

llama.cpp finds the names of control tokens anywhere in a rendered conversation. A template's own
must be found. Those in a message must not, or a web page could end the user's turn and begin a
system message.

The parts of a conversation are not tokenised apart, because words may be other tokens at the
borders: a text that spells no such name has the tokens it always had. Only where a message spells
one is the prompt cut, around the name alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from pyorch.engine.model import Model
from pyorch.engine.text import tokenize

# enum llama_token_attr. Names of the first two are found where a prompt may have them. The third
# are words of a tokeniser, found in every text; in some models the marks of turns are such words.
_UNKNOWN, _CONTROL, _WORD = 1 << 0, 1 << 3, 1 << 4
_SENTENCEPIECE = 1  # enum llama_vocab_type
_ANCHOR = "\x02"  # a character that no vocabulary joins with another


def names_of(of: Model, tokens: Iterable[int], *, words: bool = False) -> set[str]:
    """The names of the control tokens among these, or of the words that could be marks."""
    kinds, names = _WORD if words else _UNKNOWN | _CONTROL, set()
    for token in set(tokens):
        if of.lib.llama_vocab_get_attr(of.vocab, token) & kinds:
            names.add(
                (of.lib.llama_vocab_get_text(of.vocab, token) or b"").decode("utf-8", "replace")
            )
    return {n for n in names if n and not (words and n.isspace())}


def hidden(messages: Sequence[tuple[str, set[str]]]) -> tuple[list[str], dict[str, str]]:
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


def tokens_of_pieces(of: Model, text: str, placeholders: Mapping[str, str]) -> list[int]:
    """The tokens of a rendered text with placeholders. Names outside of them are control tokens,
    and those that they stand for are text."""
    first, *others = re.split(f"({'|'.join(placeholders)})", text)
    out = tokenize(of, first, add_special=False, parse_special=True)
    for piece in others:
        name = placeholders.get(piece)
        out += inner(of, piece, parse_special=True) if name is None else _spelled(of, name)
    return out


def _spelled(of: Model, name: str) -> list[int]:
    tokens = inner(of, name)
    return tokens if len(tokens) > 1 else inner(of, name[:1]) + inner(of, name[1:])


def inner(of: Model, text: str, *, parse_special: bool = False) -> list[int]:
    """The tokens of a text that goes on within a line: SentencePiece puts a blank before others."""
    if of.lib.llama_vocab_type(of.vocab) != _SENTENCEPIECE:
        return tokenize(of, text, add_special=False, parse_special=parse_special)
    n = len(tokenize(of, _ANCHOR, add_special=False))
    return tokenize(of, _ANCHOR + text, add_special=False, parse_special=parse_special)[n:]
