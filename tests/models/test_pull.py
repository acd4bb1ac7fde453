"""pull: names, choices, downloads and refusals, against a small hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_server import COMMIT, REPO, Hub, find, sha256
from huggingface_hub import close_session, constants
from tiny import write_tiny_gguf

from pyorch import native
from pyorch.errors import SparqError
from pyorch.models import cards, pull
from pyorch.native import probe

Run = Callable[..., Any]


def get(text: str = f"hf:{REPO}") -> pull.Model:
    return pull.fetch(find(text))


def refused(text: str = f"hf:{REPO}") -> SparqError:
    with pytest.raises(SparqError) as e:
        get(text)
    assert "\n" not in e.value.message + e.value.hint and e.value.hint
    return e.value


def files_below(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()]


def here(path: Path) -> list[str]:
    """The names of contents in the hub's cache."""
    return [p.name for p in path.glob("home/hub/*/blobs/*")]


# ---- names ----


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("hf:a/b", pull.Spec("a/b")),
        ("a/b:Q4_K_M@v1.0", pull.Spec("a/b", quant="Q4_K_M", revision="v1.0")),
        ("a/b/c/d.gguf@refs/pr/1", pull.Spec("a/b", "c/d.gguf", revision="refs/pr/1")),
        ("hf:here/b/c.gguf", pull.Spec("here/b", "c.gguf")),
        *((p, None) for p in ("x.gguf", "a/x.gguf", "./a/b/x.gguf", "/a/b/x.gguf", "a/b/c")),
        *((p, None) for p in ("here/b", "here/b/c.gguf", "llama3-8b")),
        ("llama2-7b", pull.Spec("TheBloke/Llama-2-7B-GGUF", quant="Q4_K_M", card="llama2-7b")),
        (
            "llama2-7b:Q8_0@v2",
            pull.Spec("TheBloke/Llama-2-7B-GGUF", "", "Q8_0", "v2", "llama2-7b"),
        ),
    ],
)
def test_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, spec: pull.Spec | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("llama3-8b").touch()  # a file goes before a card
    assert pull.parse_spec(text) == spec


@pytest.mark.parametrize(
    "text",
    ["hf:", "hf:a", "hf:a/b:", "hf:a/b@", "hf:a/../c.gguf", "hf:a/b/../../c.gguf", "hf:a/b/c/"]
    + ["hf:a/b@../../x", "hf:a/b@x/../../y", "hf:a/b//c.gguf", "hf:a/b/c\\d.gguf", "hf:a/b\n"]
    + ["llama2-8b", "smollm2-135m-instruct:Q8_0"],
)
def test_wrong_names(text: str) -> None:
    with pytest.raises(SparqError) as e:
        pull.parse_spec(text)
    assert e.value.exit_code == 2 and e.value.hint and "\n" not in e.value.message


def test_a_card_without_gguf_files() -> None:
    with pytest.raises(SparqError) as e:
        pull.parse_spec("cerebras-gpt-6.7b")
    assert "sparq-cpp convert hf:cerebras/Cerebras-GPT-6.7B" in e.value.hint
    original = pull.parse_spec("cerebras-gpt-6.7b", original=True)
    assert original and original.repo == "cerebras/Cerebras-GPT-6.7B"


# ---- what is chosen ----


