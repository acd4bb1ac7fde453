"""With a CUDA device (`make test-gpu`): decoding, graphs, compute-sanitizer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llama import ROOT, from_child
from test_gate import Run, assert_same_bits, runner

from pyorch.native import cuda

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def decode(demo_model: Path, cuda_lib_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Greedy tokens after the first 1500 of a text, by gate.py."""
    text = str(ROOT / "models" / "demo" / "document.txt")
    options = {"text": text, "n_prompt": 1500, "n_ctx": 4096, "n_threads": 1}
    return runner(demo_model, tmp_path_factory.mktemp("demo"), **options)


@pytest.mark.parametrize("spec", ["sparq,rank=16,topk=128", "topk,k=256"])
def test_1000_greedy_tokens_are_those_of_the_cpu(spec: str, decode: Run) -> None:
    line = spec + ",min_ctx=0,gpu_min_mb=0"
    on_cpu, on_gpu = (decode(spec=line, n_decode=1000, n_gpu_layers=n) for n in (0, 99))
    here, there = (json.loads(str(x["facts"])) for x in (on_cpu, on_gpu))
    calls, on_cpu_calls = (x["info"]["counters"]["calls_sparse"] for x in (there, here))
    assert calls == on_cpu_calls > 0
    assert {layer["reason"] for layer in there["info"]["layers"]} == {""}
    assert there["differ"] in (0, -1)  # -1: top-k has no shadow
    parted = np.flatnonzero(on_cpu["tokens"] != on_gpu["tokens"])
    best = np.sort(on_cpu["logits"][parted[:1]])[:, -2:]
    assert not len(parted), f"token {parted[0]}, whose two best logits are {best}"


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
@pytest.mark.parametrize("order", ["rp", "rpr"])
def test_a_reply_beside_prompts_is_what_it_is_alone(
    order: str, unified: bool, demo_model, cuda_lib_dir: Path
) -> None:
    """As on devices that are not there (tests/e2e/test_placement.py), but for rounding."""
    spec = "sparq,rank=16,topk=64,shadow=f16,min_ctx=0,gpu_min_mb=0"
    text = json.dumps({"spec": spec, "order": order, "unified": unified, "n_gpu_layers": 99})
    found = from_child(ROOT / "tests/e2e/beside.py", demo_model, "", text, timeout=None)
    assert set(found["info"]["counters"]["stock_reasons"]) == {"prefill"}
    assert {layer["reason"] for layer in found["info"]["layers"]} == {""} and found["differ"] == 0
    for seq in (seq for seq, kind in enumerate(order) if kind == "r"):
        got, alone, off = (np.array(found[key][seq]) for key in ("logits", "alone", "off"))
        assert np.abs(got - alone).max() < 0.2 * np.abs(got - off).max()


def test_cuda_graphs_stay_captured(decode: Run) -> None:
    """Captured anew when the view of the cache grows (every 256 tokens), not per token."""
    spec = "sparq,rank=16,topk=128,min_ctx=0,gpu_min_mb=0"
    log = json.loads(str(decode(spec=spec, n_decode=400, n_gpu_layers=99)["facts"]))["log"]
    if any("due to GPU architecture" in line for line in log):
        pytest.skip("no CUDA graphs on this device")
    assert not any("unsupported node" in line or "update failed" in line for line in log)
    reused = sum("reused" in line for line in log)
    reset = sum("warmup reset" in line for line in log)
    assert reused > 300 and reset < 20, (reused, reset)


def test_overlapping_launches_give_the_same_bits(
    decode: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0: each kernel begins after the one in front of it has ended."""
    spec, runs = "sparq,rank=16,topk=128,min_ctx=0,gpu_min_mb=0", []
    for overlap in "01":
        monkeypatch.setenv("GGML_CUDA_PDL", overlap)
        decode.cache_clear()
        runs.append(decode(spec=spec, n_decode=1000, n_gpu_layers=99))
    assert_same_bits(*runs)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer(tool: str, cuda_lib_dir: Path) -> None:
    beside = str(Path(cuda.find_nvcc()).resolve().parent)
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=beside)
    if program is None:
        pytest.skip("no compute-sanitizer")
    argv = [program, "--tool", tool, "--error-exitcode", "99", sys.executable, "-m", "pytest", "-q"]
    argv += ["-p", "no:cacheprovider", "tests/ops", "-k", "half_way or (mixed_batch and sparq)"]
    env = {**os.environ, "SPARQ_TEST_DEVICE": "cuda", "SPARQ_TEST_LIB_DIR": str(cuda_lib_dir)}
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer refuses this device")
    assert done.returncode == 0, done.stdout[-3000:]
