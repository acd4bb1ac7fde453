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
from pyorch.policies.base import Selector, Step, WithMeanV, at, softmax, summed_scores, top_rows


class OracleSelector(Selector):
    policy: Oracle

    def select(self, step: Step) -> np.ndarray:
        k, page = self.k_at(step), self.policy.page
        if page == 1:
            positions = top_rows(summed_scores(step.logits), k)
        else:
            scores = page_scores(step.logits, step.last // page, page)
            positions = pages.select(scores, k, step.n_pos, page)
        if self.policy.uses_mean_v(self.heads):
            self.alpha = at(softmax(step.logits), positions).sum(axis=2)
        return positions


@dataclass(frozen=True)
class Oracle(WithMeanV):
    """page: the number of positions in a row that are chosen together."""

    page: int = 1

    name = "oracle"
    selector = OracleSelector

    def check(self) -> None:
        super().check()
        if self.page < 1:
            raise self.error(f"page {self.page} is below 1")


def page_scores(logits: np.ndarray, n_full: int, page: int) -> np.ndarray:
    """(n_head_kv, n_group_q, n) to (n_head_kv, 1, n_full): attention on a page, over all heads."""
    rows = softmax(logits)[..., : n_full * page].reshape(*logits.shape[:2], n_full, page)
    scores: np.ndarray = rows.sum(axis=(1, 3))[:, None]
    return scores
