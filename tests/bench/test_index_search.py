"""Ways to find positions: what they find and count, on keys whose neighbours are known."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import index_search

N, D, N_BEST = 1000, 16, 20


def exact(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return np.sort(np.argsort(-(q @ k.T), axis=1)[:, :N_BEST], axis=1)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((2, D), np.float32), rng.standard_normal((N, D), np.float32)


def test_a_scan_finds_most_of_the_best() -> None:
    q, k = data()
    true = exact(q, k)
    found = []
    for way in index_search.scans(k, D**-0.5):
        cells, n_bytes = way.ask(q, N_BEST)
        assert cells.shape == (2, N_BEST)
        found.append(np.mean([len(np.intersect1d(a, b)) for a, b in zip(cells, true, strict=True)]))
        assert n_bytes > N * D / 8
    assert 0.4 * N_BEST < found[0] < found[1] < N_BEST


def test_indexes_find_most_of_the_best() -> None:
    pytest.importorskip("faiss")
    q, k = data()
    true = exact(q, k)
    found = {}
    for way in index_search.indexes(k, N_BEST):
        cells, n_bytes = way.ask(q, N_BEST)
        found[way.name] = np.mean(
            [len(np.intersect1d(a, b)) for a, b in zip(cells, true, strict=True)]
        )
        if way.name == "flat":
            assert np.array_equal(np.sort(cells, axis=1), true) and n_bytes == N * D * 2
        else:
            assert n_bytes > 0
    by_list = [n for name, n in found.items() if name.startswith("lists")]
    assert by_list == sorted(by_list) and by_list[-1] > by_list[0]
    assert found["HNSW, 4 k candidates"] > 0.9 * N_BEST
