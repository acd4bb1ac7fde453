"""Layers on workers, timed: what passes for a token is what `explain` predicts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import machines

from pyorch import engine
from pyorch.attention.shares import split_layers
from pyorch.bench import records


def test_what_passes_for_a_token(model: Path, tmp_path: Path) -> None:
    args = ["-m", str(model), "-d", "2048", "--workers", "0,2", "--trip", "5", "--rate", "0"]
    args += ["--samples", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(machines.command, args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = records.load_all(tmp_path / "machines.jsonl")
    assert len(found) == 3 * 3  # one process, and two workers with and without a network
    for rec in found:
        n_workers, wire = rec["case"]["n_workers"], rec["wire"]
        assert all(x == 0 for x in wire) == (n_workers == 0)
        if n_workers:
            assert rec["wire_predicted"] == pytest.approx(wire[-1], rel=0.1)
        if rec["case"]["trip_ms"]:
            assert 0.010 < rec["wire_predicted_s"] < 0.05  # two round trips
            assert min(rec["samples_ns"]) > 10e6
    with engine.load(model, n_ctx=256) as s:  # of workers that are gone, nothing is left behind
        assert s.model.on_cpu
    text = (tmp_path / "machines.md").read_text("utf-8")
    assert "Predicted, not measured" in text and "one process" in text


def test_the_split_is_llama_cpps() -> None:
    """By hand: upper_bound of i / n in the running sums."""
    assert split_layers(4, [1, 1]) == [range(0), range(3), range(3, 5)]
    assert split_layers(4, [3, 1], 4) == [range(1), range(1, 4), range(4, 5)]
    assert split_layers(4, [1, 0]) == [range(0), range(5), range(5, 5)]
