"""95 % intervals: Wilson for proportions, percentile bootstrap over examples for all else."""

from __future__ import annotations

import math

import numpy as np

N_BOOT = 10_000
_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution


def wilson(successes: float, n: int) -> tuple[float, float]:
    """The interval of a proportion (Wilson, 1927)."""
    p, zz = successes / n, _Z**2 / n
    middle = (p + zz / 2) / (1 + zz)
    half = _Z / (1 + zz) * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def bootstrap(samples: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """The interval of the mean."""
    rng = np.random.default_rng(seed)
    n = len(samples)
    # in pieces: 10,000 draws of thousands of examples are gigabytes
    means = np.concatenate([rng.choice(samples, (100, n)).mean(1) for _ in range(N_BOOT // 100)])
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def interval(scores: np.ndarray, proportion: bool) -> tuple[float, float]:
    """The interval of the mean score."""
    return wilson(float(scores.sum()), len(scores)) if proportion else bootstrap(scores)


def standard_error(scores: np.ndarray) -> float:
    """The standard error of the mean."""
    return float(scores.std(ddof=1) / math.sqrt(len(scores))) if len(scores) > 1 else math.nan
