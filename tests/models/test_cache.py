"""models list and rm: what is in the hub's cache, and what is removed of it; nothing outside is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, REPO, Hub, found
from huggingface_hub import constants, scan_cache_dir

from pyorch.models import cache, cards, pull
from pyorch.models.transfer import repo_folder


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the model that the demo may have brought."""
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path / "own"))


def load(text: str = f"hf:{REPO}") -> Path:
    return pull.download(found(text)).path


def blobs() -> int:
    return len(list(Path(constants.HF_HUB_CACHE).glob("*/blobs/*")))


def test_list(hub: Hub, gguf: bytes, run: Callable[..., Any]) -> None:
    names = cards.names()
    code, out, err = run("models", "list")
    table = out.splitlines()
    assert code == 0 and [line.split()[0] for line in table[1:]] == list(names)
    hub.repo, hub.files = cards.load("llama2-7b").gguf, {"m.Q4_K_M.gguf": gguf}
    load("llama2-7b")
    hub.repo, hub.files = REPO, {"a.gguf": gguf, "d/b.gguf": gguf[1:]}
    load(f"{REPO}/d/b.gguf")
    part = repo_folder(REPO) / "blobs" / f"{hub.digest(gguf)}.incomplete"
    part.write_bytes(bytes(4096))
    code, out, err = run("models", "list")
    row = next(line for line in out.splitlines() if line.startswith("llama2-7b "))
    assert row.endswith(" 557 KiB")
    assert out.splitlines()[-1].split() == [f"{REPO}/d/b.gguf", "557", "KiB"]
    assert f"unfinished: 4 KiB of {REPO}" in err
    assert max(map(len, out.splitlines())) <= 100
    result = json.loads(run("models", "list", "--json")[1])
    assert [m["name"] for m in result["models"]] == list(names)
    assert {m["repo"]: (m["name"], m["bytes"]) for m in result["cached"]} == {
        cards.load("llama2-7b").gguf: ("m.Q4_K_M.gguf", len(gguf)),
        REPO: ("d/b.gguf", len(gguf) - 1),
    }
    assert result["unfinished"] == {REPO: 4096}


