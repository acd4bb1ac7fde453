"""Formatting for people to read."""

from __future__ import annotations


def human_bytes(n: float) -> str:
    """`n` bytes in binary units with three digits: 1.41 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"
