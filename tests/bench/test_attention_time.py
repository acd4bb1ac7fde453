"""The attention bench: rows that did not run are refused, times come out as differences."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pyorch.attention.spec import parse_spec
from pyorch.bench import attention, attention_table, output, records
from pyorch.bench.worker import Worker, Workers
from pyorch.cli.bench import command
from pyorch.errors import SparqError

pytestmark = pytest.mark.usefixtures("native_lib_dir")

PLAN = attention.AttentionPlan(like=["llama2-7b"], positions=[4096], threads=[2], n_samples=8)


def test_plan_takes_turns_in_groups_of_one_cache() -> None:
    plan = replace(PLAN, positions=[512, 4096], threads=[1, 2])
    groups = list(plan.groups())
    assert len(groups) == 4
    for group in groups:
        assert [c.label for c in group[:2]] == ["stock -fa 0", "stock -fa 1"]
        assert len({(c.n_depth, c.n_threads, c.like) for c in group}) == 1
        assert group[0].n_samples == 10  # whole turns
        place = {str(c.spec): c.place for c in group}
        assert place["sparq,ratio=1/8"] == place["dense"] != place["sparq,ratio=1/8,shadow=f16"]
    with pytest.raises(SparqError, match="too few"):
        list(replace(PLAN, positions=[256]).groups())


def test_row_of_ours_is_refused_unless_every_call_ran() -> None:
    (group,) = PLAN.groups()
    stock, dense = group[0], group[2]
    sparse = group[4]  # ratio 1/8
    calls = sparse.n_samples * sparse.n_layer
    attention.refuse_idle(stock, {})
    attention.refuse_idle(sparse, {"calls_sparse": calls})
    attention.refuse_idle(dense, {"calls_dense_op": calls})
    for case, counters in (
        (sparse, {}),
        (sparse, {"calls_sparse": 0, "calls_dense_op": calls}),
        (sparse, {"calls_sparse": calls - 1}),
        (dense, {"calls_stock": calls}),
    ):
        with pytest.raises(SparqError, match="not reported"):
            attention.refuse_idle(case, counters)


def test_settings_that_are_the_same_are_measured_once() -> None:
    lines = ["sparq,ratio=1/8", "dense", "sparq,ratio=0.125", "sparq,ratio=1"]
    (group,) = replace(PLAN, specs=[parse_spec(line) for line in lines]).groups()
    assert [str(c.spec) for c in group] == ["off", "off", "sparq,ratio=1/8", "dense"]


@pytest.mark.parametrize("spec", ["sparq,ratio=1/8", "dense"])
def test_a_wrong_kernel_is_not_timed(spec: str) -> None:
    """Our dense attention is compared with stock's, whether or not it is a row."""

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name
            self.now = "off"

        def attention(self, spec: str) -> None:
            self.now = spec

        def logits(self, token: int) -> list[float]:
            assert self.now == ("off" if self.name.startswith("stock") else "dense")
            return [1.0, 2.0 if self.name.startswith("stock") else wrong]

    (group,) = replace(PLAN, specs=[parse_spec(spec)]).groups()
    workers: Any = {c.place: Fake(c.place) for c in group}
    wrong = 2.0
    attention._prepare(group, workers, check=True)
    wrong = 3.0
    attention._prepare(group, workers, check=False)
    for worker in workers.values():
        worker.now = "off"
    with pytest.raises(SparqError, match="our dense attention differs"):
        attention._prepare(group, workers, check=True)


@pytest.mark.parametrize(
    ("key", "value", "names", "table"),
    [
        ("type_k", "q8_0", ["f16 K, f16 V", "q8_0 K, f16 V"], " q8_0 K, f16 V, threads: 2\n"),
        ("numa", "distribute", ["numa none", "numa distribute"], "threads: 2, numa: distribute\n"),
    ],
)
def test_what_differs_has_a_column_and_a_table(
    key: str, value: str, names: list[str], table: str
) -> None:
    recs = fake_records()
    other = [{**r, "case": r["case"] | {key: value}, "run": "b"} for r in recs]
    head = attention_table.summary(recs + other).splitlines()[0]
    assert head.strip(" |").split(" | ")[1:] == [f"llama2-7b, S 4096, {name}" for name in names]
    assert names[0] not in attention_table.summary(recs)
    tables = attention_table.markdown(recs + other)
    assert (tables.count("threads: 2"), tables.count(table)) == (2, 1)


def fake_records() -> list[records.Record]:
    """Stock takes 20 and 30 ms, dense 10, the others 5; 4 of each without attention."""
    (group,) = PLAN.groups()
    out = []
    for case, ms in zip(group, (20, 30, 10, 5, 5, 5, 5, 5, 5, 5), strict=True):
        out.append(
            records.record(
                attention.BENCH,
                records.case_of(case),
                "s",
                samples_ns=[(4 + ms) * 10**6] * 10,
                base_samples_ns=[4 * 10**6] * 10,
                bytes_per_token=10**8 + 10**6,
                base_bytes_per_token=10**6,
                counters={},
                bandwidth_bytes_per_s=[1e9, 1e9, 20e9, 20e9],  # two turns at 32 positions, two at S
                env={"machine": {"cpu": "C", "cores": 2}, "commit": "c"},
            )
        )
    return out


