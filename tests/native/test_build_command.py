"""The command line of build and doctor, and what all verbs share."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyorch import children, native
from pyorch.cli import doctor
from pyorch.native import build as native_build

if TYPE_CHECKING:
    from conftest import Run


def test_build(run: Run, world: Path) -> None:
    code, out, err = run("build")
    assert code == 0 and err
    folder = out.strip()
    assert Path(folder, "libllama.so").is_file()
    assert run("build") == (0, out, "")  # nothing to do, nothing to say
    script = run("build", "--env")[1]
    script += 'echo "$PYTHONPATH $LLAMA_CPP_LIB_PATH $MTMD_CPP_LIB"'
    env = {**os.environ, "PYTHONPATH": "/mine"}
    output = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True).stdout
    assert output.split() == [f"{native_build.bindings()}:/mine", folder, folder]


def test_doctor_json(run: Run, native_lib_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARQ_ATTN", "sparq,ratio=1/8")
    code, out, err = run("doctor", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["sparq-cpp"]["SPARQ_ATTN"] == "sparq,ratio=1/8"
    assert facts["built"]["sparq"]["lib_dir"] == str(native_lib_dir)
    assert facts["built"]["sparq"]["stamp"] in native_lib_dir.name
    assert facts["toolchain"]["compiler"]


def test_doctor_on_a_bare_machine(run: Run, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert "compiler: none" in out and "works: yes" not in out


def test_report(
    run: Run, native_lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file with what every device did, or how it failed. It names nobody and replaces none."""
    monkeypatch.setitem(doctor.RUNS, "CPU, wrong", "--top-k x")
    file = tmp_path / "report.json"
    assert run("doctor", "--report", file).out.strip() == str(file)
    facts = json.loads(text := file.read_text())
    dense, sparse, wrong = (facts["runs"][f"CPU, {x}"] for x in ("dense", "sparse", "wrong"))
    assert len(dense["tokens"]) == len(sparse["tokens"]) == doctor.N_TOKENS
    assert sparse["attention"]["counters"]["calls_sparse"] > 0
    assert wrong["failed"] and "--top-k" in wrong["notes"][0]
    assert facts["built"]["works"] == "yes" and facts["built"]["used"] == native_lib_dir.name
    assert str(native_lib_dir.parent) not in text and str(Path.home()) not in text
    code, _, err = run("doctor", "--report", file)
    assert code == 2 and str(file) in err and "hint" in err and file.read_text() == text


def test_a_report_ends(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run does not, as on a GPU in software, whose shaders take minutes to compile."""

    def endless(argv: list[str], timeout: float | None = None, **_: object) -> None:
        raise subprocess.TimeoutExpired(argv, timeout or 1e9)

    monkeypatch.setattr(doctor, "examine", lambda: {"cache": {}})
    monkeypatch.setattr(native, "lib_dir", lambda: tmp_path)
    monkeypatch.setattr(native, "gpus", list)
    monkeypatch.setattr(children, "run", endless)
    assert run("doctor", "--report", file := tmp_path / "report.json").code == 0
    runs = json.loads(file.read_text())["runs"].values()
    assert len(runs) >= 2 and all("minute" in x["notes"][0] and x["failed"] for x in runs)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/usr/bin/nvcc (release 13.0)", "nvcc (release 13.0)"),
        ("at /home/Anna May/it/a.cu:3:1: ggml-org/llama.cpp", "at a.cu:3:1: ggml-org/llama.cpp"),
        (r"C:\Users\anna\a.dll of anna on box7 by box77", "a.dll of  on  by box77"),
        ("sparq,ratio=1/8", "sparq,ratio=1/8"),
    ],
)
def test_report_names_nobody(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/Anna May")
    monkeypatch.setenv("USER", "anna")
    monkeypatch.setattr("platform.node", lambda: "box7")
    assert doctor.anonymous(text) == shown
