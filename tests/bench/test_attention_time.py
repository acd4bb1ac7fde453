"""The attention bench: rows that did not run are refused, times come out as differences."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_options import options
from click.testing import CliRunner

from pyorch.cli.bench import attention_time, command
from pyorch.cli.bench.attention_time import AttentionCase
from pyorch.errors import SparqError
from pyorch.measure import records
from pyorch.measure.process import Process, Processes
from pyorch.measure.turns import OFF, Side, check_dense, in_turns

pytestmark = pytest.mark.usefixtures("native_lib_dir")


def planned(*specs: str, **more: Any) -> list[list[AttentionCase]]:
    of = dict(like=("llama2-7b",), n_depth=[4096], n_threads=[2], repetitions=2, attn=specs)
    return attention_time.groups(options(attention_time.MEASUREMENT, **of | more))


def test_a_row_of_ours_is_refused_unless_every_call_ran() -> None:
    stock, _, dense, sparse = planned("dense", "sparq,ratio=1/8")[0]
    calls = sparse.n_samples * sparse.n_layer
    attention_time.check_calls(stock, {})
    attention_time.check_calls(sparse, {"calls_sparse": calls})
    attention_time.check_calls(dense, {"calls_dense_op": calls})
    for case, counters in (
        (sparse, {}),
        (sparse, {"calls_sparse": 0, "calls_dense_op": calls}),
        (sparse, {"calls_sparse": calls - 1}),
        (dense, {"calls_stock": calls}),
    ):
        with pytest.raises(SparqError, match="not reported"):
            attention_time.check_calls(case, counters)


@pytest.mark.parametrize("spec", ["sparq,ratio=1/8", "dense"])
def test_a_wrong_kernel_is_not_timed(spec: str) -> None:
    """Our dense attention is compared with stock's, whether or not it is a row."""

    class Fake:
        def __init__(self, name: str) -> None:
            self.name, self.now = name, "off"

        def attention(self, spec: str) -> None:
            self.now = spec

        def logits(self, token: int) -> list[float]:
            assert self.now == ("off" if self.name.startswith("stock") else "dense")
            return [1.0, second.get(self.name, second["ours"])]

    (group,) = planned(spec)
    processes: Any = {c.place: Fake(c.place) for c in group}
    second = {"stock -fa 0": 2.0, "stock -fa 1": 2.0, "ours": 2.0}
    check_dense(group, lambda c: processes[c.place], 4096)
    second |= {"stock -fa 1": 2.4, "ours": 2.7}  # as far as stock's two settings
    check_dense(group, lambda c: processes[c.place], 4096)
    second["ours"] = 3.0
    with pytest.raises(SparqError, match="our dense attention differs"):
        check_dense(group, lambda c: processes[c.place], 4096)


def test_turns_go_forwards_and_backwards() -> None:
    """The first is not counted; the bandwidth of each is."""
    sides = [Side(library=x, flash_attn=True, spec=OFF) for x in "ABC"]
    order: dict[int, str] = {}

    def once(side: Side, turn: int) -> dict[str, Any]:
        order[turn] = order.get(turn, "") + side.library
        return {"samples_ns": [turn], "counters": {"calls": 1, "name": "x"}}

    reader: Any = SimpleNamespace(read=lambda: 1.0)
    results, bandwidth = in_turns(sides, range(-1, 2), once, reader, lambda _: None)
    assert " ".join(order.values()) == "CBA ABC CBA" and len(bandwidth) == 3
    assert results == [{"samples_ns": [0, 1], "counters": {"calls": 2}}] * 3


