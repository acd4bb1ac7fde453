"""The demo: a model completes what stands in a long story, and sparse attention really ran."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyorch import paths
from pyorch.cli import demo
from pyorch.cli.summary import Summary
from pyorch.models import cards, wheel

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.usefixtures("native_lib_dir")


Pair = tuple[Summary, Summary]  # dense and sparse
Pairs = list[Pair]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    """What the demo found, beside what it prints."""
    pairs: Pairs = []
    plain = demo.complete

    def noted(*args: Any) -> Pairs:
        pairs.extend(plain(*args))
        return pairs

    monkeypatch.setattr(demo, "complete", noted)
    return pairs


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The bundled model, which recites, in the place of the one that is downloaded; and the file of
    its story, which has a passage twice."""
    bundled = paths.data("models") / "demo"
    text = (bundled / "document.txt").read_text(encoding="utf-8")
    words = text[text.index("\n\n", len(text) // 20) :].split()[:60]
    cue, rest = " ".join(words[:24]), " ".join(words[24:])
    monkeypatch.setattr(demo, "MODEL", str(bundled / "demo.gguf"))
    monkeypatch.setattr(demo, "FACTS", ((0.2, cue, rest),))
    (story := tmp_path / "demo" / "story.txt").parent.mkdir()
    story.write_text(text, encoding="utf-8")
    real = paths.data
    monkeypatch.setattr(paths, "data", lambda name: tmp_path if name == "models" else real(name))
    return story


def test_both_completions_are_those_of_the_story(run: Run, toy: Path, found: Pairs) -> None:
    result = run("demo")
    assert result.code == 0, result.err
    assert n_read(result.out) >= 3000
    (pair,) = found
    check(pair)
    assert n_decoded(pair) == demo.N_TOKENS - 1  # the first follows from the prompt
    ((_, _, rest),) = demo.FACTS
    dense, sparse = completions(result.out)
    assert len(dense) > 40 < len(sparse) and rest.startswith(dense) and rest.startswith(sparse)
    n_calls = 5 * n_decoded(pair)
    for piece in ("llama.cpp", "sparq,ratio=1/8", "time per token", f"{n_calls} of {n_calls}"):
        assert piece in result.out


def n_read(out: str) -> int:
    """The tokens of the story, as the demo says them."""
    return int(re.findall(r"(\d+) tokens, read in", out)[0])


def completions(out: str) -> list[str]:
    """Those of each sentence, dense and sparse, as the demo shows them."""
    return re.findall(r"^    (?:llama.cpp|sparq),[^:]*: *(.*?) *$", out, re.MULTILINE)


def n_decoded(pair: Pair) -> int:
    return len(pair[1].timings.decode_s)


def check(pair: Pair) -> None:
    """Every decoded token was sparse in all layers and read an eighth; dense is llama.cpp's."""
    info = pair[1].info
    assert info and pair[0].info is None and info.sparse_share == 1
    assert info.counter("calls_sparse") == n_decoded(pair) * info.n_layer
    read, full = info.bytes_per_token
    assert 1 / 8 < read / full < 0.15  # and the last positions, which are scored from K


@pytest.mark.slow
def test_the_real_model(run: Run, found: Pairs) -> None:
    """It completes both sentences."""
    package = cards.load(demo.MODEL).package
    assert package
    if not wheel.path_of(package).is_file():
        pytest.skip(f"{package.file} is not here: sparq-cpp pull {demo.MODEL}")
    result = run("demo", "--yes")
    assert result.code == 0, result.err
    assert "two sentences added" in result.out and n_read(result.out) > 6000
    assert len(found) == 2
    for pair in found:
        check(pair)
    rests = [rest for _, _, rest in demo.FACTS for _ in ("dense", "sparse")]
    for text, rest in zip(completions(result.out), rests, strict=True):
        words = re.findall(r"\w+", rest)
        assert re.findall(r"\w+", text)[: len(words)] == words


def test_demo_fails_when_nothing_ran_sparse(run: Run, toy: Path) -> None:
    """A story below min_ctx: attention is exact, and the demo must not pass for that."""
    toy.write_text(toy.read_text(encoding="utf-8")[:2000], encoding="utf-8")
    result = run("demo")
    assert result.code == 1 and "time per token" not in result.out
    assert "counter of sparse calls is 0" in result.err
