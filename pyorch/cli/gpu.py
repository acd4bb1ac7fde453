"""What the GPUs of this machine hold of a model, and what a token takes with K and V there or in
memory: for `explain`, and for the line that says of how many layers they stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, TypeVar

from pyorch.attention.placement import MARGIN, Cache, Rates
from pyorch.cli.terminal import note
from pyorch.errors import SparqError
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.engine import Session
    from pyorch.engine.gpus import Gpu

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """The GPUs of this machine. free: bytes of all, beside what computing takes; rates: those of
    the slowest."""

    names: Sequence[str]
    free: int
    rates: Rates


@dataclass(frozen=True)
class Place:
    """Where K and V lie: of the layers `in_memory` there, of the others on the GPU. needed: its
    bytes that weights, K, V and the transposed K take; token_s: the least seconds of a token."""

    name: str
    in_memory: Sequence[int]
    needed: int
    fits: bool
    token_s: float


def facts(bandwidth: float) -> Facts | None:
    """The GPUs, measured now; None if there are none, or the library is not built.

    Args:
        bandwidth: bytes per second that the CPU's threads read from memory.

    Raises:
        SparqError: a GPU is full.
    """
    from pyorch import engine
    from pyorch.engine import gpus

    if not (found := _gpus()):
        return None
    library = engine.library()
    own, link = (min(each) for each in zip(*(gpus.measure(library, g) for g in found), strict=True))
    return Facts([g.name for g in found], _free_of(found), Rates(bandwidth, own, link))


def free() -> int | None:
    """The bytes that are free on the GPUs, as `Facts.free`; None if there are none."""
    return _free_of(found) if (found := _gpus()) else None


def rates(n_threads: int) -> Rates | None:
    """What is read how fast, measured now. None where it cannot be: there is no compiler, the cache
    cannot be written, or memory or a GPU is full."""
    from pyorch.bench import bandwidth

    try:
        there = facts(bandwidth.measured(n_threads))
    except (SparqError, OSError):
        return None
    return there.rates if there else None


def apart(function: Callable[..., T], *of: object) -> T:
    """The result of a function above, by a process of its own: what CUDA takes of a GPU for one
    would be missing to llama-server."""
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        return child.submit(function, *of).result()


def _gpus() -> Sequence[Gpu]:
    from pyorch import engine, native
    from pyorch.engine import gpus

    return gpus.gpus(engine.library()) if native.find() else ()


def _free_of(found: Sequence[Gpu]) -> int:
    return sum(g.free - MARGIN for g in found)


def places(there: Facts, cache: Cache, weights: int, kv_offload: bool | None) -> list[Place]:
    """The places of K and V that an option leaves open, after `cache.n_ctx` positions: all on the
    GPU, all in memory, and as many as fit where only some do.

    Args:
        weights: the bytes of all weights, which lie on the GPU.
    """
    sizes = cache.layer_bytes()
    fitting = cache.in_memory(there.free - weights, range(cache.geo.n_layer))
    wanted: list[tuple[str, Sequence[int]]] = []
    if kv_offload is not False:
        wanted.append(("there", ()))
    if kv_offload is None and 0 < len(fitting) < len(sizes):
        wanted.append(("as many as fit", fitting))
    if kv_offload is not True:
        wanted.append(("in memory", tuple(sizes)))
    return [
        Place(
            name,
            layers,
            needed := weights + sum(n for il, n in sizes.items() if il not in layers),
            needed <= there.free and set(fitting) <= set(layers),
            cache.token_s(cache.n_ctx, there.rates, layers),
        )
        for name, layers in wanted
    ]


def show(there: Facts, found: Sequence[Place]) -> None:
    """Print them."""
    r = there.rates
    print(f"\n  weights on {', '.join(there.names)}, and K and V")
    for x in found:
        n = f"{human_bytes(x.needed)}, {_rate(x.token_s)}" if x.fits else human_bytes(x.needed)
        print(f"  {x.name:<26}  {n}{'' if x.fits else ': does not fit'}")
    print(
        f"  ({human_bytes(there.free)} free beside {human_bytes(MARGIN)} for computing; it reads "
        f"{r.gpu / 1e9:.0f} GB/s, and\n  {r.link / 1e9:.1f} GB/s reach it from memory, measured "
        "now; limits, by the same roofline)"
    )


def _rate(token_s: float) -> str:
    return f"at most {1 / token_s:.1f} tokens/s"


def in_memory_text(cache: Cache, in_memory: Sequence[int], known: Rates | None) -> str:
    """The line that says of how many layers K and V stay in memory, and how fast tokens then are,
    where that is known."""
    n, of = len(in_memory), len(cache.layer_bytes())
    text = f"note: K and V of {n} of {of} layers do not fit on the GPU and stay in memory"
    if known:
        token_s = cache.token_s(cache.n_ctx, known, in_memory)
        text += f": {_rate(token_s)} after {cache.n_ctx} positions"
    if cache.spec is None or cache.spec.method == "off":
        return f"{text}; llama.cpp copies them there for each token, -a dense and --ratio do not"
    return text + "; --kv-offload keeps them on the GPU anyway"


def note_in_memory() -> Callable[[Session], None]:
    """A function that tells of a session in which K and V of layers stay in memory, once of each
    kind."""
    said: set[object] = set()

    def tell(session: Session) -> None:
        kind = session.cache.n_ctx, session.kv_in_memory
        if kind in said:
            return
        said.add(kind)
        known = rates(session.n_threads)
        note(in_memory_text(session.cache, session.kv_in_memory, known), "yellow")

    return tell
