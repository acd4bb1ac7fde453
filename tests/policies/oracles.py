"""The methods once more, from their papers: loops over positions, double precision.

Imports nothing of this project. Each oracle is one layer of one sequence: `choose(q, k)` says what
the token with query q (n_head, d) may read, of the keys k (n, n_head_kv, d) so far with its own, as
one set per KV head; `follow(read)` is told what was really read, in case rounding decided a tie
otherwise (`margin`: how near the choice was to another, relative to the score at the cut).
"""

from __future__ import annotations

import math

import numpy as np

Sets = list[set[int]]


def softmax(x):
    x = [float(v) for v in x]
    top = max(x)
    e = [math.exp(v - top) if v > -math.inf else 0.0 for v in x]
    total = sum(e)
    return [v / total for v in e]


def best(scores: dict[int, float], k: int) -> tuple[set[int], float]:
    """The k positions with the largest scores (ties: the lower one), and the margin."""
    order = sorted(scores, key=lambda p: (-scores[p], p))
    margin = math.inf
    if 0 < k < len(order):
        inside, outside = scores[order[k - 1]], scores[order[k]]
        margin = (inside - outside) / max(abs(inside), 1e-30)
    return set(order[:k]), margin


class Oracle:
    """What the oracles share: k_of(n) positions at n positions; scores per head."""

    def __init__(self, n_head: int, n_head_kv: int, k_of, scale: float) -> None:
        self.n_head, self.n_head_kv, self.k_of, self.scale = n_head, n_head_kv, k_of, scale
        self.group = n_head // n_head_kv
        self.margin = math.inf

    def heads_of(self, h: int) -> range:
        return range(h * self.group, (h + 1) * self.group)

    def scores(self, q, k, head: int, positions=None) -> dict[int, float]:
        """softmax of a query head over `positions` (all)."""
        positions = range(len(k)) if positions is None else sorted(positions)
        q, k = q[head].astype(np.float64), k[:, head // self.group].astype(np.float64)
        return dict(
            zip(positions, softmax([q @ k[p] * self.scale for p in positions]), strict=True)
        )

    def best(self, scores: dict[int, float], k: int) -> set[int]:
        chosen, margin = best(scores, k)
        self.margin = min(self.margin, margin)
        return chosen

    def prompt(self, queries, k) -> None:
        """The queries (n, n_head, d) and keys of all positions before the first `choose`."""

    def choose(self, q, k) -> Sets:
        raise NotImplementedError

    def follow(self, read: Sets) -> None:
        self.margin = math.inf


class Exact(Oracle):
    """The largest scores, summed over the query heads of a KV head."""

    def choose(self, q, k) -> Sets:
        out = []
        for h in range(self.n_head_kv):
            total = dict.fromkeys(range(len(k)), 0.0)
            for head in self.heads_of(h):
                for p, s in self.scores(q, k, head).items():
                    total[p] += s
            out.append(self.best(total, self.k_of(len(k))))
        return out


class Window(Oracle):
    """The first positions and the newest ones."""

    def __init__(self, *args, sinks: int) -> None:
        super().__init__(*args)
        self.sinks = sinks

    def choose(self, q, k) -> Sets:
        n = len(k)
        budget = min(self.k_of(n), n)
        chosen = {n - 1}
        for p in range(min(self.sinks, n)):
            if len(chosen) < budget:
                chosen.add(p)
        for p in reversed(range(n)):
            if len(chosen) < budget:
                chosen.add(p)
        return [chosen] * self.n_head_kv
