"""A server as a child: what it died of, and what faults of ours do to it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from pyorch.cli.supervise import Child
from pyorch.errors import SparqError


def quiet(line: str) -> None:
    """Nobody wants to know."""


def child(code: str, on_line: Callable[[str], None] = quiet) -> Child:
    code = f"import os, signal, sys, time\n{code}"
    return Child([sys.executable, "-c", code], os.environ, on_line, False)


def death(code: str) -> tuple[str, str]:
    """What is said of a server that does this: the message, without the program, and the hint."""
    with pytest.raises(SparqError) as error, child(code) as server:
        server.wait_end()
    return error.value.message.partition(" ")[2], error.value.hint


# as llama-server does at an assertion where gdb is installed, and the debugger at last
ABORTED = """
print("0.00.009.119 I srv    load_model: loading model", file=sys.stderr)
print("/src/ggml/src/ggml-cpu/ops.cpp:4711: {words}", file=sys.stderr)
print("[New LWP 8]", file=sys.stderr)
print("#1  0x00007f in ggml_print_backtrace () at ggml.c:235", file=sys.stderr)
print("[Inferior 1 (process 7) detached]", file=sys.stderr, flush=True)
os.abort()
"""


@pytest.mark.parametrize("words", ["GGML_ASSERT(n > 0) failed", "no such op"])
def test_an_abort_is_told_by_its_own_words(words: str) -> None:
    message, hint = death(ABORTED.format(words=words))
    assert message.endswith(f": {words}") and "-v" in hint


def test_a_signal_of_the_cpu_is_not_explained_by_the_last_line() -> None:
    code = "print('0.01.0.0 I sched_reserve: graph nodes = 1030', file=sys.stderr, flush=True)\n"
    message, _ = death(f"{code}os.kill(os.getpid(), signal.SIGILL)")
    assert "SIGILL" in message and "1030" not in message


def test_the_first_error_is_the_cause_while_it_loads() -> None:
    lines = "0.00.009.528 E tensor 'x' has a wrong shape\n0.00.009.529 E exiting\n"
    message, hint = death(f"print({lines!r}, file=sys.stderr)\nsys.exit(1)")
    assert message.endswith("tensor 'x' has a wrong shape") and "-v" in hint


@pytest.mark.parametrize("how, other", [("BUS", "model"), ("KILL", "--ctx")])
def test_what_the_user_can_change_is_not_a_fault_to_report(how: str, other: str) -> None:
    _, hint = death(f"os.kill(os.getpid(), signal.SIG{how})")
    assert "doctor" not in hint and other in hint


def test_who_reads_the_log_may_fail_and_the_server_does_not_stand_still() -> None:
    """More lines than a pipe holds."""

    def fails(line: str) -> None:
        raise OSError("the terminal is gone")

    code = "for _ in range(5000): print('x' * 100)"
    with child(code, fails) as server:
        assert server.process.wait(60) == 0


def test_a_server_that_cannot_start_leaves_signals_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError), Child(["a\0b"], {}, quiet, False):
        raise AssertionError("it started")
    assert signal.getsignal(signal.SIGTERM) == before
