"""The figures of `sparq-cpp eval`: ablations, repetition, tasks over k, and needles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from eval_records import add_ablations, add_repetition, add_topk

from bench.papers import ablations, repetition, topk
from pyorch.cli import eval as evaluation
from pyorch.errors import SparqError
from pyorch.evals import figures, series


def test_scores_over_k_keep_budgets_apart(tmp_path: Path) -> None:
    add_topk(tmp_path)
    rows = topk.scores(tmp_path)
    assert len(rows) == len(topk.TASKS) * 5
    found = {(r["budget"], r["k"]): r["score"] for r in rows if r["task"] == "vt"}
    assert found == pytest.approx(
        {("all", None): 100, ("uniform", 8): 6.25, ("ramp", 8): 3.125, ("uniform", 64): 50,
         ("ramp", 64): 25}
    )  # fmt: skip
    cells = topk.needles(tmp_path)
    assert [r["found"] for r in cells] == 3 * [1, 0, 1, 0]
    assert {r["method"] for r in cells} == {"off", "topk,topk=10", "streaming-llm,k=64"}


def test_a_needle_of_a_method_that_read_everything_is_not_drawn(tmp_path: Path) -> None:
    add_topk(tmp_path)
    found = series.read(tmp_path / topk.NEEDLE / "needle.jsonl")
    idle = replace(found[1], counters={"calls_sparse": 0})
    with pytest.raises(SparqError, match="no attention call ran sparse"):
        figures.needle_rows([found[0], idle])


def test_repetition_is_a_share_of_what_dense_recites(tmp_path: Path) -> None:
    add_repetition(tmp_path)
    ours = [r for r in repetition.data(tmp_path) if r["model"] == "m"]
    assert {r["method"]: r["y"] for r in ours} == pytest.approx(
        {"SparQ": 100, "H2O": 10, "LM-Infinite": 10}
    )
    assert all(r["x"] == 12.5 and r["low"] == pytest.approx(r["high"]) for r in ours)
    n = len(repetition.MODELS) * len(repetition.METHODS) * 2
    assert len(repetition.data(tmp_path)) == 3 + n
    found = series.read(tmp_path / repetition.FILE)[0]
    scores = {"numbers": np.arange(8), "scores": np.array([0, 200.0] * 4)}
    half = [replace(found, **scores), replace(found, **scores | {"scores": np.full(8, 100.0)})]
    assert repetition.share(*half) == pytest.approx((100, 10.6, 189.4), abs=0.1)


def test_ablations_are_of_valid_methods_each_once(tmp_path: Path) -> None:
    specs = [spec for *_, spec in ablations.points()]
    assert len(specs) == len(set(specs)) == 1 + 4 * 5 + 5 * 3 + 4 * 6
    add_ablations(tmp_path)
    rows = ablations.data(tmp_path)
    assert [r["spec"] for r in rows] == 2 * list(map(str, specs))
    assert rows[0]["share"] == 1 and rows[1]["share"] == 1 / 8
    assert [r["score"] for r in rows[:3]] == pytest.approx([1, 1 / 2, 1 / 3], rel=1e-5)
    pairs = {(r["line"], r["point"]) for r in rows if r["panel"] == "b"}
    assert len(pairs) == len(ablations.TAUS) * len(ablations.CONFIGS)


def test_ablations_can_be_measured() -> None:
    """The options of the lines exist, and ask for all points."""
    lines = [line.split() for line in ablations.lines().splitlines()]
    for line in lines[: len(ablations.TASKS)]:
        asked = evaluation.command.commands["run"].make_context("run", line[2:]).params
        assert list(asked["methods"]) == [str(spec) for *_, spec in ablations.points()]
