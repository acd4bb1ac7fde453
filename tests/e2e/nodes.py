"""Sparse attention inside llama.cpp: every node against the oracle, from the node's own inputs.

`Watch` is called by the evaluation callback. The shadow that SCORE reads must be what K gives in
its type, so a stale one shows; its result is compared with scores of those values, that of SELECT
with a choice from the very logits it read, that of ATTEND with attention over the very cells it was
given. SCORE_SELECT keeps its logits to itself: SCORE computes them beside it, and both are checked.
Of PREFILL's tokens the first, the last and one between are compared.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterable
from ctypes import c_int32
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "ops"))

import oracle
from cases import GROUP, visible_of
from ggml_ctypes import (
    AttendParams,
    Ggml,
    Graph,
    PrefillParams,
    ScoreParams,
    ScoreSelectParams,
    SelectParams,
    TensorPtr,
)
from llama import bindings
from tolerances import Errors, as_alpha, check_selection, score_scale

from pyorch.native.slots import ATTEND, PREFILL, SCORE, SCORE_SELECT, SEAL, SELECT, VISIBLE
from pyorch.native.slots import source_of as _source
from pyorch.native.tensor import Tensor, floats, view

_OP, _PARAMS = Tensor.op.offset, Tensor.op_params.offset


def read(t: Tensor) -> np.ndarray:
    """View of a tensor in host memory, numpy axes; bf16, q8_0 and q4_0 as a copy in f32."""
    stored = view(t)
    return stored if stored.dtype not in (np.uint8, np.uint16) else floats(stored, t.type)


def shadow_values(k_t: Tensor, k_range: Tensor | None, n_bit: int) -> tuple[np.ndarray, np.ndarray]:
    """What k_t stands for, and the steps of the codes: both (n_stream, components, n_pos)."""
    stored = read(k_t)[0]
    if n_bit == 16:
        return stored.astype(np.float32), np.zeros(stored.shape, np.float32)
    codes = stored.view(np.uint8)
    t = np.arange(64)  # lines of 64 bytes, as sparse-codes.h orders them
    lines = codes[..., : codes.shape[2] // 64 * 64].reshape(*codes.shape[:2], -1, 1, 64)
    lines = lines[..., t // 4 % 4 * 16 + t // 16 * 4 + t % 4]
    if n_bit == 4:  # low halves, then high halves
        lines = np.concatenate([lines & 15, lines >> 4], axis=3)
    codes = lines.reshape(*codes.shape[:2], -1)
    ranges = read(k_range)  # (n_stream, n_grp, components, 2)
    n_grp = min(codes.shape[2] // GROUP, ranges.shape[1])  # behind them either has padding
    codes, ranges = codes[..., : n_grp * GROUP], ranges[:, :n_grp].astype(np.float32)
    step, zero = (np.repeat(ranges[..., i].swapaxes(1, 2), GROUP, axis=2) for i in (0, 1))
    with np.errstate(invalid="ignore", over="ignore"):  # ranges of groups that were never sealed
        return zero + step * codes, step


def _leaf(g: Graph, t: Tensor | None) -> TensorPtr | None:
    """The same values without what computed them."""
    if t is None:
        return None
    leaf = g.ggml.base.ggml_new_tensor(g.ctx, t.type, 4, (ctypes.c_int64 * 4)(*t.ne))
    leaf.contents.nb[:] = t.nb[:]
    leaf.contents.data = t.data
    return leaf


def _params(t: Tensor, kind: type):
    return kind.from_address(ctypes.addressof(t) + _PARAMS + 4)


READS_ALL = -1  # GGML_SPARSE_SELECT_ALL: of a selection, in place of its length


@dataclass
class Attend:
    """What one ATTEND node did; axes (stream, token, KV head) where there are any."""

    layer: int
    n_head: int
    shape: tuple[int, int, int]
    k: np.ndarray  # (n_stream, n_kv, n_head_kv*d_k) f32, a copy of K in the cache; layer 0 only
    visible: np.ndarray  # (n_stream, n_tok, n_kv) bool
    n_read: int  # positions, over all KV heads
    forced: np.ndarray | None  # (n_stream, n_tok, n_forced); None where the node is dense
    kl: np.ndarray | None  # (n_stream, n_tok, 2)
    n_local_max: int = 0
    rank: int = 0
    mean_v: bool = False
    softcap: float = 0.0
    max_bias: float = 0.0
    has_sinks: bool = False

    @property
    def is_sparse(self) -> bool:
        return self.forced is not None

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(stream, token) of those that see anything: PREFILL reads the others."""
        return [tuple(map(int, x)) for x in np.argwhere(self.visible.any(axis=2))]

    @property
    def calls(self) -> int:
        return len(self.tokens)

    @property
    def sparse_calls(self) -> int:
        """Those of tokens that read a selection."""
        return sum(int(self.kl[s, t, 0]) >= 0 for s, t in self.tokens) if self.is_sparse else 0


