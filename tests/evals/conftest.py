"""Fixtures of the evaluations: a book, the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from parrot import WORDS

from pyorch.cli.eval import command


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = np.random.default_rng(3).choice(WORDS, 3000)
    words[9::10] = [w + "." for w in words[9::10]]
    path = tmp_path_factory.mktemp("book") / "book.txt"
    body = " ".join(words)
    path.write_text(f"Licence\n*** START OF THIS EBOOK ***\n{body}\n*** END OF IT ***\nMore\n")
    return path


@pytest.fixture
def run_eval(tiny: Path, book: Path, tmp_path: Path):
    """`run_eval("needle", "-n", 3)`: the command on the tiny model."""

    def run(*args: object, model: Path = tiny) -> Result:
        line = ["-m", model, "--text", book, "-t", 1, "--out", tmp_path / "out", *args]
        return CliRunner().invoke(command, [str(a) for a in line])

    return run
