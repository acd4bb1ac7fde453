"""A model in several files is one model: all of it is counted, hashed, read and run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyorch import engine
from pyorch.evals import run as evals
from pyorch.models import content
from pyorch.models.gguf_file import read_gguf

pytestmark = pytest.mark.usefixtures("native_lib_dir")

Run = Callable[..., Any]
TEXT = "It was the best of times, it was the worst of times, " * 30
SPARSE = "sparq,rank=8,topk=64,min_ctx=0"


def last(model: Path) -> Path:
    return read_gguf(model).parts[-1]


def change_weights(model: Path) -> None:
    raw = bytearray(model.read_bytes())
    raw[-1] ^= 1
    model.write_bytes(raw)


def logits(model: Path) -> np.ndarray:
    with engine.load(model, n_ctx=2048, n_threads=1, attention=SPARSE) as s:
        engine.prefill(s, engine.tokenize(s, TEXT))
        engine.decode(s, 100)
        assert engine.info(s).counter("calls_sparse")
        return engine.logits(s)


def test_it_runs_as_the_whole_model_does(split: Path, tiny: Path) -> None:
    assert np.array_equal(logits(split), logits(tiny))


def test_hashes_are_of_all_parts(split: Path, tiny: Path) -> None:
    before = content.content_hash(split)
    assert before != content.content_hash(tiny)
    change_weights(last(split))
    assert evals.about_model(split)["hash"] == content.content_hash(split) != before
    assert evals.about_model(tiny)["hash"] == content.file_hash(tiny), "as in earlier records"


def test_the_hash_of_a_large_model_is_remembered(
    split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path))
    monkeypatch.setattr(content, "LARGE_BYTES", 1)
    first = content.content_hash(split)
    assert first == content.file_hash(*read_gguf(split).parts)
    with monkeypatch.context() as patch:
        patch.setattr(content, "file_hash", lambda *_: pytest.fail("read again"))
        assert content.content_hash(split) == first
    change_weights(last(split))
    assert content.content_hash(split) == content.file_hash(*read_gguf(split).parts) != first


@pytest.mark.parametrize(
    "command",
    [("explain", "-m"), ("generate", "-p", "x", "-m"), ("bench", "-m"), ("pull",)],
    ids=lambda command: command[0],
)
def test_a_part_that_is_missing_is_named(run: Run, split: Path, command: tuple[str]) -> None:
    last(split).unlink()
    code, out, err = run(*command, split)
    assert code == 1 and out == ""
    assert "split-00003-of-00003.gguf" in err and "hint: " in err
