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
def ref(tmp_path_factory: pytest.TempPathFactory):
    from ref_lib import Ref, find_compiler

    if find_compiler() is None:
        pytest.skip("no C compiler")
    return Ref(tmp_path_factory.mktemp("ref"))


@pytest.fixture(scope="session")
def ggml(request: pytest.FixtureRequest):
    """ggml of our build; SPARQ_TEST_LIB_DIR names another one (a sanitized build, say)."""
    from ggml_ctypes import Ggml

    folder = os.environ.get("SPARQ_TEST_LIB_DIR") or request.getfixturevalue("native_lib_dir")
    return Ggml(Path(folder))
