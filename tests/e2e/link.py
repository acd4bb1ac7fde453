"""Workers on this machine, and a network to them: slow, counted."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyorch import children, native
from pyorch.engine import machines
from pyorch.errors import SparqError

PROGRAM = "ggml-rpc-server"

_PIECE = 1 << 16


@contextmanager
def local_worker(
    log: Path, threads: int = 1, stock: bool = False
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(HOST:PORT, the process) of a worker on a free port, which answers.

    Raises:
        SparqError: it does not start; the log says why.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = native.built(stock=stock, tools=(PROGRAM,)) / PROGRAM
    argv = [program, "-H", "127.0.0.1", "-p", port, "-t", threads]
    env, endpoint = os.environ | native.waiting(), f"127.0.0.1:{port}"
    with (
        log.open("wb") as out,
        children.running(list(map(str, argv)), env=env, stdout=out, stderr=out) as process,
    ):
        if not children.wait_until(process, lambda: machines.answers(endpoint), seconds=30):
            code = process.poll()
            how = "does not answer" if code is None else children.ended(code)
            raise SparqError(f"{PROGRAM} {how}", f"log: {log}")
        yield endpoint, process


class Link:
    """Passes every connection to `endpoint` on, as a context; `n_sent` are the bytes sent there.

    Args:
        endpoint: HOST:PORT.
        rate: bytes per second in either direction.
    """

    def __init__(self, endpoint: str, rate: float = float("inf")) -> None:
        host, _, port = endpoint.partition(":")
        self._target, self._rate = (host, int(port)), rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.n_sent = 0
        self._open: list[socket.socket] = [self._listener]

    def __enter__(self) -> Link:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # nobody is behind it any more
                    near.close()
                    continue
                for one in (near, far):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                if target.getpeername() == self._target:
                    self.n_sent += len(piece)
                time.sleep(len(piece) / self._rate)
                target.sendall(piece)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
