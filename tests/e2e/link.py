"""Workers on this machine, and a network to them: slow, counted."""

from __future__ import annotations

import os
import queue
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

Waiting = queue.Queue[tuple[float, bytes]]  # pieces, and when they are to arrive
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
    """Passes every connection to `endpoint` on, as a context; `there` and `back` count bytes.

    Args:
        endpoint: HOST:PORT.
        rate: bytes per second in either direction; 0 is no limit.
    """

    def __init__(self, endpoint: str, rate: float = 0.0) -> None:
        host, _, port = endpoint.partition(":")
        self._target = host, int(port)
        self._rate = rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.there = self.back = 0
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
                for ends in ((near, far, True), (far, near, False)):
                    waiting: Waiting = queue.Queue()
                    for work in (self._take, self._give):
                        arguments = (*ends, waiting)
                        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _take(
        self, source: socket.socket, _: socket.socket, is_there: bool, waiting: Waiting
    ) -> None:
        """Read, and say when each piece is to arrive."""
        free_at = 0.0
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                if is_there:
                    self.there += len(piece)
                else:
                    self.back += len(piece)
                took = len(piece) / self._rate if self._rate else 0.0
                free_at = max(free_at, time.perf_counter()) + took
                waiting.put((free_at, piece))
        waiting.put((0.0, b""))

    def _give(
        self, _: socket.socket, target: socket.socket, is_there: bool, waiting: Waiting
    ) -> None:
        """Write each piece at its time."""
        with suppress(OSError):
            while True:
                due, piece = waiting.get()
                if not piece:
                    break
                if (rest := due - time.perf_counter()) > 0:
                    time.sleep(rest)
                target.sendall(piece)
            target.shutdown(socket.SHUT_RDWR)
