"""Pages by the mean of their keys, with the standard deviation as an offset (arXiv 2605.27740).

The score of a page is the sum over components of q*mean + offset*|q|*std. The paper's offset is
the norm of q times one deviation per page; per component it is Quest's bound with other
numbers, at the same bytes, as GGUF runtimes use it. Shared KV heads are treated as in Quest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.pages import Paged


@dataclass(frozen=True)
class PageMeanStd(Paged):
    """offset: weight of the standard deviation."""

    offset: float = 1.0
    name = "page-mean-std"

    def summary(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return keys.mean(axis=1), keys.std(axis=1)

    def weights(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return q, np.abs(q) * np.float32(self.offset)
