"""The figures: what is drawn from records, and what is said when they are missing."""

from __future__ import annotations

import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from eval_records import ENV, add_ablations, add_repetition, add_topk

from bench import __main__ as main
from bench import draw, plot
from bench.papers import (
    end_to_end,
    microbenchmark,
    node_times,
    roofline,
    time_in_attention,
)
from bench.users import llama_server, prompt_time, serving, token_rate
from pyorch.attention.spec import parse_spec
from pyorch.bench import attention, pictures, records, speed
from pyorch.bench.plan import Case
from pyorch.cli.bench import command as bench_command
from pyorch.errors import SparqError

BENCH = Path(__file__).parents[2] / "bench"
WEIGHTS, SPEED = 1_000_000_000, 1e10  # bytes; bytes per second
STOCK = Case(
    model_filename="m.gguf",
    model_type="llama2-7b q8_0, 4 of 32 layers",
    model_size=WEIGHTS,
    model_n_params=WEIGHTS,
    n_threads=2,
    type_k="f16",
    type_v="f16",
    n_prompt=0,
    n_gen=4,
    n_depth=4096,
    library="stock",
    flash_attn=False,
    spec=parse_spec("off"),
    repetitions=2,
)
OURS = replace(STOCK, library="sparq", flash_attn=True, spec=parse_spec("sparq,ratio=1/8"))
LENGTHS = (4096, 8192, 16384)


def kv_bytes(n_depth: int) -> int:
    return 4 * 2 * 2 * 32 * 128 * n_depth


def add_run(folder: Path, cases: Mapping[Case, float], env: dict[str, Any] = ENV) -> None:
    """A run in which a token of each case takes as long as its bytes, times the case's factor."""
    run = secrets.token_hex(4)
    for case, factor in cases.items():
        kv = 0 if case.n_prompt else kv_bytes(case.n_depth) // (1 if case.library == "stock" else 8)
        ns = round((WEIGHTS + kv) / SPEED * 1e9 * factor)
        n = case.repetitions * (case.n_gen or 1)
        rec = records.record(
            speed.BENCH,
            records.case_of(case),
            env["stamps"][case.library],
            samples_ns=[ns] * n,
            counters={"calls_sparse": 1},
            env=env,
            bytes_weights=WEIGHTS,
            bytes_kv=kv,
            n_layer=4,
            layers_sparse=4,
            bandwidth_bytes_per_s=[SPEED],
            run=run,
        )
        records.append(folder / "speed.jsonl", rec)


def add_lengths(folder: Path, stock_factor: float = 1.0) -> None:
    for n in LENGTHS:
        stock, ours = replace(STOCK, n_depth=n), replace(OURS, n_depth=n)
        add_run(folder, {stock: stock_factor, replace(stock, flash_attn=True): 3.0, ours: 1.0})


def add_prompts(folder: Path) -> None:
    """Each attention takes a second more than the one before it, and twice that at 8,192."""
    run = secrets.token_hex(4)
    for depth in (0, 8192):
        for i, (spec, flash_attn) in enumerate(prompt_time.SIDES, 1):
            case = prompt_time.Case("m", "t", depth, flash_attn, spec, 2, 3)
            rec = records.record(
                "prompt_time",
                records.case_of(case),
                "s",
                samples_ns=[i * 10**9 * (2 if depth else 1)] * 3,
                counters={"prompt_visible": 2, "prompt_read": 1},
                model_name="m",
                run=run,
                env=ENV,
            )
            records.append(folder / prompt_time.FILE, rec)


def test_prompts_are_compared_with_the_faster_of_llama_cpp(tmp_path: Path) -> None:
    add_prompts(tmp_path)
    found = {r["attention"]: r for r in prompt_time.data(tmp_path)}
    assert len(found) == len(prompt_time.SIDES)
    assert found["llama.cpp -fa 0"]["speedup"] == 1
    assert found["ours, sparse"]["seconds"] == pytest.approx(8192 / 512 * 5 * 1.5)
    assert found["ours, sparse"]["speedup"] == pytest.approx(1 / 5)


