"""What each of several machines holds and reads, for `explain --rpc`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyorch.attention import shares
from pyorch.attention.spec import AttentionSpec
from pyorch.cli.options import WorkerOptions
from pyorch.errors import SparqError
from pyorch.models.geometry import layer_weights
from pyorch.models.gguf_file import GGUFFile
from pyorch.models.memory import available_memory
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.engine.machines import Worker
    from pyorch.ggml import TensorType
    from pyorch.models.geometry import Geometry

_FOREIGN = "exact: runs no sparse attention of this version"


@dataclass(frozen=True)
class Cluster:
    """This machine and the workers, with their shares of a model.

    free: bytes of memory of each; rates: bytes per second to each worker; bandwidth: bytes per
    second that this machine reads, as the others are taken to do.
    """

    shares: Sequence[shares.Share]
    workers: Sequence[Worker]
    sparse: Sequence[bool]
    free: Sequence[int]
    rates: Sequence[float]
    bandwidth: float

    @property
    def reading_s(self) -> float:
        read = sum(
            x.weights_read + (x.read if sparse else x.dense)
            for x, sparse in zip(self.shares, self.sparse, strict=True)
        )
        return read / self.bandwidth

    @property
    def wire_s(self) -> float:
        trips = [w.round_trip_s for w in self.workers]
        return shares.wire_s(self.shares[1:], trips, self.rates)

    def json(self) -> dict[str, Any]:
        names = ["here", *(w.endpoint for w in self.workers)]
        every = zip(names, self.shares, self.sparse, self.free, strict=True)
        rows = [
            {**asdict(x), "layers": [x.layers.start, x.layers.stop], "machine": name}
            | {"sparse": sparse, "free": free}
            for name, x, sparse, free in every
        ]
        for row, worker, rate in zip(rows[1:], self.workers, self.rates, strict=True):
            row |= {"round_trip_s": worker.round_trip_s, "bytes_per_s": rate}
        return {"machines": rows, "reading_s": self.reading_s, "wire_s": self.wire_s}


def cluster(
    wanted: WorkerOptions,
    n_gpu_layers: int | None,
    file: GGUFFile,
    geo: Geometry,
    spec: AttentionSpec,
    n_pos: int,
    types: tuple[TensorType, TensorType],
    bandwidth: float,
) -> Cluster:
    """Ask the workers, and share the model among them as llama.cpp does.

    Raises:
        SparqError: a worker is not here, or --tensor-split does not fit.
    """
    from pyorch import engine
    from pyorch.engine import machines

    found = [machines.ask(e) for e in wanted.allowed()]
    parts = wanted.tensor_split or [w.free for w in found]
    if len(parts) != len(found) or not sum(parts):
        raise SparqError(
            f"--tensor-split has {len(parts)} parts for {len(found)} workers",
            "give one part for each",
            exit_code=2,
        )
    layers = shares.split_layers(geo.n_layer, parts, n_gpu_layers)
    n_vocab = next(max(t.shape) for t in file.tensors if t.name == "token_embd.weight")
    held, used = (layer_weights(file, geo.n_layer, x) for x in (False, True))
    library = engine.library()
    return Cluster(
        shares.shares(geo, spec, n_pos, types, held, used, n_vocab, layers),
        found,
        [True, *(machines.runs_sparse(library, w) for w in found)],
        [available_memory(), *(w.free for w in found)],
        [machines.measure_rate(w.endpoint) for w in found],
        bandwidth,
    )


def show(c: Cluster) -> None:
    """Print it as a table, and the time of a token."""
    print("\n  machines, and what a token reads and what passes for it")
    head = ("layers", "weights", "cache", "shadow", "reads", "sent", "back", "free")
    print(f"  {'':<22}{head[0]:>8}" + "".join(f"{x:>11}" for x in head[1:]))
    names = ["here", *(w.endpoint for w in c.workers)]
    for name, x, sparse, free in zip(names, c.shares, c.sparse, c.free, strict=True):
        run = f"{x.layers.start}-{x.layers.stop - 1}" if x.layers else "none"
        read = x.weights_read + (x.read if sparse else x.dense)
        sizes = (x.weights, x.cache, x.shadow if sparse else 0, read, x.sent, x.received, free)
        said = "" if sparse else f"  {_FOREIGN}"
        said += "  does not fit" * (x.memory > free)
        print(f"  {name:<22}{run:>8}" + "".join(f"{human_bytes(n):>11}" for n in sizes) + said)
    for w, rate in zip(c.workers, c.rates, strict=True):
        trip = 1000 * w.round_trip_s
        print(f"  to {w.endpoint}: round trip {trip:.2f} ms, {rate / 1e6:.0f} MB/s")
    print(
        f"  limit of a token            {1000 * (c.reading_s + c.wire_s):.2f} ms: "
        f"{1000 * c.reading_s:.2f} ms of reading, if all machines read as fast as this one, and "
        f"{1000 * c.wire_s:.2f} ms on the way"
    )
