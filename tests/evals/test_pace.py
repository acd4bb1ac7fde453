"""The time left of an evaluation, on a clock of its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pyorch.evals.pace import DECODED, DECODED_IN_PYTHON, Pace, Part, size_of
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("python_s", [0.2, 4.0])
def test_the_time_left_is_right_after_the_first_example(demo_model: Path, python_s: float) -> None:
    """Prompts of 500 to 8,000 tokens, a method in Python as slow as guessed or 20 times slower, and
    a tenth of noise."""
    geo, rng, clock = geometry(read_gguf(demo_model)), random.Random(1), Clock()
    costs = {"read": 0.01, "sparq": 0.01 * DECODED, "python": python_s / 60}
    lengths = [2000, *(rng.choice([500, 1000, 4000, 8000]) for _ in range(20))]
    parts = []
    for n in lengths:
        decoded = size_of(geo, n, 60)
        parts += [
            Part("read", size_of(geo, 0, n)),
            Part("sparq", DECODED * decoded),
            Part("python", DECODED_IN_PYTHON * decoded),
        ]
    took = [rng.uniform(0.9, 1.1) * costs[p.kind] * p.size for p in parts]
    told: list[tuple[float, float, str]] = []
    pace = Pace(parts, lambda *x: told.append(x), clock)
    for i, s in enumerate(took):
        with pace.part("{done} of {total}") as tick:
            clock.now += s / 2
            tick(1, 2)
            assert told[-1][0] == clock.now and told[-1][2] == "1 of 2"
            clock.now += s / 2
        so_far, total, _ = told[-1]
        if 2 <= i < len(took) - 1:
            assert total - so_far == pytest.approx(sum(took[i + 1 :]), rel=0.2)
    assert told[-1][0] == told[-1][1] == pytest.approx(sum(took))


def test_a_position_costs_what_its_arithmetic_does(demo_model: Path) -> None:
    geo = geometry(read_gguf(demo_model))
    assert size_of(geo, 0, 1) == pytest.approx(1, rel=1e-3)
    whole = size_of(geo, 0, 4096)
    assert whole > 4096
    assert size_of(geo, 0, 1000) + size_of(geo, 1000, 3096) == pytest.approx(whole)
