"""bench/busy.py: one sample in its own process, what it refuses, and its table."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import busy

from pyorch.errors import SparqError


def test_a_sample_and_the_table(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("It was a dark night. " * 200, "utf-8")
    case = busy.Case("m", "sparq", "sparq,ratio=1/8,min_ctx=0", 1000, 1, 300, 4, 2, 2)
    sample = busy.one_round(model, text, case)
    assert sample["prompt_s"] > 0 and sample["token_s"] > 0
    with pytest.raises(SparqError, match="did not run sparse"):  # dense below min_ctx
        busy.one_round(model, text, replace(case, spec="sparq,ratio=1/8"))
    samples = [{"prompt_s": 2.0, "token_s": 0.1}, {"prompt_s": 4.0, "token_s": 0.05}]
    rec = {"case": asdict(case), "samples": samples, "model_name": "M"}
    rec["env"] = {"machine": {"cpu": "C"}}
    row = busy.table([rec]).splitlines()[-1]
    cells = [x.strip() for x in row.strip("|").split("|")]
    assert cells[1:] == ["1", "1,000", "15.0", "10.0 - 20.0", "3.00"]
