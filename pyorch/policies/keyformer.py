"""Keyformer (Adnan et al., arXiv 2403.09054): key tokens by a Gumbel softmax, and the newest.

It is H2O with another score (eq. 9): softmax((x + noise) / tau) over the positions in the cache,
where tau grows from 1 in the prompt to 2 (eq. 10). It uses original positions and scores per layer,
the best of its table 3, and draws the noise once per position and query head (its algorithm 1).
Shared KV heads: scores are summed over their query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Heads, Step, at
from pyorch.policies.h2o import H2O, H2OSelector, prompt_sums


class KeyformerSelector(H2OSelector):
    """n_step: the tokens decoded so far."""

    policy: Keyformer
    n_step = 0

    def begin(self) -> None:
        prompt, heads, seed = self.prompt, self.heads, self.policy.seed
        self.noise = noise = gumbel(seed, heads, prompt.n)
        key = ("keyformer", seed)
        self.sums = prompt.once(key, lambda: prompt_sums(prompt, heads.n_head_kv, noise))
        self.positions = np.tile(np.arange(prompt.n), (heads.n_head_kv, 1))

    def logits(self, step: Step) -> np.ndarray:
        """With noise, by the temperature."""
        policy = self.policy
        if step.n_pos > self.noise.shape[2]:
            self.noise = gumbel(policy.seed, self.heads, 2 * step.n_pos)
        self.n_step += 1
        tau = np.float32(1 + min(self.n_step / policy.tokens, 1))
        noisy: np.ndarray = (super().logits(step) + at(self.noise, self.positions)) / tau
        return noisy


@dataclass(frozen=True)
class Keyformer(H2O):
    """recent: the share of k for the newest positions (0.2 to 0.3 in its section 4.4.4)

    tokens: the length of the text to be generated; tau is 2 from its last token on
    """

    recent: float = 0.25
    tokens: int = 256
    seed: int = 0
    name = "keyformer"
    selector = KeyformerSelector

    def check(self) -> None:
        if not 0 < self.recent <= 1:
            raise self.error(f"recent {self.recent} is not above 0 and at most 1")
        if self.tokens < 1 or self.seed < 0:
            raise self.error("tokens is at least 1, seed at least 0")

    def position_bytes(self, heads: Heads) -> float:
        """The bytes of a row, its score (f32) and each query head's noise (f32)."""
        return heads.row + 4 + 4 * heads.n_head / heads.n_head_kv


def gumbel(seed: int, heads: Heads, n: int) -> np.ndarray:
    """Standard Gumbel noise (n_head_kv, n_group_q, n) f32 of a layer's first n positions. More
    positions begin with the same noise."""
    rng, n_group_q = np.random.default_rng((seed, heads.index)), heads.n_head // heads.n_head_kv
    e = rng.standard_exponential((n, heads.n_head_kv, n_group_q), np.float32)
    noise: np.ndarray = -np.log(np.maximum(e, np.float32(1e-30))).transpose(1, 2, 0)
    return noise
