"""What each of several machines holds and reads, for `explain --rpc`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pyorch.attention.placement import split_layers
from pyorch.cli.options import RpcOptions
from pyorch.cli.prediction import Prediction
from pyorch.models.geometry import layer_weights
from pyorch.models.gguf_file import GGUFFile
from pyorch.models.memory import available_memory
from pyorch.text import human_bytes


@dataclass(frozen=True)
class Share:
    """One machine's part of a model.

    layers: their numbers, `n_layer` being the output; sparse: whether it runs our attention; free:
    its bytes of memory, and weights, cache, shadow: those that its part takes; read: bytes that a
    token reads there.
    """

    machine: str
    layers: range
    sparse: bool
    free: int
    weights: int
    cache: int
    shadow: int
    read: int

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "layers": [self.layers.start, self.layers.stop]}


def shares(
    rpc: RpcOptions, n_gpu_layers: int | None, file: GGUFFile, p: Prediction
) -> Sequence[Share]:
    """Ask the workers, and share the model among them as llama.cpp does, this machine first; none
    if there are no workers.

    Raises:
        SparqError: a worker is not here, or --tensor-split does not fit.
    """
    from pyorch import engine
    from pyorch.engine import machines

    workers = [machines.ask(e) for e in rpc.allowed()]
    if not workers:
        return ()
    machines.check_split(rpc.tensor_split, len(workers))
    parts = rpc.tensor_split if any(rpc.tensor_split) else [w.free for w in workers]
    every = [("here", True, available_memory())]
    every += [(w.endpoint, machines.runs_sparse(engine.library(), w), w.free) for w in workers]
    held, used = (layer_weights(file, p.geo.n_layer, x) for x in (False, True))
    result = []
    layers = split_layers(p.geo.n_layer, parts, n_gpu_layers)
    for (name, sparse, free), part in zip(every, layers, strict=True):
        heads = tuple(n if il in part else 0 for il, n in enumerate(p.geo.n_head_kv))
        own = replace(p, geo=replace(p.geo, n_head_kv=heads))
        costs = (c.bytes_read if sparse else c.bytes_dense for c in p.layers if c.il in part)
        result.append(
            Share(
                name,
                part,
                sparse,
                free,
                weights=sum(held[il] for il in part),
                cache=own.cache,
                shadow=own.shadow if sparse else 0,
                read=sum(used[il] for il in part) + sum(costs),
            )
        )
    return result


def show(shares: Sequence[Share]) -> None:
    """Print them as a table."""
    print("\n  machines, and what a token reads there")
    head = ("weights", "cache", "shadow", "free", "reads")
    print(f"  {'':<22}{'layers':>8}" + "".join(f"{x:>11}" for x in head))
    for x in shares:
        run = f"{x.layers.start}-{x.layers.stop - 1}" if x.layers else "none"
        sizes = (x.weights, x.cache, x.shadow, x.free, x.read)
        row = f"  {x.machine:<22}{run:>8}" + "".join(f"{human_bytes(n):>11}" for n in sizes)
        why = "" if x.sparse else "  exact: runs no sparse attention of this version"
        why += "  does not fit" * (x.weights + x.cache + x.shadow > x.free)
        print(row + why)
