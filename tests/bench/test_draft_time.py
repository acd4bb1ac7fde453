"""Replies with drafts: what is measured, and that nothing idle is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import runner
from bench.users import drafts
from bench.users.drafts import _Ngrams
from pyorch import paths
from pyorch.bench import records
from pyorch.errors import SparqError

pytestmark = pytest.mark.usefixtures("native_lib_dir")

DOCUMENT = paths.data("models") / "demo" / "document.txt"


def measured(model: Path, folder: Path, depth: int) -> Any:
    args = ["-m", str(model), "--draft", str(model), "--text", str(DOCUMENT), "-d", str(depth)]
    args += ["-t", "1", "--samples", "2", "-n", "24", "-fa", "1,0", "--out", str(folder)]
    return CliRunner().invoke(runner.command(drafts.MEASUREMENT), args, catch_exceptions=False)


def test_each_attention_has_each_kind_of_drafts(model: Path, tmp_path: Path) -> None:
    """A model that guesses for itself is right where products round alike, and counted."""
    assert measured(model, tmp_path, 2048).exit_code == 0
    recs = records.load_all(tmp_path / f"{drafts.MEASUREMENT.name}.jsonl")
    assert len(recs) == 2 * 3 + 3 + 2 and len({r["run"] for r in recs}) == 1
    for rec in recs:
        case = records.read_case(drafts.Case, rec)
        assert len(rec["samples_ns"]) == 2 and min(rec["samples_ns"]) > 0
        assert 24 <= rec["n_said"] <= 24 + case.n_draft
        assert rec["n_accepted"] <= rec["n_drafted"]
        assert bool(rec["n_drafted"]) >= (case.drafts == "model")
        steps = rec["n_said"] - rec["n_accepted"]
        if case.spec.sparse and case.spec.verify == "sparse":
            assert rec["counters"]["steps"] == steps + rec["n_drafted"]
            assert rec["counters"]["calls_prefill"] == 0
            assert rec["counters"]["verified"] >= rec["n_drafted"]
        elif case.spec.sparse:
            assert rec["counters"]["verified"] == 0 < rec["counters"]["calls_prefill"]
        if case.drafts == "none":
            assert rec["n_same"] == 24 and rec["n_drafted"] == 0
    table = (tmp_path / "drafts.md").read_text()
    assert "| llama.cpp `-fa 0` | model |" in table and "| sparq,ratio=1/8 | ngram |" in table


def test_a_run_that_is_dense_fails(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SparqError, match="ran nothing sparse"):
        measured(model, tmp_path, 256)
    assert not (tmp_path / "drafts.jsonl").read_bytes()


def test_ngrams_go_on_as_where_they_stood_last() -> None:
    guesser = _Ngrams([1, 2, 3, 4, 1, 2, 3, 9, 8, 7, 1, 2])
    assert guesser.guess(3) == []  # the last three stood nowhere before
    guesser.tokens.append(3)
    assert guesser.guess(3) == [9, 8, 7]  # the newest place, not the first
    assert guesser.guess(9) == [9, 8, 7, 1, 2, 3]  # as far as the text goes
