"""The other instruction sets of the kernels: the same steps, the same oracle. See isa.py.

Each takes half a minute to compile. The quick one is that which no machine of ours has by itself:
scalar code, with little scratch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cases
import pytest
import test_prefill
import test_quant
import test_steps
from isa import TARGETS, IsaGgml, why_not

CASES = [c for c in cases.quick_cases() if c.size <= 300_000]
QUICK = "scalar"


@pytest.fixture(
    scope="module",
    params=[t if t == QUICK else pytest.param(t, marks=pytest.mark.slow) for t in TARGETS],
)
def isa(request, ggml, ggml_headers: Path, tmp_path_factory) -> Iterator[IsaGgml]:
    if reason := why_not(request.param):
        pytest.skip(reason)
    isa = IsaGgml(ggml.folder, request.param, ggml_headers, tmp_path_factory.mktemp("isa"))
    yield isa
    if isa.arena:
        isa.arena.close()


def test_isa_equals_oracle(isa: IsaGgml) -> None:
    """Many cases in one test: with an emulator each costs a process per op."""
    check_cases(isa, CASES[::4], test_steps.check_steps)


def check_cases(isa: IsaGgml, chosen: list[cases.Case], check: Callable[..., None]) -> None:
    assert len(chosen) > 3
    for case in chosen:
        try:
            check(case, ggml=isa)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("fast", [False, True])
def test_isa_prefill(isa: IsaGgml, fast: bool) -> None:
    check_cases(isa, test_prefill.CASES[::3], partial(test_prefill.check_prefill, fast=fast))
    leak = test_prefill.test_prefill_hidden_positions_never_leak
    for what in ("k", "v"):
        leak(test_prefill.WHOLE, what, float("nan"), fast, isa)


def test_isa_seal_and_select(isa: IsaGgml) -> None:
    for type_k in ("f16", "bf16", "f32"):
        test_steps.test_seal_writes_listed_groups_only(type_k, 200, 80, 3, 2, True, isa)
    for kind in ("normal", "heavy ties", "signed zeros", "few visible", "uneven"):
        test_steps.test_select_one_head_equals_sort(kind, 3000, isa)
    for g in (1, 4):
        test_steps.test_select_ties(g, isa)
        test_steps.test_select_k_counts_forced(g, isa)
        test_steps.test_select_top_p("heavy ties", 1003, g, isa)


def test_isa_quantised_shadow(isa: IsaGgml) -> None:
    for n_bit in test_quant.BITS:
        test_quant.test_codes_hold_k_to_half_a_step(isa, n_bit, 768, 33, 3, 1, "f16")
        test_quant.test_codes_of_values_that_are_not_finite(isa, n_bit)
        for q_value in (1e-38, 1e38, math.inf, math.nan):
            test_quant.test_scan_of_a_dead_query_gives_numbers(isa, n_bit, q_value)
        for sizes in (
            (1280, 128, (4, 4), 32, 2, 0.7),
            (768, 64, (8, 2), 33, 1, 0.7),
            (2304, 64, (7, 1), 64, 1, 0.7),
            (4608, 64, (2, 2), 30, 1, 1),
        ):
            test_quant.test_scan_equals_the_values_of_the_codes(isa, n_bit, *sizes)
