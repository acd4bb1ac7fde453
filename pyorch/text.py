"""Text of people's files, and numbers for people to read."""

from __future__ import annotations


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


def decoded(raw: bytes) -> str:
    """The text of a file: UTF-8, or else Latin-1, as in old ones, with line feeds alone."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    return text.replace("\r\n", "\n")
