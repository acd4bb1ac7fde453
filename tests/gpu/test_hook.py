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

from pyorch.native import cuda

pytestmark = pytest.mark.gpu
DECODE = Path(__file__).with_name("decode.py")


def decode(model: Path, n: int, *options: str) -> dict:
    return from_child(DECODE, model, ROOT / "models/demo/document.txt", n, *options, timeout=None)


@pytest.mark.parametrize("spec", ["sparq,rank=16,topk=128", "topk,k=256"])
def test_1000_greedy_tokens_are_those_of_the_cpu(spec: str, demo_model, cuda_lib_dir: Path) -> None:
    line = spec + ",min_ctx=0,gpu_min_mb=0"
    on_cpu, on_gpu = decode(demo_model, 1000, line, "0"), decode(demo_model, 1000, line, "99")
    assert on_gpu["calls_sparse"] == on_cpu["calls_sparse"] > 0
    assert on_gpu["reasons"] == [""] and on_gpu["differ"] in (0, -1)  # -1: top-k has no shadow
    pairs = zip(on_cpu["text"], on_gpu["text"], on_cpu["leads"], on_gpu["leads"], strict=True)
    parted = [(i, a, b, *leads) for i, (a, b, *leads) in enumerate(pairs) if a != b]
    assert not parted, f"(token, on the CPU, on the GPU, their leads): {parted[0]}"


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


def test_cuda_graphs_stay_captured(demo_model, cuda_lib_dir: Path) -> None:
    """Captured anew when the view of the cache grows (every 256 tokens), not per token."""
    found = decode(demo_model, 400, "sparq,rank=16,topk=128,min_ctx=0,gpu_min_mb=0", "99", "--log")
    log = found["log"]
    if any("due to GPU architecture" in line for line in log):
        pytest.skip("no CUDA graphs on this device")
    assert not any("unsupported node" in line or "update failed" in line for line in log)
    reused = sum("reused" in line for line in log)
    reset = sum("warmup reset" in line for line in log)
    assert reused > 300 and reset < 20, (reused, reset)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool: str, cuda_lib_dir: Path) -> None:
    beside = str(Path(cuda.find_nvcc()).resolve().parent)
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=beside)
    if program is None:
        pytest.skip("no compute-sanitizer")
    argv = [program, "--tool", tool, "--error-exitcode", "99", sys.executable, "-m", "pytest", "-q"]
    argv += ["-p", "no:cacheprovider", "tests/ops/test_attn.py", "-k", "half_way or extras"]
    env = {**os.environ, "SPARQ_TEST_DEVICE": "cuda", "SPARQ_TEST_LIB_DIR": str(cuda_lib_dir)}
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer refuses this device")
    assert done.returncode == 0, done.stdout[-3000:]
