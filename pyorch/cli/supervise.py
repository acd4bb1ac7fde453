"""Run a server as a child process: start it, wait for it, pass signals on, say why it died."""

from __future__ import annotations

import errno
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

import click

from pyorch import children, system
from pyorch.errors import SparqError

GRACE_S = children.GRACE_S
KEPT_LINES = 200  # of the log, for the reason of a death
LINE_BYTES = 4096  # a longer line comes in pieces: a whole request may be in one

_LINE = re.compile(r"(?:\d+(?:\.\d+){3} )?(?:([A-Z]) )?(.*)")  # 0.00.009.528 E text
_PLACE = re.compile(r"^\S+\.(?:c|cpp|h|cu|cuh|m):\d+: ")  # in the source
# of these, a place in the source begins what ggml_abort() says, whatever that is
_FATAL = re.compile(rf"GGML_ASSERT|what\(\):|^error[: ]|CUDA error|RPC server|{_PLACE.pattern}")


@contextmanager
def reserved(host: str, port: int) -> Iterator[tuple[str, int]]:
    """Keep the port, or any free one for 0, while the model is made ready. Nobody is answered yet:
    it does not listen. Yields the address that a name stands for, and the port.

    Raises:
        SparqError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as llama-server does
        try:
            addresses = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            place.bind((address := str(addresses[0][4][0]), port))
        except (OSError, UnicodeError) as e:
            hint = "--host takes an address of this machine, 127.0.0.1 or 0.0.0.0"
            if isinstance(e, OSError) and e.errno == errno.EADDRINUSE:
                hint = "another program listens there: --port 0 takes a free one"
            reason = getattr(e, "strerror", None) or e
            raise SparqError(f"cannot listen on {host}:{port}: {reason}", hint) from None
        yield address, place.getsockname()[1]


class Child:
    """A server as a context: it starts at the beginning, and has ended at the end.

    SIGINT, SIGTERM or SIGHUP, sent to us in that time, asks the server to end. It is asked once,
    because llama-server drops everything when it is asked twice; a second signal kills it.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        show_log: bool,
    ) -> None:
        """on_line: called with each line of the server's log, from another thread."""
        self.name = Path(argv[0]).name
        self.was_stopped = False  # asked to end
        self.killed = ""  # why, if we did
        self._argv, self._env, self._on_line, self._show = argv, env, on_line, show_log
        self._ready = False
        self._log: deque[str] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._handlers = ExitStack()

    def __enter__(self) -> Child:
        self._handlers.enter_context(system.handled(self._on_signal, system.ENDING))
        env = dict(self._env)
        if not self._show:
            # llama.cpp would call a debugger before it aborts, which takes seconds and says much
            env.setdefault("GGML_NO_BACKTRACE", "1")
        try:
            self._process = subprocess.Popen(
                children.bound(self._argv),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                umask=0o077,  # what it writes (slots, logs) is made of what people asked
                start_new_session=True,  # Ctrl-C in a terminal comes to us alone
            )
        except BaseException:
            self._handlers.close()
            raise
        self._reader.start()
        if self.was_stopped:  # while it was started
            self._process.terminate()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # an error of ours: there is nobody to look after it
        self._wait()
        self._handlers.close()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it is a context"
        return self._process

    def wait_ready(self, answers: Callable[[], bool], doing: str) -> bool:
        """Wait until the server answers. False: it was asked to end before that, and has ended.

        Args:
            answers: asks it, which may take seconds.
            doing: what it does meanwhile, which is shown if it takes long.

        Raises:
            SparqError: it ended by itself.
        """
        from rich.console import Console

        status = Console(stderr=True).status(f"{doing} ...")
        shown = not self._show and sys.stderr.isatty()
        with suppress(OSError), status if shown else nullcontext():  # a terminal may go meanwhile
            self._ready = children.wait_until(
                self.process, lambda: not self.was_stopped and answers()
            )
        if not self._ready:
            self.wait_end()
        return self._ready

    def wait_end(self) -> None:
        """Wait until the server has ended as it was asked to.

        Raises:
            SparqError: it ended by itself.
        """
        self._wait()
        if not self.was_stopped:
            raise self._death()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.was_stopped:
            self._kill("a second signal came")
            return
        self.was_stopped = True
        if self._process is not None:
            self._process.terminate()
        timer = threading.Timer(GRACE_S, self._kill, [f"it did not end in {GRACE_S:.0f} s"])
        timer.daemon = True
        timer.start()

    def _kill(self, why: str) -> None:
        if self._process is not None and self._process.returncode is None:
            self.killed = why
            self._process.kill()

    def _wait(self) -> None:
        """Wait for the end of the process, then of its log, which a child of its own may hold."""
        self.process.wait()
        self._reader.join(timeout=2)

    def _read(self) -> None:
        """Read the log to its end: a server whose pipe is full stands still."""
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            while piece := stream.readline(LINE_BYTES):
                line = piece.decode("utf-8", errors="replace").rstrip()
                self._log.append(line)
                # our terminal is gone, or a request is in the log: the pipe must not fill
                with suppress(OSError, ValueError, KeyError):
                    self._on_line(line)
                    if self._show:
                        click.echo(line, err=True)

    def _death(self) -> SparqError:
        code = self.process.returncode
        if code == system.KILLED:
            hint = "the system does so when memory runs out: lower --ctx or --parallel"
            return SparqError(f"{self.name} was killed", hint)
        more = "" if self._show else f"run with -v to see what {self.name} says"
        # the level and the text of each line; a copy, since a child of its own may still write
        log = [_LINE.fullmatch(line) for line in list(self._log)]
        lines = [(line[1], line[2].strip()) for line in log if line and line[2].strip()]
        # With this line llama.cpp ended the program itself; a debugger or the system follows
        fatal = next((text for _, text in lines if _FATAL.search(text)), "")
        fatal = _PLACE.sub("", fatal.removeprefix("error: "))
        if system.died(code):
            cut = "a file that it reads was cut short, or its disk failed: check the model"
            hint = cut if system.died(code).startswith("SIGBUS") else children.HINT
            hint = f"{hint}; {more}" if more else hint
            reason = f": {fatal}" if fatal else ""
            return SparqError(f"{self.name} {children.ended(code)}{reason}", hint)
        # the first error is the cause of others while a model is loaded; then they are of requests
        errors = [text for level, text in lines if level == "E"] or [text for _, text in lines[-1:]]
        reason = fatal or (errors[-1 if self._ready else 0] if errors else "")
        if not code or not reason:  # 0: after -- -h
            reason = f"exit code {code}"
        return SparqError(f"{self.name} ended by itself: {reason}", more)
