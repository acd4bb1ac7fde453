"""Quest (Tang et al., arXiv 2406.10774): pages by an upper bound of their scores.

It keeps the least and the largest value of K per page and component; the bound of q.k is the sum
over the components of max(q*min, q*max). Pages have 16 positions, as in its code. For shared KV
heads the bounds are taken as logits, softmaxed and summed over their query heads (its code repeats
K for every query head). Its code leaves the first two layers dense; here every layer has the same
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.pages import Paged


@dataclass(frozen=True)
class Quest(Paged):
    page: int = 16
    name = "quest"

    def summary(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return keys.min(axis=1), keys.max(axis=1)

    def weights(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.minimum(q, 0), np.maximum(q, 0)