@dataclass
class Watch:
    """Collects the nodes since the last `clear`; raises AssertionError at the first that is wrong.

    checks=False only collects.
    """

    checks: bool = True
    attends: list[Attend] = field(default_factory=list)
    sealed: int = 0  # groups, over all layers
    prefilled: int = 0  # tokens, over all layers
    n_bits: set[int] = field(default_factory=set)  # of the shadows that were read
    addresses: dict[str, int] = field(default_factory=dict)  # of K and k_t of the last SCORE, v_sum
    in_shadow: np.ndarray | None = None  # (n_stream, n_group) groups that it read from k_t

    def __post_init__(self) -> None:
        name = bindings()._lib.ggml_op_name
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int]
        self._sparse_op = next(i for i in range(200) if name(i) == b"SPARSE_ATTN")
        self._ggml = Ggml(Path(bindings()._lib._name).parent)
        self._selections: dict[int, tuple] = {}

    def clear(self) -> None:
        self.attends.clear()
        self.sealed = self.prefilled = 0

    def wants(self, address: int) -> bool:
        return c_int32.from_address(address + _OP).value == self._sparse_op

    def node(self, address: int) -> None:
        t = Tensor.from_address(address)
        step = t.op_params[0]
        if step == SEAL:
            self.sealed += int((read(_source(t, "list")) >= 0).sum())
            if v_sum := _source(t, "v_sum"):
                self.addresses |= {"v_sum": v_sum.data, "v_sum_stride": v_sum.nb[1]}
        else:
            steps = {VISIBLE: self._visible, SCORE: self._score, SELECT: self._select}
            steps |= {SCORE_SELECT: self._score_select, ATTEND: self._attend}
            (steps | {PREFILL: self._prefill})[step](t)

    def _visible(self, t: Tensor) -> None:
        if not self.checks:
            return
        counts = visible_of(read(_source(t, "mask")))
        assert np.array_equal(read(t), counts), "VISIBLE counts other positions than the mask shows"

    def _score_select(self, t: Tensor) -> None:
        """SELECT(SCORE(..)) of the same sources: SCORE is computed here, then both are checked."""
        p = _params(t, ScoreSelectParams)
        with self._ggml.graph() as g:
            names = ("q", "k", "k_t", "sealed", "mask", "wanted", "k_range")
            given = {name: _leaf(g, _source(t, name)) for name in names}
            given["visible"] = visible_of(read(_source(t, "mask")))
            score = g.node("score", p.score, **given)
            g.compute(score)
            self._score(score.contents)
            select = g.node("select", p.select, **given | {"logits": score})
            select.contents.data = t.data
            self._select(select.contents)
            self._selections[ctypes.addressof(t)] = self._selections.pop(
                ctypes.addressof(select.contents)
            )

    def _score(self, t: Tensor) -> None:
        q, k, mask = (read(_source(t, name)) for name in ("q", "k", "mask"))
        k_t, sealed = _source(t, "k_t"), _source(t, "sealed")
        p = _params(t, ScoreParams)
        self._rank = p.rank if k_t else 0
        source = _source(t, "k")
        self.addresses |= {"k": source.data, "k_stride": source.nb[2], "k_size": source.nb[0]}
        if k_t:
            self.addresses |= {"k_t": k_t.data, "k_t_stride": k_t.nb[1]}
            self.in_shadow = read(sealed)[0, 0].copy()
            self.n_bits.add(p.n_bit)
        if not self.checks:
            return
        if k_t and p.n_rot:  # step 1 is done in the basis before llama.cpp rotated q and K
            q, k = (oracle.hadamard(x, p.n_rot).astype(np.float32) for x in (q, k))
        got, n_group_q = read(t), q.shape[2] // k.shape[2]
        slopes = oracle.alibi_slopes(q.shape[2], p.max_bias)
        errors = Errors("score")
        n_kv, n_head_kv, d = k.shape[1:]
        keys = k.astype(np.float32).swapaxes(1, 2)
        first = np.zeros((q.shape[0], -(-n_kv // GROUP)), int)
        values, code_steps = keys, np.zeros(keys.shape, np.float32)
        if k_t:
            first = read(sealed)[0, 0]
            values, code_steps = self._shadow(keys, k_t, _source(t, "k_range"), first, p)
        for s, tok, h in np.ndindex(q.shape[0], q.shape[1], n_head_kv):
            heads = slice(h * n_group_q, (h + 1) * n_group_q)
            qh, from_codes = q[s, tok, heads], (first[s] > 0) & (first[s] <= tok + 1)
            in_shadow = np.repeat(from_codes, GROUP)[:n_kv, None]
            kh, steps = (
                np.where(in_shadow, x[s, h], y) for x, y in ((values, keys[s, h]), (code_steps, 0))
            )
            spread = None
            if k_t and p.n_bit < 16:
                ranges = read(_source(t, "k_range"))[s, :, h * d : (h + 1) * d]
                spread = oracle.spread_of(ranges, from_codes, n_kv, p.n_bit)
            components = oracle.select_components(qh, p.rank, spread) if k_t else None
            bias = oracle.make_bias(mask[s, 0, tok].astype(np.float64), slopes[heads])
            want, plain = (
                oracle.logits_of(
                    *(qh, kh, bias, p.scale, p.softcap, components, dtype), spread=spread
                )
                for dtype in (np.float64, np.float32)
            )
            factor = np.full(n_group_q, p.scale)
            if k_t:
                root = oracle.temperature_factor(qh, components, spread=spread)
                factor = p.scale / np.maximum(root, 1e-6)
            result = got[s, tok, heads]
            if k_t and p.n_bit < 16:
                # coefficients are rounded; a code is at most so far from the middle one
                half_step, middle = (0.5 / 127, 7.5) if p.n_bit == 4 else (0.5 / 4096, 127.5)
                largest = np.abs(qh[:, components, None] * steps.T[components]).max(axis=1)
                allowed = 1.001 * factor[:, None] * p.rank * half_step * middle * largest
                seen = ~np.isneginf(want)
                off = result[seen] - want[seen]
                result = result.copy()
                result[seen] -= np.clip(off, -allowed[seen], allowed[seen])
            # codes are summed apart from their zero: terms are larger than the keys
            terms = np.abs(kh) + steps * ((1 << p.n_bit) - 1 if k_t else 0)
            errors.add(result, want, plain, score_scale(qh, terms, bias, factor))
        errors.check()

    def _shadow(
        self, k: np.ndarray, k_t: Tensor, k_range: Tensor | None, sealed: np.ndarray, p: ScoreParams
    ) -> tuple[np.ndarray, np.ndarray]:
        """What k_t holds, and steps of the codes: both (n_stream, n_head_kv, n_kv, d)."""
        n_kv = k.shape[2]
        values, steps = (
            x[..., :n_kv].reshape(*k.shape[:2], k.shape[3], -1).swapaxes(2, 3)
            for x in shadow_values(k_t, k_range, p.n_bit)
        )
        in_shadow = np.repeat(sealed != 0, GROUP, axis=1)[:, None, :n_kv, None]
        exact = np.clip(k, -65504, 65504)
        if p.n_bit == 16 and not p.n_rot:
            exact = exact.astype(np.float16).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # elsewhere k_t holds anything
            allowed = 0.501 * steps + 1e-6 * np.abs(exact)
            if p.n_rot:  # rotating rounds, and then k_t may round to the other side
                largest = np.abs(exact).max(axis=3, keepdims=True)
                allowed += 1e-6 * largest + (p.n_bit == 16) * 2**-10 * np.abs(exact)
            near = np.abs(values - exact) <= allowed
        stale = in_shadow & ~near
        assert not stale.any(), f"k_t is stale in cells {np.flatnonzero(stale.any(axis=(0, 1, 3)))}"
        return values, steps

    def _select(self, t: Tensor) -> None:
        logits, wanted = (read(_source(t, name)) for name in ("logits", "wanted"))
        p = _params(t, SelectParams)
        kl, forced = wanted[..., p.i_k : p.i_k + 2], wanted[..., p.i_forced :]
        self._selections[ctypes.addressof(t)] = (
            forced[:, 0].copy(),
            kl[:, 0].copy(),
            p.n_local_max,
            self._rank,
        )
        if not self.checks:
            return
        result = read(t)
        n_group_q = logits.shape[2] // p.n_head_kv
        errors = Errors("alpha")
        for s, tok, h in np.ndindex(logits.shape[0], logits.shape[1], p.n_head_kv):
            heads = slice(h * n_group_q, (h + 1) * n_group_q)
            row, (k, n_local) = result[s, tok, h], kl[s, 0, tok]
            if k < 0:
                assert row[0] == READS_ALL, "an exact token has a selection"
                continue
            cells, rest = _cells(row, n_group_q)
            assert (row[1 + n_group_q + len(cells) :] == -1).all(), "cells after the last one"
            lh = logits[s, tok, heads]
            must = oracle.forced_positions(
                lh,
                forced[s, 0, tok, : min(n_local, p.n_local_max)],
                forced[s, 0, tok, p.n_local_max :],
                p.topk_max,
            )
            check_selection(cells, lh, min(k, p.topk_max), must)
            if p.rest:
                errors.add(*as_alpha(rest, lh, cells), 1.0)
            else:
                assert np.isneginf(rest).all(), "rest without being asked for"
        errors.check()

    def _attend(self, t: Tensor) -> None:
        q, k, mask = (read(_source(t, name)) for name in ("q", "k", "mask"))
        sel, sinks, p = _source(t, "sel"), _source(t, "sinks"), _params(t, AttendParams)
        n_stream, n_tok, n_head, _ = q.shape
        n_head_kv = k.shape[2]
        hidden = np.isneginf(mask[:, 0])
        layer = int(t.name.decode().rpartition("-")[2])
        record = Attend(
            layer=layer,
            n_head=n_head,
            shape=(n_stream, n_tok, n_head_kv),
            k=k.astype(np.float32).reshape(n_stream, k.shape[1], -1) if layer == 0 else None,
            visible=~hidden,
            n_read=int((~hidden).sum()) * n_head_kv,
            forced=None,
            kl=None,
            mean_v=bool(p.mean_v),
            softcap=p.softcap,
            max_bias=p.max_bias,
            has_sinks=sinks is not None,
        )
        if sel is not None:
            selection = self._selections[ctypes.addressof(sel)]
            record.forced, record.kl, record.n_local_max, record.rank = selection
            n_sel, n_seen = read(sel)[..., 0], (~hidden).sum(axis=2)[..., None]
            record.n_read = int(np.where(n_sel == READS_ALL, n_seen, n_sel).sum())
        self.attends.append(record)
        if self.checks:
            self._compare(t, p, range(n_tok), sinks, sel)

    def _prefill(self, t: Tensor) -> None:
        n_tok = read(_source(t, "q")).shape[1]
        self.prefilled += int((~np.isneginf(read(_source(t, "mask"))[:, 0])).any(axis=2).sum())
        if self.checks:
            some = {0, n_tok - 1, (7 * self.prefilled) % n_tok}
            sinks = _source(t, "sinks")
            p = _params(t, PrefillParams)
            few_bits = bool(p.fast) and self._ggml.has_fast
            self._compare(t, p, sorted(some), sinks, None, chain=not few_bits, few_bits=few_bits)

    @staticmethod
    def _compare(
        t: Tensor,
        p: AttendParams | PrefillParams,
        tokens: Iterable[int],
        sinks: Tensor | None,
        sel: Tensor | None,
        chain: bool = False,
        few_bits: bool = False,
    ) -> None:
        """Some tokens of a node that attends with attention over what it was given.

        chain: how it adds, see `oracle.logits_of`; few_bits: whether q and K are rounded to 8 bits.
        """
        q, k, v, mask = (read(_source(t, name)) for name in ("q", "k", "v", "mask"))
        n_stream, n_tok, n_head, _ = q.shape
        n_head_kv, d_v = k.shape[2], v.shape[3]
        n_group_q = n_head // n_head_kv
        hidden = np.isneginf(mask[:, 0])
        got = read(t).reshape(n_stream, n_tok, n_head, d_v)
        slopes = oracle.alibi_slopes(n_head, p.max_bias)
        errors = Errors("attend_fast" if few_bits else "attend")
        for s, tok, h in itertools.product(range(n_stream), tokens, range(n_head_kv)):
            heads = slice(h * n_group_q, (h + 1) * n_group_q)
            seen = np.flatnonzero(~hidden[s, tok])
            if not len(seen):
                assert not got[s, tok, heads].any(), "a token that sees nothing has a result"
                continue
            bias = oracle.make_bias(mask[s, 0, tok].astype(np.float64), slopes[heads])
            qh, kh, vh = q[s, tok, heads], k[s, :, h].astype(np.float32), v[s, seen, h]
            if few_bits:
                qh, kh = oracle.few_bits(qh, kh, bias)
            bias, kh, vh = bias[:, seen], kh[seen], vh.astype(np.float32)
            cells = rest = None
            if sel is not None and read(sel)[s, tok, h, 0] != READS_ALL:
                cells, rest = _cells(read(sel)[s, tok, h], n_group_q)
                rest = rest if p.mean_v else None
                assert not hidden[s, tok, cells].any(), "a hidden cell was selected"
                cells = np.searchsorted(seen, cells)
            sink = None if sinks is None else read(sinks)[0, 0, 0, heads]
            args = (qh, kh, vh, bias, p.scale, p.softcap, cells, sink)
            size = float(np.abs(vh).max(initial=0))
            more = {"chain": chain, "rest": rest}
            errors.compare(got[s, tok, heads], size, oracle.attend, *args, **more)
        errors.check()


def _cells(row: np.ndarray, n_group_q: int) -> tuple[np.ndarray, np.ndarray]:
    """One row of SELECT's result: (cells, rest of each query head)."""
    return row[1 + n_group_q :][: row[0]], row[1 : 1 + n_group_q].view(np.float32)
