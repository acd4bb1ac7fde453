"""Fixtures of the bench tests: a synthetic model of a few hundred kilobytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyorch import native
from pyorch.bench.worker import Worker
from pyorch.models import synth

SHAPE = synth.Shape(
    n_layer=2,
    n_embd=64,
    n_head=4,
    n_head_kv=2,
    head_dim=32,
    n_ff=32,
    n_vocab=288,
    n_ctx=4096,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synth") / "small.gguf"
    synth.write(path, SHAPE)
    return path


@pytest.fixture(scope="session")
def stock(native_lib_dir: Path) -> None:
    """The unpatched library, built if need be."""
    native.built(stock=True)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How workers were asked to load a model, from now on."""
    found, ask = [], Worker._ask

    def noted(self: Worker, call: str, args: dict[str, Any]) -> Any:
        if call == "open":
            found.append(args)
        return ask(self, call, args)

    monkeypatch.setattr(Worker, "_ask", noted)
    return found
