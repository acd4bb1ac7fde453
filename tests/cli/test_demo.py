"""The demo: models complete what stands in a long document, and sparse attention really ran."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyorch import paths
from pyorch.cli import demo
from pyorch.errors import SparqError
from pyorch.models import cards, wheel

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.usefixtures("native_lib_dir")


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[demo.Report]:
    """What the demo found, beside what it prints."""
    found: list[demo.Report] = []
    plain = demo._run

    def noted(*args: Any) -> demo.Report:
        found.append(plain(*args))
        return found[-1]

    monkeypatch.setattr(demo, "_run", noted)
    return found


def test_toy(run: Run, reports: list[demo.Report]) -> None:
    result = run("demo", "--toy", "-n", 64)
    assert result.code == 0, result.err
    (report,) = reports
    assert n_read(result.out) >= 3000
    (pair,) = report.pairs
    check(pair)
    assert n_decoded(pair) == 63  # the first of the 64 follows from the prompt
    expected = " ".join(pair.cue.expected.split())
    for which in (pair.dense, pair.sparse):  # both recite: the words are those of the document
        assert " ".join(which.text.split())[:60] == expected[:60]


def n_read(out: str) -> int:
    """The tokens of the document, as the demo says them."""
    return int(re.findall(r"(\d+) tokens, read in", out)[0])


def n_decoded(pair: demo.Pair) -> int:
    return len(pair.sparse.summary.timings.decode_s)


def check(pair: demo.Pair) -> None:
    """Every decoded token was sparse in all layers and read an eighth; dense is llama.cpp's."""
    info = pair.sparse.summary.info
    assert info and pair.dense.summary.info is None and info.sparse_share == 1
    assert info.counter("calls_sparse") == n_decoded(pair) * info.n_layer
    read, full = info.bytes_per_token
    assert read / full == pytest.approx(1 / 8, rel=0.1)


@pytest.mark.slow
def test_the_real_model(run: Run, reports: list[demo.Report]) -> None:
    """It completes both sentences. Run where its file is, and in CI, which downloads it."""
    package = cards.load(demo.MODEL).package
    assert package
    if not wheel.file_of(package).path and not os.environ.get("CI"):
        pytest.skip(f"{package.file} is not here: sparq-cpp pull {demo.MODEL}")
    result = run("demo", "--yes")
    assert result.code == 0, result.err
    (report,) = reports
    assert "two sentences of ours" in result.out and n_read(result.out) > 6000
    assert len(report.pairs) == 2
    for pair in report.pairs:
        check(pair)
        words = re.findall(r"\w+", pair.cue.expected)
        for which in (pair.dense, pair.sparse):
            assert re.findall(r"\w+", which.text)[: len(words)] == words


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
