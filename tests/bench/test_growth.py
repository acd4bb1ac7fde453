"""Growth: the fitted line, what may run dense, and the tokens after a restored state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pyorch.attention.spec import AttentionSpec
from pyorch.bench import growth, output, records, speed
from pyorch.bench.plan import Case, SpeedPlan
from pyorch.bench.turns import turns
from pyorch.bench.worker import Workers
from pyorch.cli.bench import command
from pyorch.errors import SparqError


def test_slope_is_that_of_the_line() -> None:
    assert growth.slope([(0, 3), (10, 5), (20, 7)]) == pytest.approx((0.2, 3))


def test_a_token_is_the_median_of_its_repetitions() -> None:
    """Two tokens, three times: 90 is an accident."""
    rec = {"case": {"repetitions": 3}, "samples_ns": [50, 20, 52, 90, 54, 20]}
    assert growth.tokens(rec) == [52, 20]


class NoReader:
    def read(self) -> float:
        return 1.0


@pytest.mark.parametrize(("swap", "wanted"), [(False, "CBA ABC CBA"), (True, "ABC CBA ABC")])
def test_turns_go_forwards_and_backwards(swap: bool, wanted: str) -> None:
    bandwidth: list[float] = []
    found = turns(3, range(-1, 2), NoReader(), bandwidth, swap=swap)  # type: ignore[arg-type]
    assert " ".join("".join("ABC"[i] for i in order) for _, order in found) == wanted
    assert len(bandwidth) == 3


def test_a_median_is_of_twenty_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[SpeedPlan] = []

    def run(plan: SpeedPlan, *_: Any, **__: Any) -> Any:
        plans.append(plan)
        raise SparqError("enough")

    monkeypatch.setattr(growth, "run", run)
    CliRunner().invoke(command, ["--growth", "--yes"])
    (plan,) = plans
    assert (plan.n_gen, plan.n_layer) == ([20], 2)
    assert plan.n_depth == [4096, 8192, 16384, 32768, 65536]


@pytest.mark.usefixtures("stock")
def test_growth_measures_all_three_and_only_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[dict[str, Any]]
) -> None:
    timed: dict[tuple[int, int], list[str]] = {}  # (depth, round) -> who, in order
    once = speed._once

    def noted(workers: Workers, case: Case, turn: int) -> dict[str, Any]:
        if turn == 0:
            timed.setdefault((case.n_depth, case.seed), []).append(case.label)
        return once(workers, case, turn)

    monkeypatch.setattr(speed, "_once", noted)
    plan = SpeedPlan(models=[model], n_depth=[1280, 2048], n_gen=[3], repetitions=2, numa="isolate")
    file = tmp_path / "growth.jsonl"
    bar: list[tuple[int, int]] = []
    found, sealing = growth.run(plan, file, lambda *now: bar.append(now))
    assert bar == sorted(bar) and len({total for _, total in bar}) == 1  # one bar for all parts
    assert bar[-1][0] == bar[-1][1]
    for depth in plan.n_depth:
        assert timed[depth, 2] == timed[depth, 1][::-1]  # nobody is always the last
    assert [r["case"]["n_depth"] for r in found[::3]] == [1280, 2048, 1280, 2048, 256, 768]
    for rec in found[2::3]:
        short = rec["case"]["below_min_ctx"]
        calls = rec["counters"]["calls_dense_op" if short else "calls_sparse"]
        assert calls == 2 * 3 * (2 if short else 1)  # layers, tokens, and rounds are by themselves
    (rec,) = sealing
    assert rec["counters"]["groups_sealed"] == 3 * (2048 // 64 * 2)  # two layers
    assert rec["counters"]["calls_sparse"] == 3 * 20 * 2
    assert len(rec["samples_ns"]) == 3 * 20 and len(rec["seal_ns"]) == 3
    assert {args["numa"] for args in opened} == {"isolate"}
    assert {r["case"]["numa"] for r in found + sealing} == {"isolate"}
    table = growth.markdown(found, sealing)
    assert table.count("tg3 @ d768") == 3 and "| 2048 |" in table
    assert "threads: 1, numa: isolate; medians" in table

    before = len(records.load(file))
    again = growth.run(plan, file, lambda done, total: pytest.fail("measured again"))
    assert again == (found, sealing) and len(records.load(file)) == before


RESTORED = {"samples_ns": [5], "sealed": 4, "counters": {"calls_sparse": 2}}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"turned_on": {"ns": 9, "sealed": 0}}, "no group of positions was sealed"),
        ({"restored": RESTORED | {"sealed": 0}}, "no group of positions was sealed"),
        ({"restored": RESTORED | {"counters": {"calls_sparse": 0}}}, "no attention call was spa"),
    ],
)
def test_sealing_is_reported_only_where_all_of_it_happened(
    broken: dict[str, Any], message: str
) -> None:
    answers = {"turned_on": {"ns": 9, "sealed": 4}, "restored": RESTORED}

    class Fake:
        def __getattr__(self, name: str) -> Any:
            return lambda **_: answers.get(name)

        def start(self, *_: str) -> Any:
            return self

    case = growth.Case("m.gguf", "m", 1, "f16", "f16", 512, AttentionSpec("sparq"))
    workers: Any = Fake()
    (got,) = growth._measure(Path("m.gguf"), [case], workers, lambda share: None)
    assert got["seal_ns"] == [9] * case.repetitions
    answers |= broken
    with pytest.raises(SparqError, match=message):
        growth._measure(Path("m.gguf"), [case], workers, lambda share: None)


def test_a_round_is_fitted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of stock's slope in every round, whatever the round does to both."""
    rows = [
        {"seed": seed, "n_depth": d, "median_ns": slow * (100 + d * per), "name": name}
        | {"below_min_ctx": False, "model_type": "m", "n_threads": 1, "numa": ""}
        for seed, slow in ((1, 1.0), (2, 3.0), (3, 1.5))
        for d in (1000, 2000, 4000)
        for name, per in (("stock -fa 0", 2.0), ("stock -fa 1", 4.0), ("ours", 1.0))
    ]
    monkeypatch.setattr(output, "rows", lambda recs: recs)
    monkeypatch.setattr(output, "label", lambda row: row["name"])
    table = growth.markdown(rows, [])
    assert "threads: 1; medians" in table
    assert "| `ours` | 1.5 | 50.0 % (50.0-50.0) |" in table
    assert "| `stock -fa 0` | 3.0 | 100.0 % (100.0-100.0) |" in table


