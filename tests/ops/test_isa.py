"""The other instruction sets of the kernels: the same steps, the same oracle. See isa.py."""

from __future__ import annotations

import os
from pathlib import Path

import cases
import pytest
import test_steps
from isa import TARGETS, IsaGgml, why_not

CASES = [c for c in cases.quick_cases() if c.size <= 300_000]


@pytest.fixture(scope="session")
def ggml_headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pyorch.native import source

    pin = source.read_pin()
    into = tmp_path_factory.mktemp("ggml")
    source.unpack(source.locate(pin), f"{pin.folder}/ggml", into, skip=("cmake",))
    return into


@pytest.fixture(scope="module", params=TARGETS)
def isa(request, ggml, ggml_headers: Path, tmp_path_factory) -> IsaGgml:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return IsaGgml(ggml.folder, request.param, ggml_headers, tmp_path_factory.mktemp("isa"))


def test_isa_equals_oracle(isa: IsaGgml) -> None:
    """All cases in one test: with an emulator each costs a process per op."""
    chosen = CASES if os.environ.get("SPARQ_TEST_ISA_ALL") else CASES[::4]
    assert len(chosen) > 5
    for case in chosen:
        try:
            test_steps.check_steps(case, isa)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_isa_seal_and_select(isa: IsaGgml) -> None:
    for type_k in ("f16", "bf16", "f32"):
        test_steps.test_seal_writes_listed_groups_only(type_k, 200, 80, 3, 2, True, isa)
    for kind in ("normal", "heavy ties", "signed zeros", "few visible", "uneven"):
        test_steps.test_select_one_head_equals_sort(kind, 3000, isa)
    for g in (1, 4):
        test_steps.test_select_ties(g, isa)
        test_steps.test_select_k_counts_forced(g, isa)