def test_a_split_model_is_here_when_all_of_it_is(
    hub: Hub, gguf: bytes, run: Callable[..., Any]
) -> None:
    """One file of it counts as what an interrupted download left, and is removed as that."""
    one, two = (f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    hub.files = {one: gguf, two: gguf[1:]}
    load()
    entry = repo_folder(REPO) / "snapshots" / COMMIT / two
    cache.drop(repo_folder(REPO), entry)
    code, out, err = run("models", "list")
    assert code == 0 and one not in out and f"unfinished: 557 KiB of {REPO}" in err
    result = json.loads(run("models", "list", "--json")[1])
    assert result["cached"] == [] and result["unfinished"] == {REPO: len(gguf)}
    load()
    assert [m["name"] for m in json.loads(run("models", "list", "--json")[1])["cached"]] == [one]
    cache.drop(repo_folder(REPO), entry)
    assert run("models", "rm", f"hf:{REPO}", "--yes")[0] == 0 and blobs() == 0


def test_rm_of_one_and_of_all(hub: Hub, gguf: bytes, run: Callable[..., Any]) -> None:
    hub.files = {"m-Q8_0.gguf": gguf, "m-Q4_K_M.gguf": gguf[1:], "README.md": b"hello"}
    for quant in ("Q8_0", "Q4_K_M"):
        load(f"hf:{REPO}:{quant}")
    code, out, err = run("models", "rm", f"hf:{REPO}:q8_0")
    assert code == 1 and "--yes" in err and "m-Q8_0.gguf (557 KiB)" in err and blobs() == 2
    code, out, err = run("models", "rm", f"hf:{REPO}:q8_0", "--yes")
    assert (code, out) == (0, f"557 KiB freed ({len(gguf)} bytes)\n") and blobs() == 1
    scan = scan_cache_dir(constants.HF_HUB_CACHE)
    assert not scan.warnings and scan.size_on_disk == len(gguf) - 1
    code, out, err = run("models", "rm", f"hf:{REPO}:Q8_0", "--yes")
    assert code == 1 and "is not in the cache" in err and "m-Q4_K_M.gguf" in err
    (repo_folder(REPO) / "blobs" / f"{'0' * 64}.incomplete").write_bytes(bytes(1000))
    refused = run("models", "rm", f"hf:{REPO}")[2]
    assert "m-Q4_K_M.gguf, unfinished downloads" in refused and "would be removed" in refused
    code, out, err = run("models", "rm", f"hf:{REPO}", "--yes")
    assert code == 0 and f"({len(gguf) - 1 + 1000} bytes)" in out
    assert not repo_folder(REPO).exists()
    assert load(f"hf:{REPO}").exists()


def test_rm_of_a_card(hub: Hub, gguf: bytes, run: Callable[..., Any]) -> None:
    hub.repo = cards.load("llama2-7b").gguf
    hub.files = {"m.Q4_K_M.gguf": gguf, "m.Q8_0.gguf": gguf[1:]}
    load("llama2-7b")
    load("llama2-7b:Q8_0")
    assert run("models", "rm", "llama2-7b:Q4_K_M", "--yes")[0] == 0 and blobs() == 1
    load("llama2-7b")
    assert run("models", "rm", "llama2-7b", "--yes")[0] == 0 and blobs() == 0


def test_rm_keeps_what_others_use(hub: Hub, gguf: bytes, run: Callable[..., Any]) -> None:
    """The same content by another name, a file that is no model, a model of two revisions."""
    hub.files = {"a.gguf": gguf, "b.gguf": gguf}
    a, b = load(f"{REPO}/a.gguf"), load(f"{REPO}/b.gguf")
    (a.parent / "config.json").write_text("{}")
    assert run("models", "rm", f"{REPO}/a.gguf", "--yes")[1] == "0 B freed (0 bytes)\n"
    assert b.read_bytes() == gguf and not a.exists()
    hub.history[COMMIT], hub.commit = hub.files, "f" * 40
    assert load(f"{REPO}/b.gguf") != b and blobs() == 1
    assert f"({len(gguf)} bytes)" in run("models", "rm", f"{REPO}/b.gguf", "--yes")[1]
    assert blobs() == 0 and not b.is_symlink() and (a.parent / "config.json").exists()


def test_rm_removes_nothing_outside(
    hub: Hub, gguf: bytes, run: Callable[..., Any], tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "m.gguf").write_bytes(gguf)
    hub.files = {"m.gguf": gguf}
    entry = load()
    entry.unlink()
    entry.symlink_to(mine / "m.gguf")  # into a folder of mine
    (entry.parent / "sub").symlink_to(mine)
    code, out, err = run("models", "rm", f"hf:{REPO}", "--yes")
    assert (code, out) == (0, "0 B freed (0 bytes)\n") and not entry.is_symlink()
    assert (mine / "m.gguf").read_bytes() == gguf
    for text in (str(mine / "m.gguf"), "hf:../..", "hf:a/../../mine/m.gguf", "mine"):
        code, _, err = run("models", "rm", text, "--yes")
        assert code == 2, text
    folder = repo_folder("org/linked")
    folder.symlink_to(mine)
    (mine / "snapshots" / COMMIT).mkdir(parents=True)
    (mine / "m.gguf").rename(mine / "snapshots" / COMMIT / "m.gguf")
    code, _, err = run("models", "rm", "hf:org/linked", "--yes")
    assert code == 1 and "is a link" in err
    assert (mine / "snapshots" / COMMIT / "m.gguf").read_bytes() == gguf


def test_rm_of_content_that_repositories_share(
    hub: Hub, gguf: bytes, run: Callable[..., Any]
) -> None:
    """huggingface-hub 2 keeps a file once, in a store that repositories link to."""
    hub.files = {"m.gguf": gguf}
    entry = load()
    blob = entry.resolve()
    content = Path(constants.HF_HUB_CACHE) / "blobs" / "ab" / ("ab" * 32)
    content.parent.mkdir(parents=True)
    blob.rename(content)
    blob.symlink_to(content)
    other = repo_folder("org/other") / "blobs" / blob.name
    other.parent.mkdir(parents=True)
    other.symlink_to(content)
    assert run("models", "rm", f"hf:{REPO}", "--yes")[1] == "0 B freed (0 bytes)\n"
    assert content.exists() and not blob.is_symlink()
    load_again = repo_folder(REPO) / "snapshots" / COMMIT / "m.gguf"
    blob.parent.mkdir(parents=True, exist_ok=True)
    load_again.parent.mkdir(parents=True, exist_ok=True)
    blob.symlink_to(content)
    load_again.symlink_to(f"../../blobs/{blob.name}")
    other.unlink()
    assert f"({len(gguf)} bytes)" in run("models", "rm", f"hf:{REPO}", "--yes")[1]
    assert not content.exists()


def test_rm_asks(
    hub: Hub, gguf: bytes, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = {"m.gguf": gguf}
    path = load()
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda prompt: "n")
    code, out, err = run("models", "rm", f"hf:{REPO}", terminal=True)
    assert (code, out) == (1, "") and "interrupted" not in err and path.exists()
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda prompt: "y")
    assert run("models", "rm", f"hf:{REPO}", terminal=True)[0] == 0 and not path.exists()


def test_a_repository_that_cannot_be_read_is_named(
    hub: Hub, gguf: bytes, run: Callable[..., Any]
) -> None:
    hub.files = {"a.gguf": gguf}
    entry = load()
    (repo_folder("org/other") / "snapshots" / COMMIT).mkdir(parents=True)
    (repo_folder("org/other") / "snapshots" / COMMIT / "b.gguf").symlink_to("nowhere")
    (repo_folder(REPO).parent / "version.txt").write_text("1")  # old programs leave it there
    code, out, err = run("models", "list")
    assert code == 0 and f"{REPO}/a.gguf" in out and "b.gguf" not in out
    assert err.count("left out") == 1 and "models--org--other" in err
    assert run("models", "rm", f"hf:{REPO}", "--yes")[0] == 0 and not entry.exists()


def test_an_empty_cache(hub: Hub) -> None:
    assert cache.models() == [] and cache.unfinished() == {}