def test_rows_are_differences_against_the_better_stock() -> None:
    rows = attention_table.rows(fake_records())
    assert [round(r["attention_ms"], 6) for r in rows] == [20, 30, 10] + [5] * 7
    assert [round(r["speedup"], 6) for r in rows] == [1, 0.666667, 2] + [4] * 7
    assert rows[2]["roofline"] == pytest.approx(0.5)  # 100 MB in 10 ms, at 20 GB/s
    assert rows[0]["token_ms"] == pytest.approx(24)
    table = attention_table.markdown(fake_records())
    summary = attention_table.summary(fake_records())
    assert "| attention | llama2-7b, S 4096 |" in summary
    assert "| `stock -fa 0` | 20.0 |" in summary
    assert "| `dense` | 10.0 (2.0x, 50 %) |" in summary
    assert "| 4096 | `sparq,ratio=1/8` | 5.00 (5.00-5.00) | 4.00x | 9.00 | 101.0 | 100 % |" in table


@pytest.mark.parametrize("printed", [True, False])
def test_the_table_beside_the_records_has_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: bool
) -> None:
    """However little was asked for now, and whether or not it can be printed."""
    recs = fake_records()
    for rec in recs:
        records.append(tmp_path / "attention.jsonl", rec)
    monkeypatch.setattr(attention, "run", lambda *_, **__: recs[:4])
    if not printed:
        monkeypatch.setattr(output, "FORMATS", None)
    done = CliRunner().invoke(command, ["--attn-only", "--out", str(tmp_path), "-o", "csv"])
    assert (done.exit_code == 0) == printed
    assert (tmp_path / "attention.md").read_text() == attention_table.markdown(recs) + "\n"


def test_worker_reports_errors_and_its_death(model: Path) -> None:
    with Worker() as worker:
        with pytest.raises(SparqError, match="no model is open"):
            worker.layers()
        worker.open(model=str(model), n_ctx=512, n_threads=1)
        worker.fill(n_pos=400, seed=1)
        worker.attention(spec="dense")
        got = worker.decode(n=2, seed=1)
        assert len(got["samples_ns"]) == 2 and min(got["samples_ns"]) > 1000
        assert got["counters"]["calls_dense_op"] == 4
        with pytest.raises(SparqError, match="unknown method"):
            worker.attention(spec="nonsense")
        worker.process.kill()
        with pytest.raises(SparqError, match="ended by SIGKILL .*, during 'layers'"):
            worker.layers()


def test_a_worker_outlives_ctrl_c_before_its_first_line(capfd: pytest.CaptureFixture[str]) -> None:
    """It is for the caller, who then ends the process."""
    with Workers() as workers:
        worker = workers.start("stock by name", "sparq")
        for _ in range(40):  # through all of its start
            worker.process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        worker.close()
        assert "--stock" not in worker.process.args
    assert "Traceback" not in capfd.readouterr().err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_dead_worker_is_told_and_the_others_end() -> None:
    """It took no request: the unsent one must not come up again when its pipe is closed."""
    ended = "ended by SIGKILL .*, during 'seal'"
    with pytest.raises(SparqError, match=ended), Workers() as workers:
        dead, other = (workers.start(name, "sparq") for name in "ab")
        dead.process.kill()
        dead.process.wait()
        dead.seal()
    assert other.process.poll() is not None


@pytest.mark.usefixtures("stock")
def test_attention_command_measures_once(tmp_path: Path, opened: list[dict[str, Any]]) -> None:
    args = ["--attn-only", "--like", "llama3-8b", "-d", "1280", "--layers", "1", "-r", "1", "-t"]
    args += ["1", "-a", "dense", "-a", "sparq,ratio=1/8", "--numa", "isolate"]
    args += ["--out", str(tmp_path)]
    runner = CliRunner()
    first = runner.invoke(command, args, catch_exceptions=False)
    assert first.exit_code == 0
    assert first.stdout.count("| 1280 |") == 4
    file = tmp_path / "attention.jsonl"
    found = records.load(file)
    assert len(found) == 4
    for rec in found.values():
        assert len(rec["samples_ns"]) == len(rec["base_samples_ns"]) == 5
        assert rec["bandwidth_bytes_per_s"] and rec["case"]["numa"] == "isolate"
    assert {args["numa"] for args in opened} == {"isolate"}
    again = runner.invoke(command, args, catch_exceptions=False)
    assert again.stdout == first.stdout  # taken from the records
    assert records.load(file) == found
