"""bench/gpu on a device that is not there, and the figures of its records."""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import fake_device
import pytest
from click.testing import CliRunner

from bench import plot, runner
from bench.gpu import attention, in_memory, tokens
from pyorch import paths
from pyorch.attention.spec import AttentionSpec
from pyorch.bench import records
from pyorch.errors import SparqError

ENV = {"machine": {"cpu": "A CPU", "cores": 2}}


def test_quick_run(native_lib_dir: Path, tmp_path: Path) -> None:
    """Every case that needs no torch is measured; a second run finds them measured."""
    library = fake_device.build(tmp_path, native_lib_dir)
    argv = [sys.executable, "-m", "bench", "gpu_attention", "--quick", "--device", library]
    argv += ["--out", tmp_path]
    for _ in range(2):
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=600, cwd=paths.REPOSITORY
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found = records.load_all(tmp_path / attention.FILE)
        methods = ["ggml flash", "sparq f16", "sparq q8", "sparq q4"] * 2
        assert [r["case"]["method"] for r in found] == methods
    for rec in found:
        assert min(rec["samples_ns"]) > 0 and rec["device"] == "FAKE0"
        dense = rec["case"]["positions"] * rec["case"]["batch"] * rec["case"]["n_head_kv"] * 512
        sparse = rec["case"]["method"].startswith("sparq")
        assert 0 < rec["bytes_read"] <= dense and (rec["bytes_read"] < dense) == sparse
    assert "| batch  2 heads 4/4 S    768 sparq q4 |" in (tmp_path / "gpu_attention.md").read_text()


