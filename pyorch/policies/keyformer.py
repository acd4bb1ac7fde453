"""Keyformer (Adnan et al., arXiv 2403.09054): key tokens by a Gumbel softmax, and the newest.

It is like H2O, but sums softmax((x + noise) / tau) over the positions in the cache (eq. 9), where
tau grows from 1 in the prompt to 2 (eq. 10); the newest positions are a share `recent` of k. It
uses original positions and scores per layer, the best of its table 3. Evicted positions never come
back.
Shared KV heads: scores summed over their query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Heads, Policy, Prompt, Selector, Step, at, evict, softmax


@dataclass(frozen=True)
class Keyformer(Policy):
    """recent: the share of k for the newest positions (0.2 to 0.3 in its section 4.4.4)

    tokens: the length of the text to be generated; tau reaches `tau_end` with its last token
    noise: drawn once per position and query head (`once`, its algorithm 1) or anew for each row
        (`row`, its authors' code)
    """

    recent: float = 0.25
    tau_init: float = 1.0
    tau_end: float = 2.0
    tokens: int = 256
    noise: str = "once"
    seed: int = 0
    name = "keyformer"
    needs_prompt = True

    def check(self) -> None:
        if not 0 < self.recent <= 1:
            raise self.error(f"recent {self.recent} is not above 0 and at most 1")
        if min(self.tau_init, self.tau_end) <= 0 or self.tokens < 1 or self.seed < 0:
            raise self.error("tau_init, tau_end, tokens are above 0, seed is not below")
        if self.noise not in ("once", "row"):
            raise self.error(f"unknown noise {self.noise!r}", "noise=once or noise=row")

    def position_bytes(self, heads: Heads) -> float:
        """The bytes of a row, its score (f32) and, if noise=once, each query head's noise (f32)."""
        noise = 4 * heads.n_head / heads.n_head_kv if self.noise == "once" else 0
        return heads.row + 4 + noise

    def tau(self, step: int) -> float:
        """The temperature for the step-th decoded token, counted from 1; the prompt is step 0."""
        return self.tau_init + (self.tau_end - self.tau_init) * min(step / self.tokens, 1)

    def start(self, heads: Heads, prompt: Prompt | None) -> KeyformerSelector:
        assert prompt is not None
        noise = Noise(self, heads)
        key = ("keyformer", self.noise, self.seed, self.tau_init)
        sums, drawn = prompt.once(key, lambda: prompt_sums(prompt, heads, noise, self.tau_init))
        noise.restore(drawn)
        positions = np.tile(np.arange(prompt.n), (heads.n_head_kv, 1))
        return KeyformerSelector(self, heads, positions, sums, noise)


# the state of the random generator, and the noise that was drawn once
NoiseState = tuple[Mapping[str, object], np.ndarray]


class Noise:
    """Standard Gumbel noise of one layer, from its own stream of random numbers."""

    def __init__(self, policy: Keyformer, heads: Heads) -> None:
        self.once = policy.noise == "once"
        self.shape = heads.n_head_kv, heads.n_head // heads.n_head_kv
        self.rng = np.random.default_rng((policy.seed, heads.index))
        self.fixed = np.empty((*self.shape, 0), np.float32)

    def draw(self, n: int) -> np.ndarray:
        e = self.rng.standard_exponential((*self.shape, n), np.float32)
        noise: np.ndarray = -np.log(np.maximum(e, np.float32(1e-30)))
        return noise

    def rows(self, n_rows: int, n: int) -> np.ndarray:
        """Noise (n_head_kv, n_group_q, n_rows or 1 for all, n) for the positions 0 .. n-1."""
        if not self.once:
            return self.draw(n_rows * n).reshape(*self.shape, n_rows, n)
        if n > self.fixed.shape[2]:
            more = self.draw(max(n - self.fixed.shape[2], 256))
            self.fixed = np.concatenate([self.fixed, more], axis=2)
        return self.fixed[:, :, None, :n]

    def state(self) -> NoiseState:
        return self.rng.bit_generator.state, self.fixed

    def restore(self, state: NoiseState) -> None:
        self.rng.bit_generator.state, self.fixed = state


def prompt_sums(
    prompt: Prompt, heads: Heads, noise: Noise, tau: float
) -> tuple[np.ndarray, NoiseState]:
    """(n_head_kv, n) f32, the scores of the prompt's positions; and the noise after them."""
    out = np.zeros((heads.n_head_kv, prompt.n), np.float32)
    for logits in prompt.blocks():
        rows, cols = logits.shape[2:]
        logits += noise.rows(rows, cols)
        out[:, :cols] += softmax(logits / np.float32(tau)).sum(axis=(1, 2))
    return out, noise.state()


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
        noise = at(self.noise.rows(1, step.n_pos)[:, :, 0], self.positions)
        kept = at(step.logits, self.positions)
        self.sums += softmax((kept + noise) / np.float32(self.policy.tau(self.step))).sum(axis=1)
        return self.positions
