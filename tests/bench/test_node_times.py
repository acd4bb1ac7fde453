"""Nodes of attention by themselves: what is timed, and what makes two cases."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from bench import runner
from bench.papers import node_times
from pyorch import paths
from pyorch.models import synth


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
from bench.papers import node_times
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
