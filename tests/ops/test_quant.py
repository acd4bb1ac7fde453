"""The quantised k_t: codes against K, and the scan against the values the codes stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracle
import pytest
from cases import GROUP, to_type, visible_of
from ggml_ctypes import STATS, Ggml, ScoreParams, ScoreSelectParams, SealParams, SelectParams

BITS = [8, 4]

# the byte of each of the 64 positions of a line: 16*j + 4*i + l is at 16*i + 4*j + l
BYTE = np.arange(64).reshape(4, 4, 4).transpose(1, 0, 2).ravel()

BY_CHANNEL = (0, 2, 1, 3)  # the order of ranges in memory, as the library has it


@dataclass
class Shadow:
    """k_t in codes and its ranges, as arrays the ops write.

    codes: (n_stream, n_head_kv*d, bytes) int8; ranges: (n_stream, n_grp, n_head_kv*d, 2) f16
    """

    n_bit: int
    codes: np.ndarray
    ranges: np.ndarray

    @classmethod
    def empty(cls, n_bit: int, n_stream: int, n_chan: int, n_kv: int) -> Shadow:
        n_grp = n_kv // GROUP
        size = n_grp * GROUP * n_bit // 8 + 192
        return cls(
            n_bit,
            np.full((n_stream, n_chan, size), -91, np.int8),
            np.full((n_stream, n_grp, n_chan, 2), np.nan, np.float16),
        )

    def code(self, n_kv: int) -> np.ndarray:
        """(n_stream, n_kv, n_chan), from the layout of ggml_ops/sparse-codes.h."""
        raw = self.codes.view(np.uint8)
        t = np.arange(n_kv)
        byte = raw[:, :, t // (512 // self.n_bit) * 64 + BYTE[t % 64]].transpose(0, 2, 1)
        if self.n_bit == 8:
            return byte
        return np.where((t % 128 < 64)[None, :, None], byte & 15, byte >> 4)

    def values(self, n_kv: int) -> np.ndarray:
        """(n_stream, n_kv, n_chan) f64: zero + scale*code."""
        scale, zero = (
            self.ranges[:, np.arange(n_kv) // GROUP].astype(np.float64).transpose(3, 0, 1, 2)
        )
        return zero + scale * self.code(n_kv)


def seal(
    ggml: Ggml,
    shadow: Shadow,
    k: np.ndarray,
    groups: np.ndarray,
    type_k: str = "f16",
    n_threads: int = 2,
) -> Shadow:
    """k (n_stream, n_kv, n_head_kv, d); groups (n_stream, n_list)."""
    with ggml.graph() as g:
        k_t = g.tensor(shadow.codes, "i8", inplace=True)
        ranges = g.tensor(shadow.ranges, "f16", inplace=True)
        k = (k, type_k, (0, 64, 2, 0))
        given = {"k_t": k_t, "k": k, "list": groups, "k_range": ranges}
        g.compute(g.node("seal", SealParams(shadow.n_bit), **given), n_threads=n_threads)
        return Shadow(shadow.n_bit, g.read(k_t)[0], g.read(ranges))


def shadow_of(
    ggml: Ggml, n_bit: int, k: np.ndarray, share: np.ndarray | float = 1
) -> tuple[Shadow, np.ndarray]:
    """The shadow of k, and which of its groups are sealed: those of a mask, or a share of them."""
    n_kv, n_chan = k.shape[1], k.shape[2] * k.shape[3]
    sealed = np.random.default_rng(n_kv).random(n_kv // GROUP) < share
    sealed = np.broadcast_to(share if isinstance(share, np.ndarray) else sealed, (1, n_kv // GROUP))
    groups = np.where(sealed, np.arange(n_kv // GROUP), -1)
    empty = Shadow.empty(n_bit, 1, n_chan, n_kv)
    return seal(ggml, empty, k, groups), sealed.astype(np.int32)


def given_of(shadow: Shadow, q, k, sealed, mask, order: tuple[int, ...] = BY_CHANNEL) -> dict:
    """Sources of SCORE. order: of the ranges in memory; (): as their shape says."""
    ranges = (shadow.ranges, "f16", (), False, order)
    given = {"q": q, "k": k, "k_t": (shadow.codes, "i8"), "k_range": ranges}
    return given | {"sealed": sealed, "mask": mask, "visible": visible_of(mask)}


def score(ggml: Ggml, shadow: Shadow, *given, rank: int, n_threads=2, **more) -> np.ndarray:
    """Logits (n_stream, n_tok, n_head, n_kv) of the sources of `given_of`."""
    with ggml.graph() as g:
        params = ScoreParams(rank, 0.125, 0.0, 0.0, shadow.n_bit)
        out = g.node("score", params, **given_of(shadow, *given, **more))
        g.compute(out, n_threads=n_threads)
        return g.read(out)


def open_mask(n_kv: int) -> np.ndarray:
    return np.zeros((1, 1, 1, n_kv), np.float32)


def keys(rng: np.random.Generator, shape: tuple[int, ...], kind: str = "f16") -> np.ndarray:
    """Keys with what real ones have: an offset and a width of their own in every channel."""
    offset = 3 * rng.standard_normal((1, 1, *shape[2:]))
    width = np.exp(rng.standard_normal((1, 1, *shape[2:])))
    return to_type(offset + width * rng.standard_normal(shape), kind)


@pytest.mark.parametrize("n_bit", BITS)
@pytest.mark.parametrize(
    ("n_kv", "d", "n_head_kv", "n_stream", "type_k"),
    [
        (512, 64, 1, 1, "f16"),
        (1280, 80, 2, 2, "bf16"),
        (2048, 128, 2, 1, "f32"),
        (768, 33, 3, 1, "f16"),
    ],
)
def test_codes_hold_k_to_half_a_step(ggml, n_bit, n_kv, d, n_head_kv, n_stream, type_k) -> None:
    """Groups are sealed in random order, a few at a time; scales and zeros are rounded to f16."""
    rng = np.random.default_rng(n_kv + d + n_bit)
    k = keys(rng, (n_stream, n_kv, n_head_kv, d), type_k)
    n_grp = n_kv // GROUP
    shadow = Shadow.empty(n_bit, n_stream, n_head_kv * d, n_kv)
    order = np.stack([rng.permutation(n_grp) for _ in range(n_stream)])
    for i in range(0, n_grp, 3):
        part = order[:, i : i + 3]
        groups = np.pad(part, ((0, 0), (0, 1)), constant_values=-1)
        listed = (part[:, None] == np.arange(n_kv)[None, :, None] // GROUP).any(axis=2)
        hidden = np.where(listed[..., None, None], k, np.nan)  # the others may hold anything
        shadow = seal(ggml, shadow, hidden, groups, type_k, n_threads=1 + i % 3)

    parts = k.reshape(n_stream, n_grp, GROUP, -1).astype(np.float32)
    top, low = np.float32(2**n_bit - 1), parts.min(axis=2)
    scale, zero = ((parts.max(axis=2) - low) / top).astype(np.float16), low.astype(np.float16)
    assert np.array_equal(shadow.ranges, np.stack([scale, zero], axis=-1))
    scale, zero = (x.astype(np.float32)[:, :, None] for x in (scale, zero))
    codes = np.clip(np.rint((parts - zero) * (1 / scale)), 0, top)
    assert np.array_equal(shadow.code(n_kv).reshape(codes.shape), codes)
    error = np.abs(shadow.values(n_kv).reshape(codes.shape) - parts)
    assert (error <= 0.5001 * scale + 2**-11 * (np.abs(zero) + top * scale)).all()


@pytest.mark.parametrize("n_bit", BITS)
def test_codes_of_values_that_are_not_finite(ggml, n_bit) -> None:
    k = np.zeros((1, 512, 1, 16), np.float32)
    k[0, :4, 0, 0] = [np.nan, np.inf, -np.inf, 1e9]
    shadow = seal(ggml, Shadow.empty(n_bit, 1, 16, 512), k, np.arange(4)[None], "f32")
    assert np.isfinite(shadow.ranges).all()
    assert np.allclose(shadow.values(512)[0, 1:4, 0], [65504, -65504, 65504], rtol=1e-3)
    assert abs(shadow.values(512)[0, 0, 0]) <= 0.501 * shadow.ranges[0, 0, 0, 0], "NaN counts as 0"
    assert (shadow.values(512)[0, :, 1:] == 0).all(), "a constant channel"


@pytest.mark.parametrize("n_bit", BITS)
@pytest.mark.parametrize(
    ("n_kv", "d", "heads", "rank", "n_tok"),
    [
        (512, 64, (1, 1), 1, 1),
        (1280, 128, (4, 4), 32, 2),
        (768, 64, (8, 2), 33, 1),
        (2304, 128, (7, 1), 128, 1),
        (9216, 80, (6, 2), 16, 1),
        (9216, 64, (2, 2), 30, 1),
    ],
)
@pytest.mark.parametrize("share", [0.7, 1])
def test_scan_equals_the_values_of_the_codes(
    ggml, n_bit, n_kv, d, heads, rank, n_tok, share
) -> None:
    """Sealed, unsealed, hidden groups mixed, or all sealed: many groups in one scan; up to the
    rounding of the coefficients."""
    n_head, n_head_kv = heads
    rng = np.random.default_rng(n_kv + rank)
    k = keys(rng, (1, n_kv, n_head_kv, d))
    q = rng.standard_normal((1, n_tok, n_head, d)) * np.exp(rng.standard_normal(d))
    q = q.astype(np.float32)
    mask = np.where(rng.random((1, 1, n_tok, n_kv)) < 0.2, -np.inf, 0).astype(np.float32)
    if share < 1:
        mask[..., n_kv // 2 // GROUP * GROUP :][..., :GROUP] = -np.inf
    shadow, sealed = shadow_of(ggml, n_bit, k, share)
    given = shadow, q, k, sealed, mask
    runs = [score(ggml, *given, rank=rank, n_threads=t) for t in ggml.threads(1, 2, 3)]
    runs.append(score(ggml, *given, rank=rank, order=()))
    assert all(np.array_equal(runs[0], r) for r in runs), "by threads, or by the order of ranges"

    from_codes = np.repeat(sealed[0], GROUP) != 0
    values = np.nan_to_num(shadow.values(n_kv)[0]).reshape(n_kv, n_head_kv, d)
    g = n_head // n_head_kv
    for t in range(n_tok):
        for h in range(n_head_kv):
            qh = q[0, t, h * g : (h + 1) * g].astype(np.float64)
            ranges = shadow.ranges[0, :, h * d : (h + 1) * d]
            spread = oracle.spread_of(ranges, sealed[0], n_kv, n_bit)
            kept = oracle.select_components(qh, rank, spread)
            factor = 0.125 / oracle.temperature_factor(qh, kept, spread=spread)
            coef = qh[:, kept] * factor[:, None]
            x = np.where(from_codes[:, None], values[:, h], k[0, :, h])[:, kept]
            want = coef @ x.T
            got = runs[0][0, t, h * g : (h + 1) * g]
            hidden = np.isneginf(mask[0, 0, t])
            assert np.isneginf(got[:, hidden]).all() and np.isfinite(got[:, ~hidden]).all()

            # plain f32 sums; half a step of the rounded coefficients, times the distance of a code
            # from the middle one
            scale = shadow.ranges[0, np.arange(n_kv) // GROUP][:, h * d : (h + 1) * d, 0][:, kept]
            scale = np.nan_to_num(scale.astype(np.float64))
            largest = (np.abs(coef)[:, None] * scale).max(axis=-1)  # (g, n_kv)
            half_step, middle = (0.5 / 127, 7.5) if n_bit == 4 else (0.5 / 4096, 127.5)
            allowed = 2e-6 * (
                np.abs(coef) @ np.abs(x).T + 8 * np.abs(coef) @ np.abs(values[:, h][:, kept]).T
            )
            allowed = allowed + from_codes * 1.001 * len(kept) * half_step * middle * largest
            error = np.abs(got - want)
            assert (error[:, ~hidden] <= allowed[:, ~hidden]).all()
            # the coefficients lose less than the codes themselves
            exact = coef @ k[0, :, h][:, kept].T
            seen = ~hidden & from_codes
            lost = np.sqrt(np.mean((got - want)[:, seen] ** 2))
            codes = np.sqrt(np.mean((want - exact)[:, seen] ** 2))
            assert rank == 1 or lost < 0.3 * codes


@pytest.mark.parametrize("n_bit", BITS)
def test_components_that_do_not_vary_are_not_scored(ggml, n_bit) -> None:
    """A large query on a constant component ranks nothing, and one on a component that drifts from
    group to group does; where the first groups are not sealed, |q| alone decides, as in the
    paper."""
    n_kv, d, rank = 2048, 64, 2
    rng = np.random.default_rng(0)
    k = rng.standard_normal((1, n_kv, 1, d)).astype(np.float32)
    k[..., 5] = 50  # never varies
    k[..., 9] = 10 * (np.arange(n_kv) // 512)[None, :, None]  # varies between groups only
    q = 0.1 * rng.standard_normal((1, 1, 1, d)).astype(np.float32)
    q[..., 5], q[..., 9], q[..., 20] = 4, 1, 2
    for share, kept in ((1, [9, 20]), (np.arange(n_kv // GROUP) > 8, [5, 20])):
        shadow, sealed = shadow_of(ggml, n_bit, k, share)
        got = score(ggml, shadow, q, k, sealed, open_mask(n_kv), rank=rank)[0, 0, 0]
        spread = oracle.spread_of(shadow.ranges[0], sealed[0], n_kv, n_bit)
        kind = oracle.select_components(q[0, 0], rank, spread)
        assert kind.tolist() == kept
        tau = oracle.temperature_factor(q[0, 0], kind, spread=spread)
        want = 0.125 / tau * (q[0, 0, 0][kind].astype(float) @ k[0, :, 0, kind])
        assert np.abs(got - want).max() < 0.05 * np.ptp(want)


@pytest.mark.parametrize("n_bit", BITS)
@pytest.mark.parametrize("longer", [128, 512, 7 * 512, 40 * 512])
def test_a_longer_stream_beside_it_changes_nothing(ggml, n_bit, longer) -> None:
    """The cells past the end of a stream, which are in view because another stream has them, are
    hidden and not sealed. What they hold, and how many they are, must not show."""
    n_kv, d, rank = 23 * GROUP, 64, 9
    rng = np.random.default_rng(longer)
    k = np.full((1, n_kv + longer, 2, d), np.nan, np.float32)
    k[:, :n_kv] = keys(rng, (1, n_kv, 2, d)) * np.exp(rng.standard_normal(d))
    q = rng.standard_normal((1, 1, 4, d)).astype(np.float32)
    mask = open_mask(n_kv + longer)
    mask[..., n_kv:] = -np.inf
    n_grp = n_kv // GROUP
    shadow, sealed = shadow_of(ggml, n_bit, k, np.arange(n_grp + longer // GROUP) < n_grp)
    alone = k[:, :n_kv], sealed[:, :n_grp], mask[..., :n_kv]
    want = score(ggml, shadow, q, *alone, rank=rank)
    got = score(ggml, shadow, q, k, sealed, mask, rank=rank)
    assert np.array_equal(got[..., :n_kv], want) and np.isneginf(got[..., n_kv:]).all()


@pytest.mark.parametrize("n_bit", BITS)
@pytest.mark.parametrize("damage", ["hidden", "unsealed", "biased"])
@pytest.mark.parametrize("group", [3, 35, 71])
def test_scan_of_one_unlike_tile_among_whole_ones(ggml, n_bit, damage, group) -> None:
    """A group of one of three tiles is hidden, unsealed or biased: no other position changes."""
    n_kv = 9216
    rng = np.random.default_rng(group)
    k = keys(rng, (1, n_kv, 2, 64))
    q = rng.standard_normal((1, 1, 2, 64)).astype(np.float32)
    shadow, sealed = shadow_of(ggml, n_bit, k)
    mask = open_mask(n_kv)
    before = score(ggml, shadow, q, k, sealed, mask, rank=64)[0, 0]

    at = slice(group * GROUP, (group + 1) * GROUP)
    mask[..., at] = {"hidden": -np.inf, "unsealed": 0, "biased": 2}[damage]
    if damage == "unsealed":
        sealed[0, group] = 0
        if n_bit == 8:
            shadow.codes[:, :, at] = 0  # not what it is to be read from
    after = score(ggml, shadow, q, k, sealed, mask, rank=64)[0, 0]
    exact = 0.125 * np.einsum("hd,nhd->hn", q[0, 0], k[0, at])
    want = {"hidden": -np.inf, "unsealed": exact, "biased": before[:, at] + np.float32(2)}[damage]
    assert np.allclose(after[:, at], want, rtol=1e-5, atol=1e-5)
    after[:, at] = before[:, at]
    assert np.array_equal(before, after)


@pytest.mark.parametrize("n_bit", BITS)
def test_a_group_that_a_token_completes_is_one_for_those_after_it(ggml, n_bit) -> None:
    """Each token gets what it gets alone: the group's codes, or K, and the spread that follows."""
    n_kv, n_tok = 8 * GROUP, 4
    rng = np.random.default_rng(n_bit)
    k = keys(rng, (1, n_kv, 2, 64)) * np.exp(rng.standard_normal(64))
    q = rng.standard_normal((1, n_tok, 4, 64)).astype(np.float32)
    mask = np.zeros((1, 1, n_tok, n_kv), np.float32)
    shadow, sealed = shadow_of(ggml, n_bit, k)
    sealed[0, 4:] = [2, 4, 0, 5]  # of tokens 1 and 3 on, and of none
    got = score(ggml, shadow, q, k, sealed, mask, rank=9)
    for i in range(n_tok):
        one = ((sealed > 0) & (sealed <= i + 1)).astype(np.int32)
        want = score(ggml, shadow, q[:, i : i + 1], k, one, mask[:, :, :1], rank=9)
        assert np.array_equal(got[:, i : i + 1], want), i
    assert not np.array_equal(got[:, 0], score(ggml, shadow, q, k, sealed > 0, mask, rank=9)[:, 0])


