"""Approximate scores from a random low-rank projection of K: the baseline of SparQ's Fig. 7a.

One orthonormal (d_k, rank) matrix per layer and KV head projects q and K; the projected K is kept
in f16 and read whole (arXiv 2312.04985, section 5.4, and its code). The rest is `Scan`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Step
from pyorch.policies.scan import Scan, ScanSelector


class LowRankSelector(ScanSelector):
    """projected (n_head_kv, rank, n): K, f16 values as f32."""

    policy: LowRank

    def begin(self) -> None:
        heads, rank = self.heads, self.policy.rank_of(self.heads)
        self.matrix = projection(heads.n_head_kv, heads.d_k, rank, (self.policy.seed, heads.index))
        self.projected = np.empty((heads.n_head_kv, rank, 0))

    def approximate_logits(self, step: Step) -> np.ndarray:
        known = self.projected.shape[2]
        new = self.matrix.transpose(0, 2, 1) @ step.keys(known, step.n_pos).transpose(1, 2, 0)
        new = new.astype(np.float16).astype(np.float32)
        self.projected = np.concatenate([self.projected, new], axis=2) if known else new
        logits: np.ndarray = (step.q @ self.matrix) @ self.projected * np.float32(step.scale)
        return logits


@dataclass(frozen=True)
class LowRank(Scan):
    seed: int = 0
    name = "low-rank"
    selector = LowRankSelector

    def check(self) -> None:
        super().check()
        if self.seed < 0:
            raise self.error(f"seed {self.seed} is below 0")


def projection(n_head_kv: int, d: int, rank: int, seed: tuple[int, ...]) -> np.ndarray:
    """(n_head_kv, d, rank) f32: random, with orthonormal columns."""
    normal = np.random.default_rng(seed).normal(size=(n_head_kv, d, rank))
    return np.linalg.qr(normal)[0].astype(np.float32)