def test_a_case_that_failed_shows_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are measured: all.sh comes back to a step that failed."""

    def layers(_: object, case: attention.Case, *__: object) -> dict[str, object]:
        if case.method == "sparq q8":
            raise SparqError("not here", "x")
        return {"samples_ns": [1], "bytes_read": 1}

    device = Mock()
    device.name = "FAKE"
    monkeypatch.setattr(attention, "opened", lambda _: device)
    monkeypatch.setattr(attention, "copy_bandwidth", lambda *_: (1.0, "ggml"))
    monkeypatch.setattr(attention, "has_torch", lambda: False)
    monkeypatch.setattr(attention, "layers_of", lambda *_: 1)
    monkeypatch.setattr(attention, "ggml_layers", layers)
    argv = ["--quick", "--out", str(tmp_path)]
    done = CliRunner().invoke(runner.command(attention.MEASUREMENT), argv)
    assert len(records.load(tmp_path / attention.FILE)) == 6
    assert "sparq q8: not measured: not here (x)" in done.stderr
    assert "2 of 8 groups not measured" in str(done.exception)


def test_kv_in_memory_run(native_lib_dir: Path, tmp_path: Path) -> None:
    """Every case is measured with each number of threads, also without a device."""
    argv = [sys.executable, "-m", "bench", "gpu_in_memory", "--like", "llama3.2-1b", "--layers", 1]
    argv += ["-d", 1500, "-n", 2, "-r", 1, "-t", "1,2", "-ngl", 0]
    argv += ["--out", tmp_path]
    done = subprocess.run(
        [*map(str, argv)], capture_output=True, text=True, timeout=600, cwd=paths.REPOSITORY
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = records.load_all(tmp_path / "gpu_in_memory.jsonl")
    cases = [records.read_case(in_memory.Case, rec) for rec in found]
    assert [case.threads for case in cases] == [1] * 5 + [2] * 5
    assert [case.name for case in cases[:3]] == ["stock -fa 1", "stock -fa 0", "dense"]
    assert [len(rec["samples_ns"]) for rec in found] == [2] * 10
    for rec, case in zip(found, cases, strict=True):
        assert bool(rec["counters"].get("calls_sparse")) == case.name.startswith("sparq")
        assert f"turn 1: {case.name}, {case.threads} threads: " in done.stderr
    best, ours = min(sum(rec["samples_ns"]) for rec in found[5:7]), found[9]
    share = ours["bytes"] / statistics.median(ours["samples_ns"]) * 1e9 / ours["memory"]
    row = [line for line in done.stdout.splitlines() if "ratio=1/32" in line][1]
    assert row.endswith(f" {best / sum(ours['samples_ns']):.2f}x | {share:.0%} |")
    assert ours["bytes"] < found[5]["bytes"] and found[0]["bytes"] == found[5]["bytes"]


def test_a_prompt_is_timed_where_there_is_a_gpu() -> None:
    given = dict(like="llama3.2-1b", layers=1, n_depth=[1500], quant="q8_0", cache_type="q8_0")
    given |= dict(card=0, flash_attn=[1, 0], specs=[AttentionSpec("dense")], threads=[3])
    for n_gpu_layers, names in (
        (None, ["stock -fa 1", "dense", "stock -fa 1, 512 tokens of a prompt"]),
        (0, ["stock -fa 1", "dense"]),  # a cache of blocks has no transposed V, so no -fa 0
    ):
        (cases,) = in_memory.groups(SimpleNamespace(**given, n_gpu_layers=n_gpu_layers))
        assert [case.name for case in cases] == names


def add(folder: Path, method: str, us: float, stamp: str = "s", **shape: int) -> None:
    case = dict(batch=1, n_head=32, n_head_kv=32, positions=4096, method=method) | shape
    more = {"bytes_read": 10**6, "copy_gb_s": 100.0, "samples_ns": [us * 1e3]}
    more |= {"device": "a GPU", "env": ENV | {"stamps": {"sparq": stamp}}}
    rec = records.record("gpu_attention", case, stamp, **more)
    records.append(folder / attention.FILE, rec)


def test_figure(tmp_path: Path) -> None:
    """Against the best dense of the same shape; what has none is left out."""
    add(tmp_path, "ggml flash", 80)
    add(tmp_path, "torch sdpa", 60)
    add(tmp_path, "sparq q4", 20)
    add(tmp_path, "sparq q4", 10, positions=8192)
    add(tmp_path, "ggml flash", 30, n_head_kv=8)
    add(tmp_path, "sparq q4", 15, n_head_kv=8, batch=1)
    rows = attention.data(tmp_path)
    ours = [r for r in rows if r["method"] == "sparq q4"]
    assert [(r["n_head_kv"], r["positions"], r["speedup"]) for r in ours] == [
        (8, 4096, 2.0),
        (32, 4096, 3.0),
    ]
    assert ours[1]["dense_is"] == "torch sdpa" and ours[1]["gb_s"] == pytest.approx(50)
    pytest.importorskip("matplotlib")
    plot.make(attention.FIGURE, tmp_path, tmp_path)
    assert "Fig. 8" in (tmp_path / "gpu_attention.svg").read_text()


def test_figure_of_tokens(tmp_path: Path) -> None:
    """The last of each setting against dense of the same length; other models are left out."""
    env = ENV | {"machine": ENV["machine"] | {"gpu": "a GPU"}}
    line = "sparq,ratio=1/8,gpu_min_mb=0"
    for like, depth, spec, ms in (
        ("llama2-7b", 8192, "off", 6.0),
        ("llama2-7b", 8192, line, 4.0),
        ("llama2-7b", 8192, line, 3.0),
        ("llama2-7b", 16384, line, 1.0),
        ("llama3-8b", 8192, line, 1.0),
    ):
        case = dict(like=like, quant="f16", n_layer=32, n_depth=depth, spec=spec)
        rec = records.record("gpu_tokens", case, "s", samples_ns=[ms * 1e6], env=env)
        records.append(tmp_path / tokens.FILE, rec)
    rows = tokens.data(tmp_path)
    assert [(r["attention"], r["positions"], r["speedup"]) for r in rows] == [
        ("dense", 8192, 1.0),
        ("SparQ 1/8 q4", 8192, 2.0),
    ]
    pytest.importorskip("matplotlib")
    plot.make(tokens.FIGURE, tmp_path, tmp_path)
    assert "Fig. 10" in (tmp_path / "gpu_end_to_end.svg").read_text()


def test_figure_has_the_last_of_each_case_against_dense_of_the_same_library(
    tmp_path: Path,
) -> None:
    for stamp, dense, ours in (("a", 40, 20), ("b", 80, 20)):
        add(tmp_path, "ggml flash", dense, stamp)
        add(tmp_path, "sparq q4", ours, stamp)
    add(tmp_path, "ggml flash", 60, "b")  # measured again
    add(tmp_path, "sparq q4", 10, "c")  # with no dense beside it
    rows = attention.data(tmp_path)
    assert [(r["method"], 1e3 * r["layer_ms"], r["speedup"]) for r in rows] == [
        ("ggml flash", 60, 1),
        ("sparq q4", 20, 3),
    ]


@pytest.mark.parametrize("figure", [attention.FIGURE, tokens.FIGURE])
def test_without_records_nothing_is_drawn(figure: plot.Figure, tmp_path: Path) -> None:
    with pytest.raises(SparqError, match="no records of .* on a GPU"):
        figure.data(tmp_path)


def test_the_cases_of_the_paper_are_there() -> None:
    shapes = [asdict(c) for c in attention.cases(quick=False)]
    assert sum(c["batch"] == 64 and c["positions"] == 4096 for c in shapes) == 5
    assert {c["positions"] for c in shapes if c["batch"] == 1} == {4096 << i for i in range(6)}
    assert all(c["rank"] == 32 and c["topk"] == 128 for c in shapes)
