"""Oracle: the exact top-k positions, as if the scores cost nothing.

It is the upper bound of SparQ's ablation (arXiv 2312.04985, section 5.4 and Fig. 7a): all of the
bytes pay for rows of K and V, and alpha is exact. Shared KV heads: softmaxed scores summed over
their query heads, as SparQ ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import (
    Heads,
    Prompt,
    Selector,
    Step,
    WithMeanV,
    at,
    softmax,
    summed_scores,
    top_rows,
)


@dataclass(frozen=True)
class Oracle(WithMeanV):
    name = "oracle"

    def start(self, heads: Heads, prompt: Prompt | None) -> OracleSelector:
        return OracleSelector(self, heads)


@dataclass
class OracleSelector(Selector):
    policy: Oracle
    heads: Heads

    def select(self, step: Step) -> np.ndarray:
        positions = select(step.logits, self.policy.k_at(step.n_pos, self.heads))
        if self.policy.uses_mean_v(self.heads):
            self.alpha = at(softmax(step.logits), positions).sum(axis=2)
        return positions


def select(logits: np.ndarray, k: int) -> np.ndarray:
    """(n_head_kv, n_group_q, n) to (n_head_kv, min(k, n)): positions of the k largest scores."""
    return top_rows(summed_scores(logits), k)
