"""FlexGen's sparse attention (Sheng et al., arXiv 2303.06865, section 4): the top-k rows of V.

Scores are exact, so all of K is read. The softmax runs over all positions and is not normalised
again: positions not read count as zero, as in FlexGen's code and in SparQ's eq. 5. The token's own
position is always in. Shared KV heads: softmaxed scores summed over their query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Heads, Policy, Selector, Step, summed_scores, top_rows


class FlexGenSelector(Selector):
    def select(self, step: Step) -> np.ndarray:
        others = top_rows(summed_scores(step.logits)[:, :-1], self.k_at(step) - 1)
        return np.concatenate([others, np.full((len(others), 1), step.last)], axis=1)


@dataclass(frozen=True)
class FlexGen(Policy):
    name = "flexgen"
    selector = FlexGenSelector
    renormalises = False

    def fixed_bytes(self, n_pos: int, heads: Heads) -> float:
        return n_pos * heads.k_bytes

    def position_bytes(self, heads: Heads) -> float:
        return heads.v_bytes
