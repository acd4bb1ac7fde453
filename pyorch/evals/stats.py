"""95 % intervals: Wilson for proportions, Student's t for everything else.

Examples that ask about the same text are not independent, nor are those about stretches of a book
that overlap. `groups` says which do, and then whole texts count: the standard error is what leaving
out one text at a time gives (the jackknife, Tukey 1958; for a plain mean it is the usual one), and
Wilson's interval counts fewer examples (Kish's design effect). Both go by Student's t, since a few
texts tell little about their own spread. Fewer than `FEWEST` tell too little, and texts that are
all alike nothing: their interval is NaN, and tables show none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

FEWEST = 6  # groups that an interval needs
NONE = (math.nan, math.nan)
NORMAL = 1.959963984540054  # the 97.5 % quantile of the normal distribution


@cache
def quantile(n: int) -> float:
    """Student's 97.5 % quantile for n groups; NaN for a single one.

    The share of the distribution within -t and t is a finite sum for whole degrees of freedom
    (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4, by the angle whose tangent is t over the root of
    the degrees); bisection finds where it is 95 %.
    """
    if n < 2:
        return math.nan
    powers = np.arange((n - 1) % 2, n - 2, 2)
    factors = np.append(1, (powers + 1) / (powers + 2)).cumprod()[: len(powers)]
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        share = math.sin(angle) * float(factors @ math.cos(angle) ** powers)
        if n % 2 == 0:
            share = (share + angle) * 2 / math.pi
        low, high = (angle, high) if share < 0.95 else (low, angle)
    return math.sqrt(n - 1) * math.tan(high)


def wilson(successes: float, n: float, z: float = NORMAL) -> tuple[float, float]:
    """The interval of a proportion (Wilson, 1927) for a quantile, by default the normal one."""
    p, zz = successes / n, z**2 / n
    middle = (p + zz / 2) / (1 + zz)
    half = z / (1 + zz) * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def student(value: float, without: np.ndarray) -> tuple[float, float]:
    """The interval of a statistic by the jackknife.

    Args:
        value: the statistic of all groups.
        without: (n,) the statistic with each group left out in turn.
    """
    n = len(without)
    if n < FEWEST or np.allclose(without, without[0], rtol=1e-12, atol=0):
        return NONE
    half = quantile(n) * _error(without)
    return value - half, value + half


def _error(without: np.ndarray) -> float:
    n = len(without)
    return math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))


def mean(samples: np.ndarray, groups: Sequence[int] | None = None) -> tuple[float, float]:
    """The interval of the mean of `samples` (n,); `groups` (n,) are the numbers of their texts."""
    return student(float(samples.mean()), _without(samples, groups)) if len(samples) else NONE


def interval(
    scores: np.ndarray, proportion: bool, groups: Sequence[int] | None = None
) -> tuple[float, float]:
    """The interval of the mean score."""
    if not proportion:
        return mean(scores, groups)
    n = n_groups(scores, groups)
    if n < FEWEST:
        return NONE
    if n == len(scores):
        return wilson(float(scores.sum()), n)
    counted = len(scores) / _design_effect(scores, groups)
    return wilson(float(scores.mean()) * counted, counted, quantile(n))


def overlapping(stretches: Sequence[Sequence[int]]) -> list[int]:
    """The group of each stretch (book, begin, end). Those that overlap, be it through others, are
    in one group."""
    groups, group, end = [0] * len(stretches), -1, (-1, 0)
    for i in sorted(range(len(stretches)), key=lambda i: tuple(stretches[i])):
        book, begin, stop = stretches[i]
        if (book, begin) >= end:
            group += 1
        groups[i], end = group, max(end, (book, stop))
    return groups


def n_groups(scores: np.ndarray, groups: Sequence[int] | None) -> int:
    return len(scores if groups is None else set(groups))


def standard_error(scores: np.ndarray, groups: Sequence[int] | None = None) -> float:
    """The standard error of the mean; NaN from a single group."""
    return _error(_without(scores, groups)) if n_groups(scores, groups) > 1 else math.nan


def _without(samples: np.ndarray, groups: Sequence[int] | None) -> np.ndarray:
    """The mean with each group left out in turn; of a single group there is none."""
    _, of = np.unique(range(len(samples)) if groups is None else groups, return_inverse=True)
    sums, sizes = np.bincount(of, samples), np.bincount(of)
    if len(sums) == 1:
        return np.full(1, math.nan)
    means: np.ndarray = (sums.sum() - sums) / (sizes.sum() - sizes)
    return means


def _design_effect(scores: np.ndarray, groups: Sequence[int] | None) -> float:
    """The variance of the mean over that of as many independent examples, at least 1. Where all
    scores are alike nothing tells it, and only whole texts count."""
    if scores.var() == 0:
        return len(scores) / n_groups(scores, groups)
    return max(standard_error(scores, groups) ** 2 / (float(scores.var()) / len(scores)), 1.0)
