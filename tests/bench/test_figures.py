"""The figures: all are drawn from the committed records, and what is said when some are missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from bench import draw, plot
from bench.papers import topk
from pyorch.errors import SparqError
from pyorch.evals import figures, series
from pyorch.measure import pictures

BENCH = Path(__file__).parents[2] / "bench"
EPYC = BENCH / "results" / "amd-epyc-2-cores"
H100 = BENCH / "results" / "nvidia-h100-intel-xeon-16-cores"


def test_every_figure_is_drawn(tmp_path: Path) -> None:
    """All by one function, which makes of the same records the same file."""
    pytest.importorskip("matplotlib")
    for name in draw.FIGURES:
        figure, folder = draw.figure(name), H100 if "gpu" in name else EPYC
        plot.make(figure, folder, tmp_path)
        svg = (tmp_path / f"{name}.svg").read_text()
        root = ElementTree.fromstring(svg)
        assert figure.caption in "".join(root.itertext())
        assert "currentColor" in svg and pictures._INK not in svg
        assert (tmp_path / f"{name}.csv").read_text().count("\n") > 2
    plot.make(figure, folder, tmp_path)
    assert (tmp_path / f"{name}.svg").read_text() == svg


def test_what_is_measured_is_drawn_though_other_records_are_missing(tmp_path: Path) -> None:
    """Nobody has the records of all machines. What was asked for by its name has to be there."""
    pytest.importorskip("matplotlib")
    args = ["--results", str(tmp_path), "--out", str(tmp_path / "out")]
    none = CliRunner().invoke(draw.command, args)
    assert isinstance(none.exception, SparqError) and not none.stdout
    shutil.copytree(EPYC / topk.NEEDLE, tmp_path / topk.NEEDLE)
    done = CliRunner().invoke(draw.command, args, catch_exceptions=False)
    assert done.exit_code == 0 and (tmp_path / "out" / "topk_needle.svg").exists()
    assert "geometries: not drawn" in done.stderr
    named = CliRunner().invoke(draw.command, [*args, "topk_needle", "geometries"])
    assert isinstance(named.exception, SparqError) and "1 of 2" in named.exception.message
    (tmp_path / "gpu_tokens.jsonl").write_text("{}\n{}\n")
    broken = CliRunner().invoke(draw.command, args)
    assert isinstance(broken.exception, SparqError) and "not drawn" in broken.exception.message


def test_a_needle_of_a_method_that_read_everything_is_not_drawn() -> None:
    dense, sparse, *_ = series.read(EPYC / topk.NEEDLE / "needle.jsonl")
    assert figures.needle_rows([dense, sparse])
    with pytest.raises(SparqError, match="no attention call ran sparse"):
        figures.needle_rows([dense, replace(sparse, counters={"calls_sparse": 0})])
