"""models list and rm: what is in the hub's cache, and what is removed of it; nothing outside is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, REPO, Hub, find, sha256
from huggingface_hub import constants, scan_cache_dir

from pyorch.models import cache, cards, pull

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the model that the demo may have brought."""
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path / "own"))


def load(text: str = f"hf:{REPO}") -> Path:
    return pull.fetch(find(text)).path


def folder(repo: str = REPO) -> Path:
    return pull.Spec(repo).folder


def blobs() -> int:
    return len(list(Path(constants.HF_HUB_CACHE).glob("*/blobs/*")))


def listed(run: Run) -> tuple[dict[str, int], dict[str, int]]:
    """The models and what is unfinished, with their bytes."""
    result = json.loads(run("models", "list", "--json")[1])
    cached = {f"{m['repo']}/{m['name']}": m["bytes"] for m in result["cached"]}
    return cached, result["unfinished"]


def test_list(hub: Hub, gguf: bytes, run: Run) -> None:
    assert listed(run) == ({}, {})  # there is no cache yet
    hub.repo, hub.files = cards.load("llama2-7b").gguf, {"m.Q4_K_M.gguf": gguf}
    load("llama2-7b")
    hub.repo, hub.files = REPO, {"a.gguf": gguf, "d/b.gguf": gguf[:-1] + b"!"}
    load(f"{REPO}/d/b.gguf")
    (folder() / "blobs" / f"{sha256(gguf)}.incomplete").write_bytes(bytes(4096))
    code, out, err = run("models", "list")
    row = next(line for line in out.splitlines() if line.startswith("llama2-7b "))
    assert row.endswith(" 557 KiB") and f"{REPO}/d/b.gguf" in out and REPO in err
    assert listed(run) == (
        {f"{cards.load('llama2-7b').gguf}/m.Q4_K_M.gguf": len(gguf), f"{REPO}/d/b.gguf": len(gguf)},
        {REPO: 4096},
    )


def test_a_split_model_is_here_when_all_of_it_is(hub: Hub, run: Run, split: Path) -> None:
    """One file of it counts as what an interrupted download left, and is removed as that."""
    hub.files = {p.name: p.read_bytes() for p in split.parent.glob("split-*.gguf")}
    path = load()
    total = sum(map(len, hub.files.values()))
    assert listed(run) == ({f"{REPO}/{path.name}": total}, {})
    rest = total - path.stat().st_size
    cache.drop(path)
    assert listed(run) == ({}, {REPO: rest})
    assert run("models", "rm", f"hf:{REPO}", "--yes")[0] == 0 and blobs() == 0


@pytest.mark.parametrize("name", [f"hf:{REPO}", "llama2-7b"])
def test_rm_of_one_and_of_all(hub: Hub, gguf: bytes, run: Run, name: str) -> None:
    hub.repo = REPO if REPO in name else cards.load(name).gguf
    hub.files = {"m-Q8_0.gguf": gguf, "m-Q4_K_M.gguf": gguf + b"0", "README.md": b"hello"}
    for quant in ("Q8_0", "Q4_K_M"):
        load(f"{name}:{quant}")
    code, out, err = run("models", "rm", f"{name}:q8_0")
    assert code == 1 and "--yes" in err and "m-Q8_0.gguf" in err and blobs() == 2
    code, out, err = run("models", "rm", f"{name}:q8_0", "--yes")
    assert code == 0 and f"({len(gguf)} bytes)" in out and blobs() == 1
    assert not scan_cache_dir(constants.HF_HUB_CACHE).warnings
    code, out, err = run("models", "rm", f"{name}:Q8_0", "--yes")
    assert code == 1 and "m-Q4_K_M.gguf" in err  # what else there is
    (folder(hub.repo) / "blobs" / f"{'0' * 64}.incomplete").write_bytes(bytes(1000))
    assert run("models", "rm", name, "--yes")[0] == 0 and not folder(hub.repo).exists()


def test_rm_keeps_what_others_use(hub: Hub, gguf: bytes, run: Run) -> None:
    """The same content by another name, a file that is no model, a model of two revisions."""
    hub.files = {"a.gguf": gguf, "b.gguf": gguf}
    a, b = load(f"{REPO}/a.gguf"), load(f"{REPO}/b.gguf")
    (a.parent / "config.json").write_text("{}")
    assert "(0 bytes)" in run("models", "rm", f"{REPO}/a.gguf", "--yes")[1]
    assert b.read_bytes() == gguf and not a.exists()
    hub.history[COMMIT], hub.commit = hub.files, "f" * 40
    assert load(f"{REPO}/b.gguf") != b and blobs() == 1
    assert f"({len(gguf)} bytes)" in run("models", "rm", f"{REPO}/b.gguf", "--yes")[1]
    assert blobs() == 0 and not b.is_symlink() and (a.parent / "config.json").exists()


def test_rm_removes_nothing_outside(hub: Hub, gguf: bytes, run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "m.gguf").write_bytes(gguf)
    for more in ({}, {"config.json": b"{}"}):  # the repository goes, or a part of it
        hub.files = {"m.gguf": gguf}
        entry = load()
        for name, content in more.items():
            (entry.parent / name).write_bytes(content)
        entry.unlink()
        entry.symlink_to(mine / "m.gguf")  # into a folder of mine
        (entry.parent / "sub").symlink_to(mine)
        assert run("models", "rm", f"hf:{REPO}", "--yes")[0] == 0 and not entry.is_symlink()
        assert (mine / "m.gguf").read_bytes() == gguf
    for text in (str(mine / "m.gguf"), "hf:../..", "hf:a/../../mine/m.gguf", "mine"):
        assert run("models", "rm", text, "--yes")[0] == 2, text


def test_a_repository_that_cannot_be_read_is_named(hub: Hub, gguf: bytes, run: Run) -> None:
    hub.files = {"a.gguf": gguf}
    entry = load()
    broken = folder("org/other") / "snapshots" / COMMIT
    broken.mkdir(parents=True)
    (broken / "b.gguf").symlink_to("nowhere")
    (folder().parent / "version.txt").write_text("1")  # old programs leave it there
    code, out, err = run("models", "list")
    assert code == 0 and f"{REPO}/a.gguf" in out and "b.gguf" not in out
    assert err.count("left out") == 1 and "models--org--other" in err
    assert run("models", "rm", f"hf:{REPO}", "--yes")[0] == 0 and not entry.exists()
