"""The demo: models complete what stands in a long document, and sparse attention really ran."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyorch import paths
from pyorch.cli import demo
from pyorch.cli.demo import first_difference
from pyorch.errors import SparqError
from pyorch.models import cards, wheel

if TYPE_CHECKING:
    from conftest import Run


def test_toy(run: Run) -> None:
    result = run("demo", "--toy", "-n", 64, "--json")
    assert result.code == 0, result.err
    r = json.loads(result.out)
    assert r["document_tokens"] >= 3000
    (cue,) = r["cues"]
    check(cue)
    assert len(cue["runs"]["sparse"]["tokens"]) == 64
    expected = " ".join(cue["expected"].split())
    for which in cue["runs"].values():  # both recite: the words are those of the document
        assert " ".join(which["text"].split())[:60] == expected[:60]


def check(cue: dict[str, Any]) -> None:
    """Every decoded token was sparse in all layers and read an eighth; dense is llama.cpp's."""
    sparse, dense = cue["runs"]["sparse"], cue["runs"]["dense"]
    assert sparse["share_sparse"] == 1 and dense["attention"] is None
    n_decoded = len(sparse["tokens"]) - 1  # the first follows from the prompt
    n_layer = sparse["attention"]["n_layer"]
    assert sparse["attention"]["counters"]["calls_sparse"] == n_decoded * n_layer
    read, full = sparse["attention_bytes_per_token"], sparse["attention_bytes_per_token_dense"]
    assert read / full == pytest.approx(1 / 8, rel=0.1)


def test_the_real_model(run: Run) -> None:
    """It completes both sentences. Run where its file is, and in CI, which downloads it."""
    package = cards.load(demo.MODEL).package
    assert package
    if not wheel.file_of(package).path and not os.environ.get("CI"):
        pytest.skip(f"{package.file} is not here: sparq-cpp pull {demo.MODEL}")
    result = run("demo", "--yes", "--json")
    assert result.code == 0, result.err
    r = json.loads(result.out)
    assert r["model"] == demo.MODEL and r["document_tokens"] > 6000
    assert len(r["cues"]) == 2
    for cue in r["cues"]:
        check(cue)
        words = re.findall(r"\w+", cue["expected"])
        for which in cue["runs"].values():
            assert re.findall(r"\w+", which["text"])[: len(words)] == words


def test_without_the_model_the_toy_takes_its_place(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise SparqError("no index", "connect to one")

    monkeypatch.setattr(demo, "model_path", unreachable)
    result = run("demo", "-n", 8)
    assert result.code == 0, result.err
    assert "note: no index; a bundled toy model takes its place" in result.err
    for piece in ("llama.cpp", "sparq,ratio=1/8", "time per token", "35 of 35"):
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
    result = run("demo", "--toy", "-n", 4)
    assert result.code == 1 and "time per token" not in result.out
    assert "counter of sparse calls is 0" in result.err


def test_one_token_is_too_few(run: Run) -> None:
    """It follows from the prompt, so none would be decoded."""
    result = run("demo", "--toy", "-n", 1)
    assert result.code == 2 and "--tokens" in result.err


def test_passage() -> None:
    document = "\n\n".join(f"paragraph {i}\n of a few words" for i in range(100))
    cue = demo.passage(document)
    assert document.endswith("\n\n" + cue.text + cue.expected)
    assert len(cue.text.split()) == 24
    assert 0.05 <= 1 - len(cue.text + cue.expected) / len(document) < 0.1


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