def test_the_only_model(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files = {"README.md": b"hello", "mmproj-f16.gguf": b"x", "m-Q2_K.gguf": gguf}
    model = get()
    assert model.path.read_bytes() == gguf and model.path.name == "m-Q2_K.gguf"
    assert model.path.is_relative_to(tmp_path / "home" / "hub") and model.commit == COMMIT
    assert get().path == get(f"hf:{REPO}@{COMMIT}").path == model.path
    assert hub.fetched() == ["m-Q2_K.gguf"]  # once, and nothing else


def test_quantisations(hub: Hub) -> None:
    names = ["m-IQ4_K.gguf", "m-Q4_K.gguf", "m-Q4_K_M.gguf", "m.q8_0.gguf", "d/n-F16.gguf"]
    hub.files = dict.fromkeys(names, b"x")
    chosen = {q: find(f"hf:{REPO}:{q}").files[0].name for q in ("Q4_K", "Q8_0", "F16", "IQ4_K")}
    assert chosen == {"Q4_K": names[1], "Q8_0": names[3], "F16": names[4], "IQ4_K": names[0]}
    assert find().files[0].name == "m-Q4_K_M.gguf"
    assert find(f"{REPO}/d/n-F16.gguf").files[0].name == "d/n-F16.gguf"
    error = refused(f"hf:{REPO}:Q5_0")
    assert error.exit_code == 2 and "Q5_0" in error.message
    assert all(n in error.hint for n in names)


@pytest.mark.parametrize(
    ("files", "spec"),
    [
        ({"a.gguf": b"", "b.gguf": b""}, f"hf:{REPO}"),
        ({"model.safetensors": b"x"}, f"hf:{REPO}"),
        ({"a.gguf": b""}, f"{REPO}/no.gguf"),
        ({"m-Q4_K_M-00002-of-00002.gguf": b""}, f"hf:{REPO}:Q4_K_M"),
        ({"m.gguf": b""}, f"hf:{REPO}@v9"),
    ],
    ids=["two models", "no model", "no such file", "a part is missing", "no such revision"],
)
def test_no_choice(hub: Hub, files: dict[str, bytes], spec: str) -> None:
    hub.files = files
    assert REPO in refused(spec).message and not hub.fetched()


def test_all_parts_of_a_split_model(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    for i in (1, 2):
        path = tmp_path / f"m-Q4_K_M-0000{i}-of-00002.gguf"
        write_tiny_gguf(path, n_layer=1, keys={"split.count": 2, "split.no": i - 1})
        name = b".weight" if i == 1 else b".second"  # no tensor is in both
        hub.files[f"Q4_K_M/{path.name}"] = path.read_bytes().replace(b".weight", name)
    first, second = hub.files
    hub.files["m-Q8_0.gguf"] = gguf
    model = get(f"hf:{REPO}:q4_k_m")
    assert [f.path and f.path.read_bytes() for f in model.files] == [*hub.files.values()][:2]
    assert model.path.match(first) and get(f"{REPO}/{second}").path == model.path


# ---- what goes wrong ----


def test_a_wrong_checksum_leaves_nothing(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files, hub.wrong = {"m.gguf": gguf}, gguf[:99] + bytes([gguf[99] ^ 1])
    assert "m.gguf: wrong checksum" in refused().message
    assert not list(tmp_path.glob("home/hub/models--*"))
    hub.wrong = b""
    assert get().path.read_bytes() == gguf


def test_a_damaged_file_is_noticed_and_replaced(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files = {"m.gguf": gguf}
    path = get().path
    path.resolve().write_bytes(gguf[:-1] + b"!")
    assert "wrong checksum" in refused().message and not path.is_symlink()
    path, mine = get().path, tmp_path / "mine.gguf"
    mine.write_bytes(b"not that model")
    path.unlink()
    path.symlink_to(mine)
    assert "wrong checksum" in refused().message
    assert mine.exists() and not path.exists()  # what is outside of the cache stays
    assert get().path.read_bytes() == gguf


def test_a_cards_checksum(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo, hub.files = cards.load("llama2-7b").gguf, {"m-Q4_K_M.gguf": gguf}
    load = cards.load

    def with_checksum(name: str) -> cards.Card:
        return replace(load(name), files=(cards.File("m-Q4_K_M.gguf", len(gguf), checksum),))

    monkeypatch.setattr(cards, "load", with_checksum)
    checksum = "0" * 64
    error = refused("llama2-7b")
    assert checksum not in error.message and f"hf:{hub.repo}/m-Q4" in error.hint
    assert hub.fetched() == []
    checksum = sha256(gguf)
    path = get("llama2-7b").path
    assert path.read_bytes() == gguf
    # without symbolic links, the cache does not say the checksum of a file
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path.unlink()
    path.write_bytes(gguf)
    assert get("llama2-7b").files[0].sha256 == checksum
    path.write_bytes(gguf[:-1] + b"!")
    assert "wrong checksum" in refused("llama2-7b").message


def test_not_a_model(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files = {"m.gguf": gguf[:5000]}
    assert "m.gguf" in refused().message
    assert not list(tmp_path.glob("home/hub/*/refs/*"))  # so it is not used offline


@pytest.mark.parametrize("where", ["/api/", "/resolve/"])
@pytest.mark.parametrize(
    ("status", "code", "hint"),
    [
        (401, "", "HF_TOKEN"),
        (403, "", "hf auth login"),
        (403, "GatedRepo", "accept them"),
        (404, "RepoNotFound", "check the name"),
        (429, "", "wait"),
    ],
)
def test_refusals(
    hub: Hub,
    gguf: bytes,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    hint: str,
    where: str,
) -> None:
    """Of the listing, or of the file alone. The token is not shown."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("time.sleep", lambda s: None)  # huggingface-hub waits for a busy hub
    hub.files, hub.status, hub.code, hub.refuse = {"m.gguf": gguf}, status, code, where
    error = refused()
    assert error.message.startswith(f"{REPO}: ") and hint in error.hint
    assert "hf_secret" not in error.message + error.hint


@pytest.mark.parametrize(
    "listing",
    [b"<html>log in to this network</html>", b'{"id": "a/b", "sha": "../../x", "siblings": []}'],
)
def test_no_hub_answers(hub: Hub, listing: bytes) -> None:
    hub.listing = listing
    assert "HF_ENDPOINT" in refused().hint


def test_no_disk_space(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m.gguf": gguf}
    usage = SimpleNamespace(total=10**9, used=10**9, free=len(gguf) - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    error = refused()
    assert REPO in error.message and "HF_HOME" in error.hint and hub.fetched() == []


@pytest.mark.parametrize(
    "name",
    ["../../../../evil.gguf", "/tmp/evil.gguf", "a/../../evil.gguf", "a\\..\\evil.gguf"]
    + ["a\x1b.gguf", "a\0.gguf", "C:evil.gguf", "x" * 300 + ".gguf", "~/../../evil.gguf"],
)
def test_names_cannot_leave_the_cache(hub: Hub, gguf: bytes, tmp_path: Path, name: str) -> None:
    hub.files = {name: gguf, "m-Q4_K_M.gguf": gguf}
    assert "\x1b" not in refused().message
    assert hub.fetched() == [] and files_below(tmp_path) == []


def test_a_killed_download_starts_again(hub: Hub, gguf: bytes, run: Run, tmp_path: Path) -> None:
    hub.files, hub.hold = {"m.gguf": gguf}, threading.Event()
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    env.pop("HF_HUB_CACHE", None)
    argv = [sys.executable, "-m", "pyorch", "pull", f"hf:{REPO}"]
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as process:
        for _ in range(1000):
            if here(tmp_path):
                break
            time.sleep(0.02)
        process.kill()
    (left,) = here(tmp_path)
    assert left.endswith(".incomplete")
    hub.hold.set()
    hub.hold = None
    status, out, _ = run("pull", f"hf:{REPO}")
    assert status == 0 and Path(out.strip()).read_bytes() == gguf
    assert here(tmp_path) == [sha256(gguf)]


# ---- revisions, and without a hub ----


def test_a_pinned_revision_stays(hub: Hub, gguf: bytes) -> None:
    hub.files = {"m.gguf": gguf}
    old = get(f"hf:{REPO}@{COMMIT}")
    assert get(f"hf:{REPO}@v1.0").path == old.path and hub.fetched() == ["m.gguf"]
    hub.history[COMMIT], hub.commit = hub.files, "f" * 40
    hub.files = {"m.gguf": gguf[:-1] + b"!"}
    assert get().path.read_bytes() == hub.files["m.gguf"]
    hub.commit = "e" * 40  # with the content of the one before
    assert find().missing_bytes == 0 and get().commit == hub.commit
    again = get(f"hf:{REPO}@{COMMIT}")
    assert again.path == old.path and again.path.read_bytes() == gguf
    assert hub.fetched() == ["m.gguf"] * 2


def test_offline(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m-Q8_0.gguf": gguf, "m-F16.gguf": gguf + b"0"}
    online = get(f"hf:{REPO}:Q8_0")
    seen = len(hub.log)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get().files == online.files  # the only one that is here
    assert get(f"hf:{REPO}@{COMMIT}").path == online.path
    assert "F16" in refused(f"hf:{REPO}:F16").message
    assert "HF_HUB_OFFLINE" in refused("hf:org/other").hint
    online.path.resolve().write_bytes(gguf[:-1] + b"!")
    assert "wrong checksum" in refused().message
    assert len(hub.log) == seen


@pytest.mark.parametrize(
    ("where", "status"),
    [("hub", status) for status in (401, 403, 404, 407, 429, 502, 504)]
    + [("proxy", 403), ("socks5", 403), ("nothing", 0)],
)
def test_without_a_hub_the_cache_is_used(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch, where: str, status: int
) -> None:
    """And a line says so."""
    hub.files = {"m-Q8_0.gguf": gguf}
    online = get()
    hub.status = status
    if where == "nothing":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    elif where != "hub":
        proxy = hub.url.replace("http", where.replace("proxy", "http"))
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
        close_session()  # it read the variable when it was made
    lines: list[str] = []
    try:
        assert find(say=lines.append).files == online.files and REPO in lines[-1]
        refused("hf:org/other")  # what is not here still needs it
    finally:
        close_session()


@pytest.mark.skipif(sys.platform == "win32", reason="files have no limit")
def test_a_full_disk_leaves_the_name_of_the_old_revision(hub: Hub, gguf: bytes) -> None:
    import resource

    hub.files = {"m-Q8_0.gguf": gguf}
    old, hub.commit = get(), "b" * 40
    get()
    pull.paths.put(old.spec.folder / "refs" / "main", old.commit)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(OSError, match="main"):
            get()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    hub.status = 502
    assert find() == old


# ---- the commands ----


def test_pull(hub: Hub, gguf: bytes, run: Run, tmp_path: Path) -> None:
    hub.files = {"m.gguf": gguf}
    code, out, err = run("pull", f"hf:{REPO}")
    assert code == 0 and Path(out.strip()).read_bytes() == gguf
    assert "m.gguf" in err
    assert run("pull", f"{REPO}/m.gguf") == (0, out, "")
    assert run("pull", out.strip()) == (0, out, "")  # a file that is here
    assert run("pull", str(tmp_path / "no.gguf"))[:2] == (1, "")


def test_a_model_is_pulled_on_demand(
    hub: Hub, gguf: bytes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = {"m.gguf": gguf}
    command = ("explain", "--ctx", "64", "--json", "-m", f"hf:{REPO}")
    code, out, err = run(*command)
    assert (code, out, hub.fetched()) == (1, "", [])
    assert "--yes" in err and f"sparq-cpp pull hf:{REPO}" in err
    asked: list[str] = []
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda p: asked.append(p) or "n")
    assert run(*command, terminal=True)[0] == 1 and hub.fetched() == [] and len(asked) == 1
    code, out, _ = run(*command, "--yes")
    assert code == 0 and json.loads(out)["model"] == "tiny" and hub.fetched() == ["m.gguf"]
    assert run(*command)[0] == 0 and hub.fetched() == ["m.gguf"]  # it is here now


@pytest.mark.parametrize(
    "use",
    [
        ("chat", "-m"),
        ("generate", "-p", "x", "-m"),
        ("serve", "--port", "0", "-m"),
        ("calibrate", "--ctx", "512", "-m"),
        ("eval", "repetition", "--ctx", "512", "-m"),
        ("quantize",),
        ("bench", "-d", "2048", "-m"),
    ],
    ids=lambda use: use[0],
)
def test_faults_show_before_anything_is_built_or_downloaded(
    hub: Hub,
    gguf: bytes,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: tuple[str, ...],
) -> None:
    """In every command that needs a model and the library."""
    builds: list[str] = []

    def built(stock: bool = False, tools: tuple[str, ...] = ()) -> None:
        builds.append("built")
        raise SparqError("enough")

    monkeypatch.setattr(native, "find", lambda **_: None)
    monkeypatch.setattr(native, "built", built)
    last = [tmp_path / "out.gguf"] * (use[0] == "quantize")
    code, _, err = run(*use, tmp_path / "typo.gguf", *last)
    assert code == 1 and "typo.gguf" in err and not builds
    hub.files, model = {"m.gguf": gguf}, tmp_path / "m.gguf"
    model.write_bytes(gguf)
    if use[0] in ("chat", "generate", "serve"):
        code, _, err = run(*use, model, "--ctx", 99_999)
        assert code == 2 and "99999" in err and not builds
    with monkeypatch.context() as bare:
        bare.setattr(probe, "find_compiler", lambda: None)
        code, _, err = run(*use, f"hf:{REPO}", *last, "--yes")
        assert code == 1 and "compiler" in err and hub.fetched() == []
    code, _, err = run(*use, f"hf:{REPO}", *last, "--yes")
    assert code == 1 and "enough" in err and hub.fetched() == ["m.gguf"] and builds
