"""The time of a prompt by depth: what is measured, and what the lines add up to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.users import prompt_time
from pyorch import paths
from pyorch.cli.bench import measurement
from pyorch.measure import records
from pyorch.measure.turns import OFF

pytestmark = pytest.mark.usefixtures("native_lib_dir")

DOCUMENT = paths.data("models") / "demo" / "document.txt"


@pytest.fixture(autouse=True)
def any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI or NEON's dot product `prompt=fast` is exact, and a run with it is refused."""
    sides = [side for side in prompt_time.SIDES if side[0] == OFF or side[0].prompt != "fast"]
    monkeypatch.setattr(prompt_time, "SIDES", sides)


def measured(model: Path, folder: Path, depths: str) -> Any:
    args = ["-m", str(model), "--text", str(DOCUMENT), "-d", depths, "-t", "1", "--samples", "2"]
    args += ["--out", str(folder)]
    return CliRunner().invoke(
        measurement.command(prompt_time.MEASUREMENT), args, catch_exceptions=False
    )


def test_a_whole_prompt_is_the_area_below_its_line() -> None:
    assert prompt_time.whole([(0, 1.0), (512, 2.0), (2560, 4.0)]) == [0, 1.5, 1.5 + 4 * 3.0]


def test_all_attentions_are_timed_at_each_depth(model: Path, tmp_path: Path) -> None:
    assert measured(model, tmp_path, "0,2048").exit_code == 0
    recs = records.load_all(tmp_path / prompt_time.FILE)
    assert len(recs) == 2 * len(prompt_time.SIDES) and len({r["run"] for r in recs}) == 1
    assert all(len(r["samples_ns"]) == 2 and min(r["samples_ns"]) > 0 for r in recs)
    ours = [r["counters"]["calls_prefill"] > 0 for r in recs if r["case"]["spec"] != "off"]
    assert ours and all(ours)
    table = (tmp_path / "prompt_time.md").read_text()
    assert "| llama.cpp -fa 0 |" in table and "| ours, f32 |" in table
