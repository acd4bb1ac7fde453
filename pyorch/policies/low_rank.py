"""Approximate scores from a random low-rank projection of K: the baseline of SparQ's Fig. 7a.

One orthonormal (d_k, rank) matrix per layer and KV head projects q and K; the projected K is kept
in f16 and read whole, then rows of K and V of the best positions (arXiv 2312.04985, section 5.4,
and its code). The newest k/4 and the first 4 positions are always in, as for `sparq`. Shared KV
heads: softmaxed scores summed over the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.errors import SparqError
from pyorch.policies.base import (
    Heads,
    Prompt,
    Selector,
    Step,
    WithMeanV,
    at,
    group_scores,
    softmax,
    top_rows,
)


@dataclass(frozen=True)
class LowRank(WithMeanV):
    """rank: components of the projection; None: half of the bytes, but at most d_k/4 of them."""

    rank: int | None = None
    sinks: int = 4
    seed: int = 0
    name = "low-rank"

    def check(self) -> None:
        super().check()
        if self.rank is None and self.ratio is None:
            raise SparqError("low-rank: k needs a rank", "low-rank,k=128,rank=8", exit_code=2)
        if (self.rank is not None and self.rank < 1) or min(self.sinks, self.seed) < 0:
            raise SparqError("low-rank: rank is at least 1, sinks and seed 0", exit_code=2)

    def rank_of(self, heads: Heads) -> int:
        if self.rank is not None:
            return min(self.rank, heads.d_k)
        assert self.ratio is not None
        return min(max(round(self.ratio * heads.row / 4), 1), max(heads.d_k // 4, 1))

    def fixed_bytes(self, n_pos: int, heads: Heads) -> float:
        return n_pos * self.rank_of(heads) * 2 + super().fixed_bytes(n_pos, heads)

    def start(self, heads: Heads, prompt: Prompt | None) -> LowRankSelector:
        rank = self.rank_of(heads)
        matrix = projection(heads.n_head_kv, heads.d_k, rank, (self.seed, heads.index))
        return LowRankSelector(self, heads, matrix, np.empty((heads.n_head_kv, rank, 0)))


def projection(n_head_kv: int, d: int, rank: int, seed: tuple[int, ...]) -> np.ndarray:
    """(n_head_kv, d, rank) f32: random, with orthonormal columns."""
    normal = np.random.default_rng(seed).normal(size=(n_head_kv, d, rank))
    return np.linalg.qr(normal)[0].astype(np.float32)


@dataclass
class LowRankSelector(Selector):
    """projected (n_head_kv, rank, n): K, f16 values as f32."""

    policy: LowRank
    heads: Heads
    matrix: np.ndarray
    projected: np.ndarray

    def select(self, step: Step) -> np.ndarray:
        known = self.projected.shape[2]
        new = self.matrix.transpose(0, 2, 1) @ step.keys(known, step.n_pos).transpose(1, 2, 0)
        new = new.astype(np.float16).astype(np.float32)
        self.projected = np.concatenate([self.projected, new], axis=2) if known else new
        scores = (step.q @ self.matrix) @ self.projected * np.float32(step.scale)
        k = self.policy.k_at(step.n_pos, self.heads)
        positions = select(scores, k, self.policy.sinks)
        if self.policy.uses_mean_v(self.heads):
            self.alpha = at(softmax(scores), positions).sum(axis=2)
        return positions


def select(logits: np.ndarray, k: int, sinks: int) -> np.ndarray:
    """(n_head_kv, group, n) to (n_head_kv, min(k, n)): newest k/4, first `sinks`, best others."""
    n = logits.shape[2]
    local = max(min(k, n) // 4, 1)
    scores = group_scores(logits).copy()
    scores[:, n - local :] = np.inf
    scores[:, : min(sinks, max(k - local, 0))] = np.inf
    return top_rows(scores, k)