def test_a_table_of_more_depths_stays_and_so_do_those_of_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rec(model: str, n: int, short: bool = False) -> records.Record:
        case = {"n_depth": n, "below_min_ctx": short, "model_filename": model}
        case |= {"n_threads": 1, "numa": ""}
        return records.record("speed", case, "s", samples_ns=[1], env={})

    def table(model: str, n: int) -> str:
        return f"{growth.TITLE}{model}; medians\n\n| {n} |"

    file = tmp_path / "growth.jsonl"
    every = {
        model: [*(rec(model, n) for n in depths), rec(model, 256, short=True)]
        for model, depths in (("synthetic", (2048, 4096, 8192)), ("real", (2048, 4096)))
    }
    for model, n, wanted in (
        ("synthetic", 4, {"synthetic": 4}),
        ("synthetic", 2, {"synthetic": 4}),
        ("real", 3, {"synthetic": 4, "real": 3}),
        ("real", 1, {"synthetic": 4, "real": 3}),
        ("synthetic", 3, {"synthetic": 3, "real": 3}),
    ):
        found = every[model][:n]
        for one in found:
            records.append(file, one)
        monkeypatch.setattr(growth, "run", lambda *_, found=found, **__: (found, []))
        monkeypatch.setattr(growth, "markdown", lambda *_, of=(model, n): table(*of))
        done = CliRunner().invoke(command, ["--growth", "--yes", "--out", str(tmp_path)])
        assert done.stdout.startswith(table(model, n))
        assert ("stays as it is" in done.output) == (n < 3)
        page = "\n\n".join(table(*of) for of in wanted.items())
        assert (tmp_path / "growth.md").read_text() == f"{page}\n"


@pytest.mark.usefixtures("stock")
def test_what_is_to_run_dense_is_refused_when_it_runs_sparse(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = SpeedPlan(models=[model], n_depth=[1280], n_gen=[3], repetitions=1, below_min_ctx=True)
    monkeypatch.setattr(speed, "check", lambda planned: None)  # as if nobody had known
    with pytest.raises(SparqError, match="calls_dense_op is 0"):
        speed.run(plan, tmp_path / "s.jsonl", lambda done, total: None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-d", "4096"], "a slope needs two depths"),
        (["-d", "4096,4096"], "a slope needs two depths"),
        (["-d", "2048,4096", "-n", "257"], "is not dense at 1025 positions"),
        (["-d", "2048,4096", "-a", "sparq,min_ctx=0"], "is not dense at 276 positions"),
        (["-d", "512,4096"], "stays dense at 513 positions: not above min_ctx 1024"),
    ],
)
def test_what_cannot_be_is_refused_before_measuring(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.setattr(records, "resume", lambda *_, **__: pytest.fail("measured"))
    done = CliRunner().invoke(
        command, ["--growth", "-m", str(model), "--out", str(tmp_path), *args]
    )
    assert isinstance(done.exception, SparqError) and message in done.exception.message
    assert done.exception.exit_code == 2
