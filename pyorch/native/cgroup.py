"""What the control groups of this process leave it: CPU time and memory.

A container, a unit of systemd and a batch system set such limits. They hold for everything below
the group that has them, so each is looked for from the group of this process up to the mount. The
files are those of the kernel's documentation, "Control Group v2"; version 1 is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc/self")


def cpus(proc: Path = _PROC) -> float | None:
    """The CPUs whose time this process may take, such as 0.5; None without a quota."""
    quotas = []
    for folder in _groups(proc):
        try:
            quota, period = map(int, (folder / "cpu.max").read_text().split())  # or `max`
        except (OSError, ValueError):
            continue
        quotas.append(quota / period)
    return min(quotas, default=None)


def memory(proc: Path = _PROC) -> int | None:
    """The bytes of main memory that this process and the others of its group may use; None without
    a limit."""
    return min((limit for limit, _ in _memory(proc)), default=None)


def memory_left(proc: Path = _PROC) -> int | None:
    """The bytes that are left of it. Pages of files count as free: the kernel drops them first."""
    return min((max(limit - used, 0) for limit, used in _memory(proc)), default=None)


def _memory(proc: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes used without the pages of files) of each group that has a limit."""
    for folder in _groups(proc):
        try:
            words = [(folder / name).read_text().strip() for name in ("memory.max", "memory.high")]
            limit = min(int(word) for word in words if word != "max")
            lines = (folder / "memory.stat").read_text().splitlines()
            stat = {key: int(n) for key, n in (line.split() for line in lines)}
            pages = sum(stat.get(f"{kind}_file", 0) for kind in ("active", "inactive"))
            yield limit, int((folder / "memory.current").read_text()) - pages
        except (OSError, ValueError):
            continue


def _groups(proc: Path) -> Iterator[Path]:
    """The folder of each group that this process is in, from its own up to the mount.

    Inside a container the mount may begin at the container's own group, while the path of the group
    begins at the root of the machine.
    """
    try:
        lines = (line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines())
        path = next((Path(path) for _, names, path in lines if not names), Path("/"))
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except (OSError, ValueError):
        return
    for mount in mounts:
        if mount[mount.index("-") + 1] == "cgroup2":
            root, top = _plain(mount[3]), Path(_plain(mount[4]))
            below = path.relative_to(root) if path.is_relative_to(root) else Path()
            for folder in (below, *below.parents):
                yield top / folder


def _plain(text: str) -> str:
    r"""A path of mountinfo, where a blank is `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)
