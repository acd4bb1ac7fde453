"""Whether a model fits into the memory of this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pyorch import system
from pyorch.errors import SparqError
from pyorch.models.gguf_file import GGUFFile
from pyorch.native import cgroup
from pyorch.native.probe import numbers
from pyorch.text import human_bytes

PROC = Path("/proc/self")
NODES = Path("/sys/devices/system/node")


def available_memory() -> int:
    """The bytes that can be used without swapping: `SPARQ_MEMORY_LIMIT`, or the least that the
    system, the container and the NUMA nodes of this process allow."""
    if own := os.environ.get("SPARQ_MEMORY_LIMIT"):
        if not own.isdecimal():
            raise SparqError(f"SPARQ_MEMORY_LIMIT is {own!r}", "it is a number of bytes", 2)
        return int(own)
    bound = of_nodes("MemFree", "Active(file)", "Inactive(file)")
    limits = [_meminfo_available(), cgroup.memory_left(), bound]
    known = [n for n in limits if n is not None]
    return min(known) if known else 2**63


def _meminfo_available() -> int | None:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(s.split()[1]) for s in lines if s.startswith("MemAvailable:")) * 1024
    with suppress(OSError, ValueError):
        return system.memory()[1]
    return None


def of_nodes(*kinds: str, proc: Path = PROC, nodes: Path = NODES) -> int | None:
    """The bytes of these kinds of memory, by their names in meminfo, on the NUMA nodes that this
    process may use; None if it may use all.

    The nodes of `numactl --membind` are in numa_maps, those of a container in status.
    """
    try:
        every = numbers((nodes / "has_memory").read_text())
        status = (line.split() for line in (proc / "status").read_text().splitlines())
        allowed = every & numbers(next(x[1] for x in status if x[0] == "Mems_allowed_list:"))
        with (proc / "numa_maps").open() as f:  # each line has the policy; there may be many
            policy, _, where = f.readline().split()[1].partition(":")
        if policy.startswith("bind"):
            allowed &= numbers(where)
        if allowed == every:
            return None
        lines = [s for n in allowed for s in (nodes / f"node{n}/meminfo").read_text().splitlines()]
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    entries = (line.split()[2:4] for line in lines)  # Node 0 MemFree: 123 kB
    return sum(int(n) * 1024 for kind, n in entries if kind.rstrip(":") in kinds)


_PROGRAM = 512 << 20  # of address space: libraries, stacks, other buffers; 430 MiB were measured
_SMALLER = "lower --ctx, use shadow=q4, or -a topk, which has no transposed K"


def check_more(path: Path, what: str, n_bytes: int) -> None:
    """Refuse so many more bytes for a part of a model that is loaded, such as its transposed K.

    Raises:
        SparqError: they exceed the available memory.
    """
    if n_bytes > 0 and n_bytes > (free := available_memory()):
        raise SparqError(
            f"{path}: its {what} needs {human_bytes(n_bytes)}, but only "
            f"{human_bytes(free)} of memory is available",
            _SMALLER,
        )


def weight_bytes(file: GGUFFile) -> int:
    """The bytes of the weights of all parts of a model."""
    return sum(t.n_bytes for t in file.tensors)


def check_memory(
    file: GGUFFile, kv_bytes: int, shadow_bytes: int = 0, share: float = 1.0, n_batch: int = 0
) -> int:
    """Refuse a cache, with the shadow, that exceeds the available memory.

    Weights need not fit: they are mapped, and the system reads again what it has dropped. Only a
    limit of the address space counts them, and the logits of a batch, which llama.cpp allocates
    and mostly leaves untouched.

    Args:
        share: of the weights that this machine holds.

    Returns:
        the bytes that are left. They are negative where the weights do not fit as well.

    Raises:
        SparqError: the cache is too large; the message has all sizes.
    """
    weights, free = int(share * weight_bytes(file)), available_memory()
    n_vocab = next((t.shape[-1] for t in file.tensors if t.name == "token_embd.weight"), 0)
    mapped = weight_bytes(file) + kv_bytes + shadow_bytes + 4 * n_batch * n_vocab + _PROGRAM
    if (space := system.address_space()) is not None and mapped > space:
        raise SparqError(
            f"{file.path}: needs {human_bytes(mapped)} of address space, but `ulimit -v` leaves "
            f"{human_bytes(space)}",
            "raise that limit, or lower --ctx",
        )
    if kv_bytes + shadow_bytes <= free:
        return free - weights - kv_bytes - shadow_bytes
    what = f"{human_bytes(kv_bytes)} for the cache"
    if shadow_bytes:
        what += f" and {human_bytes(shadow_bytes)} for its transposed K"
    raise SparqError(
        f"{file.path}: needs {what} beside {human_bytes(weights)} of weights, but only "
        f"{human_bytes(free)} of memory is available",
        "lower --ctx, or --parallel of serve: the cache grows with it"
        if kv_bytes > free
        else _SMALLER,
    )
