"""H2O (Zhang et al., arXiv 2306.14048): heavy hitters by accumulated attention, and the newest.

This is the version of SparQ's comparison (arXiv 2312.04985, appendix G): a cache of k positions, of
which l = k/4 are the newest, and the others have the largest sums of attention over all rows so
far, including the prompt's. Evicted positions never come back. For shared KV heads attention is
summed over their query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Heads, Policy, Selector, Step, at, evict, softmax
from pyorch.policies.prompt import Prompt


class H2OSelector(Selector):
    """positions (n_head_kv, m): in the cache, ascending; sums (n_head_kv, m) of their attention."""

    policy: H2O
    prompt: Prompt

    def begin(self) -> None:
        prompt, n_head_kv = self.prompt, self.heads.n_head_kv
        self.sums = prompt.once(("h2o",), lambda: prompt_sums(prompt, n_head_kv))
        self.positions = np.tile(np.arange(prompt.n), (n_head_kv, 1))

    def select(self, step: Step) -> np.ndarray:
        k = self.k_at(step)
        local = max(int(k * self.policy.recent), 1)
        self.positions, self.sums = evict(self.positions, self.sums, step.last, k, local)
        self.sums += softmax(self.logits(step)).sum(axis=1)
        return self.positions

    def logits(self, step: Step) -> np.ndarray:
        """Those of the positions in the cache: (n_head_kv, n_group_q, m)."""
        return at(step.logits, self.positions)


@dataclass(frozen=True)
class H2O(Policy):
    name = "h2o"
    recent = 0.25  # the share of k for the newest positions
    selector = H2OSelector
    needs_prompt = True

    def position_bytes(self, heads: Heads) -> float:
        return heads.row + 4  # a row and its sum (f32)


def prompt_sums(prompt: Prompt, n_head_kv: int, noise: np.ndarray | None = None) -> np.ndarray:
    """(n_head_kv, n) f32: the attention that each position got from all rows of the prompt, with
    its noise (n_head_kv, n_group_q, n) added to the logits."""
    out = np.zeros((n_head_kv, prompt.n), np.float32)
    for logits in prompt.blocks():
        if noise is not None:
            logits += noise[:, :, None, : logits.shape[3]]
        out[:, : logits.shape[3]] += softmax(logits).sum(axis=(1, 2))
    return out
