"""Fixtures of what concerns the hub: a server on this machine, an empty cache, a small model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hub_server import Hub, serve
from huggingface_hub import constants
from tiny_gguf import write_tiny_gguf

import pyorch.cli
from pyorch.models import transfer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub without files, and an empty cache. All that huggingface-hub reads at import."""
    with serve(Hub()) as hub:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.01)
        monkeypatch.setattr("pyorch.cli.explain._bandwidth", lambda n_threads: 1e10)  # seconds
        yield hub
        huggingface_hub.close_session()


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