@pytest.mark.parametrize("n_bit", BITS)
@pytest.mark.parametrize("q_value", [1e-36, 1e-38, 1e38, np.inf, np.nan])
def test_scan_of_a_dead_query_gives_numbers(ggml, n_bit, q_value) -> None:
    """Coefficients too small to divide by, too large, or none: logits near 0, not NaN, nothing
    old."""
    rng = np.random.default_rng(2)
    k = keys(rng, (1, 512, 1, 64))
    q = np.full((1, 1, 2, 64), q_value, np.float32)
    q[0, 0, 1] = rng.standard_normal(64)  # a healthy head beside it
    shadow, sealed = shadow_of(ggml, n_bit, k)
    got = score(ggml, shadow, q, k, sealed, open_mask(512), rank=16)[0, 0]
    assert np.abs(got[0]).max() < 1e-30
    if np.isnan(q_value):  # its sums of |q| are NaN: no component is chosen
        assert (got[1] == 0).all()
    else:
        assert np.ptp(got[1]) > 0.1


def test_scan_notices_a_wrong_code(ggml) -> None:
    """The comparison above can fail: one flipped code moves its logit by more than is allowed."""
    rng = np.random.default_rng(1)
    k = keys(rng, (1, 512, 1, 64))
    q = rng.standard_normal((1, 1, 1, 64)).astype(np.float32)
    for n_bit in BITS:
        shadow, sealed = shadow_of(ggml, n_bit, k)
        given = shadow, q, k, sealed, open_mask(512)
        before = score(ggml, *given, rank=16)
        c = int(np.abs(q[0, 0, 0]).argmax())
        raw = shadow.codes.view(np.uint8)
        raw[0, c, BYTE[7]] ^= 0x88 if n_bit == 4 else 0x80
        moved = np.flatnonzero((before != score(ggml, *given, rank=16)).ravel())
        assert moved.tolist() == ([7, 71] if n_bit == 4 else [7])


