"""The passages bench: the task itself, its statistics, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pyorch import engine
from pyorch.attention.bytes import split
from pyorch.attention.spec import parse_spec
from pyorch.bench import passages, records
from pyorch.cli.bench import command
from pyorch.errors import SparqError

WORDS = ("the", "of", "and", "a", "to", "in", "he", "was", "that", "his", "it", "had", "with")
SPECS = ("off", "dense", "sparq,ratio=1/4,min_ctx=0,min_k=1")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = np.random.default_rng(3).choice(WORDS, 1500)
    path = tmp_path / "book.txt"
    body = " ".join(words)
    path.write_text(f"Licence\n*** START OF THIS EBOOK ***\n{body}\n*** END OF IT ***\nMore\n")
    return path


def test_read_texts_cuts_what_is_not_the_book(text: Path, tmp_path: Path) -> None:
    (body,) = passages.read_texts([tmp_path])
    assert set(body.split()) == set(WORDS)
    (tmp_path / "old.txt").write_bytes(b"caf\xe9\r\nau lait")
    assert passages.read_texts([tmp_path / "old.txt"]) == ["café\nau lait"]
    with pytest.raises(SparqError, match=r"no \*\.txt"):
        passages.read_texts([tmp_path / "nothing.d", tmp_path / "x"][:0])
    with pytest.raises(SparqError, match="No such file"):
        passages.read_texts([tmp_path / "absent.txt"])


def test_passage_is_in_its_context(model: Path, text: Path) -> None:
    books = passages.read_texts([text])
    with engine.load(model, n_ctx=1024, n_threads=1) as s:
        sizes = {"n_context": 600, "n_cue": 12, "max_chars": 100, "seed": 4}
        source = passages.passages(s, books, **sizes)
        found = [next(source) for _ in range(20)]
        again = passages.passages(s, books, **sizes)
        assert [next(again) for _ in range(20)] == found
        for p in found:
            cue = p.prompt[-12:]
            prose = engine.detokenize(s, p.prompt[:-12])
            assert engine.detokenize(s, cue) + p.expected.decode() in prose
            assert prose.endswith("\n\n") and engine.detokenize(s, cue)[0] == " "
            assert len(p.expected) == 100
        with pytest.raises(SparqError, match="no text has"):
            next(passages.passages(s, ["short"], **sizes))


class Parrot:
    """Stands for the engine's functions: a model that says `script`, one byte per token."""

    def __init__(self, script: bytes) -> None:
        self.script, self.at = script, 0

    def decode(self, session: Any, token: int) -> None:
        pass

    def logits(self, session: Any) -> np.ndarray:
        self.at += 1
        return np.eye(256)[self.script[self.at - 1]]

    def token_bytes(self, session: Any, token: int) -> bytes:
        return bytes([token])

    def is_eog(self, session: Any, token: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("said", "right"),
    [(b"abcdef", 6), (b"abcXef", 3), (b"Xbcdef", 0), ("abé".encode(), 2)],
)
def test_recite_counts_characters_until_the_first_mistake(
    monkeypatch: pytest.MonkeyPatch, said: bytes, right: int
) -> None:
    expected = "abèdef".encode() if len(said) == 4 else b"abcdef"
    parrot = Parrot(said)
    for name in ("decode", "logits", "token_bytes", "is_eog"):
        monkeypatch.setattr(engine, name, getattr(parrot, name))
    session: Any = None
    assert passages.recite(session, passages.Passage([1, 2], expected)) == right


def test_passages_run_resumes_and_counts(model: Path, text: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    kw: dict[str, Any] = {"n_context": 600, "n_cue": 12, "max_chars": 50, "n_threads": 1}
    file = tmp_path / "p.jsonl"

    def run(n: int, specs: Sequence[str] = SPECS) -> list[records.Record]:
        calls.clear()

        def on_progress(done: int, total: int) -> None:
            calls.append((done, total))

        return passages.run(model, [text], file, on_progress, n_passages=n, specs=specs, **kw)

    first = run(10)
    assert calls[-1] == (10, 10)
    more = run(12)
    assert more[0] == first[0] and calls == [(11, 12), (12, 12)]
    assert run(12) == more and not calls

    rows = {r.spec: r for r in passages.rows(more)}
    off, dense, sparse = rows.values()
    assert off.bytes_per_token == dense.bytes_per_token == dense.bytes_dense
    assert sparse.share_sparse == 1 and dense.share_sparse == 0
    # up to 63 positions are not sealed yet and are scored from whole rows of K, half of dense's
    share = sparse.bytes_per_token / sparse.bytes_dense
    assert 0.24 < share < 0.25 + 63 / 600 / 2
    k = split(parse_spec(SPECS[2]), 640, 32).topk
    assert sparse.positions == pytest.approx(k / 640, rel=0.02)
    assert sum(r["case"]["n_passages"] for r in more) == 12
    assert "12 passages" in passages.markdown(more)


def test_passages_refuse_a_sparse_row_that_ran_dense(
    model: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(SparqError, match="no attention call ran sparse"):
        passages.run(
            model,
            [text],
            tmp_path / "p.jsonl",
            lambda done, total: None,
            n_passages=1,
            n_context=600,
            n_cue=12,
            max_chars=20,
            specs=["dense", "sparq,ratio=1/8"],  # min_ctx is 1024
            n_threads=1,
        )
    assert not (tmp_path / "p.jsonl").exists()


def test_passages_command_updates_a_readme(model: Path, text: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- passages -->\n<!-- /passages -->\nb\n")
    args = [
        "passages",
        "-m",
        str(model),
        "--text",
        str(text),
        "--passages",
        "2",
        "--context",
        "600",
    ]
    args += ["--chars", "20", "--spec", "dense", "--out", str(tmp_path), "--update-readme"]
    result = CliRunner().invoke(command, [*args, str(readme)], catch_exceptions=False)
    assert result.exit_code == 0
    assert readme.read_text() == (
        f"a\n<!-- passages -->\n{result.stdout.strip()}\n<!-- /passages -->\nb\n"
    )
    assert (tmp_path / "passages.jsonl").exists()


def test_interval_covers_the_mean_at_its_rate() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for i in range(200):
        low, high = passages.interval(rng.exponential(10, 60), seed=i)
        hits += low <= 10 <= high
    assert 0.85 < hits / 200 < 0.99
