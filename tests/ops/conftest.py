"""Fixtures of the op tests: the scalar reference (compiled here) and ggml of our build."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# before numpy is loaded: threads of BLAS and of ggml together slow the oracle down
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.fixture(scope="session")
def ref(made_once):
    from ref_lib import Ref, build, find_compiler

    if find_compiler() is None:
        pytest.skip("no C compiler")
    return Ref(made_once("ref", build))


@pytest.fixture(scope="session")
def ggml(request: pytest.FixtureRequest, native_lib_dir: Path, tmp_path_factory):
    """ggml of our build; SPARQ_TEST_SANITIZE names a sanitizer, SPARQ_TEST_DEVICE a device."""
    from ggml_ctypes import Ggml
    from isa import IsaGgml

    if target := os.environ.get("SPARQ_TEST_SANITIZE"):
        headers = request.getfixturevalue("ggml_headers")
        return IsaGgml(native_lib_dir, target, headers, tmp_path_factory.mktemp(target))
    if device := os.environ.get("SPARQ_TEST_DEVICE"):
        from device import DeviceGgml

        return DeviceGgml(native_lib_dir, device)
    return Ggml(native_lib_dir)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under a sanitizer, which takes long: of the parameters of a test every third."""
    if not os.environ.get("SPARQ_TEST_SANITIZE"):
        return
    seen: dict[str, int] = {}
    kept = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if seen.get(name, 0) % 3 == 0:
            kept.append(item)
        seen[name] = seen.get(name, 0) + 1
    items[:] = kept
