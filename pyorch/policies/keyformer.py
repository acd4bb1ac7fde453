"""Keyformer (Adnan et al., arXiv 2403.09054): key tokens by a Gumbel softmax, and the newest.

It is like H2O, but sums softmax((x + noise) / tau) over the positions in the cache (eq. 9), where
tau grows from 1 in the prompt to 2 (eq. 10); the newest positions are a share `recent` of k. It
uses original positions and scores per layer, the best of its table 3. Noise is drawn once per
position and query head, as in its algorithm 1. Evicted positions never come back. Shared KV heads:
scores summed over their query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Heads, Policy, Prompt, Selector, Step, at, evict, softmax


@dataclass(frozen=True)
class Keyformer(Policy):
    """recent: the share of k for the newest positions (0.2 to 0.3 in its section 4.4.4)

    tokens: the length of the text to be generated; tau reaches `tau_end` with its last token
    """

    recent: float = 0.25
    tau_init: float = 1.0
    tau_end: float = 2.0
    tokens: int = 256
    seed: int = 0
    name = "keyformer"
    needs_prompt = True

    def check(self) -> None:
        if not 0 < self.recent <= 1:
            raise self.error(f"recent {self.recent} is not above 0 and at most 1")
        if min(self.tau_init, self.tau_end) <= 0 or self.tokens < 1 or self.seed < 0:
            raise self.error("tau_init, tau_end, tokens are above 0, seed is not below")

    def position_bytes(self, heads: Heads) -> float:
        """The bytes of a row, its score (f32) and each query head's noise (f32)."""
        return heads.row + 4 + 4 * heads.n_head / heads.n_head_kv

    def tau(self, step: int) -> float:
        """The temperature for the step-th decoded token, counted from 1; the prompt is step 0."""
        return self.tau_init + (self.tau_end - self.tau_init) * min(step / self.tokens, 1)

    def start(self, heads: Heads, prompt: Prompt | None) -> KeyformerSelector:
        assert prompt is not None
        key = ("keyformer", self.seed, self.tau_init)
        sums, noise = prompt.once(key, lambda: prompt_sums(prompt, heads, self))
        positions = np.tile(np.arange(prompt.n), (heads.n_head_kv, 1))
        return KeyformerSelector(self, heads, positions, sums, noise)


class Noise:
    """Standard Gumbel noise of one layer, from its own stream of random numbers."""

    def __init__(self, policy: Keyformer, heads: Heads) -> None:
        self.shape = heads.n_head_kv, heads.n_head // heads.n_head_kv
        self.rng = np.random.default_rng((policy.seed, heads.index))
        self.drawn = np.empty((*self.shape, 0), np.float32)

    def draw(self, n: int) -> np.ndarray:
        e = self.rng.standard_exponential((*self.shape, n), np.float32)
        noise: np.ndarray = -np.log(np.maximum(e, np.float32(1e-30)))
        return noise

    def of(self, n: int) -> np.ndarray:
        """The noise (n_head_kv, n_group_q, n) of the positions 0 .. n-1."""
        known = self.drawn.shape[2]
        if n > known:
            more = self.draw(max(n - known, 256))
            self.drawn = np.concatenate([self.drawn, more], axis=2)
        return self.drawn[:, :, :n]


def prompt_sums(prompt: Prompt, heads: Heads, policy: Keyformer) -> tuple[np.ndarray, Noise]:
    """(n_head_kv, n) f32, the scores of the prompt's positions; and the noise that is in them."""
    noise = Noise(policy, heads)
    out = np.zeros((heads.n_head_kv, prompt.n), np.float32)
    for logits in prompt.blocks():
        cols = logits.shape[3]
        logits += noise.of(cols)[:, :, None]
        out[:, :cols] += softmax(logits / np.float32(policy.tau_init)).sum(axis=(1, 2))
    return out, noise


@dataclass
class KeyformerSelector(Selector):
    """positions, sums: as for H2O."""

    policy: Keyformer
    heads: Heads
    positions: np.ndarray
    sums: np.ndarray
    noise: Noise
    step: int = 0

    def select(self, step: Step) -> np.ndarray:
        self.step += 1
        k = self.policy.k_at(step.n_pos, self.heads)
        local = max(int(k * self.policy.recent), 1)
        self.positions, self.sums = evict(self.positions, self.sums, step.last, k, local)
        noise = at(self.noise.of(step.n_pos), self.positions)
        kept = at(step.logits, self.positions)
        self.sums += softmax((kept + noise) / np.float32(self.policy.tau(self.step))).sum(axis=1)
        return self.positions
