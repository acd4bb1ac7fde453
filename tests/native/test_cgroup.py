"""Limits of containers and units, as the kernel shows them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from fakes import write

from pyorch.models import memory
from pyorch.native import cgroup, probe

V2 = "30 23 0:26 {root} {top} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


class Machine:
    """What /proc/self says, and the files of the control groups below `top`."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.top = folder / "proc", folder / "top"

    def is_in(self, groups: str, mounts: str) -> None:
        mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts
        write(self.proc, {"cgroup": groups, "mountinfo": mounts})

    def group(self, path: str, **files: object) -> None:
        names = {name.replace("__", "."): f"{content}\n" for name, content in files.items()}
        write(self.top / path, names)

    def limits(self) -> tuple[int | None, int | None, float | None]:
        """The memory, what is left of it, and the CPUs."""
        return tuple(f(self.proc) for f in (cgroup.memory, cgroup.memory_left, cgroup.cpus))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def stat(**values: int) -> str:
    return "\n".join(f"{k} {v}" for k, v in values.items())


def test_a_unit_whose_slice_has_the_limit(machine: Machine) -> None:
    """`MemoryMax=` and `CPUQuota=` of the slice hold for its units too."""
    machine.is_in("0::/user.slice/job.service\n", V2.format(root="/", top=machine.top))
    files = stat(anon=5, active_file=200, inactive_file=100)
    machine.group("user.slice/job.service", memory__max="max", cpu__max="max 100000")
    high = {"memory__max": 1000, "memory__high": "max", "memory__stat": files}
    machine.group("user.slice", **high, memory__current=700, cpu__max="150000 100000")
    assert machine.limits() == (1000, 600, 1.5)  # 300 of the 700 are pages of files
    low = {"memory__max": 500, "memory__high": 400, "memory__stat": files}
    machine.group("user.slice/job.service", **low, memory__current=100, cpu__max="50000 100000")
    # beyond `high` the kernel slows everything down; left is as much in the slice: 400 - 100 + 300
    assert machine.limits() == (400, 600, 0.5)


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("/docker/abc", "/docker/abc"),  # the container sees the machine's groups
        ("/docker/abc", "/docker/abc/inner"),
        ("/", "/"),  # it has a name space of its own
        ("/", "/inner"),
        ("/docker/abc", "/elsewhere"),  # it was moved after the mount
    ],
)
def test_a_container(machine: Machine, root: str, path: str) -> None:
    machine.is_in(f"1:cpu:/\n0::{path}\n", V2.format(root=root, top=machine.top))
    files = stat(active_file=50, inactive_file=150, anon=1)
    limits = {"memory__max": 1000, "memory__high": "max", "cpu__max": "50000 100000"}
    machine.group("", **limits, memory__stat=files, memory__current=800)
    machine.group("inner", memory__max="max", memory__current=1, memory__stat="", cpu__max="max 1")
    assert machine.limits() == (1000, 400, 0.5)


def test_no_limit(machine: Machine) -> None:
    assert machine.limits() == (None, None, None)  # no such files, as on macOS
    machine.is_in("0::/\n", V2.format(root="/", top=machine.top))
    machine.group("", memory__max="max", cpu__max="max 100000")
    assert machine.limits() == (None, None, None)


def test_a_path_with_blanks(machine: Machine) -> None:
    machine.top = machine.top.with_name("a b")
    machine.is_in("0::/\n", V2.format(root="/", top=str(machine.top).replace(" ", r"\040")))
    machine.group("", cpu__max="25000 100000")
    assert cgroup.cpus(machine.proc) == 0.25


@pytest.mark.parametrize(("quota", "most"), [(None, 9), (0.5, 1), (1.0, 1), (1.5, 2), (64.0, 9)])
def test_threads_go_by_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, most: int
) -> None:
    monkeypatch.setattr(cgroup, "cpus", lambda: quota)
    monkeypatch.setattr(probe.os, "sched_getaffinity", lambda _: set(range(9)), raising=False)
    assert probe.cores() == most


@pytest.mark.parametrize(
    ("siblings", "fast", "allowed", "most"),
    [
        (["0,4", "1,5", "2,6", "3,7"] * 2, "", range(8), 4),
        (["0,4", "1,5", "2,6", "3,7"] * 2, "", (1, 5), 1),
        (["0-1", "0-1", "2", "3"], "0-1", range(4), 1),  # one fast core of two threads
        (["0-1", "0-1", "2", "3"], "0-1", (2, 3), 2),
        ([], "", range(3), 3),  # the kernel does not say
    ],
)
def test_threads_are_one_per_physical_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: list[str], fast: str,
    allowed: Iterable[int], most: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(cgroup, "cpus", lambda: None)
    monkeypatch.setattr(probe.os, "sched_getaffinity", lambda _: set(allowed), raising=False)
    monkeypatch.setattr(probe.platform, "system", lambda: "Linux")
    files = {f"system/cpu/cpu{i}/topology/thread_siblings_list": s for i, s in enumerate(siblings)}
    write(tmp_path, files | ({"cpu_core/cpus": fast} if fast else {}))
    assert probe.compute_cores(tmp_path) == most
    monkeypatch.setattr(cgroup, "cpus", lambda: 0.5)
    assert probe.compute_cores(tmp_path) == 1


def test_memory_goes_by_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory", lambda: 12345)
    monkeypatch.setattr(cgroup, "memory_left", lambda: 1234)
    assert probe.memory() == 12345 and memory.available_memory() == 1234
