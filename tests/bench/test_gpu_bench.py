"""bench/gpu on a device that is not there, and the figures of its records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake_device
import numpy as np
import pytest
import tiny
from click.testing import CliRunner

from bench.gpu import kernels, nodes, real, tokens
from pyorch import paths
from pyorch.attention.spec import parse_spec
from pyorch.engine.library import Library
from pyorch.errors import SparqError
from pyorch.measure import records
from pyorch.measure.room import Synthetic


def test_quick_run(model: Path, native_lib_dir: Path, tmp_path: Path) -> None:
    """Every case that needs no torch is measured."""
    library = fake_device.build(tmp_path, native_lib_dir)
    argv = [sys.executable, "-m", "bench", "gpu_attention", "--quick", "--device", library]
    (text := tmp_path / "text.txt").write_text(tiny.text_of(600))
    argv += ["--real", model, text]
    subprocess.run([*argv, "--out", tmp_path], check=True, timeout=600, cwd=paths.REPOSITORY)
    recs = records.load_all(tmp_path / kernels.FILE)
    methods = ["ggml flash", "sparq f16", "sparq q8", "sparq q4"]
    assert [r["case"]["method"] for r in recs] == methods * 2 + ["sparq q4"] * 4 + methods
    assert [r["case"].get("tail", 0) for r in recs[8:12]] == [1, 7, 1, 7]
    assert {r["case"]["positions"] for r in recs if "real" in r["case"]} == {512}
    assert all(("passes" in r) == r["case"]["method"].startswith("sparq") for r in recs)
    assert recs[7]["bytes_read"] < recs[10]["bytes_read"] < recs[11]["bytes_read"]
    for rec in recs[:8]:
        assert len(rec["samples_ns"]) >= 10 and rec["device"] == "FAKE0"
        dense = rec["case"]["positions"] * rec["case"]["batch"] * rec["case"]["n_head_kv"] * 512
        sparse = rec["case"]["method"].startswith("sparq")
        assert 0 < rec["bytes_read"] <= dense and (rec["bytes_read"] < dense) == sparse
    assert "| batch  2 heads 4/4 S    768 sparq q4 |" in (tmp_path / "gpu_attention.md").read_text()


@pytest.mark.usefixtures("native_lib_dir")
def test_rows_of_a_model_are_in_the_order_of_positions(model: Path) -> None:
    text = tiny.text_of(600)
    long, short = (real.read(model, part, 0) for part in (text, text[:300]))
    for (q, *of_long), (_, *of_short) in zip(long, short, strict=True):
        assert q.shape[0] == 1 and q.shape[2] == of_long[0].shape[2]
        for a, b in zip(of_long, of_short, strict=True):
            assert (len(a), len(b)) == (512, 256) and np.allclose(a[:256], b, atol=0.1)
            assert not np.allclose(a[1:257], b, atol=0.5)


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


CSV = """Processing [nodes-dense.sqlite] with [cuda_gpu_kern_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
"""


def test_launches_of_a_layer(tmp_path: Path) -> None:
    """What both attentions launch is taken from the sparse one's. Names have commas."""
    n, m = nodes.DENSE * 32, (nodes.DENSE + nodes.SPARSE) * 32
    line = '9.0,{},{},1.0,1.0,1,9,0.5,"{}"\n'.format
    flash, product = line(n * 9000, n, "flash"), "mul_mat<(int)2, (bool)1>"
    (dense := tmp_path / "dense.csv").write_text(CSV + line(n * 7000, 2 * n, product) + flash)
    both = line(m * 7000, 2 * m, product) + flash + line((m - n) * 5000, m - n, "layer")
    (file := tmp_path / "both.csv").write_text(CSV + both)
    assert CliRunner().invoke(nodes.command, [str(dense), str(file)]).output.splitlines()[2:] == [
        "| all | 3.00 | 16.00 | 3.00 | 12.00 |",
        "| flash | 1.00 | 9.00 | 0.00 | 0.00 |",
        f"| {product} | 2.00 | 7.00 | 2.00 | 7.00 |",
        "| layer | 0.00 | 0.00 | 1.00 | 5.00 |",
    ]
    file.write_text(CSV)
    with pytest.raises(SparqError, match="both.csv"):
        nodes.read(file)
