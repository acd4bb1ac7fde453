"""pull: against a small hub on this machine, over real HTTP."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants
from tiny_gguf import write_tiny_gguf

import pyorch.cli
from pyorch.errors import SparqError
from pyorch.models import pull

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/repo"


@dataclass
class Hub:
    """What the server has and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    small: bool = False  # files kept by git itself, without a SHA-256
    status: int = 200  # of every answer
    headers: dict[str, str] = field(default_factory=dict)  # of an answer that is no 200
    break_after: int = 0  # bytes of a file, then the connection is cut, once
    wrong: bytes = b""  # sent in place of a file's first bytes
    etag: str = ""  # in place of the right one
    api: bytes | None = None  # in place of the listing
    log: list[tuple[str, str, str, str]] = field(default_factory=list)  # verb, path, range, token
    url: str = ""

    def digest(self, data: bytes) -> str:
        if self.small:
            return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return hashlib.sha256(data).hexdigest()

    def listing(self) -> bytes:
        if self.api is not None:
            return self.api
        siblings = []
        for name, data in self.files.items():
            row: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
            if self.small:
                row["blobId"] = self.digest(data)
            else:
                row["lfs"] = {"sha256": self.digest(data), "size": len(data), "pointerSize": 1}
            siblings.append(row)
        return json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode()

    def fetched(self) -> list[str]:
        """Names of the files that were sent, without their folder."""
        sent = [path for verb, path, _, _ in self.log if verb == "GET" and "/resolve/" in path]
        return [path.rpartition("/")[2] for path in sent]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def reply(self, status: int, headers: dict[str, str], body: bytes, whole: bool) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if whole:
            self.wfile.write(body)

    def answer(self, whole: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        asked = self.headers.get("Range", "")
        hub.log.append((self.command, path, asked, self.headers.get("Authorization", "")))
        if hub.status != 200:
            return self.reply(hub.status, hub.headers, b"", whole)
        if path.startswith(f"/api/models/{REPO}/revision/"):
            if path.endswith(("/main", "/" + COMMIT)):
                return self.reply(200, {"Content-Type": "application/json"}, hub.listing(), whole)
            return self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"", whole)
        data = hub.files.get(path.removeprefix(f"/{REPO}/resolve/{COMMIT}/"))
        if data is None:
            return self.reply(404, {"X-Error-Code": "RepoNotFound"}, b"", whole)
        headers = {"ETag": f'"{hub.etag or hub.digest(data)}"', "X-Repo-Commit": COMMIT}
        data = hub.wrong + data[len(hub.wrong) :]
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if whole and hub.break_after:
            headers["Content-Length"] = str(len(data) - start)
            data, hub.break_after = data[: start + hub.break_after], 0
            self.close_connection = True
        return self.reply(206 if start else 200, headers, data[start:], whole)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one small model, and an empty cache. All that huggingface-hub reads at import."""
    hub = Hub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    cache = tmp_path / "home" / "hub"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield hub
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", n_layer=1).read_bytes()


def get(text: str) -> pull.Model:
    spec = pull.parse_spec(text)
    assert spec is not None
    model = pull.download(pull.find(spec), quiet=True)
    seen = [(0, sum(f.n_bytes for f in model.files))]
    pull.check(model, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (seen[0][1], seen[0][1])  # bytes checked
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
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
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
    found = {q: get(f"hf:{REPO}:{q}").files[0].name for q in ("Q4_K", "Q8_0", "F16", "IQ4_K")}
    assert found == {"Q4_K": names[1], "Q8_0": names[3], "F16": names[4], "IQ4_K": names[0]}
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
        write_tiny_gguf(path, n_layer=1, **{"split.count": 2})
        out[f"Q4_K_M/{path.name}"] = path.read_bytes()
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


def test_a_broken_connection_is_resumed(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # written as they arrive
    hub.files, hub.break_after = {"m.gguf": gguf}, 1000
    assert get(f"hf:{REPO}").path.read_bytes() == gguf
    ranges = [r for verb, path, r, _ in hub.log if verb == "GET" and path.endswith(".gguf")]
    assert ranges[0] == "" and len(ranges) == 2
    assert ranges[1] == "bytes=1000-"


def test_wrong_checksum_leaves_nothing(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files, hub.wrong = {"m.gguf": gguf}, gguf[:99] + bytes([gguf[99] ^ 1])
    error = refused(f"hf:{REPO}")
    assert "wrong checksum" in error.message and "deleted" in error.hint
    left = everything_below(tmp_path / "home" / "hub")
    assert not any("snapshots" in n or "blobs" in n for n in left), left
    hub.wrong = b""
    assert get(f"hf:{REPO}").path.read_bytes() == gguf


def test_a_file_damaged_in_the_cache_is_found(hub: Hub, gguf: bytes) -> None:
    hub.files = {"m.gguf": gguf}
    path = get(f"hf:{REPO}").path
    path.resolve().write_bytes(gguf[:-1] + bytes([gguf[-1] ^ 1]))
    assert "wrong checksum" in refused(f"hf:{REPO}").message
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
        (429, {"Retry-After": "7"}, "too many requests", "wait 7 s"),
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
    assert "no commit" in refused(f"hf:{REPO}").message
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    error = refused(f"hf:{REPO}")
    assert "no usable answer" in error.message and "HF_ENDPOINT" in error.hint


def test_the_token_is_sent(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m.gguf": gguf}
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    get(f"hf:{REPO}")
    assert {token for _, _, _, token in hub.log} == {"Bearer hf_secret"}


def test_no_disk_space(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m.gguf": gguf}
    usage = SimpleNamespace(total=10**9, used=10**9, free=len(gguf) - 1)
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda folder: usage)
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
    ],
)
def test_names_cannot_leave_the_cache(hub: Hub, gguf: bytes, tmp_path: Path, name: str) -> None:
    hub.files = {name: gguf, "m-Q4_K_M.gguf": gguf}
    before = everything_below(tmp_path)
    error = refused(f"hf:{REPO}")
    assert "leads out of the cache" in error.message and "\x1b" not in error.message
    assert hub.fetched() == [] and everything_below(tmp_path) == before


def test_an_etag_cannot_leave_the_cache(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    hub.files, hub.etag = {"m.gguf": gguf}, "../../../../evil"
    assert "contradicts itself" in refused(f"hf:{REPO}").message
    assert hub.fetched() == [] and not any("evil" in n for n in everything_below(tmp_path))


# ---- offline ----


def test_offline(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m-Q8_0.gguf": gguf, "m-F16.gguf": gguf + b"0"}
    online = get(f"hf:{REPO}:Q8_0")
    seen = len(hub.log)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get(f"hf:{REPO}").files == online.files  # the only one that is here
    assert get(f"hf:{REPO}@{COMMIT}").path == online.path
    assert "no F16" in refused(f"hf:{REPO}:F16").message
    assert "not in the cache" in refused("hf:org/other").message
    assert len(hub.log) == seen
    online.path.resolve().write_bytes(gguf[:-1] + b"!")
    assert "wrong checksum" in refused(f"hf:{REPO}").message


def test_offline_without_a_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = refused(f"hf:{REPO}")
    assert "not in the cache" in error.message and "HF_HUB_OFFLINE" in error.hint
    assert hub.log == []


# ---- the command ----


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run_command(*args: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["sparq-cpp", *args])
        with pytest.raises(SystemExit) as e:
            pyorch.cli.main()
        return (e.value.code or 0, *capsys.readouterr())

    return run_command


def test_command(hub: Hub, gguf: bytes, run: Callable[..., Any], tmp_path: Path) -> None:
    hub.files = {"m.gguf": gguf}
    code, out, err = run("pull", f"hf:{REPO}")
    assert code == 0 and Path(out.strip()).read_bytes() == gguf
    assert err.startswith("m.gguf, ") and len(err.splitlines()) == 1
    code, text, err = run("pull", f"{REPO}/m.gguf", "--json", "--quiet")
    r = json.loads(text)
    assert code == 0 and err == "" and r["path"] == out.strip() and r["downloaded_bytes"] == 0
    assert r["files"] == [{"name": "m.gguf", "bytes": len(gguf), "checksum": hub.digest(gguf)}]
    assert run("pull", out.strip()) == (0, out, "")  # a file that is here
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
    with monkeypatch.context() as terminal:
        for stream in (sys.stdin, sys.stderr):
            terminal.setattr(stream, "isatty", lambda: True)
        terminal.setattr("click.termui.visible_prompt_func", lambda prompt: "n")
        assert run(*command)[0] == 130 and hub.fetched() == []
    code, out, _ = run(*command, "--yes")
    assert code == 0 and json.loads(out)["model"] == "tiny" and hub.fetched() == ["m.gguf"]
    assert run(*command)[0] == 0 and hub.fetched() == ["m.gguf"]  # it is here now


def test_the_environment_is_respected(hub: Hub, gguf: bytes, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE, which are read as a process starts."""
    hub.files = {"m.gguf": gguf}
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "elsewhere")}
    env.pop("HF_HUB_CACHE", None)
    code = "from pyorch.cli import main; main()"
    args = [sys.executable, "-c", code, "pull", f"hf:{REPO}"]
    first = subprocess.run(args, env=env, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert Path(first.stdout.strip()).is_relative_to(tmp_path / "elsewhere")
    seen = len(hub.log)
    again = subprocess.run(args, env={**env, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert len(hub.log) == seen
