"""The first positions and a window of the newest: LM-Infinite and StreamingLLM.

LM-Infinite (Han et al., arXiv 2308.16137) is the version of SparQ's comparison (arXiv 2312.04985,
appendix G): the first 16 positions and the k - 16 newest. StreamingLLM (Xiao et al., arXiv
2309.17453) has 4 attention sinks.

What both do to distances beyond those of the training is left out, a ceiling and keys rotated anew:
here no text is longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Policy, Selector, Step, same_for_all


class WindowSelector(Selector):
    policy: LMInfinite

    def select(self, step: Step) -> np.ndarray:
        k = self.k_at(step)
        sinks = min(self.policy.sinks, k - 1)
        newest = np.arange(step.n_pos - (k - sinks), step.n_pos)
        return same_for_all(np.append(np.arange(sinks), newest), self.heads.n_head_kv)


@dataclass(frozen=True)
class LMInfinite(Policy):
    """sinks: how many of the first positions are always read."""

    sinks: int = 16
    name = "lm-infinite"
    selector = WindowSelector

    @property
    def least(self) -> int:
        return self.sinks + 1

    def check(self) -> None:
        if self.sinks < 0:
            raise self.error(f"sinks {self.sinks} is below 0")
        if self.k is not None and self.k < self.least:
            raise self.error(f"k {self.k} has no room for {self.sinks} sinks and a window")


@dataclass(frozen=True)
class StreamingLLM(LMInfinite):
    sinks: int = 4
    name = "streaming-llm"
