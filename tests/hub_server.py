"""A small model hub on this machine, over real HTTP: what huggingface-hub asks of a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pyorch.models import pull

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/repo"


def find(text: str = f"hf:{REPO}", say: Callable[[str], None] = lambda _: None) -> pull.Model:
    """What the hub has under a name that is one of its own, or a card's."""
    from pyorch.models import pull  # huggingface-hub, once the fixture `hub` has prepared it

    spec = pull.parse_spec(text)
    assert spec is not None
    return pull.find(spec, say)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Hub:
    """What the server has, and how it misbehaves."""

    repo: str = REPO
    kind: str = "model"  # or dataset
    commit: str = COMMIT  # of main and v1.0
    files: dict[str, bytes] = field(default_factory=dict)
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)  # other commits
    status: int = 200  # of every answer
    code: str = ""  # the hub's name of an error, in a header
    refuse: str = "/"  # only paths with this get `status`
    listing: bytes | None = None  # in place of the right one
    wrong: bytes = b""  # sent in place of a file's first bytes
    hold: threading.Event | None = None  # half of a file, then silence until it is set
    log: list[tuple[str, str]] = field(default_factory=list)  # verb, path
    url: str = ""

    def fetched(self) -> list[str]:
        """The files that were sent, names without their folder."""
        sent = [p for verb, p in self.log if verb == "GET" and "/resolve/" in p]
        return [path.rpartition("/")[2] for path in sent]

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """The status, the headers and the body."""
        if self.status != 200 and self.refuse in path:
            return self.status, {"X-Error-Code": self.code}, b""
        if f"/{self.repo}/" not in path:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        api = path.startswith(f"/api/{self.kind}s/")
        revision, _, name = path.partition("/revision/" if api else "/resolve/")[2].partition("/")
        commit = self.commit if revision in ("main", "v1.0") else revision
        files = self.files if commit == self.commit else self.history.get(commit)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if api:
            rows = [
                {"rfilename": name, "size": len(data), "blobId": "0" * 40}
                | {"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 1}}
                for name, data in files.items()
            ]
            listing = json.dumps({"id": self.repo, "sha": commit, "siblings": rows}).encode()
            return 200, {}, listing if self.listing is None else self.listing
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        data = files[name]
        headers = {"ETag": f'"{sha256(data)}"', "X-Repo-Commit": commit}
        return 200, headers, self.wrong + data[len(self.wrong) :]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append((self.command, path))
        status, headers, body = self.hub.answer(path)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "GET":
            return
        if (hold := self.hub.hold) and "/resolve/" in path:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            hold.wait(30)
            self.close_connection = True
        else:
            self.wfile.write(body)

    do_HEAD = do_CONNECT = do_GET


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Answer on a free port until the context ends; `hub.url` is the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        if hub.hold:
            hub.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
