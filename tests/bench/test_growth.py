"""Growth: the fitted line, the turns of a round, and what is refused before it is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import runner
from bench.users import growth
from pyorch.bench import output, records, speed
from pyorch.bench.plan import Case
from pyorch.bench.turns import turns
from pyorch.bench.worker import Worker
from pyorch.errors import SparqError


class NoReader:
    def read(self) -> float:
        return 1.0


@pytest.mark.parametrize(("swap", "wanted"), [(False, "CBA ABC CBA"), (True, "ABC CBA ABC")])
def test_turns_go_forwards_and_backwards(swap: bool, wanted: str) -> None:
    bandwidth: list[float] = []
    found = turns(3, range(-1, 2), NoReader(), bandwidth, swap=swap)  # type: ignore[arg-type]
    assert " ".join("".join("ABC"[i] for i in order) for _, order in found) == wanted
    assert len(bandwidth) == 3


def run(folder: Path, model: Path, *args: str) -> Any:
    argv = ["-m", str(model), "--out", str(folder), *args]
    return CliRunner().invoke(runner.command(growth.MEASUREMENT), argv)


@pytest.mark.usefixtures("stock")
def test_rounds_take_turns_and_are_measured_only_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: dict[tuple[int, int], list[str]] = {}  # (depth, round) -> who, in order
    once = speed._once

    def noted(worker: Worker, case: Case, turn: int) -> dict[str, Any]:
        if turn == 0:
            timed.setdefault((case.n_depth, case.seed), []).append(case.label)
        return once(worker, case, turn)

    monkeypatch.setattr(speed, "_once", noted)
    monkeypatch.setattr(growth, "TOKENS", 3)
    args = ["-d", "1280,2048", "--rounds", "2", "-t", "1"]
    done = run(tmp_path, model, *args)
    assert done.exception is None, done.output
    for depth in (1280, 2048):
        assert timed[depth, 2] == timed[depth, 1][::-1]  # nobody is always the last
    found = records.load_all(tmp_path / "growth.jsonl")
    assert [r["case"]["n_depth"] for r in found[::3]] == [1280, 2048, 1280, 2048]
    for rec in found[2::3]:
        assert rec["counters"]["calls_sparse"] == 2 * 3  # layers and tokens
    assert "threads: 1; medians of 2 rounds" in done.stdout
    assert "| `sparq,ratio=1/8` |" in (tmp_path / "growth.md").read_text()

    monkeypatch.setattr(speed, "measure", lambda *_: pytest.fail("measured again"))
    again = run(tmp_path, model, *args)
    assert again.exception is None and again.stdout == done.stdout


def test_a_round_is_fitted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of stock's slope in every round, whatever the round does to both; dense rows of old
    records are left out, and another model has a table of its own."""
    rows = [
        {"seed": seed, "n_depth": d, "median_ns": slow * (100 + d * per), "name": name}
        | {"below_min_ctx": False, "model_type": model, "n_threads": 1}
        for model in ("m", "n")
        for seed, slow in ((1, 1.0), (2, 3.0), (3, 1.5))
        for d in (1000, 2000, 4000)
        for name, per in (("stock -fa 0", 2.0), ("stock -fa 1", 4.0), ("ours", 1.0))
    ]
    rows.append(rows[0] | {"below_min_ctx": True, "n_depth": 256, "median_ns": 1e9})
    monkeypatch.setattr(output, "rows", lambda recs: recs)
    monkeypatch.setattr(output, "label", lambda row: row["name"])
    table = growth.table(rows)
    assert "m, threads: 1; medians" in table and "n, threads: 1; medians" in table
    assert table.count("| `ours` | 1.5 | 50.0 % (50.0-50.0) |") == 2
    assert table.count("| `stock -fa 0` | 3.0 | 100.0 % (100.0-100.0) |") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-d", "4096"], "a slope needs two depths"),
        (["-d", "4096,4096"], "a slope needs two depths"),
        (["-d", "512,4096"], "stays dense at 513 positions: not above min_ctx 1024"),
    ],
)
def test_what_cannot_be_is_refused_before_measuring(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.setattr(records, "resume", lambda *_, **__: pytest.fail("measured"))
    done = run(tmp_path, model, *args)
    assert isinstance(done.exception, SparqError) and message in done.exception.message
    assert done.exception.exit_code == 2
