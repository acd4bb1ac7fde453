"""Oracle: the exact top-k positions, as if the scores cost nothing.

It is the upper bound of SparQ's ablation (arXiv 2312.04985, section 5.4 and Fig. 7a): all of the
bytes pay for rows of K and V, and alpha is exact. Shared KV heads: softmaxed scores summed over
their query heads, as SparQ ranks. With `page` it is the upper bound of all methods that choose
whole pages: those with the most attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies import pages
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
from pyorch.policies.prompt import Prompt


@dataclass(frozen=True)
class Oracle(WithMeanV):
    """page: the number of positions in a row that are chosen together."""

    page: int = 1

    name = "oracle"

    def check(self) -> None:
        super().check()
        if self.page < 1:
            raise self.error(f"page {self.page} is below 1")

    def start(self, heads: Heads, prompt: Prompt | None) -> OracleSelector:
        return OracleSelector(self, heads)


@dataclass
class OracleSelector(Selector):
    policy: Oracle
    heads: Heads

    def select(self, step: Step) -> np.ndarray:
        k, page = self.policy.k_at(step.n_pos, self.heads), self.policy.page
        if page == 1:
            positions = select(step.logits, k)
        else:
            scores = page_scores(step.logits, step.last // page, page)
            positions = pages.select(scores, k, step.n_pos, page)
        if self.policy.uses_mean_v(self.heads):
            self.alpha = at(softmax(step.logits), positions).sum(axis=2)
        return positions


def select(logits: np.ndarray, k: int) -> np.ndarray:
    """(n_head_kv, n_group_q, n) to (n_head_kv, min(k, n)): positions of the k largest scores."""
    return top_rows(summed_scores(logits), k)


def page_scores(logits: np.ndarray, n_full: int, page: int) -> np.ndarray:
    """(n_head_kv, n_group_q, n) to (n_head_kv, 1, n_full): attention on a page, over all heads."""
    rows = softmax(logits)[..., : n_full * page].reshape(*logits.shape[:2], n_full, page)
    scores: np.ndarray = rows.sum(axis=(1, 3))[:, None]
    return scores
