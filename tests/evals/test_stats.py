"""Intervals hold what they promise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import stdtrit

from pyorch.evals import stats


def test_student_s_quantile_is_that_of_scipy() -> None:
    n = np.arange(2, 1002)
    got = [stats.quantile(int(x)) for x in n]
    assert got == pytest.approx(stdtrit(n - 1, 0.975), rel=1e-10)
    assert pytest.approx(stdtrit(np.inf, 0.975), rel=1e-15) == stats.NORMAL
    assert np.isnan(stats.quantile(1))


def test_wilson_against_known_values() -> None:
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3
    known = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0, 0.1611),
             (1, 29): (0.0061, 0.1718)}  # fmt: skip
    for (successes, n), want in known.items():
        assert stats.wilson(successes, n) == pytest.approx(want, abs=5e-5)
    assert stats.wilson(10, 10)[1] == pytest.approx(1.0)


def normal(rng: np.random.Generator, n_texts: int) -> np.ndarray:
    """Ten answers about each text, with a mean of 5; half of their variance is the text's."""
    texts = np.repeat(rng.normal(5, 1, n_texts), 10)
    return texts + rng.normal(0, 1, len(texts))


def hits(rng: np.random.Generator, n_texts: int) -> np.ndarray:
    """The same for answers that are right or wrong, on average 0.7."""
    return (rng.random(10 * n_texts) < np.repeat(rng.beta(7, 3, n_texts), 10)).astype(float)


@pytest.mark.parametrize("n_texts", [6, 10, 30])
@pytest.mark.parametrize(("draw", "truth", "most"), [(normal, 5, 0.97), (hits, 0.7, 0.98)])
def test_intervals_cover_the_mean_at_their_rate(
    draw: Callable[[np.random.Generator, int], np.ndarray], truth: float, most: float, n_texts: int
) -> None:
    """2,000 draws of a few texts, ten questions each. Wilson's is a little wide for the fewest."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(n_texts), 10).tolist()
    intervals = [stats.interval(draw(rng, n_texts), draw is hits, groups) for _ in range(2000)]
    assert 0.93 < np.mean([low <= truth <= high for low, high in intervals]) < most


def test_stretches_that_overlap_count_once() -> None:
    """400 books, and 100 stretches of each at random places, as `eval` takes them."""
    rng = np.random.default_rng(0)
    held: dict[str, list[bool]] = {"alone": [], "grouped": []}
    for _ in range(400):
        book = np.repeat(rng.normal(5, 1, 1000), 100)
        stretches = [[0, int(a), int(a) + 2000] for a in rng.integers(0, len(book) - 2000, 100)]
        scores = np.array([book[a:b].mean() for _, a, b in stretches])
        for name, groups in (("alone", None), ("grouped", stats.overlapping(stretches))):
            low, high = stats.mean(scores, groups)
            held[name].append(low <= 5 <= high)
    assert np.mean(held["alone"]) < 0.8 < 0.92 < np.mean(held["grouped"]) < 0.97


def test_the_groups_of_stretches() -> None:
    stretches = [[0, 50, 60], [0, 0, 10], [1, 5, 9], [0, 55, 70], [0, 10, 20], [0, 69, 71]]
    assert stats.overlapping(stretches) == [2, 0, 3, 2, 1, 2]
    nested = [[0, 0, 100], [0, 10, 20], [0, 30, 40]]
    assert stats.overlapping(nested) == [0, 0, 0]


@pytest.mark.parametrize("proportion", [True, False])
def test_fewer_than_six_texts_have_no_interval(proportion: bool) -> None:
    """However many questions there are. One value had no width, so any gap got a star."""
    scores = np.array([1.0, 0.0, 1.0, 1.0, 0.0] * 10)
    for n_texts in range(1, 6):
        groups = [i % n_texts for i in range(50)]
        assert np.isnan(stats.interval(scores, proportion, groups)).all()
        assert np.isnan(stats.interval(scores[:n_texts], proportion)).all()
    assert np.isfinite(stats.interval(scores, proportion, [i % 6 for i in range(50)])).all()
    assert np.isfinite(stats.interval(scores[:6], proportion)).all()


def test_the_mean_of_a_sample_has_the_interval_of_a_textbook() -> None:
    """Student's own: the gain of sleep by one drug over another (1908), 0.70 to 2.46 hours."""
    gain = np.array([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
    assert stats.mean(gain) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    same = stats.mean(np.repeat(gain, 3), np.repeat(np.arange(10), 3).tolist())
    assert same == pytest.approx(stats.mean(gain))
    assert np.isnan(stats.mean(np.full(12, 0.1))).all()  # their spread is not known to be nothing


def test_right_answers_to_all_questions_about_a_text_count_once() -> None:
    """Texts decide: where all answers about each are alike, the interval is not that of answers."""
    texts = np.array([1.0] * 30 + [0.0] * 10)
    groups = np.repeat(np.arange(40), 10).tolist()
    low, high = stats.interval(np.repeat(texts, 10), True, groups)
    assert (low, high) == pytest.approx(stats.interval(texts, True), abs=0.015)
    all_right = stats.interval(np.ones(100), True, [i // 10 for i in range(100)])
    assert all_right[0] < stats.interval(np.ones(10), True)[0] + 0.01


def test_standard_error() -> None:
    scores = np.array([1.0, 2.0, 3.0, 4.0])
    assert stats.standard_error(scores) == pytest.approx(np.sqrt(5 / 3) / 2)
    repeated = stats.standard_error(np.repeat(scores, 5), [i // 5 for i in range(20)])
    assert repeated == pytest.approx(np.sqrt(5 / 3) / 2)
    assert np.isnan(stats.standard_error(scores, [0] * 4))
