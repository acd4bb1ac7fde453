"""The speed of memory: measured once, by threads that fit into what is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyorch.engine import bandwidth
from pyorch.errors import SparqError


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and buffers that are made at once."""
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path))
    monkeypatch.setattr(bandwidth.system, "is_busy", lambda: False)
    monkeypatch.setattr(bandwidth, "LEAST_BYTES", 1 << 20)
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(16 << 20))


def test_it_is_measured_once_for_so_many_threads(tmp_path: Path) -> None:
    first = bandwidth.measured(2)
    assert 1e8 < first < 1e13 and bandwidth.measured(2) == first
    (kept,) = (tmp_path / "bench").iterdir()
    kept.write_text("1e9")
    assert bandwidth.measured(2) == 1e9
    assert bandwidth.measured(1) != 1e9
    kept.write_text("")  # of a full disk
    assert bandwidth.measured(2) > 1e8


def test_a_busy_machine_keeps_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth.system, "is_busy", lambda: True)
    assert bandwidth.measured(1) > 1e8 and not (tmp_path / "bench").exists()


def test_it_is_known_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "bench").touch()  # nothing can be written below
    assert bandwidth.measured(1) > 1e8


def test_fewer_threads_read_where_memory_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert bandwidth.measured(64) == bandwidth.measured(4)
    assert "4 of 64 threads" in capsys.readouterr().err


def test_a_thread_without_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no number then, and nobody waits for it."""
    monkeypatch.setattr(bandwidth, "_START_S", 0.1)
    with pytest.raises(SparqError, match="with 2 threads"):
        bandwidth.MemoryReader(2, 1 << 60)
