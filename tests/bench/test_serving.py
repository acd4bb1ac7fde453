"""The speed of servers, of all slots and of one beside another: what counts, and runs with both
libraries."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import neighbours
import servers
import serving

from pyorch import paths
from pyorch.attention.spec import parse_spec
from pyorch.bench import records
from pyorch.errors import SparqError

DOCUMENT = paths.data("models") / "demo" / "document.txt"


def test_tokens_count_while_all_reply() -> None:
    """One slot begins at 1 and the other ends at 3: four tokens of each in two seconds."""
    early = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    late = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    assert serving.tokens_per_s([early, late]) == 4
    assert serving.tokens_per_s([late]) == 2
    with pytest.raises(SparqError, match="ended before the last one began"):
        serving.tokens_per_s([early, [3.0, 3.5]])


def test_a_reply_that_is_not_sparse_fails() -> None:
    sparq, dense = (
        servers.cases([parse_spec(x)], model="m", n_slot=1, n_prompt=8, n_gen=5, n_threads=1,
                      n_rounds=1)[-1]
        for x in ("sparq,ratio=1/8", "dense")
    )  # fmt: skip
    right = {"sparse_attn": {"steps": 4, "calls_sparse": 8}}
    servers.check(sparq, [right])
    servers.check(dense, [{"sparse_attn": {"steps": 4, "calls_dense": 8}}])
    with pytest.raises(SparqError, match="did not run dense"):
        servers.check(dense, [right])
    none = {"steps": 4, "calls_sparse": 0, "calls_dense": 8}
    for wrong in ({}, none, {"steps": 4, "calls_sparse": 7}, {"steps": 3, "calls_sparse": 6}):
        with pytest.raises(SparqError, match="did not run sparse"):
            servers.check(sparq, [right, {"sparse_attn": wrong}])


class Replies(servers.Server):
    """A slot whose tokens come every 10 ms."""

    def ask(self, slot, n_gen, go_on=lambda _: True):
        started, times = time.perf_counter(), []
        while len(times) < n_gen and (not times or go_on(times)):
            time.sleep(0.01)
            times.append(time.perf_counter() - started)
        return times, {}


def test_tokens_beside_a_neighbour() -> None:
    """They count from the moment the other slot begins, and the reply ends after it."""
    (case, *_) = servers.cases(
        [], model="m", n_slot=2, n_prompt=8, n_gen=400, n_threads=1, n_rounds=1
    )
    times, took = neighbours.beside(Replies(case, 0, []), lambda: time.sleep(0.2), 5)
    assert 0 < times[0] < took and times == sorted(times)
    assert took >= 0.2 and sum(t > took for t in times) in (4, 5, 6)
    short = replace(case, n_gen=20)
    with pytest.raises(SparqError, match="ended while the other slot was busy"):
        neighbours.beside(Replies(short, 0, []), lambda: time.sleep(0.5), 5)


@pytest.mark.slow  # it builds stock's server
def test_a_reply_beside_a_neighbour_is_timed(model: Path, tmp_path: Path) -> None:
    args = ["-m", str(model), "--text", str(DOCUMENT), "-p", "1500", "-n", "1024", "-t", "1"]
    args += ["--samples", "1", "--out", str(tmp_path), "-b", "512", "-b", "128"]
    done = CliRunner().invoke(neighbours.command, args, catch_exceptions=False)
    assert done.exit_code == 0
    recs = records.load_all(tmp_path / neighbours.FILE)
    assert [(r["case"]["library"], r["case"]["n_batch"]) for r in recs] == [
        ("stock", 512), ("stock", 512), ("sparq", 512), ("sparq", 128)
    ]  # fmt: skip
    for r in recs:
        times = [r["samples"][x] for x in ("alone_s", "read_s", "restore_s", "slowest_s")]
        assert all(len(x) == 1 and x[0] > 0 for x in times)
        assert len(r["samples"]["read_tokens_per_s"]) == 1
    assert "| llama.cpp -fa 0 | 512 |" in (tmp_path / "neighbours.md").read_text()


@pytest.mark.slow  # it builds stock's server
def test_all_servers_are_timed(model: Path, tmp_path: Path) -> None:
    args = ["-m", str(model), "--text", str(DOCUMENT), "--slots", "2", "-p", "600", "-n", "128"]
    args += ["-t", "1", "--samples", "2", "--out", str(tmp_path), "-a", "dense"]
    args += ["-a", "sparq,ratio=1/8,min_ctx=0"]
    done = CliRunner().invoke(serving.command, args, catch_exceptions=False)
    assert done.exit_code == 0
    recs = records.load_all(tmp_path / serving.FILE)
    assert [r["case"]["library"] for r in recs] == ["stock", "stock", "sparq", "sparq"]
    assert all(len(r["samples"]) == 2 and min(r["samples"]) > 0 for r in recs)
    assert all(len(r["first_s"]) == 2 for r in recs)
    assert "| llama.cpp -fa 0 |" in (tmp_path / "serving.md").read_text()
