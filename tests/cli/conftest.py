"""Fixtures of the command-line tests: the command run in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import pyorch.cli
from pyorch import paths


@dataclass
class Result:
    """Exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`run("generate", "-p", "x", stdin="...")`: the command as a user would run it, with
    folders of documents of its own."""

    monkeypatch.setattr(paths, "documents", lambda: tmp_path / "documents")
    monkeypatch.setattr(paths, "kept_texts", lambda: tmp_path / "texts")
    for command in (
        "GENERATE",
        "CHAT",
        "DEMO",
        "READ",
    ):  # on a busy machine, threads wait for each other
        monkeypatch.setenv(f"SPARQ_{command}_THREADS", "1")

    def run_command(*args: object, stdin: str | bytes = "") -> Result:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["sparq-cpp", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        capsys.readouterr()
        code: object = 0
        try:
            pyorch.cli.main()
        except SystemExit as e:
            code = e.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "\x1b" not in err  # colour is for terminals
        assert isinstance(code, int)
        return Result(code, out, err)

    return run_command
