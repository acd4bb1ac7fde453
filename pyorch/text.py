"""Formatting for people to read."""

from __future__ import annotations


def human_bytes(n: float) -> str:
    """`n` bytes in binary units with three digits: 1.41 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"


def human_time(seconds: float) -> str:
    """A time with as many digits as an estimate deserves: 45 s, 12 min, 1 h 20 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
