"""How near is near enough: rules, not numbers in tests.

A test names a family. Errors are measured against float64, divided by a scale of the block (one
token, one KV head), and the largest one counts. An implementation in f32 may have at most twice the
error of the plain f32 implementation in numpy, plus a few ulp of the scale.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle

EPS32 = float(np.finfo(np.float32).eps)

# family: (how much worse than plain f32, floor in f32 ulp of the scale)
FAMILIES = {
    "ref": (0.0, 1.0),  # f64 arithmetic, the result rounded to f32
    "score": (2.0, 4.0),  # scale: sum |q k| of the largest logit, plus the largest bias
    "attend": (2.0, 4.0),  # scale: the largest |v| that was read
    # p and V have 2^-9 each, e^x 2^-13, and a tie of the 8 bits may round the other way
    "attend_fast": (0.0, 1.5 * 2**15),  # scale as of attend
    # the mean of V over what is left out is a sum over whole blocks, less what is read of them
    # on a GPU: what is left out is a difference of two f32 sums, whose terms one launch takes in
    # another order. Where it is small, alpha is as uncertain as a rounding of these sums
    "attend_one_launch": (5.0, 4.0),
    # scale: 1. Mass below oracle.MIN_LEFT counts as nothing, which is 16 ulp of alpha; what lies at
    # that limit may be rounded to either side
    "alpha": (2.0, 16.0 + 4.0),
    "sum": (2.0, 16.0),  # v_sum: sums of 64, in any order; scale: sum |v|
}


class Errors:
    """Collects the blocks of one case; `check` compares the worst ones.

    >>> errors = Errors("score"); errors.add(got, want, plain, scale); errors.check()
    """

    def __init__(self, family: str) -> None:
        self.family = family
        self.factor, self.floor = FAMILIES[family]
        self.got = self.plain = 0.0
        self.count = 0

    def add(self, got: np.ndarray, want: np.ndarray, plain: np.ndarray, scale: float) -> None:
        """want is float64; plain the same at f32. -inf must be in the same places; NaN and +inf
        fail."""
        finite = ~np.isneginf(want)
        assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
        assert np.array_equal(np.isneginf(got), ~finite), "-inf in other places"
        assert np.isfinite(got[finite]).all(), "NaN or inf in the result"
        if finite.any():
            scale = max(scale, np.finfo(np.float32).tiny)
            self.got = max(self.got, float(np.abs(got[finite] - want[finite]).max()) / scale)
            self.plain = max(self.plain, float(np.abs(plain[finite] - want[finite]).max()) / scale)
        self.count += finite.sum()

    def compare(self, got: np.ndarray, scale: float, step: Callable, *args, **more) -> None:
        """`got` against what a step of the oracle gives, at f64 and at f32."""
        want, plain = (step(*args, dtype=dtype, **more) for dtype in (np.float64, np.float32))
        self.add(got, want, plain, scale)

    def check(self) -> None:
        limit = self.factor * self.plain + self.floor * EPS32
        assert self.got <= limit, (
            f"{self.family}: error {self.got / EPS32:.2f} ulp of the scale,"
            f" limit {limit / EPS32:.2f} (plain f32: {self.plain / EPS32:.2f})"
        )


def score_scale(q: np.ndarray, k: np.ndarray, bias: np.ndarray, factor: np.ndarray) -> float:
    """Size of the largest sum that a logit is made of: max over positions of sum |q||k|, times the
    scale of the head."""
    seen = ~np.isneginf(bias[0])
    if not seen.any():
        return 1.0
    terms = np.abs(q).astype(np.float64) @ np.abs(k[seen]).astype(np.float64).T
    return float((terms * factor[:, None]).max() + np.abs(bias[:, seen]).max())


def as_alpha(
    rest: np.ndarray, logits: np.ndarray, cells: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What rest (g,) makes of alpha where approximate scores are exact ones; at f64 and at f32."""
    exact = logits[:, cells].astype(np.float64)
    plain = (oracle.rest(x, cells) for x in (logits.astype(np.float64), logits))
    return tuple(oracle.kept(exact, r.astype(np.float64)) for r in (rest, *plain))


def check_selection(
    got: np.ndarray, logits: np.ndarray, k: int, forced: list[int], top_p: float = 1.0
) -> None:
    """A selection as a set: the right number, no repeats, forced ones in, and nothing better left
    out.

    got: cells as the op lists them; logits (g, n): the very numbers that it ranked. With one query
    head the order is that of the logits, so the set is exact; summed scores (g > 1) may differ by
    the rounding of exp and of the sum.
    """
    can = oracle.selectable(logits)
    n_sel = min(max(k, len(forced)), int(can.sum()))
    if top_p < 1:
        n_sel = _top_p_size(got, logits, n_sel, forced, top_p)
    assert len(got) == n_sel, f"n_sel {len(got)}, expected {n_sel}"
    assert (np.diff(got) > 0).all(), "not ascending, or repeated"
    assert set(forced) <= set(got.tolist()), "a forced cell is missing"
    assert can[got].all(), "a hidden cell was selected, or NaN"
    if len(logits) == 1:
        want = oracle.select(logits, n_sel, forced, n_sel)
        assert np.array_equal(got, want), "other cells than those with the largest logits"
        return
    score = oracle.rank_scores(logits.astype(np.float64))
    rest = np.setdiff1d(np.flatnonzero(can), got)
    chosen = np.setdiff1d(got, forced)
    if len(rest) and len(chosen):
        cut, best_left = score[chosen].min(), score[rest].max()
        assert best_left <= cut + score_rounding(logits, best_left), (
            f"left out a score of {best_left:.9g} for one of {cut:.9g}"
        )


def _top_p_size(
    got: np.ndarray, logits: np.ndarray, n_max: int, forced: list[int], top_p: float
) -> int:
    """How many cells top_p keeps: as `got` has it, where rounding may make it that number."""
    heads = oracle.softmax_of_heads(logits.astype(np.float64))
    mass = heads.sum(axis=0) / max(len(heads), 1)
    free = np.setdiff1d(got, forced)
    kept, eps = mass[got].sum(), 64 * EPS32
    enough = kept >= top_p - eps or len(got) == n_max
    needed = not len(free) or kept - mass[free].min() < top_p + eps
    if enough and needed:
        return len(got)
    return len(oracle.select(logits.astype(np.float64), n_max, forced, n_max, top_p))


def score_rounding(logits: np.ndarray, score: float) -> float:
    """Possible rounding of a summed softmax at f32: exp of (logit - max), whose own rounding grows
    with its size.

    Below the smallest normal f32 (summed over the group) all scores are alike.
    """
    finite = logits[np.isfinite(logits)].astype(np.float64)
    spread = np.ptp(finite) if len(finite) else 0.0
    floor = len(logits) * float(np.finfo(np.float32).tiny) * 2
    return (16 + 2 * min(spread, 100.0)) * EPS32 * score + floor
