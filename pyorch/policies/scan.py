"""A scan of a few numbers per position, then rows of K and V of the best positions, as in SparQ.

SparQ's ablations compare such scans (arXiv 2312.04985, section 5.4): the numbers and the
temperature differ, the bytes do not. As for `sparq`, the newest k/4 and the first 4 positions are
always in.
Shared KV heads: softmaxed scores summed over their query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import (
    Heads,
    Selector,
    Step,
    WithMeanV,
    at,
    softmax,
    summed_scores,
    top_rows,
)


@dataclass(frozen=True)
class Scan(WithMeanV):
    """rank: the f16 numbers per position; None: half of the bytes, but at most d_k/4 numbers."""

    rank: int | None = None
    sinks: int = 4

    def check(self) -> None:
        super().check()
        if self.rank is None and self.ratio is None:
            raise self.error("k needs a rank", f"{self.name},k=128,rank=8")
        if (self.rank is not None and self.rank < 1) or self.sinks < 0:
            raise self.error("rank is at least 1, sinks 0")

    def rank_of(self, heads: Heads) -> int:
        if self.rank is not None:
            return min(self.rank, heads.d_k)
        assert self.ratio is not None
        return min(max(round(self.ratio * heads.row / 4), 1), max(heads.d_k // 4, 1))

    def fixed_bytes(self, n_pos: int, heads: Heads) -> float:
        return n_pos * self.rank_of(heads) * 2 + super().fixed_bytes(n_pos, heads)


class ScanSelector(Selector):
    policy: Scan

    def approximate_logits(self, step: Step) -> np.ndarray:
        """The logits of all positions as this method sees them: (n_head_kv, n_group_q, n_pos)."""
        raise NotImplementedError

    def select(self, step: Step) -> np.ndarray:
        logits = self.approximate_logits(step)
        k, n = self.k_at(step), step.n_pos
        n_newest = max(k // 4, 1)
        scores = summed_scores(logits).copy()
        scores[:, n - n_newest :] = np.inf
        scores[:, : min(self.policy.sinks, k - n_newest)] = np.inf
        positions = top_rows(scores, k)
        if self.policy.uses_mean_v(self.heads):
            self.alpha = at(softmax(logits), positions).sum(axis=2)
        return positions
