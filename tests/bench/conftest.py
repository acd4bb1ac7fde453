"""Fixtures of the bench tests: a synthetic model of a few hundred kilobytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pyorch import native
from pyorch.bench import growth, speed
from pyorch.bench.plan import SpeedPlan
from pyorch.bench.worker import Worker
from pyorch.cli import cli
from pyorch.errors import SparqError
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
    tokenizer="bytes",
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
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[SpeedPlan, str]]:
    """What `bench` with these options would measure, and what it says before."""
    plans: list[SpeedPlan] = []

    def run(plan: SpeedPlan, *_: Any, **__: Any) -> Any:
        plans.append(plan)
        raise SparqError("enough")

    monkeypatch.setattr(speed, "run", run)
    monkeypatch.setattr(growth, "run", run)

    def of(*args: str) -> tuple[SpeedPlan, str]:
        done = CliRunner().invoke(cli, ["bench", "--yes", *args])
        assert plans, done.exception
        return plans[-1], done.output

    return of


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
