"""llama-server of our build as a child of a test, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from pathlib import Path
from typing import Any

READY_S = 60  # that a server has to load its model
HANGS_S = 300  # a request that takes longer; of the real model three others come before it


def resident(pid: int | str = "self") -> int:
    """Bytes of a process in memory, counted page by page. The sum in `statm` lags behind."""
    line = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1]
    return int(line.split()[1]) * 1024


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("SPARQ_ATTN", "LLAMA_"))}


def gone(pid: int) -> bool:
    """Whether no process has this id, a moment later at most."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")
            if not (state.is_file() and state.read_text().split(") ")[1].startswith("Z")):
                time.sleep(0.02)
                continue
        return True
    return False


@contextmanager
def serving(tools: Path, log: Path, *args: object, **env: str) -> Iterator[str]:
    """A server on a free port: its address. At the end it has ended, and written its `log`."""
    with started(tools, log, *args, **env) as (url, _):
        yield url


@contextmanager
def started(
    tools: Path, log: Path, *args: object, ends: int = 0, by: int = signal.SIGTERM, **env: str
) -> Iterator[tuple[str, int]]:
    """The same, with the number of its process. ends: how, -9 if the test kills it; by: what."""
    line = [tools / "llama-server", "--host", "127.0.0.1", "--port", 0, *args]
    with (
        log.open("w") as f,
        subprocess.Popen(
            [str(a) for a in line],
            env=clean() | env,
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
        if match := re.search(r"listening on (http://\S+)\n", log.read_text(errors="replace")):
            with suppress(OSError):  # not yet: 503, or nobody listens
                if ask(f"{match[1]}/health") == {"status": "ok"}:
                    return match[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text(errors="replace"))


def answered(url: str, value: Any = None, **headers: str) -> tuple[Message, str]:
    """The headers and the text of an answer to a request, which is a POST with a `value`: JSON, or
    bytes."""
    body = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return answer.headers, answer.read().decode()


def text(url: str, value: dict[str, Any] | list[Any] | None = None) -> str:
    return answered(url, value)[1]


def ask(url: str, value: dict[str, Any] | None = None) -> dict[str, Any]:
    return json.loads(text(url, value))


def metrics(url: str) -> dict[str, float]:
    lines = re.findall(r"^(\S+:\S+) (\S+)$", text(f"{url}/metrics"), re.M)
    return {name: float(value) for name, value in lines}


def complete(url: str, prompt: Any, **more: Any) -> dict[str, Any]:
    """A greedy reply of 20 tokens, unless `more` says otherwise."""
    asked = {"prompt": prompt, "n_predict": 20, "temperature": 0, "ignore_eos": True}
    return ask(f"{url}/completion", asked | more)


def sent(
    url: str, body: dict[str, Any], stream: bool = True, **headers: str
) -> http.client.HTTPConnection:
    """The connection of a reply, streamed or whole; who closes it hangs up."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=HANGS_S)
    connection.request("POST", "/completion", json.dumps(body | {"stream": stream}), headers)
    return connection


def events(connection: http.client.HTTPConnection) -> Iterator[dict[str, Any]]:
    with connection.getresponse() as answer:
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