def fake_records() -> list[records.Record]:
    """Stock takes 20 and 30 ms, dense 10, the others 5; 4 of each without attention."""
    (group,) = planned()
    out = []
    for case, ms in zip(group, (20, 30, 10, 5, 5, 5, 5, 5, 5, 5), strict=True):
        out.append(
            records.record(
                "attention",
                records.case_of(case),
                "s",
                samples_ns=[(4 + ms) * 10**6] * 10,
                base_samples_ns=[4 * 10**6] * 10,
                bytes_per_token=10**8 + 10**6,
                base_bytes_per_token=10**6,
                counters={},
                bandwidth_bytes_per_s=[1e9, 1e9, 20e9, 20e9],  # two turns at 32 positions, two at S
                env={"machine": {"cpu": "C", "cores": 2}, "isa": [], "commit": "c", "dirty": 0},
            )
        )
    return out


def test_rows_are_differences_against_the_better_stock() -> None:
    rows = attention_time.rows(fake_records())
    assert [round(r["attention_ms"], 6) for r in rows] == [20, 30, 10] + [5] * 7
    assert [round(r["speedup"], 6) for r in rows] == [1, 0.666667, 2] + [4] * 7
    assert rows[2]["roofline"] == pytest.approx(0.5)  # 100 MB in 10 ms, at 20 GB/s
    assert rows[0]["token_ms"] == pytest.approx(24)
    table = attention_time.markdown(fake_records())
    assert "| 4096 | `sparq,ratio=1/8` | 5.00 (5.00-5.00) | 4.00x | 9.00 | 101.0 | 100 % |" in table


def test_process_reports_errors(model: Path) -> None:
    with Process() as process:
        with pytest.raises(SparqError, match="no model is open"):
            process.layers()
        process.open(model=str(model), n_ctx=512, n_threads=1)
        process.fill(n_pos=400, seed=1)
        process.attention(spec="dense")
        got = process.decode(n=2, seed=1)
        assert len(got["samples_ns"]) == 2 and min(got["samples_ns"]) > 1000
        assert got["counters"]["calls_dense_op"] == 4
        with pytest.raises(SparqError, match="unknown method"):
            process.attention(spec="nonsense")


def test_ctrl_c_in_a_terminal_is_for_the_caller_alone() -> None:
    """Who then ends the process: from its first moment on it is in a group of its own."""
    with Processes() as processes:
        process = processes.start("stock by name", "sparq")
        assert os.getpgid(process.process.pid) == process.process.pid != os.getpgid(0)
        process.close()
        assert "--stock" not in process.process.args


def test_a_dead_process_is_told_and_the_others_end() -> None:
    """It took no request: the unsent one must not come up again when its pipe is closed."""
    ended = "ended by SIGKILL .*, during 'seal'"
    with pytest.raises(SparqError, match=ended), Processes() as processes:
        dead, other = (processes.start(name, "sparq") for name in "ab")
        dead.process.kill()
        dead.process.wait()
        dead.seal()
    assert other.process.poll() is not None


@pytest.mark.usefixtures("stock")
def test_attention_command_measures_once(tmp_path: Path) -> None:
    args = ["--attn-only", "--like", "llama3-8b", "-d", "1280", "--layers", "1", "-r", "1", "-t"]
    args += ["1", "-a", "dense", "-a", "sparq,ratio=1/8", "--numa", "isolate"]
    args += ["--out", str(tmp_path)]
    runner, other = CliRunner(), fake_records()[0]
    records.append(tmp_path / "attention.jsonl", other)
    first = runner.invoke(command, args, catch_exceptions=False)
    assert first.exit_code == 0
    assert first.stdout.count("| 1280 |") == 4
    file = tmp_path / "attention.jsonl"
    recs = records.load(file)
    assert recs.pop(other["key"]) and len(recs) == 4
    for rec in recs.values():
        assert len(rec["samples_ns"]) == len(rec["base_samples_ns"]) == 5
        assert rec["bandwidth_bytes_per_s"] and rec["case"]["numa"] == "isolate"
    again = runner.invoke(command, args, catch_exceptions=False)
    assert again.stdout == first.stdout  # taken from the records
    assert records.load(file) == recs | {other["key"]: other}
    assert "| 4096 |" in file.with_suffix(".md").read_text(), "the table of all records"
