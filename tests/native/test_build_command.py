"""The command line of build and doctor, and what all verbs share."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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
    assert "cuda" in facts["off"] or facts["machine"]["gpu"]


def test_doctor_on_a_bare_machine(run: Run, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert "compiler: none" in out and "works: yes" not in out
