"""The emulator stops at a race that is put into the kernels."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from pathlib import Path

import cuda_lib
import numpy as np
import pytest
import test_layer
from cuda_lib import CudaGgml
from graphs import sparse_run
from test_layer import CUTS, HEADS, N_SM, with_logits

SELECT, ATTEND = "sparse-layer-select.cuh", "sparse-layer-attend.cuh"
READ = "        arrive<true>();\n        wait(); // the histograms were read\n"
LISTED = "    arrive<OWN_MASS>();\n    wait(); // C\n"


def edited(folder: Path, *edits: tuple[str, str, str]) -> Path:
    """A copy of the kernels with these edits: file, old, new."""
    kernels = Path(shutil.copytree(cuda_lib.OPS / "cuda", folder / "cuda"))
    for file, old, new in edits:
        text = (kernels / file).read_text()
        assert text.count(old) == 1
        (kernels / file).write_text(text.replace(old, new))
    return kernels


def switch(name: str, value: int = 1) -> tuple[str, str, str]:
    return "sparse-switches.cuh", f" SPARQ_{name} 0", f" SPARQ_{name} {value}"


@pytest.mark.slow  # each is compiled
@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("sparse-layer.cuh", "if (!is_early)", "if (is_early)", "begin_kernel"),
        (ATTEND, "of_block(&st[d_v])", "st[d_v]", "L1 cache"),
        (SELECT, READ, "", "a race"),
        (SELECT, LISTED, "", "cuda_emu"),  # reads what is no list yet
        (SELECT, "arrive<OWN_MASS>()", "arrive<true>()", "a race in global memory"),
    ],
)
def test_an_edit_that_makes_a_race_is_found(
    file: str, old: str, new: str, message: str, native_lib_dir, ggml_headers, tmp_path, capfd
) -> None:
    if reason := cuda_lib.why_no_host():
        pytest.skip(reason)
    kernels = edited(tmp_path, (file, old, new), switch("FENCE"))
    cuda_lib.build_host(ggml_headers, tmp_path, kernels)
    logits = CUTS["ties"](np.random.default_rng(7), 3000).astype(np.float16)

    def run() -> None:
        ggml = CudaGgml(native_lib_dir, tmp_path / cuda_lib.NAME)
        for heads in ((1, 1), (8, 1)):
            sparse_run(ggml, with_logits(heads, logits))

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGABRT
    assert message in capfd.readouterr().err


@pytest.mark.slow
def test_experiments_give_the_same(native_lib_dir, ggml_headers, tmp_path) -> None:
    """What is off until a device has timed it."""
    names = "HEADS_8 SINGLE FENCE SMEM_KEYS PIPE_SCAN PIPE_ROWS DSMEM_FINISH FORCED_EARLY MMA"
    kernels = edited(tmp_path, switch("EARLY", 2), *map(switch, names.split()))
    cuda_lib.build_host(ggml_headers, tmp_path, kernels)
    ggml = CudaGgml(native_lib_dir, tmp_path / cuda_lib.NAME)
    for heads in HEADS:
        for n_sm in N_SM:
            test_layer.test_as_separate_launches(heads, n_sm, ggml)
        test_layer.test_codes(4, heads, ggml)
        test_layer.test_cuts_that_are_hard_to_find("ties", heads, ggml)