def add_servers(folder: Path) -> None:
    """Each kind of server makes ten tokens per second more than the one before it."""
    run, common = secrets.token_hex(4), dict(model="m", n_slot=8, n_prompt=4096, n_gen=64)
    specs = [parse_spec("dense"), parse_spec("sparq,ratio=1/8")]
    for i, case in enumerate(llama_server.cases(specs, n_threads=2, n_rounds=3, **common), 1):
        rec = records.record(
            "serving",
            records.case_of(case),
            "s",
            samples=[10 * i] * 3,
            first_s=[1.0, 2.0],
            between_s={"50": 0.1, "95": 0.2, "99": 0.3},
            model_name="m",
            run=run,
            env=ENV,
        )
        records.append(folder / serving.FILE, rec)


def test_servers_are_compared_with_the_faster_of_llama_cpp(tmp_path: Path) -> None:
    add_servers(tmp_path)
    found = {r["attention"]: r for r in serving.data(tmp_path)}
    assert {name: r["speedup"] for name, r in found.items()} == {
        "llama.cpp -fa 0": 0.5,
        "llama.cpp -fa 1": 1,
        "dense": 1.5,
        "sparq,ratio=1/8": 2,
    }
    assert found["dense"]["between_ms_p95"] == 200 and found["dense"]["first_s_median"] == 1.5


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Records of every figure."""
    add_servers(tmp_path)
    add_lengths(tmp_path)
    add_prompts(tmp_path)
    prompt = {"n_depth": 0, "n_gen": 0, "n_prompt": 512}
    add_run(tmp_path, {replace(STOCK, **prompt): 1.0, replace(OURS, **prompt): 1.0})
    (group,) = attention.AttentionPlan(
        like=["llama2-7b"], positions=[4096], specs=microbenchmark.SPECS
    ).groups()
    for case, ms in zip(group, (20, 30, 19, 6, 4), strict=True):
        rec = records.record(
            attention.BENCH,
            records.case_of(case),
            "s",
            samples_ns=[ms * 10**6] * 5,
            base_samples_ns=[10**6] * 5,
            bytes_per_token=1000
            // (1 if case.library == "stock" or case.spec.method == "dense" else 8),
            base_bytes_per_token=0,
            counters={},
            bandwidth_bytes_per_s=[1e9],
            env=ENV,
        )
        records.append(tmp_path / "attention.jsonl", rec)
    case = node_times.Case(STOCK.model_type, 8192, 2, False, 3)
    rec = records.record(
        "node_times",
        records.case_of(case),
        "s",
        samples_ns=[100] * 3,
        attention_ns=[40] * 3,
        env=ENV,
    )
    records.append(tmp_path / "node_times.jsonl", rec)
    case = records.case_of(roofline.Case(2048, 2))
    rec = records.record("peak", case, "v", samples_ns=[10**8] * 3, env=ENV)
    records.append(tmp_path / roofline.PEAK_FILE, rec)
    add_ablations(tmp_path)
    add_repetition(tmp_path)
    add_topk(tmp_path)
    add_rates(tmp_path, "m")
    return tmp_path


def test_end_to_end_is_against_the_better_stock_of_the_same_run(tmp_path: Path) -> None:
    add_lengths(tmp_path)
    rows = [r for r in end_to_end.FIGURE.data(tmp_path) if r["attention"] == "SparQ 1/8 q4"]
    assert [r["positions"] for r in rows] == list(LENGTHS)
    for row, n in zip(rows, LENGTHS, strict=True):
        limit = (WEIGHTS + kv_bytes(n)) / (WEIGHTS + kv_bytes(n) // 8)
        assert row["speedup"] == pytest.approx(row["limit"]) == pytest.approx(limit)
        assert row["full_token_ms"] == pytest.approx(8 * row["token_ms"])
    # a later run with a slower stock: its own ratio, never a mixture of two runs
    add_lengths(tmp_path, stock_factor=2.0)
    again = [r for r in end_to_end.FIGURE.data(tmp_path) if r["attention"] == "SparQ 1/8 q4"]
    assert [r["speedup"] for r in again] == pytest.approx([2 * r["speedup"] for r in rows])


def test_a_calibrated_row_is_drawn_beside_those_it_took_turns_with(tmp_path: Path) -> None:
    """Its record names its calibration, which those of stock and of other settings do not have."""
    for n in LENGTHS:
        stock, ours = replace(STOCK, n_depth=n), replace(OURS, n_depth=n)
        spec = parse_spec("sparq,ratio=1/8,calibrated")
        found = replace(ours, spec=spec, calibration="0123abcd")
        add_run(tmp_path, {stock: 2.0, replace(stock, flash_attn=True): 3.0, found: 1.0, ours: 1.0})
    rows = [r for r in end_to_end.FIGURE.data(tmp_path) if r["positions"] == LENGTHS[0]]
    names = ["stock -fa 0", "stock -fa 1", str(spec), "SparQ 1/8 q4"]
    assert [r["attention"] for r in rows] == names
    assert rows[2]["speedup"] == rows[3]["speedup"] > 2


def test_fit_uses_the_samples_between_the_quartiles() -> None:
    at = {}
    for n in LENGTHS:
        values = 5 + 0.001 * n + np.linspace(-0.1, 0.1, 40)
        values[-8:] += 1000  # interrupted tokens
        at[n] = values
    slope, start = time_in_attention.fit(at)
    assert slope == pytest.approx(0.001, rel=1e-6)
    assert start == pytest.approx(5, abs=0.05)


def test_time_in_attention_is_what_grows(full: Path) -> None:
    rows = [r for r in time_in_attention.data(full) if r["model"] == STOCK.model_type]
    (row,) = [r for r in rows if (r["attention"], r["positions"]) == ("stock -fa 0", 8192)]
    assert row["share"] == pytest.approx(kv_bytes(8192) / (WEIGHTS + kv_bytes(8192)), rel=1e-3)
    assert row["share_nodes"] == pytest.approx(0.4)
    ours = [r for r in rows if r["attention"] == "SparQ 1/8 q4"]
    assert ours[0]["fit_ms_per_1k"] == pytest.approx(row["fit_ms_per_1k"] / 8, rel=1e-3)


def test_a_line_of_token_times_is_the_newest_of_one_library(tmp_path: Path) -> None:
    def add(factor: float, stamp: str, lengths: tuple[int, ...], repetitions: int) -> None:
        for n in lengths:
            case = replace(STOCK, n_depth=n, repetitions=repetitions)
            add_run(tmp_path, {case: factor}, ENV | {"stamps": {"stock": stamp}})

    def start() -> float:
        return time_in_attention.data(tmp_path)[0]["fit_ms_at_0"]

    add(1.0, "old", LENGTHS, repetitions=4)
    first = start()
    add(2.0, "old", LENGTHS, repetitions=2)
    assert start() == pytest.approx(2 * first), "fewer samples, but newer"
    add(9.0, "new", LENGTHS[:2], repetitions=9)
    assert start() == pytest.approx(2 * first), "too few lengths for a line of its own"
    add(9.0, "new", LENGTHS[2:], repetitions=2)
    assert start() == pytest.approx(9 * first)


def test_microbenchmark_limit_is_by_bytes_read(full: Path) -> None:
    rows = {r["attention"]: r for r in microbenchmark.data(full)}
    assert list(rows) == ["stock -fa 0", "stock -fa 1", "our dense", "SparQ f16", "SparQ q4"]
    assert rows["SparQ q4"]["limit"] == 8
    assert rows["SparQ f16"]["speedup"] == pytest.approx((20 - 1) / (6 - 1))


def test_roofline_counts_the_multiply_adds_of_attention() -> None:
    dense = roofline.attention_macs(parse_spec("off"), 4096, 4)
    assert dense == 4 * 32 * 2 * 4096 * 128
    spec = parse_spec("sparq,rank=32,topk=128")
    assert roofline.attention_macs(spec, 4096, 4) == 4 * 32 * (4096 * 32 + 2 * 128 * 128)


def test_the_compute_peak_is_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the one whose records the figures are drawn from."""
    own, other = tmp_path / "own", tmp_path / "other"
    monkeypatch.setattr(records, "default_folder", lambda: own)
    add_run(other, {STOCK: 1.0})
    assert plot.default_folder() == other
    monkeypatch.setattr(roofline, "N", 8)
    monkeypatch.setattr(roofline, "usable_cores", lambda: 4)
    for given, wanted in (("2", 2), ("9", 4), ("", 4)):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", given)
        done = CliRunner().invoke(main.command, ["peak", "--force"], catch_exceptions=False)
        assert f"| {wanted} |" in done.stdout
        assert records.load_all(own / roofline.PEAK_FILE)[-1]["case"]["n_threads"] == wanted
    assert not (other / roofline.PEAK_FILE).exists()


