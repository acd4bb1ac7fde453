"""What is made of people's texts is for them alone, and they are told what is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyorch import paths

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.usefixtures("native_lib_dir")

TEXT = "what nobody else is to read, " * 60  # long enough to be kept


@pytest.fixture(autouse=True)
def _usual_mask() -> Iterator[None]:
    """The one with which everybody reads a new file."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (path := tmp_path / "secret.txt").write_text(TEXT)
    path.chmod(0o600)
    return path


def test_documents(run: Run, tiny_chat: Path, tmp_path: Path, text: Path) -> None:
    assert run("read", text, "-m", tiny_chat).code == 0
    assert mode(paths.documents()) == 0o700 and mode(paths.documents() / "secret.kv") == 0o600
    (old := tmp_path / "x.kv").write_text("of somebody who let others read it")
    assert run("read", text, "-m", tiny_chat, "-o", old, "--force").code == 0
    assert mode(old) == 0o600


def test_conversations(run: Run, tiny_chat: Path, tmp_path: Path, text: Path) -> None:
    talk = tmp_path / "talk.json"
    talk.write_text('{"messages": []}')
    script = f"/read {text}\nx\n/save {talk} kv\n"
    done = run("chat", "-m", tiny_chat, "-n", 1, stdin=script)  # it is another conversation's
    assert done.code == 2 and str(talk) in done.err and "hint:" in done.err
    assert talk.read_text() == '{"messages": []}'
    done = run("chat", "-m", tiny_chat, "-n", 1, "--resume", talk, stdin=script)
    assert done.code == 0, done.err
    (kept,) = paths.kept_texts().iterdir()
    assert [mode(p) for p in (talk, tmp_path / "talk.json.kv", kept)] == [0o600] * 3
    assert mode(paths.kept_texts()) == 0o700


def test_nothing_is_kept_unasked(run: Run, tiny_chat: Path, text: Path) -> None:
    script = f"/read {text}\nx\n/help\n"
    done = run("chat", "-m", tiny_chat, "-n", 1, "--no-keep", stdin=script)
    assert done.code == 0, done.err
    assert not paths.kept_texts().exists()
    assert str(paths.cache()) in done.err


def test_records_of_a_text(run: Run, tiny: Path, tmp_path: Path, text: Path) -> None:
    """They have the answers, and a model may recite what it read."""
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        ask = ("eval", "repetition", "-m", tiny, "-a", "off", "-n", 1, "--ctx", 1024, "-t", 1)
        done = run(*ask, "--text", text, "--out", tmp_path / name)
        assert done.code == 0, done.err
        assert mode(tmp_path / name / "repetition.jsonl") == 0o600
    assert mode(tmp_path / "new") == 0o700


@pytest.mark.parametrize("name", ["SPARQ_DOCUMENTS_LIMIT", "SPARQ_MEMORY_LIMIT"])
@pytest.mark.parametrize("given", ["none", "-1", "2X", "1e3", "inf"])
def test_a_limit_that_is_none_keeps_nothing_by_mistake(
    run: Run, tiny_chat: Path, monkeypatch: pytest.MonkeyPatch, name: str, given: str
) -> None:
    monkeypatch.setenv(name, given)
    done = run("chat", "-m", tiny_chat, stdin="x\n")
    assert done.code == 2 and name in done.err and repr(given) in done.err and "hint:" in done.err
