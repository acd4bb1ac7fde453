"""ALISA's Sparse Window Attention (Zhao et al., arXiv 2403.17312, algorithm 1).

Half of the k positions are the newest, the other half those with the largest attention in the last
k/2 rows, summed over the rows and all heads of the layer: every head reads the same. Nothing is
evicted: a position that was not read counts as 0 in its row, and may come back. Its INT8 K and V
are the cache types q8_0 (`type_k`, `type_v`). Its scheduling between CPU and GPU changes no result.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Heads, Policy, Selector, Step, same_for_all, softmax, top
from pyorch.policies.prompt import Prompt


class AlisaSelector(Selector):
    """sums (n,) f64 of the rows from `first` on; `rows`: for the rows after the prompt, the
    positions that were read and their weights (summed over heads)."""

    prompt: Prompt

    def begin(self) -> None:
        self.sums, self.first = np.zeros(0), self.prompt.n
        self.rows: deque[tuple[np.ndarray, np.ndarray]] = deque()

    def select(self, step: Step) -> np.ndarray:
        k = self.k_at(step)
        self.sums = np.append(self.sums, np.zeros(step.n_pos - len(self.sums)))
        self._begin_at(max(step.last - max(k // 2, 1), 0))
        n_old = step.n_pos - (k - k // 2)
        positions = np.append(top(self.sums[:n_old], k // 2), np.arange(n_old, step.n_pos))
        weights = softmax(step.logits[:, :, positions]).sum(axis=(0, 1))
        self.rows.append((positions, weights))
        self.sums[positions] += weights
        return same_for_all(positions, self.heads.n_head_kv)

    def _begin_at(self, first: int) -> None:
        """Sum the rows from `first` on: add rows of the prompt, or take out what is before it."""
        n = self.prompt.n
        self._add(first, min(self.first, n), 1)
        self._add(self.first, min(first, n), -1)
        for _ in range(max(self.first, n), first):
            positions, weights = self.rows.popleft()
            self.sums[positions] -= weights
        self.first = first

    def _add(self, start: int, stop: int, sign: int) -> None:
        """Add rows of the prompt to the sums, or subtract them."""
        for logits in self.prompt.blocks(start, stop):
            self.sums[: logits.shape[3]] += sign * softmax(logits).sum(axis=(0, 1, 2), dtype=float)


@dataclass(frozen=True)
class Alisa(Policy):
    name = "alisa"
    selector = AlisaSelector
    needs_prompt = True

    def fixed_bytes(self, n_pos: int, heads: Heads) -> float:
        """The bytes of the sums (f32), which all heads of the layer share."""
        return 4 * n_pos / heads.n_head_kv

    def position_bytes(self, heads: Heads) -> float:
        """The bytes of a row, and of a position and its weight in the row that leaves the sums."""
        return heads.row + 8 / heads.n_head_kv
