"""LM-Infinite (Han et al., arXiv 2308.16137): the first positions and a window of the newest.

This is the version of SparQ's comparison (arXiv 2312.04985, appendix G): the first 16 positions and
the k - 16 newest. The ceiling on distances is left out: it is for texts longer than the model was
trained on, and changes nothing for ours, which are shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Heads, Policy, Selector, Step, same_for_all
from pyorch.policies.prompt import Prompt


@dataclass(frozen=True)
class LMInfinite(Policy):
    """sinks: how many of the first positions are always read."""

    sinks: int = 16
    name = "lm-infinite"

    @property
    def least(self) -> int:
        return self.sinks + 1

    def check(self) -> None:
        if self.sinks < 0:
            raise self.error(f"sinks {self.sinks} is below 0")
        if self.k is not None and self.k < self.least:
            raise self.error(f"k {self.k} has no room for {self.sinks} sinks and a window")

    def start(self, heads: Heads, prompt: Prompt | None) -> WindowSelector:
        return WindowSelector(self, heads)


@dataclass
class WindowSelector(Selector):
    policy: LMInfinite
    heads: Heads

    def select(self, step: Step) -> np.ndarray:
        k = self.policy.k_at(step.n_pos, self.heads)
        return same_for_all(select(step.n_pos, k, self.policy.sinks), self.heads.n_head_kv)


def select(n_pos: int, k: int, sinks: int) -> np.ndarray:
    """(min(k, n_pos),): the first `sinks` positions and the newest; at least the newest one."""
    k = min(k, n_pos)
    sinks = min(sinks, k - 1)
    return np.concatenate([np.arange(sinks), np.arange(n_pos - (k - sinks), n_pos)])
