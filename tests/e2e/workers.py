"""Workers of our build as children of a test."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyorch import native
from pyorch.engine import machines
from pyorch.errors import SparqError

PROGRAM = "ggml-rpc-server"


@contextmanager
def worker(log: Path, threads: int = 1) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(HOST:PORT, the process) of a worker that answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [native.built(tools=(PROGRAM,)) / PROGRAM, "-H", "127.0.0.1", "-p", port, "-t", threads]
    with log.open("wb") as out:
        process = subprocess.Popen(list(map(str, argv)), stdout=out, stderr=out)
    try:
        endpoint, until = f"127.0.0.1:{port}", time.monotonic() + 30
        while True:
            try:
                machines.ask(endpoint)
                break
            except SparqError:
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.05)
        yield endpoint, process
    finally:
        process.kill()
        process.wait()
