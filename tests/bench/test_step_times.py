"""Steps and nodes of attention by themselves: what is timed, and what a row must have run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import runner
from bench.kernels import node_times, step_times
from pyorch import paths
from pyorch.attention.spec import parse_spec
from pyorch.bench import records
from pyorch.errors import SparqError
from pyorch.models import synth
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf


def test_node_times_of_models_with_one_name_are_two_cases(tmp_path: Path) -> None:
    found = []
    shape = synth.shape_like("llama2-7b", n_layer=1, n_embd=64, n_vocab=288)
    for n_ff in (32, 64):
        path = tmp_path / f"{n_ff}.gguf"
        synth.write(path, replace(shape, n_ff=n_ff), name="one name")
        given = runner.Given(model=path, threads=1, samples=1, n_depth=[256], flash_attn=[0])
        found += node_times.groups(given)
    (small,), (large,) = found
    assert small.model_type == large.model_type and small != large


def test_node_times_sees_the_attention_of_every_layer(model: Path, stock: None) -> None:
    code = """
import json, sys
from pathlib import Path
from bench.kernels import node_times
case = node_times.Case("m", 600, 1, sys.argv[2] == "1", 3)
print(json.dumps(node_times.nodes(Path(sys.argv[1]), case)))
"""
    for flash_attn in "01":  # a process has one library or the other, stock or ours
        done = subprocess.run(
            [sys.executable, "-c", code, str(model), flash_attn],
            capture_output=True,
            text=True,
            cwd=paths.REPOSITORY,
        )
        assert done.returncode == 0, done.stderr
        got = json.loads(done.stdout)
        assert all(0 < a < b for a, b in zip(got["attention_ns"], got["samples_ns"], strict=True))


def test_step_times_takes_as_many_threads_as_ggml() -> None:
    done = CliRunner().invoke(runner.command(step_times.MEASUREMENT), ["-t", "1,513"])
    assert isinstance(done.exception, SparqError), done.output
    assert done.exception.message == "--threads 513 is out of range"
    assert done.exception.hint == "it is at least 1 and at most 512"


def test_step_times_add_up_with_select() -> None:
    """Top-k scores in one step and selects in another, which reads next to nothing."""
    case = step_times.Case("m", 1, 600, 1, parse_spec("topk,ratio=1/8"), 3)
    rec = {
        "case": records.case_of(case),
        "samples_ns": {"score": [4000] * 3, "select": [2000] * 3, "attend": [1000] * 3},
        "bytes": {"attend": 1000, "score": 6000},
        "bandwidth_bytes_per_s": [2e9] * 3,
    }
    rows = [row.split(" | ")[4:] for row in step_times.table([rec]).splitlines()[2:]]
    assert [row[0] for row in rows] == ["attend", "score", "select", "all"]
    assert rows[2][2:] == ["-", "- |"]
    assert rows[3][1:] == ["7 (7-7)", "1.0", "50% |"]


@pytest.mark.usefixtures("native_lib_dir")
def test_step_times_sees_the_steps_and_what_they_read(model: Path) -> None:
    n_layer = geometry(read_gguf(model)).n_layer
    case = step_times.Case("m", n_layer, 600, 1, parse_spec("sparq,rank=8,topk=64,min_ctx=0"), 3)
    got = step_times.steps(model, case)
    assert {step: len(ns) for step, ns in got["samples_ns"].items()} == {
        "score_select": 3,
        "attend": 3,
    }
    assert min(got["samples_ns"]["score_select"] + got["samples_ns"]["attend"]) > 0
    assert min(got["bytes"].values()) > 0
    rows = step_times.table([{"case": records.case_of(case), **got}]).splitlines()
    assert [row.split(" | ")[4] for row in rows[2:]] == ["attend", "score_select", "all"]

    below = replace(case, spec=parse_spec("sparq,rank=8,topk=64"))  # min_ctx
    with pytest.raises(SparqError, match="0 of .* not reported"):
        step_times.steps(model, below)
