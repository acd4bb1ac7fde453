"""A program of ours that dies by a signal says so in one line, and dies of it all the same."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from c_library import compiled

SHIM = """
#include <signal.h>
int ggml_backend_sched_graph_compute_async(void * scheduler, void * graph) { DIE; return -1; }
"""
OURS = "native.reports_crashes = True"
linux = pytest.mark.skipif(platform.system() != "Linux", reason="LD_PRELOAD")
DEATHS = [
    ("__builtin_trap()", signal.SIGILL, "SIGILL (illegal instruction)"),
    ("raise(SIGABRT)", signal.SIGABRT, "SIGABRT (aborted)"),
    ("raise(SIGBUS)", signal.SIGBUS, "SIGBUS (bus error)"),  # a file that was made shorter
]


@pytest.fixture
def preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Programs die, as the parameter says, at the first graph that is computed."""
    library = compiled(SHIM.replace("DIE", request.param), tmp_path / "shim.so")
    monkeypatch.setenv("LD_PRELOAD", str(library))


def dead(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@linux
@pytest.mark.parametrize(
    ("preloaded", "number", "text"), DEATHS, indirect=["preloaded"], ids=[t for *_, t in DEATHS]
)
def test_a_command_names_the_signal(
    native_lib_dir: Path, demo_model: Path, preloaded: None, number: int, text: str
) -> None:
    line = ("generate", "-m", demo_model, "-n", "2", "-p", "Once")
    done = dead(sys.executable, "-m", "pyorch", *line)
    assert done.returncode == -number
    *_, error, hint = done.stderr.splitlines()
    assert error == f"error: this program died of {text}" and hint.startswith("hint: ")
    assert ("bug report" in hint) == (number != signal.SIGBUS)


@linux
@pytest.mark.parametrize("preloaded", ["__builtin_trap()"], indirect=True)
def test_a_library_leaves_signals_alone(native_lib_dir: Path, preloaded: None) -> None:
    """And so does a program that has a handler of its own."""
    code = "import ctypes; from pyorch import native; native.load();"
    code += "ctypes.CDLL(None).ggml_backend_sched_graph_compute_async(None, None)"
    done = dead(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (-signal.SIGILL, "")
    code = "import faulthandler; faulthandler.enable(); from pyorch import native;" + code
    done = dead(sys.executable, "-c", code.replace("native.load()", f"{OURS}; native.load()"))
    assert done.returncode == -signal.SIGILL
    assert "Fatal Python error: Illegal" in done.stderr and "hint:" not in done.stderr
