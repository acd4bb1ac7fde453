"""Random sequences of cache operations (fuzz.py).

Each seed is a process of its own, since a fault in the library may end it.

SPARQ_FUZZ_OPS=20000 makes it longer; SPARQ_FUZZ_SEED=100 takes other seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llama import python_environment

SCRIPT = Path(__file__).with_name("fuzz.py")
OPS_PER_SEED = 250
N_SEED = max(8, int(os.environ.get("SPARQ_FUZZ_OPS", "2000")) // OPS_PER_SEED)
FIRST_SEED = int(os.environ.get("SPARQ_FUZZ_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + N_SEED)


def fuzz(seed: int, *more: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPT), "--seed", str(seed), "--ops", str(OPS_PER_SEED), *more]
    env = python_environment(GGML_NO_BACKTRACE="1")
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple]:
    """seed: (process, trace), two at a time."""
    folder = tmp_path_factory.mktemp("fuzz")
    python_environment()  # builds the library once, if need be
    with ThreadPoolExecutor(2) as pool:
        runs = {s: pool.submit(fuzz, s, "--trace", str(folder / f"{s}.txt")) for s in SEEDS}
        return {s: (run.result(), folder / f"{s}.txt") for s, run in runs.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_random_operations(results: dict[int, tuple], seed: int) -> None:
    run, trace = results[seed]
    if run.returncode != 0:
        operations = trace.read_text().splitlines()[-80:] if trace.exists() else []
        pytest.fail("\n".join([
            f"python tests/e2e/fuzz.py --seed {seed} --ops {OPS_PER_SEED}  (exit {run.returncode})",
            *operations, run.stderr[-3000:],
        ]))  # fmt: skip
    assert json.loads(run.stdout)["sparse_calls"] > 0


def test_every_operation_happened(results: dict[int, tuple]) -> None:
    """Together the seeds do all that fuzz.py can, comparisons with a fresh context included."""
    reports = [json.loads(run.stdout) for run, _ in results.values() if run.returncode == 0]
    assert all(sum(r["operations"][name] for r in reports) for name in reports[0]["operations"])
    assert sum(r["compared"] for r in reports) > 20
    assert {bits for r in reports for bits in r["shadow_bits"]} == {4, 8, 16}


@pytest.mark.parametrize(("sabotage", "message"), [
    ("check", "the shadow differs from K and V"),  # k_t changed: found by llama_sparse_attn_check
    ("k", "the shadow differs from K and V"),  # K changed: as if an unseal were forgotten
    ("score", "k_t is stale"),  # k_t changed: found at the node that reads it
])  # fmt: skip
def test_stale_shadow_is_found(sabotage: str, message: str) -> None:
    run = fuzz(0, "--sabotage", sabotage)
    assert "DAMAGE" in run.stderr, "there was nothing to damage"
    assert run.returncode != 0
    assert message in run.stderr.splitlines()[-1]
