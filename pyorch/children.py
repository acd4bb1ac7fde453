"""Processes that we start: how a Python begins, run one for its output, read its lines, end it for
certain, wait until a server answers, and say how one ended."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pyorch import system

# what to do about a process that the CPU or llama.cpp itself ended
HINT = "run sparq-cpp doctor and include its output in a bug report"
GRACE_S = 10.0  # a process that was asked to end and still runs after this time is killed
POLL_S = 0.1

Argv = Sequence[str | Path]
Done = subprocess.CompletedProcess[str]

# `python -m` looks for modules in the working folder first: somebody's random.py would run there
_RUN = """\
import sys
sys.path = [folder for folder in sys.path if folder]
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

# What `bound` runs before the program: where there is prctl, the system kills it when we are gone.
# `preexec_fn` runs Python between fork and exec, which may hang beside threads.
_BOUND = """\
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl:
    prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def python(module: str, *args: str) -> list[str]:
    """The command that runs a module of ours, and no file that lies in the working folder."""
    return [sys.executable, "-c", _RUN, module, *args]


def bound(argv: Argv) -> Argv:
    """The same command as a process that does not outlive us, where the system can see to it."""
    first = [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid())]
    return argv if system.IS_WINDOWS else [*first, *argv]


def ended(code: int) -> str:
    """How a process with this `returncode` of `subprocess` ended, as a phrase for an error:
    "was ended by SIGILL (illegal instruction)" or "ended with exit code 3"."""
    how = system.died(code)
    return f"was ended by {how}" if how else f"ended with exit code {code}"


def reason(done: Done) -> str:
    """Why a program failed, in one line: the last error of pip's, else the last line that the
    program wrote, else how it ended."""
    lines = done.stderr.strip().splitlines() or (done.stdout or "").strip().splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or [f"it {ended(done.returncode)}"])[-1]
    return last.removeprefix("ERROR:").strip()


def run(
    argv: Argv, *, env: Mapping[str, str] | None = None, timeout: float | None = None, **how: Any
) -> Done:
    """Run a program to its end, without input; its output is text. how: as in `subprocess.run`.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it takes longer than `timeout` seconds.
    """
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, env=env, timeout=timeout, text=True, errors="replace", **how
    )


@contextmanager
def running(argv: Argv, grace_s: float = GRACE_S, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process without input that has ended after the block, by itself or because it was asked to.
    how: as in `subprocess.Popen`."""
    with subprocess.Popen(argv, **{"stdin": subprocess.DEVNULL, **how}) as process:
        try:
            yield process
        finally:
            stop(process, grace_s)


def lines(stream: IO[bytes] | None) -> Iterator[str]:
    """Yield the lines of a process as they come. A carriage return ends one, too: a bar of progress
    has no other."""
    assert isinstance(stream, io.BufferedReader), "it is not a pipe"
    rest = b""
    while block := stream.read1(1 << 16):
        *whole, rest = re.split(rb"\r?\n|\r", rest + block)
        yield from (line.decode("utf-8", errors="replace") for line in whole)
    if rest:
        yield rest.decode("utf-8", errors="replace")


def wait_until(
    process: subprocess.Popen[Any],
    answers: Callable[[], bool],
    *,
    seconds: float = float("inf"),
) -> bool:
    """Wait until a server answers, for so many seconds at most. False: it does not, or has ended.

    Args:
        answers: asks it, which may take a while.
    """
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        if answers():
            return True
        time.sleep(POLL_S)
    return False


def stop(process: subprocess.Popen[Any], grace_s: float = GRACE_S) -> None:
    """Ask a process to end, kill it if it does not, and wait until it is gone."""
    process.terminate()
    try:
        process.wait(grace_s)
    except BaseException as error:  # also a Ctrl-C meanwhile: no process is left behind
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