@pytest.mark.parametrize("name", draw.FIGURES)
def test_a_missing_record_is_named_with_its_command(name: str, tmp_path: Path) -> None:
    figure = draw.figure(name)
    assert figure.name == name
    with pytest.raises(plot.NoRecords, match="no records of") as caught:
        figure.data(tmp_path)
    assert caught.value.hint == f"first: {figure.needs}"


COMMANDS = "sparq-cpp bench ", "python -m bench "


@pytest.mark.parametrize("line", sorted({draw.figure(name).needs for name in draw.FIGURES}))
def test_what_a_figure_needs_can_be_measured(line: str) -> None:
    """Its options exist, and all its lengths are long enough to run sparse."""
    ours, theirs = COMMANDS
    if line.startswith(theirs):
        name = line.removeprefix(theirs).partition(" ")[0].rstrip(",")
        assert {*main.MEASUREMENTS, "ablations"} & {name}
    elif line.startswith(ours):
        asked = bench_command.make_context("bench", shlex.split(line.removeprefix(ours))).params
        specs = asked["attn"] or [f"sparq,ratio={ratio}" for ratio in asked["ratio"]]
        assert min(asked["n_depth"]) > max(parse_spec(spec).min_ctx for spec in specs)
    else:
        assert line.startswith("sparq-cpp eval")


