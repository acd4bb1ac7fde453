"""PREFILL with `keep`: positions are chosen for the tokens of a prompt. Oracle and properties."""

from __future__ import annotations

from ctypes import c_int64
from dataclasses import replace

import cases
import numpy as np
import oracle
import pytest
from cases import Case
from ggml_ctypes import Ggml, PrefillParams
from graphs import Sources, prefill, prefill_run
from test_prefill import CHOICE as SHAPES
from test_prefill import peaked
from tolerances import Errors

from pyorch.ggml import BY_NAME
from pyorch.native.slots import sources

N_CHOICE = 512  # tokens that choose together
FACTORS = {
    "n_kv": (300, 501, 1100),
    "d": (64, 80, 96, 128, 256),
    "heads": ((1, 1), (4, 4), (4, 2), (7, 1)),
    "type_k": ("f16", "bf16", "f32", "q8_0", "q4_0"),
    "batch": ((64, 1), (70, 2), (130, 1)),
    "mask": ("open", "causal", "part", "hidden", "alibi"),
    "extra": ("plain", "softcap", "sinks"),
    "strided": (False, True),
}
KEEP = (0.3, 0.7, 0.95)


def some_cases() -> list[Case]:
    found = [
        replace(Case(**row, seed=700 + i), d=96 if row["d"] == 80 else row["d"])
        if row["type_k"] in cases.BLOCKS
        else Case(**row, seed=700 + i)
        for i, row in enumerate(cases.pairwise(FACTORS, seed=5))
    ]
    large = Case(n_kv=1500, heads=(2, 1), batch=(600, 1), mask="causal", seed=799)  # two choices
    return [*found, large]


CASES = some_cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_positions_equal_oracle(case: Case, ggml: Ggml) -> None:
    check_choice(case, KEEP[case.seed % len(KEEP)], ggml)


def check_choice(case: Case, keep: float, ggml: Ggml) -> None:
    data = peaked(case)
    with ggml.graph() as g:
        s = Sources(data, g)
        out = prefill(s, keep=keep)
        g.compute(out)
        got, stats = g.read(out).reshape(*data.q.shape[:3], -1), s.stats_read()
    n_among = n_read = 0
    errors = Errors("attend_chosen")
    group = case.heads[0] // case.heads[1]
    slopes = oracle.alibi_slopes(case.heads[0], case.max_bias)
    for stream in range(len(data.q)):
        for head in range(case.heads[0]):
            k, v = data.k[stream, :, head // group], data.v[stream, :, head // group]
            sink = None if data.sinks is None else data.sinks[head]
            for at in range(0, data.q.shape[1], N_CHOICE):
                toks = slice(at, at + N_CHOICE)
                q, mask = data.q[stream, toks, head], data.mask[stream, 0, toks]
                slope = slopes[head : head + 1]
                bias = np.stack([oracle.make_bias(row.astype(float), slope)[0] for row in mask])
                choice = oracle.choose(q, k, bias, case.scale, case.softcap, keep)
                n_among += int(choice.among.sum()) * len(q)
                n_read += int(choice.read.sum()) * len(q)
                seen = ~np.isneginf(bias).all(axis=0)
                size = float(np.abs(v[seen]).max(initial=0))
                args = (q, k, v, bias, case.scale, case.softcap, sink, choice)
                errors.compare(got[stream, toks, head], size, oracle.attend_chosen, *args)
    assert (stats["prefill_visible"], stats["prefill_read"]) == (n_among, n_read)
    if case.mask == "open":
        assert 0 < n_read < n_among
    errors.check()


@pytest.mark.parametrize("n_threads", [1, 8])
def test_scratch_of_a_million_positions(n_threads: int, ggml: Ggml) -> None:
    """Some tens of MB for each thread, where the logits of all heads would be 3 GiB."""
    n_kv, n_tok, mib = 1 << 20, 512, 1 << 20
    with ggml.graph() as g:

        def tensor(kind: int, *shape: int):
            return ggml.base.ggml_new_tensor(g.ctx, kind, 4, (c_int64 * 4)(*shape))

        f16, f32 = BY_NAME["f16"].number, BY_NAME["f32"].number
        q, k, v = tensor(f32, 128, 32, n_tok, 1), *[tensor(f16, 128, 8, n_kv, 1) for _ in "kv"]
        mask = tensor(f16, n_kv, n_tok, 1, 1)
        params = PrefillParams(1.0, 0.0, 0.0, 0, 0.95)
        out = g.op("ggml_sparse_attn_prefill", sources(q=q, k=k, v=v, mask=mask), params)
        graph = ggml.base.ggml_new_graph(g.ctx)
        ggml.base.ggml_build_forward_expand(graph, out)
        size = ggml.cpu.ggml_graph_plan(graph, n_threads, None).work_size
    assert size < (64 * n_threads + 96) * mib


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_products_of_few_bits_choose_alike(case: Case, ggml: Ggml) -> None:
    """The choice is made in f32, so both read the same positions, and differ by rounding."""
    data = peaked(case)
    f32, fast = (prefill_run(ggml, data, fast=fast, keep=0.7) for fast in (False, True))
    assert np.abs(f32 - fast).max() < 0.1 * np.abs(data.v[~data.hidden]).max()
    assert np.array_equal(f32, fast) != ggml.has_fast


@pytest.mark.parametrize(("keep", "n_tok"), [(0.0, 70), (1.0, 70), (0.5, 63)])
def test_no_choice_is_exact_attention(keep: float, n_tok: int, ggml: Ggml) -> None:
    """Up to 63 tokens read all."""
    data = peaked(replace(SHAPES[0], batch=(n_tok, 1)))
    assert np.array_equal(prefill_run(ggml, data, keep=keep), prefill_run(ggml, data))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_read(value: float, ggml: Ggml) -> None:
    """A position that all see and that is not finite is not left out: its tokens are lost, as in
    exact attention."""
    data = peaked(SHAPES[0])
    data.k[0, 200] = data.v[0, 200] = value
    assert np.isnan(prefill_run(ggml, data, keep=0.5)).all()