@pytest.mark.parametrize("n_bit", BITS)
@pytest.mark.parametrize("heads", [(3, 3), (8, 2)])
@pytest.mark.parametrize("rest", [0, 1])
def test_score_select_is_select_of_score(ggml, n_bit, heads, rest) -> None:
    """Bit for bit, whether a thread has whole KV heads or parts of them."""
    n_kv, d, rank, topk = 9216, 64, 16, 500
    rng = np.random.default_rng(n_bit + heads[0])
    k = keys(rng, (1, n_kv, heads[1], d))
    q = rng.standard_normal((1, 3, heads[0], d)).astype(np.float32)
    mask = np.where(rng.random((1, 1, 3, n_kv)) < 0.2, -np.inf, 0).astype(np.float32)
    shadow, sealed = shadow_of(ggml, n_bit, k, 0.9)
    params = ScoreSelectParams(
        ScoreParams(rank, 0.125, 0.0, 0.0, n_bit), SelectParams(topk, heads[1], 16, rest)
    )
    row = np.r_[topk, 16, np.arange(20) * 7]
    wanted = np.broadcast_to(row, (1, 1, 3, len(row)))
    rows = []
    for n_threads in ggml.threads(1, 2, 3, 4, 16):
        with ggml.graph() as g:
            stats = g.tensor(np.zeros(len(STATS)), "i64", inplace=True)
            given = given_of(shadow, q, k, sealed, mask) | {"wanted": wanted}
            logits = g.node("score", params.score, **given)
            sel = g.node("select", params.select, logits=logits, wanted=wanted)
            fused = g.node("score_select", params, **given, stats=stats)
            g.compute(sel, fused, n_threads=n_threads)
            assert np.array_equal(g.read(fused), g.read(sel)), f"{n_threads} threads"
            rows.append((g.read(fused), g.read(stats)))
    assert all(np.array_equal(a, b) for r in rows[1:] for a, b in zip(rows[0], r, strict=True))
    assert (rows[0][0][..., 0] == topk).all()
