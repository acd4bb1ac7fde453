"""The demo: the small model recites from a long document, with sparse attention that really ran."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyorch import paths
from pyorch.cli.demo import first_difference, passage

if TYPE_CHECKING:
    from conftest import Run


def test_demo(run: Run) -> None:
    result = run("demo", "-n", 64, "--json")
    assert result.code == 0, result.err
    r = json.loads(result.out)
    sparse, dense = r["runs"]["sparse"], r["runs"]["dense"]
    assert r["document_tokens"] >= 3000
    assert sparse["share_sparse"] == 1
    n_decoded = 63  # the first of the 64 follows from the last token of the prompt, which is exact
    n_layer = sparse["attention"]["n_layer"]
    assert sparse["attention"]["counters"]["calls_sparse"] == n_decoded * n_layer
    assert dense["attention"] is None  # llama.cpp's own
    read, full = sparse["attention_bytes_per_token"], sparse["attention_bytes_per_token_dense"]
    assert read / full == pytest.approx(1 / 8, rel=0.1)
    expected = " ".join(r["expected"].split())
    for which in (dense, sparse):  # both recite: the words are those of the document
        assert " ".join(which["text"].split())[:60] == expected[:60]


def test_demo_for_people(run: Run) -> None:
    result = run("demo", "-n", 8)
    assert result.code == 0, result.err
    for piece in ("dense (llama.cpp)", "sparse (sparq,ratio=1/8)", "tokens/s", "calls sparse"):
        assert piece in result.out


def test_demo_fails_when_nothing_ran_sparse(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document below min_ctx: attention is exact, and the demo must not pass for that."""
    shutil.copytree(paths.data("models") / "demo", tmp_path / "demo")
    document = tmp_path / "demo" / "document.txt"
    document.write_text(document.read_text(encoding="utf-8")[:2000], encoding="utf-8")
    real = paths.data
    monkeypatch.setattr(paths, "data", lambda name: tmp_path if name == "models" else real(name))
    result = run("demo", "-n", 4)
    assert result.code == 1
    assert "counter of sparse calls is 0" in result.err


def test_passage() -> None:
    document = "\n\n".join(f"paragraph {i}\n of a few words" for i in range(100))
    cue, rest = passage(document)
    assert document.endswith("\n\n" + cue + rest)
    assert len(cue.split()) == 24
    assert 0.05 <= 1 - len(cue + rest) / len(document) < 0.1


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
