"""PREFILL: exact attention of many tokens at once. Oracle and properties."""

from __future__ import annotations

from dataclasses import replace

import cases
import numpy as np
import oracle
import pytest
from cases import Case
from ggml_ctypes import STATS, Ggml
from graphs import Sources, prefill, prefill_run
from tolerances import EPS32, Errors

FACTORS = {
    "n_kv": (1, 2, 63, 64, 65, 501, 1100),
    "d": (64, 80, 96, 100, 128, 256),
    "heads": ((1, 1), (4, 4), (8, 2), (7, 1), (32, 8)),
    "type_k": ("f16", "bf16", "f32", "q8_0", "q4_0"),
    "batch": ((2, 1), (5, 3), (17, 1), (33, 2), (70, 1)),  # 8 to 490 queries of a KV head
    "mask": ("open", "causal", "part", "hidden", "alibi"),
    "extra": ("plain", "softcap", "sinks"),
    "strided": (False, True),
}


def some_cases() -> list[Case]:
    found = []
    for i, row in enumerate(cases.pairwise(FACTORS, seed=3)):
        case = Case(**row, seed=400 + i)
        if case.type_k in cases.BLOCKS and case.d % 32:
            case = replace(case, d={80: 96, 100: 160}[case.d])
        found.append(case if case.size < 4_000_000 else replace(case, batch=(9, 1)))
    return found


BLOCK = 64  # positions
# no whole number of the four components that are multiplied at once
CASES = [*some_cases(), Case(n_kv=501, d=70, heads=(8, 2), batch=(70, 1))]
# what is found for each 4,096 positions is added up
LONG = Case(n_kv=9000, heads=(6, 2), batch=(19, 1), mask="part", extra="sinks")
CASES += [
    LONG,
    replace(LONG, mask="alibi", extra="softcap"),
    replace(LONG, batch=(5, 2), mask="hidden"),
]
SHAPES = [
    Case(n_kv=501, heads=(8, 2), batch=(70, 1)),
    Case(n_kv=300, heads=(4, 4), d=80, batch=(33, 2), mask="part", extra="sinks", strided=True),
    Case(n_kv=1100, heads=(7, 1), d=128, batch=(17, 1), mask="alibi", extra="softcap"),
    LONG,
]
# its token 61 is the first that sees all of the last whole block, beside others that do not
WHOLE = Case(n_kv=520, heads=(8, 2), batch=(70, 1))
either_kind = pytest.mark.parametrize("fast", [False, True])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_equals_oracle(case: Case, ggml: Ggml) -> None:
    check_prefill(case, ggml)


def check_prefill(case: Case, ggml: Ggml, fast: bool = False) -> None:
    data = cases.make(case)
    with ggml.graph() as g:
        s = Sources(data, g)
        out = prefill(s, fast)
        g.compute(out)
        got, stats = g.read(out).reshape(*data.q.shape[:3], -1), s.stats_read()
    n_fast = stats.pop("prefill_fast")
    assert n_fast == (wholly_seen(data) if fast and ggml.has_fast else 0)
    errors = Errors("attend_fast" if n_fast else "attend")
    for b in data.blocks():
        q, k = oracle.few_bits(b.q, b.k, b.bias) if n_fast else (b.q, b.k)
        args = (q, k, b.v, b.bias, case.scale, case.softcap, None, b.sinks)
        errors.compare(b.of(got), b.size, oracle.attend, *args)
    errors.check()
    assert np.isfinite(got).all()
    n_call = int((~np.isneginf(data.mask)).any(axis=-1).sum())  # tokens that see something
    assert {"prefill_fast": 0, **stats} == dict.fromkeys(STATS, 0) | {"prefill": n_call}


def peaked(case: Case) -> cases.Data:
    """A case whose attention has large positions, as real attention has."""
    data = cases.make(case)
    data.q[:] *= 4
    return data


def wholly_seen(data: cases.Data) -> int:
    """The (query, block of 64 positions) without a hidden or biased position."""
    n_block = data.mask.shape[-1] // BLOCK
    blocks = data.mask[..., : n_block * BLOCK].reshape(*data.mask.shape[:-1], n_block, BLOCK)
    return int((blocks == 0).all(axis=-1).sum()) * data.case.heads[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_fast_equals_oracle(case: Case, ggml: Ggml) -> None:
    """With q and K in 8 bits, as the oracle rounds them; p and V in bf16 are in the tolerance."""
    check_prefill(case, ggml, fast=True)


@either_kind
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_threads_are_bit_identical(case: Case, fast: bool, ggml: Ggml) -> None:
    """Units of other sizes, so queries beside others."""
    data = peaked(case)
    one, *others = (prefill_run(ggml, data, n_threads=n, fast=fast) for n in (1, 2, 3, 5, 16))
    assert all(np.array_equal(one, other) for other in others)


@either_kind
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("case", [*SHAPES, WHOLE], ids=str)
def test_prefill_hidden_positions_never_leak(
    case: Case, what: str, value: float, fast: bool, ggml: Ggml
) -> None:
    """Not even where later tokens see them: those alone are lost."""
    data, first = peaked(replace(case, mask="causal")), 61 if case == WHOLE else 3
    clean = prefill_run(ggml, data, fast=fast)
    at = case.n_kv - case.batch[0] + first  # of the first stream, tokens from `first` on see it
    getattr(data, what)[0, at] = value
    got = prefill_run(ggml, data, fast=fast)
    assert not np.isnan(clean).any()
    assert not np.isfinite(got[0, first:]).any() and not np.isnan(got[0, :first]).any()
    assert np.array_equal(got[1:], clean[1:])
    assert np.array_equal(got[0, :first], clean[0, :first])


@either_kind
@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("n", [1, 3, 16])
def test_prefill_other_tokens_change_no_bit(case: Case, n: int, fast: bool, ggml: Ggml) -> None:
    """How a prompt is cut into batches does not show in its attention."""
    data = cases.make(case)
    whole = prefill_run(ggml, data, fast=fast)
    part = replace(data, q=data.q[:, :n], mask=data.mask[:, :, :n], kl=data.kl[:, :, :n])
    part.forced = data.forced[:, :, :n]
    assert np.array_equal(prefill_run(ggml, part, fast=fast), whole[:, :n])


def test_prefill_of_extreme_logits(ggml: Ggml) -> None:
    """Logits beyond the range of exp, growing and falling over the tiles: the max is carried on."""
    for order in (1, -1):
        data = cases.make(Case(n_kv=500, heads=(2, 1), d=64, batch=(9, 1), mask="open"))
        data.q[:] = 1.0
        data.k[:] = (np.arange(500)[::order] / 250 - 1)[None, :, None, None] * 40
        got = prefill_run(ggml, data)
        want = np.einsum("t,tc->c", *_softmax_of(data))
        assert np.abs(got - want).max() <= 64 * EPS32 * np.abs(data.v).max()


def _softmax_of(data: cases.Data) -> tuple[np.ndarray, np.ndarray]:
    logits = cases.to_type(data.k, "f16")[0, :, 0].astype(np.float64).sum(axis=1) * data.case.scale
    p = np.exp(logits - logits.max())
    return p / p.sum(), data.v[0, :, 0].astype(np.float64)
