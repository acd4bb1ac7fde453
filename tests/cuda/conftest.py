"""Fixtures of the tests of the CUDA kernels."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).parent))

import cuda_lib
from cuda_lib import CudaGgml


@pytest.fixture(scope="session")
def ggml(native_lib_dir: Path, ggml_headers: Path, made_once) -> CudaGgml:
    """ggml of our build, whose graphs run on the CUDA kernels, emulated."""
    if reason := cuda_lib.why_no_host():
        pytest.skip(reason)
    made = made_once("cuda-host", partial(cuda_lib.build_host, ggml_headers))
    return CudaGgml(native_lib_dir, made / cuda_lib.NAME)


N_QUICK = 3  # of the parameters of a test
# tests without small parameters
LARGE = ("test_score_select_is_select_of_score", "test_select_ties")
LARGE += ("test_select_heads_shared_by_threads",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The emulator is a thousand times slower than a GPU: in a quick run a few small parameters of
    each test, evenly chosen."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if "test_kernels.py" in item.nodeid:
            tests.setdefault(item.originalname, []).append(item)
    for group in tests.values():
        small = [i for i in group if _is_small(i) and i.get_closest_marker("slow") is None]
        quick = small[:: -(-len(small) // N_QUICK)] if small else []
        for item in group:
            if item not in quick:
                item.add_marker(pytest.mark.slow)


def _is_small(item: pytest.Function) -> bool:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    case = params.get("case")
    n = max(params.get("n", 0), params.get("n_kv", 0))
    return item.originalname not in LARGE and n < 5000 and (case is None or case.size < 400_000)
