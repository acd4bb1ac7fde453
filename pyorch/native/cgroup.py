"""What the control groups of this process leave it: CPU time and memory.

A container, a unit of systemd and a batch system set such limits. They hold for everything below
the group that has them, so each is looked for from the group of this process up to the mount. The
files are those of the kernel's documentation, "Control Group v2" and "Control Groups version 1".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc/self")


def cpus(proc: Path = _PROC) -> float | None:
    """The CPUs whose time this process may take, such as 0.5; None without a quota."""
    quotas = []
    for version, folder in _groups("cpu", proc):
        try:
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())  # or `max`
            else:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory(proc: Path = _PROC) -> int | None:
    """The bytes of main memory that this process and the others of its group may use; None without
    a limit."""
    return min((limit for limit, _ in _memory(proc)), default=None)


def memory_left(proc: Path = _PROC) -> int | None:
    """The bytes that are left of it. Pages of files count as free: the kernel drops them first."""
    return min((max(limit - used, 0) for limit, used in _memory(proc)), default=None)


_NONE = 1 << 60  # version 1 writes "no limit" as the largest number of pages


def _memory(proc: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes used without the pages of files) of each group that has a limit."""
    for version, folder in _groups("memory", proc):
        limits = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        usage = "memory.current" if version == 2 else "memory.usage_in_bytes"
        try:
            limit = min((n for file in limits if (n := _number(folder / file))), default=_NONE)
            if limit >= _NONE:
                continue
            lines = (folder / "memory.stat").read_text().splitlines()
            stat = {key: int(n) for key, n in (line.split() for line in lines)}
            total = "" if version == 2 else "total_"  # with the groups below
            pages = sum(stat.get(f"{total}{kind}_file", 0) for kind in ("active", "inactive"))
            yield limit, int((folder / usage).read_text()) - pages
        except (OSError, ValueError):
            continue


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # `max`; or the kernel is too old to have it
        return None


def _groups(controller: str, proc: Path) -> Iterator[tuple[int, Path]]:
    """The version of a controller, and the folder of each group that this process is in, from its
    own up to the mount. A machine may have mounts of both versions.

    Inside a container the mount may begin at the container's own group, while the path of the group
    begins at the root of the machine.
    """
    try:
        lines = (line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines())
        paths = {name: path for _, names, path in lines for name in names.split(",")}
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except (OSError, ValueError):
        return
    for mount in mounts:
        kind, _, options = (mount[mount.index("-") + 1 :] + [""] * 3)[:3]
        if kind == "cgroup2":
            version, path = 2, paths.get("")
        elif kind == "cgroup" and controller in options.split(","):
            version, path = 1, paths.get(controller)
        else:
            continue
        root, top = _plain(mount[3]), Path(_plain(mount[4]))
        if path is None:
            continue
        below = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
        for folder in (below, *below.parents):
            yield version, top / folder


def _plain(text: str) -> str:
    r"""A path of mountinfo, where a blank is `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)
