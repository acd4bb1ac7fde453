"""FlexGen's sparse attention (Sheng et al., arXiv 2303.06865, section 4): the top-k rows of V.

Scores are exact, so all of K is read. The softmax runs over all positions and is not normalised
again: positions not read count as zero, as in FlexGen's code and in SparQ's eq. 5. The token's own
position is always in. Shared KV heads: softmaxed scores summed over their query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Heads, Policy, Selector, Step, summed_scores, top_rows
from pyorch.policies.prompt import Prompt


@dataclass(frozen=True)
class FlexGen(Policy):
    name = "flexgen"
    renormalises = False

    def fixed_bytes(self, n_pos: int, heads: Heads) -> float:
        return n_pos * heads.k_bytes

    def position_bytes(self, heads: Heads) -> float:
        return heads.v_bytes

    def start(self, heads: Heads, prompt: Prompt | None) -> FlexGenSelector:
        return FlexGenSelector(self, heads)


@dataclass
class FlexGenSelector(Selector):
    policy: FlexGen
    heads: Heads

    def select(self, step: Step) -> np.ndarray:
        return select(step.logits, self.policy.k_at(step.n_pos, self.heads))


def select(logits: np.ndarray, k: int) -> np.ndarray:
    """(n_head_kv, n_group_q, n) to (n_head_kv, min(k, n)): the last position, the best others."""
    n = logits.shape[2]
    others = top_rows(summed_scores(logits)[:, :-1], k - 1)
    return np.concatenate([others, np.full((len(others), 1), n - 1)], axis=1)
