"""Whether a model fits into the memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from pyorch.errors import SparqError
from pyorch.models.gguf_file import GGUFFile, human_bytes


def available_memory() -> int:
    """Bytes that can be taken without swapping: the least of the system's, the container's, and
    `SPARQ_MEMORY_LIMIT` (bytes)."""
    limits = [_meminfo_available(), _cgroup_available()]
    own = os.environ.get("SPARQ_MEMORY_LIMIT", "")
    if own:
        if not own.isdigit():
            raise SparqError(f"SPARQ_MEMORY_LIMIT is {own!r}, not a number of bytes", exit_code=2)
        limits.append(int(own))
    known = [n for n in limits if n is not None]
    return min(known) if known else 2**63


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _cgroup_available() -> int | None:
    """What a version 2 control group still allows; its file cache can be reclaimed, so is free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text())  # "max" = no limit: ValueError
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("file", 0))
    except (OSError, ValueError):
        return None


def check_memory(file: GGUFFile, kv_bytes: int, shadow_bytes: int = 0) -> None:
    """Refuse a model that does not fit into the available memory with its cache and the shadow.

    Raises:
        SparqError: with both sizes and what to do.
    """
    weights = sum(t.n_bytes for t in file.tensors)
    free = available_memory()
    if weights + kv_bytes + shadow_bytes <= free:
        return
    if weights > free:
        hint = "use a smaller quantisation of the model, or a machine with more memory"
    elif weights + kv_bytes > free:
        hint = "lower --ctx: the cache grows with it"
    else:
        hint = "lower --ctx, or use --shadow-type q4, or --method topk, which needs no transposed K"
    what = f"{human_bytes(weights)} for weights and {human_bytes(kv_bytes)} for the cache"
    if shadow_bytes:
        what += f" and {human_bytes(shadow_bytes)} for its transposed K"
    raise SparqError(
        f"{file.path}: needs {what}, but only {human_bytes(free)} of memory is available", hint
    )
