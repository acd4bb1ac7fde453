"""What the cache holds, and what `sparq-cpp clean` removes of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from fakes import write

from pyorch import native, paths
from pyorch.cli import clean
from pyorch.native import build

if TYPE_CHECKING:
    from conftest import Run

OTHERS = {
    "sdist/source.tar.gz": "source",
    "bench/model.gguf": "bench",
    "convert/env-1/ready": "converter",
    "wheels/linux/cc": "wheels",
    "model_hashes.jsonl": "other",
    "models/one/model.gguf": "models",
    "texts/one.kv": "kept",
    "calibrated/one.jsonl": "kept",
    "chat_history": "kept",
}


@pytest.fixture
def current(world: Path) -> Path:
    """The build of the present sources, in a cache that has an older one, and one of each kind."""
    build.build(build.Options())
    with (world / "patches" / "0001-hook.patch").open("a") as file:
        file.write("\n")
    write(paths.cache(), {name: name for name in OTHERS})
    return build.build(build.Options())


def left() -> set[str]:
    """The names of the files of `OTHERS` that are still there."""
    return {name for name in OTHERS if (paths.cache() / name).exists()}


def test_it_removes_what_another_run_would_not_use(run: Run, current: Path) -> None:
    (paths.cache() / "lib" / "sparq-killed.partial").mkdir()
    before = {kind: sum(map(paths.size, of)) for kind, of in clean.contents().items()}
    code, out, err = run("clean", "--yes")
    assert (code, err) == (0, "") and f"({before['old']} bytes)" in out
    assert native.find() == current and build.has_bindings()
    assert list((paths.cache() / "lib").iterdir()) == [current]
    assert len(list((paths.cache() / "build").iterdir())) == 1
    assert left() == set(OTHERS)
    assert before["old"] > 0
    after = json.loads(run("clean", "--json").out)
    assert after == {"path": str(paths.cache()), "bytes": before | {"old": 0}, "removed": 0}


def test_it_asks(run: Run, current: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("YES", "ALL"):  # a variable that is left over removes nothing
        monkeypatch.setenv(f"SPARQ_CLEAN_{name}", "1")
    code, _, err = run("clean")
    assert code == 1 and "--yes" in err
    assert run("clean", "models", stdin="n\n", terminal=True).code == 1
    shown = json.loads(run("clean", "--all", "--json").out)
    assert shown["removed"] == 0 and shown["bytes"]["kept"] == sum(
        len(name) for name, kind in OTHERS.items() if kind == "kept"
    )
    assert len(list((paths.cache() / "lib").iterdir())) == 2 and left() == set(OTHERS)
    assert run("clean", "models", stdin="y\n", terminal=True).code == 0
    assert left() == {name for name, kind in OTHERS.items() if kind != "models"}
    assert run("clean", "model").code == 2


def test_all_leaves_what_nobody_can_make_again(run: Run, current: Path) -> None:
    removed = json.loads(run("clean", "--all", "--yes", "--json").out)["removed"]
    assert left() == {name for name, kind in OTHERS.items() if kind in ("models", "kept")}
    assert native.find() is None and removed > 0
    assert run("clean", "models", "kept", "--yes").code == 0
    assert not [p for p in paths.cache().rglob("*") if p.is_file() and p.name != "lock"]


def test_what_is_not_ours_stays(run: Run, current: Path) -> None:
    """SPARQ_CACHE may be a folder with other things in it. A build removes old work trees too."""
    names = ("holiday", "build/theirs", "lib/libx", "python/mine")
    theirs = [paths.cache() / name for name in names]
    for folder in theirs:
        folder.mkdir()
    for i in range(9):
        (paths.cache() / "build" / f"{i:012}").mkdir()
    build.build(build.Options(), force=True)
    assert len(build.made("build")) < 9
    assert run("clean", "--all", "--yes").code == 0
    assert all(folder.is_dir() for folder in theirs)


@pytest.mark.parametrize("locked", ["", "wheels/linux"])
def test_it_waits_for_who_works_there(
    current: Path, locked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ""
    thread = Thread(target=clean.remove, args=([paths.cache() / "wheels"],))
    with paths.locked(paths.cache() / locked):
        thread.start()
        while "waiting for process" not in text:
            text += capsys.readouterr().err
            time.sleep(0.01)
        assert (paths.cache() / "wheels" / "linux" / "cc").exists()
    thread.join()
    assert not (paths.cache() / "wheels").exists()
