"""How processes end, in words; and that they do end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from server import gone

from pyorch import children

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print('only this')", "only this"),
        ("import sys; print('x'); sys.exit('first\\nlast')", "last"),
        ("import sys; sys.exit('ERROR: the cause\\nand advice')", "the cause"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "40"),
    ],
)
def test_the_reason_of_a_failure_is_one_line(code: str, text: str) -> None:
    reason = children.reason(children.run([sys.executable, "-c", code]))
    assert text in reason and "\n" not in reason


def test_lines_come_as_they_are_written_and_the_process_ends_with_the_block() -> None:
    """A bar of progress ends its lines by carriage returns, and what is no UTF-8 breaks nothing."""
    code = r"import sys, time; out = sys.stdout.buffer; out.write(b'10 %\r20 %\r\n\xff\nlast')"
    argv = [sys.executable, "-c", f"{code}; out.flush(); time.sleep(600)"]
    seen = []
    with children.running(argv, stdout=subprocess.PIPE) as process:
        for line in children.lines(process.stdout):
            seen.append(line)
            if len(seen) == 3:
                break
    assert seen == ["10 %", "20 %", "\ufffd"] and process.returncode == -signal.SIGTERM


def test_a_server_is_waited_for_until_it_answers_or_ends() -> None:
    answers = iter([False, True])
    with children.running([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        assert children.wait_until(process, lambda: next(answers))
        assert not children.wait_until(process, lambda: False, seconds=0.2)
        process.kill()
        assert not children.wait_until(process, lambda: False)


def test_what_lies_in_the_working_folder_does_not_run(tmp_path: Path) -> None:
    for name in ("json", "random", "runpy", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('somebody else runs')")
    argv = children.python("pyorch.native.smoke", "/no such folder")
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "No such file" in done.stderr and "somebody else" not in done.stderr


STARTS = {
    "measure": "one = Process(); one.close(); show(one)",
    "serve": "one = Child([sys.executable, '-uc', 'import time; print(); time.sleep(600)'],"
    " os.environ, lambda line: show(one), False).__enter__()",
}


@pytest.mark.skipif(sys.platform != "linux", reason="there is no prctl")
@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
def test_a_process_ends_when_who_started_it_is_killed(starts: str) -> None:
    """Also one that computes, and reads nothing meanwhile."""
    code = "import os, sys, time; from pyorch.measure.process import Process;"
    code += "from pyorch.cli.supervise import Child;"
    code += f"show = lambda one: print(one.process.pid, flush=True); {starts}; time.sleep(600)"
    with children.running([sys.executable, "-c", code], stdout=subprocess.PIPE) as us:
        pid = int(next(children.lines(us.stdout)))
        os.kill(pid, signal.SIGSTOP)
        us.kill()
    try:
        assert gone(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def deaf() -> subprocess.Popen[str]:
    """A process that does not end when it is asked to."""
    argv = [sys.executable, "-c", f"{DEAF}; time.sleep(600)"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    return process


def test_stop_kills_what_does_not_end() -> None:
    process = deaf()
    children.stop(process, 0.1)
    assert process.returncode == -signal.SIGKILL


def test_stop_leaves_nothing_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    process, wait = deaf(), subprocess.Popen.wait

    def interrupted(self: subprocess.Popen[str], timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        children.stop(process)
    assert process.returncode == -signal.SIGKILL
