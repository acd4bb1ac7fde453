"""The promise of `off`: the logits of a stock build of the same pin, bit for bit.

Every run is a process of its own (gate.py); the stock library never meets ours.
"""

from __future__ import annotations

import ctypes
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny as tiny_models
from llama import ROOT, python_environment

SCRIPT = Path(__file__).with_name("gate.py")
SPARSE = "sparq,rank=8,topk=64,min_ctx=0"

Run = Callable[..., "np.lib.npyio.NpzFile"]


def runner(model: Path, folder: Path, **common: Any) -> Run:
    """run(options of gate.py, stock=False): logits and tokens; the same options run once.
    no_reuse: every token's graph is made anew."""

    @functools.cache
    def gate(stock: bool = False, no_reuse: bool = False, **options: Any):
        out = folder / f"{len(list(folder.iterdir()))}.npz"
        argv = [sys.executable, str(SCRIPT), str(model), str(out), json.dumps(common | options)]
        env = python_environment(stock, **{"LLAMA_GRAPH_REUSE_DISABLE": "1"} if no_reuse else {})
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return np.load(out)

    return gate


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("gate")
    return runner(tiny_models.write(folder / "m.gguf", "llama", n_layer=3), folder)


@pytest.fixture(scope="module", params=["tiny", "demo"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    if request.param == "tiny":
        return request.getfixturevalue("tiny_run")
    text = ROOT / "models" / "demo" / "document.txt"
    model = request.getfixturevalue("demo_model")
    return runner(model, tmp_path_factory.mktemp("demo"), text=str(text))


def assert_same_bits(a, b) -> None:
    assert a["logits"].shape == b["logits"].shape
    assert np.array_equal(a["logits"].view(np.uint32), b["logits"].view(np.uint32))


def test_never_set_is_stock(run: Run) -> None:
    ours, stock = (json.loads(str(x["facts"]))["ours"] for x in (run(), run(stock=True)))
    assert ours and not stock  # two libraries, not one with itself
    assert_same_bits(run(), run(stock=True))


def test_off_after_sparse_is_stock(run: Run) -> None:
    assert_same_bits(run(spec=SPARSE, then_off=True), run(stock=True))


def test_never_set_without_flash_attention_is_stock(tiny_run: Run) -> None:
    assert_same_bits(tiny_run(flash=False), tiny_run(flash=False, stock=True))


def test_gate_can_fail(run: Run) -> None:
    """With sparse on, logits of decoded tokens differ: the comparison sees what it is to see."""
    sparse = run(spec=f"{SPARSE},prompt=f32")["logits"][1:]
    stock = run(stock=True)["logits"][1:]
    assert not np.array_equal(sparse[0], stock[0])
    assert np.abs(sparse - stock).max() > 0.1 * stock.std()


def test_sparse_does_not_depend_on_threads_or_graph_reuse(tiny_run: Run) -> None:
    two = tiny_run(spec=SPARSE)
    for n in (1, 3):
        assert_same_bits(tiny_run(spec=SPARSE, n_threads=n), two)
    assert_same_bits(tiny_run(spec=SPARSE, no_reuse=True), two)


@pytest.mark.skipif(sys.platform == "darwin", reason="ggml takes pages of the system there")
def test_large_buffers_begin_on_a_huge_page(native_lib_dir: Path) -> None:
    """Else each row of K and V lies across one pair of cache lines more than it needs."""
    base = ctypes.CDLL(str(native_lib_dir / "libggml-base.so"))
    base.ggml_aligned_malloc.restype = ctypes.c_void_p
    base.ggml_aligned_malloc.argtypes = [ctypes.c_size_t]
    base.ggml_aligned_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    base.ggml_aligned_free.restype = None
    size = 8 << 20
    memory = [base.ggml_aligned_malloc(size) for _ in range(3)]
    assert all(address % (2 << 20) == 0 for address in memory)
    for address in memory:
        base.ggml_aligned_free(address, size)
