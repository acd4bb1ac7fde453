"""llama-server of our build as a child of a test, and requests to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

READY_S = 60  # that a server has to load its model


def resident(pid: int | str = "self") -> int:
    """Bytes of a process in memory."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("SPARQ_ATTN", "LLAMA_"))}


@contextmanager
def serving(tools: Path, log: Path, *args: object) -> Iterator[str]:
    """A server on a free port: its address. At the end it has ended, and written its `log`."""
    with started(tools, log, *args) as (url, _):
        yield url


@contextmanager
def started(
    tools: Path, log: Path, *args: object, ends: int = 0, by: int = signal.SIGTERM
) -> Iterator[tuple[str, int]]:
    """The same, with the number of its process. ends: how, -9 if the test kills it; by: what."""
    line = [tools / "llama-server", "--host", "127.0.0.1", "--port", 0, *args]
    with (
        log.open("w") as f,
        subprocess.Popen(
            [str(a) for a in line],
            env=clean(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=f,
        ) as server,
    ):
        try:
            yield ready(server, log), server.pid
            server.send_signal(by)
            assert server.wait(60) == ends, log.read_text(errors="replace")
        finally:
            server.kill()


def ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The address that the log names, once the model is loaded."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end and server.poll() is None:
        if found := re.search(r"listening on (http://\S+)\n", log.read_text(errors="replace")):
            with suppress(OSError):  # not yet: 503, or nobody listens
                if ask(f"{found[1]}/health") == {"status": "ok"}:
                    return found[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text(errors="replace"))


def text(url: str, value: dict[str, Any] | list[Any] | None = None) -> str:
    """The answer to a request, which is a POST with a `value`."""
    body = None if value is None else json.dumps(value).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return answer.read().decode()


def ask(url: str, value: dict[str, Any] | None = None) -> dict[str, Any]:
    return json.loads(text(url, value))
