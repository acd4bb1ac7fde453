"""Books to take passages and haystacks from, and words for generated tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pyorch.errors import SparqError
from pyorch.progress import say
from pyorch.text import printable
from pyorch.text_file import read_text

SHOWN = 5  # names of what a folder holds and is left out
LARGEST = 8 << 20  # characters of all books, which are tokenised in some seconds
TOKEN = 16  # characters: the mean of no text has more


def read_texts(names: Sequence[Path], n_tokens: int = 0) -> list[str]:
    """Read books: each name is a file, or a folder of *.txt; a note names what else a folder holds.
    Project Gutenberg's frame is cut off.

    Of books that are longer than `LARGEST` together, each ends after its share; a note says where.

    Args:
        n_tokens: each keeps that many, if it has them.

    Raises:
        SparqError: there is nothing to read, or nothing in a file.
    """
    files = [file for name in names for file in (_in(name) if name.is_dir() else [name])]
    if not files:
        raise SparqError(f"no *.txt in {', '.join(map(str, names))}", "--text FILE or DIR")
    texts = [_body(read_text(f, "--text FILE or DIR")) for f in files]
    if empty := [f for f, text in zip(files, texts, strict=True) if not text]:
        raise SparqError(f"{empty[0]}: there is no text in it", "--text FILE or DIR")
    if sum(map(len, texts)) > LARGEST:
        n = max(LARGEST // len(texts), TOKEN * n_tokens)
        for f in (f for f, text in zip(files, texts, strict=True) if len(text) > n):
            say(f"{printable(str(f))}: only its first {n} characters are used")
        texts = [text[:n] for text in texts]
    return texts


def _in(folder: Path) -> list[Path]:
    files = sorted(folder.iterdir())
    if left := [printable(path.name) for path in files if path.suffix != ".txt"]:
        some = ", ".join(left[:SHOWN]) + ", ..." * (len(left) > SHOWN)
        say(f"{printable(folder)}: {len(left)} left out (not *.txt): {some}")
    return [path for path in files if path.suffix == ".txt"]


def _body(text: str) -> str:
    start = re.search(r"^\*\*\* ?START OF .*$", text, re.M)
    end = re.search(r"^\*\*\* ?END OF .*$", text, re.M)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip()


def haystack(
    books: Sequence[Sequence[int]], n: int, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """`n` tokens of a book from a random place on, and their stretch, as `Example.about` has it; a
    shorter book is repeated."""
    number = int(rng.integers(len(books)))
    book = books[number]
    at = int(rng.integers(max(len(book) - n, 0) + 1))
    return [book[(at + i) % len(book)] for i in range(n)], [number, at, at + n]


# RULER draws keys from a package's list of 3,000 adjectives and 6,800 nouns
_WORDS = (Path(__file__).parent / "words.txt").read_text("utf-8").split("\n\n")
ADJECTIVES, NOUNS = (some.split() for some in _WORDS)
