"""The command line of build and doctor, and what all verbs share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyorch import __version__, cli
from pyorch.native import build as native_build

Result = tuple[int, str, str]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> Result:
    """(exit code, stdout, stderr) of `sparq-cpp ARGS`."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_:
        patch.setattr(sys, "argv", ["sparq-cpp", *args])
        cli.main()
    return (int(exit_.value.code or 0), *capsys.readouterr())


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, out, err = run(capsys, verb, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: sparq-cpp {verb}")


def test_group(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert all(verb in out for verb in cli.COMMANDS)
    assert run(capsys, "-h")[1] == out
    assert __version__ in run(capsys, "--version")[1]


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["bulid"], "No such command 'bulid'.", "sparq-cpp --help"),
        (["build", "--job"], "--job", "sparq-cpp build --help"),
        (["build", "--jobs", "0"], "--jobs 0 is out of range", "at least 1"),
        (["build", "--cuda-arch", "60"], "no architecture we build for: 60", "75, 80"),
    ],
)
def test_wrong_use(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str, hint: str
) -> None:
    code, out, err = run(capsys, *args)
    first, second = err.splitlines()
    assert (code, out) == (2, "")
    assert first.startswith("error: ") and message in first
    assert second.startswith("hint: ") and hint in second


def test_build(capsys: pytest.CaptureFixture[str], world: Path) -> None:
    code, out, err = run(capsys, "build")
    assert code == 0 and "building sparq" in err
    folder = out.strip()
    assert Path(folder, "libllama.so").is_file()
    assert run(capsys, "build") == (0, out, "")  # nothing to do, nothing to say
    script = run(capsys, "build", "--env")[1]
    script += 'echo "$PYTHONPATH $LLAMA_CPP_LIB_PATH $MTMD_CPP_LIB"'
    env = {**os.environ, "PYTHONPATH": "/mine"}
    said = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True).stdout
    assert said.split() == [f"{native_build.bindings()}:/mine", folder, folder]


def test_failure_is_two_lines(
    capsys: pytest.CaptureFixture[str], world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NINJA", "echo 'a.c:1: error: bad'; exit 1")
    code, out, err = run(capsys, "build")
    assert (code, out) == (1, "")
    assert err.splitlines()[-2] == "error: ninja failed: a.c:1: error: bad"
    assert err.splitlines()[-1].startswith("hint: full log: ")


def test_doctor_json(
    capsys: pytest.CaptureFixture[str], native_lib_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARQ_ATTN", "sparq,ratio=1/8")
    code, out, err = run(capsys, "doctor", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert list(facts) == ["sparq-cpp", "built", "machine", "toolchain", "off", "cache"]
    assert facts["sparq-cpp"]["version"] == __version__
    assert facts["sparq-cpp"]["SPARQ_ATTN"] == "sparq,ratio=1/8"
    assert facts["built"]["sparq"]["lib_dir"] == str(native_lib_dir)
    assert facts["built"]["sparq"]["stamp"] in native_lib_dir.name
    assert facts["machine"]["cores"] >= 1 and facts["machine"]["memory"] > 1 << 28
    assert facts["toolchain"]["compiler"] and isinstance(facts["toolchain"]["openmp"], bool)
    assert all(facts["off"].values())
    assert "cuda" in facts["off"] or facts["machine"]["gpu"]
    assert facts["cache"]["lib"] > 1 << 20


def test_doctor_on_a_bare_machine(
    capsys: pytest.CaptureFixture[str], world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, err = run(capsys, "doctor")
    assert (code, err) == (0, "")
    assert "sparq: not built for the present sources" in out
    assert "build: no C and C++ compiler found" in out
    assert "cache\n  path: " in out
