"""The deciding part of each method, a function of arrays, against its oracle."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

from pyorch.policies import lm_infinite, oracle
from pyorch.policies.base import top

# n, n_head, n_head_kv, d
SHAPES = [
    (1, 1, 1, 8),
    (2, 2, 1, 8),
    (7, 3, 3, 16),
    (33, 6, 2, 24),
    (130, 8, 4, 32),
    (501, 5, 1, 8),
]


def keys_and_queries(
    n: int, n_head: int, n_head_kv: int, d: int, seed: int = 0, ties: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """q (n, n_head, d) and k (n, n_head_kv, d); ties: whole numbers, and every key twice."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(n, n_head, d)), rng.normal(size=(n, n_head_kv, d))
    if ties:
        k[1::2] = k[: n // 2 * 2 : 2]
        q, k = np.round(q), np.round(k)
    return q.astype(np.float32), k.astype(np.float32)


def logits_of(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """q (n_head, d), k (n, n_head_kv, d) to (n_head_kv, group, n)."""
    group = len(q) // k.shape[1]
    rows = [k[:, h // group] @ q[h] * np.float32(scale) for h in range(len(q))]
    return np.stack(rows).reshape(k.shape[1], group, -1)


def sets(positions: np.ndarray) -> list[set[int]]:
    """Of (n_head_kv, n); each row ascending, without repetition."""
    assert (np.diff(positions, axis=1) > 0).all()
    return [set(row.tolist()) for row in positions]


def budgets(n: int) -> list[int]:
    return sorted({1, 2, max(n // 4, 1), max(n // 2, 1), max(n - 1, 1), n, n + 5})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ties", [False, True])
def test_oracle(shape: tuple[int, int, int, int], ties: bool) -> None:
    n, n_head, n_head_kv, d = shape
    q, k = keys_and_queries(*shape, ties=ties)
    scale = 0.25
    for budget in budgets(n):
        want = oracles.Exact(n_head, n_head_kv, lambda _, b=budget: b, scale).choose(q[-1], k)
        assert sets(oracle.select(logits_of(q[-1], k, scale), budget)) == want


@pytest.mark.parametrize("sinks", [0, 4, 16])
@pytest.mark.parametrize("n", [1, 3, 16, 17, 100])
def test_window(n: int, sinks: int) -> None:
    k = np.zeros((n, 1, 1), np.float32)
    for budget in budgets(n):
        want = oracles.Window(1, 1, lambda _, b=budget: b, 1.0, sinks=sinks).choose(k[-1], k)
        assert [set(lm_infinite.select(n, budget, sinks).tolist())] == want


def test_top_takes_the_lower_of_equals() -> None:
    assert top(np.array([1.0, 2, 2, 2, 0]), 2).tolist() == [1, 2]
    assert top(np.array([5.0, 5, 5]), 0).tolist() == []
    assert top(np.array([3.0, 1]), 9).tolist() == [0, 1]
