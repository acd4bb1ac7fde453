"""A small model hub on this machine, over real HTTP, and all the ways in which it misbehaves."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pyorch.models import pull

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/repo"


def found(text: str = f"hf:{REPO}", say: Callable[[str], None] = lambda _: None) -> pull.Model:
    """What the hub has under a name that is one of its own, or a card's."""
    from pyorch.models import pull  # huggingface-hub, once the fixture `hub` has prepared it

    spec = pull.parse_spec(text)
    assert spec is not None
    return pull.find(spec, say)


@dataclass
class Hub:
    """What the server has and how it misbehaves."""

    repo: str = REPO
    kind: str = "model"  # or dataset
    commit: str = COMMIT
    files: dict[str, bytes] = field(default_factory=dict)
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit -> files
    small: bool = False  # files kept by git itself, without a SHA-256
    status: int = 200  # of every answer
    headers: dict[str, str] = field(default_factory=dict)  # of an answer that is no 200
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)  # then as usual
    refuse: str = "/resolve/"  # only paths with this
    breaks: list[int] = field(default_factory=list)  # bytes of a file, then the connection is cut
    reset: bool = False  # cut by a reset, not by an end
    hold_after: int | None = None  # bytes of a file, then silence until `go_on` is set
    go_on: threading.Event = field(default_factory=threading.Event)
    block_s: float = 0.0  # between blocks of 1000 bytes
    no_ranges: bool = False  # always the whole file
    shift: int = 0  # the part that is sent begins so many bytes off
    more: bytes = b""  # sent after the end of a file
    wrong: bytes = b""  # sent in place of a file's first bytes
    checksum: str = ""  # in the listing, in place of the right one
    sizes: dict[str, int] = field(default_factory=dict)  # in place of the right ones
    api: bytes | None = None  # in place of the listing
    elsewhere: str = ""  # a server that files are redirected to
    log: list[tuple[str, str, str, str]] = field(default_factory=list)  # verb, path, range, token
    at_once: int = 0  # the most files that were being sent at a time
    url: str = ""
    sending: int = 0

    def digest(self, data: bytes) -> str:
        if self.small:
            return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return hashlib.sha256(data).hexdigest()

    def listing(self, commit: str) -> bytes:
        if self.api is not None:
            return self.api
        siblings = []
        for name, data in self.at(commit).items():
            size = self.sizes.get(name, len(data))
            row: dict[str, Any] = {"rfilename": name, "size": size, "blobId": "0" * 40}
            checksum = self.checksum or self.digest(data)
            if self.small:
                row["blobId"] = checksum
            else:
                row["lfs"] = {"sha256": checksum, "size": size, "pointerSize": 1}
            siblings.append(row)
        return json.dumps({"id": self.repo, "sha": commit, "siblings": siblings}).encode()

    def at(self, commit: str) -> dict[str, bytes]:
        return self.files if commit == self.commit else self.history.get(commit, {})

    def sent(self) -> list[tuple[str, str]]:
        """(name, range) of the files that were asked for, names without their folder."""
        return [
            (path.rpartition("/")[2], asked)
            for verb, path, asked, _ in self.log
            if verb == "GET" and "/resolve/" in path
        ]

    def fetched(self) -> list[str]:
        return [name for name, _ in self.sent()]


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
        if hub.refusals and hub.refuse in path:
            status, headers = hub.refusals.pop(0)
            return self.reply(status, headers, b"", whole)
        if path.startswith(api := f"/api/{hub.kind}s/{hub.repo}/revision/"):
            revision = path.removeprefix(api)
            commit = hub.commit if revision in ("main", "v1.0") else revision
            if commit == hub.commit or commit in hub.history:
                body, kind = hub.listing(commit), {"Content-Type": "application/json"}
                return self.reply(200, kind, body, whole)
            return self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"", whole)
        folder = "/datasets/" if hub.kind == "dataset" else "/"
        revision, _, name = path.removeprefix(f"{folder}{hub.repo}/resolve/").partition("/")
        commit = hub.commit if revision in ("main", "v1.0") else revision
        data = hub.at(commit).get(name)
        if data is None:
            return self.reply(404, {"X-Error-Code": "RepoNotFound"}, b"", whole)
        headers = {"ETag": f'"{hub.digest(data)}"', "X-Repo-Commit": commit}
        if hub.elsewhere and whole:
            return self.reply(302, {**headers, "Location": hub.elsewhere + self.path}, b"", whole)
        return self.send_file(data, asked, headers, whole)

    def send_file(self, data: bytes, asked: str, headers: dict[str, str], whole: bool) -> None:
        hub = self.hub
        data = hub.wrong + data[len(hub.wrong) :]
        first, last, status = 0, len(data) - 1, 200
        if asked and not hub.no_ranges:
            low, _, high = asked.removeprefix("bytes=").partition("-")
            first, last, status = int(low) + hub.shift, int(high or last), 206
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        body = data[first : last + 1] + hub.more
        headers["Content-Length"] = str(len(body))
        if whole and hub.breaks:
            body, self.close_connection = body[: hub.breaks.pop(0)], True
        self.reply(status, headers, b"", whole)
        if not whole:
            return
        hub.sending += 1
        hub.at_once = max(hub.at_once, hub.sending)
        try:
            for i in range(0, len(body), 1000):
                if hub.hold_after is not None and i >= hub.hold_after:
                    hub.go_on.wait(30)
                time.sleep(hub.block_s)
                self.wfile.write(body[i : i + 1000])
                self.wfile.flush()
        except OSError:  # the client went away
            self.close_connection = True
        hub.sending -= 1
        if self.close_connection and hub.reset:
            time.sleep(0.05)  # what was sent arrives first
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


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
        hub.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
