"""Which combinations of parameters are quick: all of them would take minutes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import cases
import pytest


def pairwise(**factors: Mapping[str, Any] | Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with all combinations of these values; the keys of a mapping name them.

    Quick are as few as have every pair of two values; the others are slow.
    """
    named = {n: f if isinstance(f, Mapping) else {str(x): x for x in f} for n, f in factors.items()}
    rows = cases.pairwise({name: tuple(values) for name, values in named.items()})
    quick = {tuple(row[name] for name in named) for row in rows}
    params = [
        pytest.param(
            *(values[key] for key, values in zip(keys, named.values(), strict=True)),
            id="-".join(keys),
            marks=() if keys in quick else pytest.mark.slow,
        )
        for keys in itertools.product(*named.values())
    ]
    return pytest.mark.parametrize(tuple(named), params)