def test_every_figure_is_drawn(full: Path, tmp_path: Path) -> None:
    """All by one function, which makes of the same records the same file."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    for name in draw.FIGURES:
        if "gpu" in name:
            continue  # of another machine: test_gpu_bench.py
        figure = draw.figure(name)
        plot.make(figure, full, out)
        svg = (out / f"{figure.name}.svg").read_text()
        root = ElementTree.fromstring(svg)
        assert figure.caption in "".join(root.itertext())
        assert "currentColor" in svg and pictures._INK not in svg
        assert (out / f"{figure.name}.csv").read_text().count("\n") > 2
    plot.make(figure, full, out)
    assert (out / f"{figure.name}.svg").read_text() == svg


def test_command_says_what_is_missing_and_draws_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, "-m", "bench", "draw", "--results", str(tmp_path), "--out",
         str(tmp_path / "out")],
        capture_output=True,
        text=True,
        cwd=BENCH.parent,
    )  # fmt: skip
    assert done.returncode == 1
    assert not done.stdout
    assert "end_to_end: not drawn: no records of" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"error: no figure has records in {tmp_path}" in done.stderr


def test_what_is_measured_is_drawn_though_other_records_are_missing(tmp_path: Path) -> None:
    """Nobody has the records of all machines. What was asked for by its name has to be there."""
    pytest.importorskip("matplotlib")
    add_repetition(tmp_path)
    args = ["--results", str(tmp_path), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(draw.command, args, catch_exceptions=False)
    assert done.exit_code == 0 and (tmp_path / "out" / "repetition.svg").exists()
    assert "token_rate: not drawn: no records of decoded tokens of a real model" in done.stderr
    named = CliRunner().invoke(draw.command, [*args, "repetition", "token_rate"])
    assert isinstance(named.exception, SparqError)
    assert named.exception.message == "1 of 2 figures not drawn"
    (tmp_path / "speed.jsonl").write_text("{}\n{}\n")
    broken = CliRunner().invoke(draw.command, args)
    assert isinstance(broken.exception, SparqError) and "not drawn" in broken.exception.message


def add_rates(
    folder: Path, model: str, factor: float = 1.0, lengths: tuple[int, ...] = LENGTHS
) -> None:
    """Tokens of a real model: llama.cpp's two, ours exact and ours sparse."""
    lines = "dense", "sparq,ratio=1/8"
    for n in lengths:
        case = replace(STOCK, model_type=model, model_filename=f"{model}.gguf", n_depth=n)
        ours = replace(case, library="sparq", flash_attn=True)
        fast = replace(case, flash_attn=True), *(replace(ours, spec=parse_spec(x)) for x in lines)
        add_run(folder / "token_rate", {case: 2 * factor} | dict.fromkeys(fast, factor))


