"""Fixtures of what concerns models: the bytes of a small one, the command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from tiny_gguf import write_tiny_gguf

import pyorch.cli


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", n_layer=1).read_bytes()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`run("pull", "hf:org/repo")`: exit code, stdout, stderr."""

    def run_command(*args: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["sparq-cpp", *map(str, args)])
        with pytest.raises(SystemExit) as e:
            pyorch.cli.main()
        return (e.value.code or 0, *capsys.readouterr())

    return run_command
