"""bench/gpu on a device that is not there, and the figures of its records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake_device
import pytest

from bench import plot
from bench.gpu import kernels, tokens
from pyorch import paths
from pyorch.attention.spec import parse_spec
from pyorch.engine.library import Library
from pyorch.errors import SparqError
from pyorch.measure import records
from pyorch.measure.room import Synthetic


def test_quick_run(native_lib_dir: Path, tmp_path: Path) -> None:
    """Every case that needs no torch is measured."""
    library = fake_device.build(tmp_path, native_lib_dir)
    argv = [sys.executable, "-m", "bench", "gpu_attention", "--quick", "--device", library]
    subprocess.run([*argv, "--out", tmp_path], check=True, timeout=600, cwd=paths.REPOSITORY)
    recs = records.load_all(tmp_path / kernels.FILE)
    methods = ["ggml flash", "sparq f16", "sparq q8", "sparq q4"] * 2 + ["sparq q4"] * 4
    assert [r["case"]["method"] for r in recs] == methods
    assert [r["case"].get("tail", 0) for r in recs[8:]] == [1, 7, 1, 7]
    assert recs[7]["bytes_read"] < recs[10]["bytes_read"] < recs[11]["bytes_read"]
    for rec in recs[:8]:
        assert len(rec["samples_ns"]) >= 10 and rec["device"] == "FAKE0"
        dense = rec["case"]["positions"] * rec["case"]["batch"] * rec["case"]["n_head_kv"] * 512
        sparse = rec["case"]["method"].startswith("sparq")
        assert 0 < rec["bytes_read"] <= dense and (rec["bytes_read"] < dense) == sparse
    assert "| batch  2 heads 4/4 S    768 sparq q4 |" in (tmp_path / "gpu_attention.md").read_text()


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
    monkeypatch.setattr(Synthetic, "written", lambda _: model)
    monkeypatch.setattr(Library, "check_gpu", lambda *_: None)

    def measured(line: str) -> list[records.Result]:
        specs = tokens.OFF, parse_spec(line)
        of = dict(like="x", n_layer=2, quant="f32", n_depth=1280, n_gen=3, repetitions=2)
        cases = [tokens.TokenCase(**of, spec=spec) for spec in specs]
        return tokens.measure(tokens.TokenOptions(), cases, print)

    assert [len(r["samples_ns"]) for r in measured("dense")] == [6, 6]
    with pytest.raises(SparqError, match="not every layer was sparse"):
        measured("sparq,ratio=1/8,min_ctx=4096")
