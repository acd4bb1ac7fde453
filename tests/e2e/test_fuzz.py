"""Random sequences of cache operations (fuzz.py).

Each seed is a process of its own, since a fault in the library may end it.

SPARQ_FUZZ_OPS=20000 makes it longer; SPARQ_FUZZ_SEED=100 takes other seeds.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llama import python_environment

SCRIPT = Path(__file__).with_name("fuzz.py")
OPS_PER_SEED = 250
N_SEED = max(8, int(os.environ.get("SPARQ_FUZZ_OPS", "2000")) // OPS_PER_SEED)
FIRST_SEED = int(os.environ.get("SPARQ_FUZZ_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + N_SEED)


def fuzz(seed: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPT), "--seed", str(seed), "--ops", str(OPS_PER_SEED)]
    env = python_environment(GGML_NO_BACKTRACE="1")
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def results() -> dict[int, subprocess.CompletedProcess[str]]:
    """By seed, two at a time."""
    python_environment()  # builds the library once, if need be
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SEEDS, pool.map(fuzz, SEEDS), strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_operations(results: dict[int, Any], seed: int) -> None:
    run = results[seed]
    if run.returncode != 0:
        pytest.fail(f"{shlex.join(run.args)}  (exit {run.returncode})\n{run.stderr[-6000:]}")
    assert json.loads(run.stdout)["sparse_calls"] > 0


def test_every_operation_happened(results: dict[int, Any]) -> None:
    """Together the seeds do all that fuzz.py can, comparisons with a fresh context included."""
    reports = [json.loads(run.stdout) for run in results.values() if run.returncode == 0]
    assert all(sum(r["operations"][name] for r in reports) for name in reports[0]["operations"])
    assert sum(r["compared"] for r in reports) > 20
    assert {bits for r in reports for bits in r["shadow_bits"]} == {4, 8, 16}
