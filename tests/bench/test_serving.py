"""The speed of servers: what counts, and runs with both libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_options import options
from click.testing import CliRunner

from bench.users import llama_server, serving
from pyorch import paths
from pyorch.cli.bench import measurement
from pyorch.errors import SparqError
from pyorch.measure import records

DOCUMENT = paths.data("models") / "demo" / "document.txt"


def test_tokens_count_while_all_reply() -> None:
    """One slot begins at 1 and the other ends at 3: four tokens of each in two seconds."""
    early = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    late = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    assert serving.tokens_per_s([early, late]) == 4
    assert serving.tokens_per_s([late]) == 2
    with pytest.raises(SparqError, match="ended before the last one began"):
        serving.tokens_per_s([early, [3.0, 3.5]])


def test_a_reply_that_is_not_sparse_fails(model: Path) -> None:
    args = ["-m", str(model), "--text", str(DOCUMENT), "-n", "5"]
    args += ["-a", "sparq,ratio=1/8", "-a", "dense"]
    *_, sparq, dense = serving.groups(options(serving.MEASUREMENT, *args))[0]
    right = {"sparse_attn": {"steps": 4, "calls_sparse": 8}}
    llama_server.check(sparq, [right])
    llama_server.check(dense, [{"sparse_attn": {"steps": 4, "calls_dense": 8}}])
    with pytest.raises(SparqError, match="did not run dense"):
        llama_server.check(dense, [right])
    none = {"steps": 4, "calls_sparse": 0, "calls_dense": 8}
    for wrong in ({}, none, {"steps": 4, "calls_sparse": 7}, {"steps": 3, "calls_sparse": 6}):
        with pytest.raises(SparqError, match="did not run sparse"):
            llama_server.check(sparq, [right, {"sparse_attn": wrong}])


@pytest.mark.slow  # it builds stock's server
def test_all_servers_are_timed(model: Path, tmp_path: Path) -> None:
    args = ["-m", str(model), "--text", str(DOCUMENT), "--slots", "2", "-p", "600", "-n", "128"]
    args += ["-t", "1", "--samples", "2", "--out", str(tmp_path), "-a", "dense"]
    args += ["-a", "sparq,ratio=1/8,min_ctx=0"]
    done = CliRunner().invoke(
        measurement.command(serving.MEASUREMENT), args, catch_exceptions=False
    )
    assert done.exit_code == 0
    recs = records.load_all(tmp_path / serving.FILE)
    assert [r["case"]["library"] for r in recs] == ["stock", "stock", "sparq", "sparq"]
    assert all(len(r["samples"]) == 2 and min(r["samples"]) > 0 for r in recs)
    assert all(len(r["first_s"]) == 2 for r in recs)
    assert "| llama.cpp -fa 0 |" in (tmp_path / "serving.md").read_text()
