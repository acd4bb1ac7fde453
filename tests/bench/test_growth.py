"""Growth: the fitted line, the turns of a round, and what is refused before it is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.users import growth
from pyorch.cli.bench import measurement, speed
from pyorch.errors import SparqError
from pyorch.measure import records


def run(folder: Path, model: Path, *args: str) -> Any:
    argv = ["-m", str(model), "--out", str(folder), *args]
    return CliRunner().invoke(measurement.command(growth.MEASUREMENT), argv)


@pytest.mark.usefixtures("stock")
def test_rounds_take_turns(model: Path, tmp_path: Path) -> None:
    done = run(tmp_path, model, "-d", "1280,2048", "-r", "2", "-t", "1", "-n", "3")
    assert done.exception is None, done.output
    recs = records.load_all(tmp_path / "growth.jsonl")
    cases = [(r["case"]["n_depth"], r["case"]["seed"]) for r in recs[::3]]
    assert cases == [(1280, 1), (2048, 1), (1280, 2), (2048, 2)]
    for rec in recs[2::3]:
        assert rec["counters"]["calls_sparse"] == 2 * 3  # layers and tokens
    assert "| `sparq,ratio=1/8` |" in (tmp_path / "growth.md").read_text()


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
    monkeypatch.setattr(speed, "rows", lambda recs: recs)
    monkeypatch.setattr(speed, "label", lambda row: row["name"])
    table = growth.table(rows)
    assert "m, threads: 1; medians" in table and "n, threads: 1; medians" in table
    assert table.count("| `ours` | 1.5 | 50.0 % (50.0-50.0) |") == 2
    assert table.count("| `stock -fa 0` | 3.0 | 100.0 % (100.0-100.0) |") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-d", "4096"], "two depths"),
        (["-d", "4096,4096"], "two depths"),
        (["-d", "512,2048"], "dense at 513 positions"),
    ],
)
def test_what_cannot_be_is_refused_before_measuring(
    model: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    done = run(tmp_path, model, *args)
    assert isinstance(done.exception, SparqError) and message in done.exception.message
    assert done.exception.exit_code == 2 and not [*tmp_path.iterdir()]
