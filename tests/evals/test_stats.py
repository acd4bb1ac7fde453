"""Intervals hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from pyorch.evals import stats


def test_wilson_against_known_values() -> None:
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3
    known = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0, 0.1611),
             (1, 29): (0.0061, 0.1718)}  # fmt: skip
    for (successes, n), want in known.items():
        assert stats.wilson(successes, n) == pytest.approx(want, abs=5e-5)
    assert stats.wilson(10, 10)[1] == pytest.approx(1.0)


@pytest.mark.parametrize("proportion", [True, False])
def test_intervals_cover_the_mean_at_their_rate(proportion: bool) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        scores = (rng.random(60) < 0.85).astype(float) if proportion else rng.exponential(10, 60)
        low, high = stats.interval(scores, proportion)
        hits += low <= (0.85 if proportion else 10) <= high
    assert 0.88 < hits / 200 < 0.99


def test_bootstrap_of_one_value_is_that_value() -> None:
    assert stats.bootstrap(np.full(7, 3.0)) == (3.0, 3.0)


def test_ten_questions_about_a_text_are_not_ten_examples() -> None:
    """Texts decide: all answers about one are alike, so the intervals are those of the texts."""
    rng = np.random.default_rng(0)
    hits = {True: 0, False: 0}
    for _ in range(200):
        texts = (rng.random(40) < 0.8).astype(float)
        scores, groups = np.repeat(texts, 10), np.repeat(np.arange(40), 10)
        for proportion in hits:
            low, high = stats.interval(scores, proportion, groups.tolist())
            assert (low, high) == pytest.approx(stats.interval(texts, proportion), abs=0.01)
            hits[proportion] += low <= 0.8 <= high
    assert all(0.88 < n / 200 < 0.99 for n in hits.values())
    for proportion in hits:
        assert np.isnan(stats.interval(scores[:10], proportion, [0] * 10)).all(), "a single text"
    alone = list(range(60))
    for proportion in hits:
        scores = (rng.random(60) < 0.5).astype(float)
        assert stats.interval(scores, proportion, alone) == stats.interval(scores, proportion)


def test_standard_error() -> None:
    scores = np.array([1.0, 2.0, 3.0, 4.0])
    assert stats.standard_error(scores) == pytest.approx(np.sqrt(5 / 3) / 2)
