"""Numbers and names for people to read."""

from __future__ import annotations

import os


def human_bytes(n: float) -> str:
    """`n` bytes in binary units with three digits: 1.41 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"


def human_time(seconds: float) -> str:
    """A time with as many digits as an estimate deserves: 45 s, 12 min, 1 h 20 min, 3 days."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // (24 * 60)} days"


def printable(name: str | os.PathLike[str]) -> str:
    """A file's name for people, and for what is written in UTF-8: bytes of it that are not UTF-8
    become U+FFFD. Python has them as surrogates, which no encoder takes."""
    return (
        os.fspath(name).encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
    )
