"""pull: names, choices and refusals, against a small hub on this machine, over real HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_server import COMMIT, REPO, Hub, found
from huggingface_hub import constants
from tiny_gguf import write_tiny_gguf

from pyorch import native
from pyorch.errors import SparqError
from pyorch.models import cards, pull
from pyorch.models.transfer import repo_folder
from pyorch.native import probe


def get(text: str) -> pull.Model:
    model = pull.download(found(text))
    total = sum(f.n_bytes for f in model.files if not f.verified)
    seen = [(0, total)]
    pull.check(model, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (total, total)  # bytes checked
    return model


def refused(text: str) -> SparqError:
    with pytest.raises(SparqError) as e:
        get(text)
    assert "\n" not in e.value.message + e.value.hint and e.value.hint
    return e.value


def everything_below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


# ---- names ----


def test_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = pull.parse_spec
    assert parse("hf:a/b") == pull.Spec("a/b")
    assert parse("hf:a/b:Q4_K_M@v1.0") == pull.Spec("a/b", quant="Q4_K_M", revision="v1.0")
    assert parse("a/b/c/d.gguf@refs/pr/1") == pull.Spec("a/b", "c/d.gguf", revision="refs/pr/1")
    for path in ("x.gguf", "a/x.gguf", "./a/b/x.gguf", "../a/b/x.gguf", "/a/b/x.gguf", "a/b/c"):
        assert parse(path) is None
    for text in ("a/b", "a/b:Q4_K_M", "a/b@v1"):
        with pytest.raises(SparqError, match="no such file") as e:
            parse(text)
        assert e.value.hint == f"on the hub it is hf:{text}"
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    assert parse("a/b") is None
    assert parse("a/b/c.gguf") is None  # begins with a folder that is here
    assert parse("hf:a/b/c.gguf") == pull.Spec("a/b", "c.gguf")


@pytest.mark.parametrize(
    "text",
    ["hf:", "hf:a", "hf:a/b:", "hf:a/b@", "hf:a/../c.gguf", "hf:a/b/../../c.gguf", "hf:a/b/c/"]
    + ["hf:a/b@../../x", "hf:a/b@x/../../y", "hf:a/b//c.gguf", "hf:a/b/c\\d.gguf", "hf:a/b\n"],
)
def test_wrong_specs(text: str) -> None:
    with pytest.raises(SparqError) as e:
        pull.parse_spec(text)
    assert e.value.exit_code == 2 and "\n" not in e.value.message


def test_a_cards_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, card = pull.parse_spec, cards.load("llama2-7b")
    assert parse("llama2-7b") == pull.Spec(card.gguf, quant="Q4_K_M", card="llama2-7b")
    assert parse("llama2-7b:Q8_0@v2") == pull.Spec(card.gguf, "", "Q8_0", "v2", "llama2-7b")
    assert parse("llama2-7b", original=True) == pull.Spec(card.repository, card="llama2-7b")
    with pytest.raises(SparqError, match="no repository is known for certain") as e:
        parse("cerebras-gpt-6.7b")
    assert "sparq-cpp convert hf:cerebras/Cerebras-GPT-6.7B" in e.value.hint
    with pytest.raises(SparqError, match="llama2-8b: no such file, and no model") as e:
        parse("llama2-8b")
    assert "did you mean llama2-7b" in e.value.hint or "llama3-8b" in e.value.hint
    monkeypatch.chdir(tmp_path)
    Path("llama2-7b").touch()
    assert parse("llama2-7b") is None  # a file that is here


@pytest.mark.parametrize("name", [c for c in cards.names() if cards.load(c).gguf])
def test_every_card_with_files_can_be_pulled(
    hub: Hub, gguf: bytes, run: Callable[..., Any], name: str
) -> None:
    card = cards.load(name)
    hub.repo, hub.files = card.gguf, {"m-Q2_K.gguf": b"", f"m.{card.quant}.gguf": gguf}
    code, out, err = run("pull", name, terminal=True)
    assert code == 0 and Path(out.strip()).read_bytes() == gguf
    assert ("--ratio" in err) == bool(card.settings)


def test_explain_asks_the_card(hub: Hub, run: Callable[..., Any]) -> None:
    half = (2048 + 768) / 2  # a layer in two has a window: 128 and a batch, in blocks of 256
    for name, n in (("llama2-7b", 2048), ("cerebras-gpt-6.7b", 2048), ("gpt-oss-20b", half)):
        code, out, err = run("explain", "-m", name, "--ctx", "2048", "--json", "-t", "1")
        assert code == 0 and "from its card" in err and not hub.log
        result, card = json.loads(out), cards.load(name)
        assert result["model"] == card.title and result["kv_memory"] == n * card.kv_bytes


def test_a_cards_checksum(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo, hub.files = cards.load("llama2-7b").gguf, {"m-Q4_K_M.gguf": gguf}
    load = cards.load

    def with_checksum(name: str) -> cards.Card:
        return replace(load(name), files=(cards.File("m-Q4_K_M.gguf", len(gguf), checksum),))

    monkeypatch.setattr(cards, "load", with_checksum)
    checksum = "0" * 64
    error = refused("llama2-7b")
    assert "not the one on the card" in error.message and f"hf:{hub.repo}/m-Q4" in error.hint
    assert hub.fetched() == []
    checksum = hub.digest(gguf)
    blob = get("llama2-7b").path
    assert blob.read_bytes() == gguf
    # without symbolic links, the cache does not say the checksum of a file
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    blob.unlink()
    blob.write_bytes(gguf)
    assert get("llama2-7b").files[0].digest == checksum
    blob.write_bytes(gguf[:-1] + b"!")
    assert "wrong checksum" in refused("llama2-7b").message


# ---- what is chosen and fetched ----


def test_the_only_model(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files = {"README.md": b"hello", "mmproj-f16.gguf": b"x", "m-Q2_K.gguf": gguf}
    model = get(f"hf:{REPO}")
    assert model.path.read_bytes() == gguf and model.path.name == "m-Q2_K.gguf"
    assert model.path.is_relative_to(tmp_path / "home" / "hub") and model.commit == COMMIT
    assert hub.fetched() == ["m-Q2_K.gguf"]
    assert get(f"hf:{REPO}") == model and get(f"hf:{REPO}@{COMMIT}").path == model.path
    assert hub.fetched() == ["m-Q2_K.gguf"]  # and not again


def test_small_files_have_gits_checksum(hub: Hub, gguf: bytes) -> None:
    hub.files, hub.small = {"m.gguf": gguf}, True
    assert len(get(f"hf:{REPO}").files[0].digest) == 40
    hub.files, hub.wrong = {"other.gguf": gguf + b"0"}, gguf[:99] + b"0"
    assert "wrong checksum" in refused(f"hf:{REPO}").message


def test_quantisations(hub: Hub, gguf: bytes) -> None:
    names = ["m-IQ4_K.gguf", "m-Q4_K.gguf", "m-Q4_K_M.gguf", "m.q8_0.gguf", "d/n-F16.gguf"]
    hub.files = {n: gguf for n in names}
    chosen = {q: get(f"hf:{REPO}:{q}").files[0].name for q in ("Q4_K", "Q8_0", "F16", "IQ4_K")}
    assert chosen == {"Q4_K": names[1], "Q8_0": names[3], "F16": names[4], "IQ4_K": names[0]}
    assert get(f"hf:{REPO}").files[0].name == "m-Q4_K_M.gguf"
    assert get(f"{REPO}/d/n-F16.gguf").path.name == "n-F16.gguf"
    error = refused(f"hf:{REPO}:Q5_0")
    assert error.exit_code == 2 and "no Q5_0" in error.message
    assert all(n in error.hint for n in names)


def test_no_choice(hub: Hub, gguf: bytes) -> None:
    hub.files = {"a.gguf": gguf, "b.gguf": gguf}
    error = refused(f"hf:{REPO}")
    assert "2 models" in error.message and "a.gguf (" in error.hint and "b.gguf (" in error.hint
    hub.files = {"model.safetensors": b"x"}
    assert "no GGUF file" in refused(f"hf:{REPO}").message
    hub.files = {"a.gguf": gguf}
    assert "no no.gguf" in refused(f"{REPO}/no.gguf").message


def split(folder: Path) -> dict[str, bytes]:
    """A model in two parts, as far as our reader looks."""
    out = {}
    for i in (1, 2):
        path = folder / f"m-Q4_K_M-0000{i}-of-00002.gguf"
        write_tiny_gguf(path, n_layer=1, keys={"split.count": 2, "split.no": i - 1})
        name = b".weight" if i == 1 else b".second"  # no tensor is in both
        out[f"Q4_K_M/{path.name}"] = path.read_bytes().replace(b".weight", name)
    return out


def test_all_parts_of_a_split_model(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files = {**split(tmp_path), "m-Q8_0.gguf": gguf}
    names = sorted(hub.files)[:2]
    model = get(f"hf:{REPO}:q4_k_m")
    assert [f.name for f in model.files] == names and model.path.name.endswith(
        "-00001-of-00002.gguf"
    )
    assert [f.path and f.path.parent for f in model.files] == [model.path.parent] * 2
    assert get(f"{REPO}/{names[1]}").path == model.path  # any part means all
    del hub.files[names[0]]
    assert names[0] in refused(f"hf:{REPO}:Q4_K_M").message


# ---- what goes wrong on the way ----


def test_wrong_checksum_leaves_nothing(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files, hub.wrong = {"m.gguf": gguf}, gguf[:99] + bytes([gguf[99] ^ 1])
    error = refused(f"hf:{REPO}")
    assert "wrong checksum" in error.message and "deleted" in error.hint
    left = everything_below(tmp_path / "home" / "hub")
    assert not any("snapshots" in n or "blobs" in n for n in left), left
    hub.wrong = b""
    assert get(f"hf:{REPO}").path.read_bytes() == gguf


def test_not_a_model(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files = {"m.gguf": gguf[:5000]}
    error = refused(f"hf:{REPO}")
    assert "m.gguf" in error.message and "on the hub" in error.hint
    assert not any("/refs/" in n for n in everything_below(tmp_path))


@pytest.mark.parametrize(
    ("status", "headers", "said", "hint"),
    [
        (401, {}, "not found, or private", "HF_TOKEN"),
        (403, {}, "access denied", "login"),
        (403, {"X-Error-Code": "GatedRepo"}, "is gated", "accept them"),
        (404, {"X-Error-Code": "RepoNotFound"}, "not found, or private", "check the name"),
        (429, {"Retry-After": "130"}, "too many requests", "wait 130 s"),
        (429, {"RateLimit": '"api";r=0;t=222'}, "too many requests", "wait 222 s"),
        (429, {}, "too many requests", "wait a few minutes"),
        (503, {}, "answered 503", "later"),
    ],
)
def test_refusals(hub: Hub, status: int, headers: dict[str, str], said: str, hint: str) -> None:
    hub.status, hub.headers = status, headers
    error = refused(f"hf:{REPO}")
    assert said in error.message and hint in error.hint and error.exit_code == 1


def test_refused_tokens(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.status, hub.headers = (
        401,
        {"X-Error-Message": "Invalid credentials in Authorization header"},
    )
    error = refused(f"hf:{REPO}")
    assert "refused the token" in error.message and "hf_secret" not in error.message + error.hint
    hub.status, hub.headers = 404, {"X-Error-Code": "RepoNotFound"}
    assert "your token may not see it" in refused(f"hf:{REPO}").message


def test_no_such_revision(hub: Hub) -> None:
    assert "no revision v9" in refused(f"hf:{REPO}@v9").message


def test_no_hub_at_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.api = b"<html>log in to this network</html>"
    assert "no usable answer" in refused(f"hf:{REPO}").message
    hub.api = json.dumps({"id": REPO, "sha": "../../x", "siblings": []}).encode()
    assert "not a commit" in refused(f"hf:{REPO}").message
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    error = refused(f"hf:{REPO}")
    assert "no usable answer" in error.message and "HF_ENDPOINT" in error.hint


def test_no_disk_space(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m.gguf": gguf}
    usage = SimpleNamespace(total=10**9, used=10**9, free=len(gguf) - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    error = refused(f"hf:{REPO}")
    assert "only" in error.message and "HF_HOME" in error.hint
    assert hub.fetched() == []


# ---- names with tricks ----


@pytest.mark.parametrize(
    "name",
    [
        "../../../../evil.gguf",
        "/tmp/evil.gguf",
        "a/../../evil.gguf",
        "a\\..\\evil.gguf",
        "a\x1b.gguf",
        "a\0.gguf",
        "C:evil.gguf",
        "x" * 300 + ".gguf",
        "~/../../evil.gguf",
    ],
)
def test_names_cannot_leave_the_cache(hub: Hub, gguf: bytes, tmp_path: Path, name: str) -> None:
    hub.files = {name: gguf, "m-Q4_K_M.gguf": gguf}
    before = everything_below(tmp_path)
    error = refused(f"hf:{REPO}")
    assert "leads out of the cache" in error.message and "\x1b" not in error.message
    assert hub.fetched() == [] and everything_below(tmp_path) == before


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("checksum", ["../../../../evil", "a" * 63, "A" * 64, "None"])
def test_a_checksum_cannot_leave_the_cache(
    hub: Hub, gguf: bytes, tmp_path: Path, checksum: str, small: bool
) -> None:
    hub.files, hub.checksum, hub.small = {"m.gguf": gguf}, checksum, small
    assert "no checksum" in refused(f"hf:{REPO}").message
    assert hub.fetched() == [] and not everything_below(tmp_path)


@pytest.mark.parametrize("link", ["snapshots/COMMIT/sub", "snapshots", "blobs", "refs"])
def test_a_link_in_the_cache_leads_nowhere(
    hub: Hub, gguf: bytes, tmp_path: Path, link: str
) -> None:
    hub.files = {"sub/dir/m.gguf": gguf}
    outside, folder = tmp_path / "outside", repo_folder(REPO)
    outside.mkdir()
    path = folder / link.replace("COMMIT", COMMIT)
    path.parent.mkdir(parents=True)
    path.symlink_to(outside)
    assert "leads out of the cache" in refused(f"hf:{REPO}").message
    assert list(outside.iterdir()) == [] and (link == "refs") == (hub.fetched() != [])


def test_a_link_in_place_of_a_download_leads_nowhere(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files, mine = {"m.gguf": gguf}, tmp_path / "mine"
    mine.write_bytes(b"mine")
    part = repo_folder(REPO) / "blobs" / f"{hub.digest(gguf)}.incomplete"
    part.parent.mkdir(parents=True)
    part.symlink_to(mine)
    with pytest.raises(SparqError, match="symbolic links"):
        get(f"hf:{REPO}")
    assert mine.read_bytes() == b"mine"


def test_a_damaged_file_outside_of_the_cache_stays(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files = {"m.gguf": gguf}
    path, mine = get(f"hf:{REPO}").path, tmp_path / "mine.gguf"
    mine.write_bytes(b"not that model")
    path.unlink()
    path.symlink_to(mine)
    assert "wrong checksum" in refused(f"hf:{REPO}").message
    assert mine.exists() and not path.exists()
    assert get(f"hf:{REPO}").path.read_bytes() == gguf


# ---- revisions ----


def test_a_pinned_revision_stays(hub: Hub, gguf: bytes) -> None:
    hub.files = {"m.gguf": gguf}
    old = get(f"hf:{REPO}@{COMMIT}")
    assert get(f"hf:{REPO}@v1.0").path == old.path and hub.fetched() == ["m.gguf"]
    hub.history[COMMIT], hub.commit = hub.files, "f" * 40
    hub.files = {"m.gguf": gguf[:-1] + b"!"}
    new = get(f"hf:{REPO}")
    assert new.commit == "f" * 40 and new.path.read_bytes() == hub.files["m.gguf"]
    again = get(f"hf:{REPO}@{COMMIT}")
    assert again.path == old.path and again.path.read_bytes() == gguf
    assert hub.fetched() == ["m.gguf"] * 2


# ---- offline ----


def test_offline(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m-Q8_0.gguf": gguf, "m-F16.gguf": gguf + b"0"}
    online = get(f"hf:{REPO}:Q8_0")
    seen = len(hub.log)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get(f"hf:{REPO}").files == online.files  # the only one that is here
    assert get(f"hf:{REPO}@{COMMIT}").path == online.path
    assert "no F16" in refused(f"hf:{REPO}:F16").message
    error = refused("hf:org/other")
    assert "not in the cache" in error.message and "HF_HUB_OFFLINE" in error.hint
    assert len(hub.log) == seen
    online.path.resolve().write_bytes(gguf[:-1] + b"!")
    assert "wrong checksum" in refused(f"hf:{REPO}").message


@pytest.mark.parametrize("fault", ["no network", "busy"])
def test_without_a_network_the_cache_is_used(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """As huggingface-hub does itself, and with a line that says so."""
    hub.files = {"m-Q8_0.gguf": gguf}
    online = get(f"hf:{REPO}")
    if fault == "no network":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        hub.status = 503
    said: list[str] = []
    assert found(say=said.append).files == online.files and "the hub cannot be reached" in said[-1]
    assert "hub" in refused("hf:org/other").message  # what is not here still needs it
    hub.status = 401
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    assert "not found, or private" in refused(f"hf:{REPO}").message  # that is an answer


# ---- the command ----


def test_command(
    hub: Hub,
    gguf: bytes,
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.files = {"m.gguf": gguf}
    code, out, err = run("pull", f"hf:{REPO}")
    assert code == 0 and Path(out.strip()).read_bytes() == gguf
    assert err.startswith("m.gguf, ") and len(err.splitlines()) == 1
    assert run("pull", f"{REPO}/m.gguf") == (0, out, "")
    assert run("pull", out.strip()) == (0, out, "")  # a file that is here
    err = run("pull", f"hf:{REPO}", terminal=True)[2]
    assert f"next: sparq-cpp chat -m hf:{REPO} --ratio 1/8" in err
    assert "`sparq-cpp models` lists" in run("chat")[2]
    code, out, err = run("pull", str(tmp_path / "no.gguf"))
    assert (code, out) == (1, "") and "no such file" in err


def test_a_model_is_pulled_on_demand(
    hub: Hub, gguf: bytes, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.usefixtures("native_lib_dir")
def test_the_settings_of_a_card_that_was_named(
    hub: Hub, gguf: bytes, run: Callable[..., Any]
) -> None:
    hub.repo, hub.files = cards.load("llama2-7b").gguf, {"m.Q4_K_M.gguf": gguf}
    line = ("generate", "-p", "x", "-n", "1", "--ctx", "64", "-t", "1", "--yes", "-m", "llama2-7b")
    assert "attention is exact; for llama2-7b try --ratio 1/4" in run(*line)[2]


def test_bench_takes_the_same_names(
    hub: Hub, gguf: bytes, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files, plans = {"m.gguf": gguf}, []

    def measure(_: object, options: Any) -> None:
        plans.append(options)
        raise SparqError("enough")

    monkeypatch.setattr("pyorch.cli.bench.measurement.run", measure)
    code, _, err = run("bench", "-m", f"hf:{REPO}")
    assert code == 1 and "is not downloaded" in err and not plans
    code, _, err = run("bench", "--yes", "-d", 64, "-m", f"hf:{REPO},{REPO}/m.gguf")
    assert "enough" in err and [m.read_bytes() for m in plans[0].models] == [gguf] * 2


def test_the_environment_is_respected(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE, which are read as a process starts."""
    hub.files = {"m.gguf": gguf}
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "elsewhere")}
    env.pop("HF_HUB_CACHE", None)
    args = [sys.executable, "-m", "pyorch", "pull", f"hf:{REPO}"]
    first = subprocess.run(args, env=env, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert Path(first.stdout.strip()).is_relative_to(tmp_path / "elsewhere")
    seen = len(hub.log)
    again = subprocess.run(args, env={**env, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert len(hub.log) == seen


USES = [  # every command that needs a model and the library
    ("chat", "-m"),
    ("generate", "-p", "x", "-m"),
    ("serve", "--port", "0", "-m"),
    ("calibrate", "--ctx", "512", "-m"),
    ("eval", "repetition", "--ctx", "512", "-m"),
    ("quantize",),
    ("bench", "-d", "2048", "-m"),
]


def test_explain_asks_the_card_where_another_file_is_here(
    hub: Hub, gguf: bytes, run: Callable[..., Any]
) -> None:
    """Another quantisation, or the file as it was before the repository changed."""
    hub.repo = cards.load("llama2-7b").gguf
    hub.files = {"m.Q4_K_M.gguf": gguf, "m.Q8_0.gguf": gguf + bytes(1)}
    explain = ("explain", "-m", "llama2-7b", "--ctx", "2048", "--json", "-t", "1")
    get("llama2-7b:Q8_0")
    code, out, err = run(*explain)
    assert code == 0 and "from its card" in err and json.loads(out)["model"] != "tiny", err
    get("llama2-7b")
    code, out, err = run(*explain)
    assert code == 0 and json.loads(out)["model"] == "tiny" and "card" not in err
    hub.commit, hub.files = "f" * 40, {"m.Q4_K_M.gguf": gguf + gguf}
    code, out, err = run(*explain)
    assert code == 0 and "from its card" in err, err


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is built, and building is only noted."""
    builds: list[str] = []

    def built(stock: bool = False, tools: tuple[str, ...] = ()) -> None:
        builds.append("built")
        raise SparqError("enough")

    monkeypatch.setattr(native, "find", lambda **_: None)
    monkeypatch.setattr(native, "built", built)
    return builds


@pytest.mark.parametrize("use", USES, ids=[u[0] for u in USES])
def test_what_is_wrong_is_said_before_anything_is_built_or_downloaded(
    hub: Hub,
    gguf: bytes,
    run: Callable[..., Any],
    tmp_path: Path,
    unbuilt: list[str],
    monkeypatch: pytest.MonkeyPatch,
    use: tuple[str, ...],
) -> None:
    last = [tmp_path / "out.gguf"] * (use[0] == "quantize")
    code, _, err = run(*use, tmp_path / "typo.gguf", *last)
    assert code == 1 and "no such file" in err and not unbuilt
    hub.files, model = {"m.gguf": gguf}, tmp_path / "m.gguf"
    model.write_bytes(gguf)
    if use[0] in ("chat", "generate", "serve"):
        code, _, err = run(*use, model, "--ctx", 99_999)
        assert code == 2 and "context 99999 is beyond" in err and not unbuilt
    with monkeypatch.context() as bare:
        bare.setattr(probe, "find_compiler", lambda: None)
        code, _, err = run(*use, f"hf:{REPO}", *last, "--yes")
        assert code == 1 and "no C and C++ compiler" in err and hub.fetched() == []
    code, _, err = run(*use, f"hf:{REPO}", *last, "--yes")
    assert code == 1 and "error: enough" in err and hub.fetched() == ["m.gguf"] and unbuilt