def test_token_rates_are_of_the_model_measured_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now, model in (("2026-01-01T00:00:00Z", "old"), ("2026-01-02T00:00:00Z", "new")):
        monkeypatch.setattr(records.time, "strftime", lambda *_, now=now: now)
        add_rates(tmp_path, model)
    rows = token_rate.data(tmp_path)
    lines = {r["attention"]: r for r in rows if r["positions"] == LENGTHS[0]}
    assert list(lines) == [token_rate.STOCK, "ours, exact", "SparQ 1/8 q4"]
    assert {r["model"] for r in rows} == {"new"} and len(rows) == 3 * len(LENGTHS)
    stock, _, sparse = lines.values()
    assert stock["flash_attn"] == 1, "the faster of the two"
    read = WEIGHTS + kv_bytes(LENGTHS[0])
    assert stock["tokens_per_s"] == pytest.approx(SPEED / read, rel=1e-6)
    assert sparse["speedup"] == pytest.approx(read / (WEIGHTS + kv_bytes(LENGTHS[0]) // 8))


def test_a_real_model_is_drawn_beside_the_synthetic(tmp_path: Path) -> None:
    """Its points and fits are its own, and change nothing of the others."""
    pytest.importorskip("matplotlib")
    panels = {end_to_end.FIGURE: "time of a token", time_in_attention.FIGURE: "time in attention"}
    add_lengths(tmp_path)
    speeds, times = (figure.data(tmp_path) for figure in panels)
    add_rates(tmp_path, "real", 3.0, LENGTHS[:2])
    assert time_in_attention.data(tmp_path) == times, "too few lengths for a line"
    add_rates(tmp_path, "real", 3.0, LENGTHS[2:])
    more_speeds, more_times = (figure.data(tmp_path) for figure in panels)
    for figure, panel in panels.items():
        plot.make(figure, tmp_path, tmp_path)
        assert (tmp_path / f"{figure.name}.svg").read_text().count(f">{panel}<") == 2
    assert more_speeds[: len(speeds)] == speeds and more_times[: len(times)] == times
    added = more_speeds[len(speeds) :], more_times[len(times) :]
    assert all({r["model"] for r in found} == {"real"} for found in added)
    ours, theirs = (
        [r for r in found if r["attention"] == "SparQ 1/8 q4"] for found in (added[0], speeds)
    )
    assert [r["positions"] for r in ours] == list(LENGTHS)
    for r, synthetic in zip(ours, theirs, strict=True):
        assert r["speedup"] == pytest.approx(synthetic["speedup"])
        assert r["full_token_ms"] == r["token_ms"] == pytest.approx(3 * synthetic["token_ms"])
    fits = [{r["attention"]: r["fit_ms_per_1k"] for r in found} for found in (added[1], times)]
    assert fits[0]["SparQ 1/8 q4"] == pytest.approx(3 * fits[1]["SparQ 1/8 q4"])
    assert fits[0]["stock -fa 0"] == pytest.approx(6 * fits[1]["stock -fa 0"])


def test_every_measurement_has_its_name_and_help() -> None:
    for name in main.MEASUREMENTS:
        done = CliRunner().invoke(main.command, [name, "--help"], catch_exceptions=False)
        assert done.exit_code == 0 and f" {name} " in done.output and "--out DIR" in done.output
