"""Processes that we start: how a Python begins, how one ended, in words, and how to end one."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

# what to do about a process that the CPU or llama.cpp itself ended
HINT = "sparq-cpp doctor tries the library on this machine: report what it says"
GRACE_S = 10.0  # a process that was asked to end and still runs after this time is killed

# `python -m` looks for modules in the working folder first: somebody's random.py would run there
_RUN = """\
import sys
sys.path = [folder for folder in sys.path if folder]
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def python(module: str, *args: str) -> list[str]:
    """The command that runs a module of ours, and no file that lies in the working folder."""
    return [sys.executable, "-c", _RUN, module, *args]


def ended(code: int) -> str:
    """How a process with this `returncode` of `subprocess` ended, as a phrase for an error:
    "was ended by SIGILL (illegal instruction)" or "ended with exit code 3"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name, said = signal.Signals(-code).name, (signal.strsignal(-code) or "").lower()
    except ValueError:
        return f"was ended by signal {-code}"
    return f"was ended by {name} ({'out of memory?' if code == -signal.SIGKILL else said})"


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
