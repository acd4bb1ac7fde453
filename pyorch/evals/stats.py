"""95 % intervals: Wilson for proportions, percentile bootstrap over examples for all else.

Examples that ask about the same text are not independent. `groups` says which do: the bootstrap
then draws whole groups, and Wilson's interval counts fewer examples (Kish's design effect). From a
single group nothing is known: the interval is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

N_BOOT = 10_000
_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution


def wilson(successes: float, n: float) -> tuple[float, float]:
    """The interval of a proportion (Wilson, 1927)."""
    p, zz = successes / n, _Z**2 / n
    middle = (p + zz / 2) / (1 + zz)
    half = _Z / (1 + zz) * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def bootstrap(
    samples: np.ndarray, groups: Sequence[int] | None = None, seed: int = 0
) -> tuple[float, float]:
    """The interval of the mean of `samples` (n,); `groups` (n,) are the numbers of their texts."""
    rng = np.random.default_rng(seed)
    sums, sizes = _by_group(samples, groups)
    n, means = len(sums), []
    if n == 1 < len(samples):
        return math.nan, math.nan
    for _ in range(N_BOOT // 100):  # in pieces: 10,000 draws of thousands of examples are gigabytes
        drawn = rng.integers(0, n, (100, n))
        means.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def _by_group(samples: np.ndarray, groups: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """The sum and the number of samples of each group."""
    if groups is None:
        return samples, np.ones(len(samples))
    names, of = np.unique(groups, return_inverse=True)
    return np.bincount(of, samples, len(names)), np.bincount(of, minlength=len(names)).astype(float)


def interval(
    scores: np.ndarray, proportion: bool, groups: Sequence[int] | None = None
) -> tuple[float, float]:
    """The interval of the mean score."""
    if not proportion:
        return bootstrap(scores, groups)
    n = len(scores) / _design_effect(scores, groups)
    if math.isnan(n):
        return math.nan, math.nan
    return wilson(float(scores.mean()) * n, n)


def _design_effect(scores: np.ndarray, groups: Sequence[int] | None) -> float:
    """The variance of the mean over that of as many independent examples, at least 1."""
    sums, sizes = _by_group(scores, groups)
    if len(sums) == 1 < len(scores):
        return math.nan
    if len(sums) == len(scores) or scores.var() == 0:
        return 1.0
    residual = sums - sizes * scores.mean()
    of_groups = (residual**2).sum() * len(sums) / (len(sums) - 1)
    return max(float(of_groups / (scores.var() * len(scores))), 1.0)


def standard_error(scores: np.ndarray) -> float:
    """The standard error of the mean."""
    return float(scores.std(ddof=1) / math.sqrt(len(scores))) if len(scores) > 1 else math.nan
