"""What the GPUs of this machine hold of a model: for `explain`, and for the line that says of how
many layers K and V stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import TYPE_CHECKING, TypeVar

from pyorch.attention.placement import MAIN_MEMORY, MARGIN, Cache, Rates
from pyorch.children import HINT
from pyorch.cli.terminal import note
from pyorch.errors import SparqError
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.attention.spec import AttentionSpec
    from pyorch.engine import Session
    from pyorch.native.devices import Device

T = TypeVar("T")
DENSE_THERE = "dense on this GPU, where our kernels do not run, or were not timed (gpu_min_mb=0)"


@dataclass(frozen=True)
class Room:
    """What GPUs hold of a model. free: bytes of all, beside what computing takes; in_memory: the
    layers whose K and V are not there; exact: those there that are dense, see `runs_sparse`;
    needed: bytes that weights, and K, V and the transposed K of the others take; fits: whether
    there is room for these, and to read prompts."""

    names: Sequence[str]
    free: int
    in_memory: Sequence[int]
    exact: Sequence[int]
    needed: int
    fits: bool


def asked(spec: AttentionSpec | None, n_threads: int) -> tuple[Sequence[Device], Rates | None]:
    """The GPUs, none if the library is not built; and their rates if our kernels do not run there.

    Raises:
        SparqError: the rates cannot be measured.
    """
    from pyorch import native
    from pyorch.engine.library import gpus, library

    return gpus(library(), spec, n_threads) if native.find() else ([], None)


def apart(function: Callable[[], T]) -> T:
    """The result of a function, by a process of its own: what CUDA takes of a GPU for one would be
    missing to llama-server.

    Raises:
        SparqError: the process dies.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        try:
            return child.submit(function).result()
        except BrokenProcessPool:
            raise SparqError("the process that asks the GPU what is free has died", HINT) from None


def room(
    gpus: Sequence[Device], rates: Rates | None, cache: Cache, weights: int, kv_offload: bool | None
) -> Room:
    """What they hold of a model whose `weights` bytes are all there."""
    from pyorch.engine.library import free_on

    total, sizes = free_on(gpus), cache.layer_bytes()
    least = cache.in_memory(total - weights, sizes)
    chosen = cache.in_memory(total - weights, sizes, rates)
    in_memory = chosen if kv_offload is None else () if kv_offload else tuple(sizes)
    needed = weights + sum(n for il, n in sizes.items() if il not in in_memory)
    fits = needed <= total and (kv_offload is None or set(least) <= set(in_memory))
    exact = () if all(g.kernels for g in gpus) else tuple(il for il in sizes if il not in in_memory)
    return Room([g.name for g in gpus], total, in_memory, exact, needed, fits)


def show(x: Room, n_layer: int) -> None:
    """Print it. n_layer: those that have K and V."""
    print(f"\n  on {', '.join(x.names)}")
    what = f"weights, K and V of {n_layer - len(x.in_memory)} of {n_layer} layers"
    free = f"{human_bytes(x.free)} free beside {human_bytes(MARGIN)} for computing"
    of = f" of {free}{'' if x.fits else ': does not fit'}" if x.free < MAIN_MEMORY else ""
    print(f"  {what}: {human_bytes(x.needed)}{of}")
    if x.exact:
        print(f"  {DENSE_THERE}; sparse where K and V lie in memory")


def in_memory_text(cache: Cache, in_memory: Sequence[int], rates: Rates | None) -> str:
    """The line that says of how many layers K and V stay in memory, and why."""
    n, of = len(in_memory), len(cache.layer_bytes())
    if rates:
        text = f"note: {DENSE_THERE}: K and V of {n} of {of} layers lie in memory, sparse"
        return f"{text}; the rest stays on the GPU, which takes less time (-kvo, -nkvo)"
    text = f"note: K and V of {n} of {of} layers do not fit on the GPU and stay in memory"
    if cache.spec is None or cache.spec.method == "off":
        return f"{text}; llama.cpp copies them there for each token, -a dense and --ratio do not"
    return text + "; --kv-offload keeps them on the GPU anyway"


def note_in_memory(session: Session) -> None:
    """Tell of a session in which K and V of layers stay in memory, once of each kind."""
    text = in_memory_text(session.settings, session.kv_in_memory, session.rates)
    _note_once(text, "yellow")


_note_once = cache(note)
