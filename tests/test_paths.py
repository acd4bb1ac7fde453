"""Where things are kept: in a clone, in an installation, with the system's variables for it."""

from __future__ import annotations

import os
import pwd
import shutil
import time
from pathlib import Path
from threading import Thread

import pytest

from pyorch import paths
from pyorch.cli import terminal
from pyorch.errors import SparqError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, and none of the variables."""
    for name in ("SPARQ_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were not a clone."""
    monkeypatch.setattr(paths, "REPOSITORY", tmp_path / "site-packages")


def test_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert paths.cache() == home / "xdg" / "sparq-cpp"
    monkeypatch.setenv("SPARQ_CACHE", "~/mine")
    assert paths.cache() == home / "mine"


def test_a_lock_is_held_by_one_alone_though_its_folder_was_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever waited would otherwise hold a file that nobody else finds."""
    root, held = tmp_path / "root", []

    def wait() -> None:
        with paths.locked(root):
            held.append((root / "lock").exists())

    thread = Thread(target=wait)
    with paths.locked(root):
        thread.start()
        while "waiting for process" not in capsys.readouterr().err:
            time.sleep(0.01)
        shutil.rmtree(root)
    thread.join()
    assert held == [True]


def test_only_a_clone_keeps_records_in_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(home)
    assert paths.results() == paths.REPOSITORY / "bench"
    request.getfixturevalue("installed")
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    assert paths.results() == home / "data" / "sparq-cpp" / "bench"


@pytest.mark.parametrize(("load", "cores", "busy"), [(0.6, 2, True), (6.0, 64, False)])
def test_busy_is_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    load: float,
    cores: int,
    busy: bool,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    terminal.note_if_busy()
    assert ("is busy" in capsys.readouterr().err) is busy


def test_a_user_without_a_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container with any number
    for folder in (paths.cache, paths.documents):
        with pytest.raises(SparqError) as error:
            folder()
        assert "HOME" in error.value.hint
    monkeypatch.setenv("SPARQ_CACHE", str(home))
    assert paths.kept_texts() == home / "texts"
