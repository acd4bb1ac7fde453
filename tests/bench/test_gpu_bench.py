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
import numpy as np
import pytest
from click.testing import CliRunner

from bench import plot, runner
from bench.gpu import attention, in_memory, real_text, tokens
from pyorch import paths
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import records
from pyorch.engine.library import Library
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


FAKE = """
import ctypes, sys
from bench.__main__ import command
from pyorch import engine
load = engine.library().lib._lib.ggml_backend_load
load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
assert load(sys.argv.pop(1).encode())
command()
"""


def test_ways_to_read_a_prompt(native_lib_dir: Path, tmp_path: Path) -> None:
    """On a device that is not there: by llama.cpp, by PREFILL, and with K and V on the device."""
    argv = [sys.executable, "-c", FAKE, fake_device.build(tmp_path, native_lib_dir)]
    argv += ["gpu_in_memory", "--prompts", "--like", "llama3.2-1b", "--layers", 1, "-d", 700]
    argv += ["-r", 1, "-t", 1, "--out", tmp_path]
    done = subprocess.run(
        [*map(str, argv)], capture_output=True, text=True, timeout=600, cwd=paths.REPOSITORY
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = records.load_all(tmp_path / "gpu_in_memory.jsonl")
    cases = [records.read_case(in_memory.Case, rec) for rec in found]
    ways = "stock -fa 1", "ours, on the CPU", "stock -fa 1"
    names = [f"{way}, {n} tokens of a prompt" for way in ways for n in (512, 32)]
    assert [case.name for case in cases] == names
    assert [rec["in_memory"] for rec in found] == [1, 1, 1, 1, 0, 0]
    n_read = [rec["counters"].get("calls_prefill", 0) for rec in found]
    assert n_read == [0, 0, 512, 32, 0, 0]
    assert found[0]["bytes"] > 0 == found[-1]["bytes"]


def test_a_real_model_beside_the_cpu(
    demo_model: Path, native_lib_dir: Path, tmp_path: Path
) -> None:
    """On a device that is not there; and where there is none, or nothing sparse, it says so."""
    fake = fake_device.build(tmp_path, native_lib_dir)
    argv = ["gpu_real_text", "-m", demo_model, "-n", 3, "--n-prompt"]
    for program, n, error in (
        (("-c", FAKE, fake), 1200, ""),
        (("-c", FAKE, fake), 500, "no layer was sparse"),
        (("-m", "bench"), 1200, "no GPU is here"),
    ):
        line = [*map(str, (sys.executable, *program, *argv, n))]
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=600, cwd=paths.REPOSITORY
        )
        assert bool(done.returncode) == bool(error) and error in done.stderr, done.stderr[-2000:]
        if not error:
            said = f"{real_text.OURS}: 3 of 3 tokens are the CPU's, logits differ by 0\n"
            assert said in done.stdout
            assert done.stderr.count("ms per token") == 4


def test_what_a_gpu_chooses_otherwise() -> None:
    """The lead over its choice, not over the second."""
    here = np.array([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]])
    assert real_text.compare("x", here, here) == (0, 0)
    there = here + [[0, 2.5, 0], [0, 0, 1]]
    assert real_text.compare("x", here, there) == (2, 2.5)


def test_a_prompt_is_timed_where_there_is_a_gpu() -> None:
    given = dict(like="llama3.2-1b", layers=1, n_depth=[1500], quant="q8_0", cache_type="q8_0")
    given |= dict(n_gen=3, repetitions=2, prompts=False)
    given |= dict(card=0, flash_attn=[1, 0], specs=[AttentionSpec("dense")], threads=[3])
    for n_gpu_layers, names in (
        (None, ["stock -fa 1", "dense", "stock -fa 1, 512 tokens of a prompt"]),
        (0, ["stock -fa 1", "dense"]),  # a cache of blocks has no transposed V, so no -fa 0
    ):
        (cases,) = in_memory.groups(SimpleNamespace(**given, n_gpu_layers=n_gpu_layers))
        assert [case.name for case in cases] == names


def add(folder: Path, method: str, us: float, stamp: str) -> None:
    case = dict(batch=1, n_head=32, n_head_kv=32, positions=4096, method=method)
    more = {"bytes_read": 10**6, "copy_gb_s": 100.0, "samples_ns": [us * 1e3]}
    more |= {"device": "a GPU", "env": ENV | {"stamps": {"sparq": stamp}}}
    rec = records.record("gpu_attention", case, stamp, **more)
    records.append(folder / attention.FILE, rec)


@pytest.mark.parametrize("machine", ["nvidia-h100", "nvidia-h200"])
def test_tokens_are_compared_with_off_of_their_turns(machine: str, tmp_path: Path) -> None:
    """Also in records from before there were runs, those of the H200; what has none is left out."""
    folder = plot.HERE / "results" / f"{machine}-intel-xeon-16-cores"
    recs = records.load_all(folder / tokens.FILE)
    factors = [line.split(" | ")[-1] for line in tokens.table(recs).splitlines()[2:]]
    is_off = [rec["case"]["spec"] == "off" for rec in recs]
    assert {x for x, off in zip(factors, is_off, strict=True) if off} == {"1.00x |"}
    assert {f"{r['speedup']:.2f}x |" for r in tokens.data(folder)} <= set(factors)
    for rec in (ours := [r for r, off in zip(recs, is_off, strict=True) if not off]):
        records.append(tmp_path / tokens.FILE, rec)
    assert tokens.table(ours).count("| - |") == len(ours)
    with pytest.raises(SparqError, match="no records of .* on a GPU"):
        tokens.data(tmp_path)


@pytest.mark.usefixtures("native_lib_dir")
def test_tokens_of_our_dense_attention_are_timed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no device, and what should be sparse must be."""
    monkeypatch.setattr(tokens, "_model", lambda _: model)
    monkeypatch.setattr(Library, "check_gpu", lambda *_: None)

    def measured(line: str) -> list[records.Result]:
        specs = tokens.OFF, parse_spec(line)
        cases = [tokens.Case("x", 2, "f32", 1280, 3, spec, repetitions=2) for spec in specs]
        return tokens.measure(SimpleNamespace(), cases, print)

    assert [len(r["samples_ns"]) for r in measured("dense")] == [6, 6]
    with pytest.raises(SparqError, match="not every layer was sparse"):
        measured("sparq,ratio=1/8,min_ctx=4096")


def test_more_of_the_same_is_measured() -> None:
    """As many repetitions as were asked for, not those of an earlier run."""
    given = dict(like="llama3.2-1b", layers=1, n_depth=[1500], quant="q8_0", specs=[])
    given |= dict(cache_type="f16", card=0, n_gpu_layers=0, flash_attn=[1], threads=[1])
    given |= dict(prompts=False)
    keys = {
        records.key(of.name, records.case_of(of.groups(SimpleNamespace(**given, **more))[0][0]), "")
        for of in (tokens.MEASUREMENT, in_memory.MEASUREMENT)
        for more in (dict(n_gen=n, repetitions=r) for n in (3, 32) for r in (3, 300))
    }
    assert len(keys) == 8


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


def test_the_cases_of_the_paper_are_there() -> None:
    shapes = [asdict(c) for c in attention.cases(quick=False)]
    assert sum(c["batch"] == 64 and c["positions"] == 4096 for c in shapes) == 5
    assert {c["positions"] for c in shapes if c["batch"] == 1} == {4096 << i for i in range(6)}
    assert all(c["rank"] == 32 and c["topk"] == 128 for c in shapes)
