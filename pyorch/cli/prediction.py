"""What a token of a model reads, the speed-up that follows, and the share of each of several
machines: for `explain` and `models`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pyorch.attention import cost
from pyorch.attention.placement import Cache, split_layers
from pyorch.attention.spec import AttentionSpec
from pyorch.cli.options import RpcOptions
from pyorch.models.geometry import Geometry, layer_weights
from pyorch.models.gguf_file import GGUFFile
from pyorch.models.memory import available_memory
from pyorch.text import human_bytes

KINDS = {
    "full": "read every position",
    "latent": "have latent attention and stay dense",
    "window": "have a window",
    "recurrent": "are recurrent",
    "other": "are feed-forward only",  # or only predict further tokens
}


@dataclass(frozen=True)
class Prediction(Cache):
    """A context, and the token after it. Sizes are in bytes. Speed-ups and times are limits: they
    hold for a program that does nothing but read."""

    spec: AttentionSpec
    exact: frozenset[int] = frozenset()  # layers on a GPU where they are dense

    @cached_property
    def layers(self) -> Sequence[cost.LayerCost]:
        costs = cost.layer_costs(self.geo, self.spec, self.n_ctx, *self.element_bytes)
        return [c.made_dense("dense on this GPU") if c.il in self.exact else c for c in costs]

    @property
    def read(self) -> int:
        """What a token reads of K, V and the transposed K."""
        return sum(c.bytes_read for c in self.layers)

    @property
    def dense(self) -> int:
        """What a token of dense attention reads of K and V."""
        return sum(c.bytes_dense for c in self.layers)

    @property
    def counted(self) -> tuple[int, int]:
        """`read` and `dense`, of the layers that /stats counts alone."""
        ours = [c for c in self.layers if c.ours]
        return sum(c.bytes_read for c in ours), sum(c.bytes_dense for c in ours)

    @property
    def weights(self) -> int:
        """What a token reads of the weights."""
        return self.geo.weight_bytes_per_token

    @property
    def share(self) -> float:
        """The share of K and V in what a dense token reads."""
        return self.dense / (self.weights + self.dense)

    @property
    def speedup(self) -> float:
        """The speed-up of a whole token."""
        return (self.weights + self.dense) / (self.weights + self.read)

    @property
    def memory(self) -> int:
        """The memory of weights, K, V and the transposed K."""
        return self.geo.weight_bytes + self.kv_bytes() + self.shadow_bytes()

    def times(self, rate: float) -> dict[str, float]:
        """The seconds of a token where `rate` bytes per second are read."""
        dense, read = self.weights + self.dense, self.weights + self.read
        return {"token_s_dense": dense / rate, "token_s": read / rate}

    def uses_mean_v(self, c: cost.LayerCost) -> bool:
        return cost.uses_mean_v(self.spec) and not c.split.dense

    def json(self) -> dict[str, object]:
        return {
            "model": self.geo.name,
            "architecture": self.geo.arch,
            "spec": str(self.spec),
            "positions": self.n_ctx,
            "top_p": self.spec.top_p,
            "cap": self.spec.cap,
            "layers": [self._layer(c) for c in self.layers],
            "layer_kinds": layer_kinds(self.geo),
            "attention_bytes_per_token_dense": self.dense,
            "attention_bytes_per_token": self.read,
            "counted_bytes_per_token_dense": self.counted[1],
            "counted_bytes_per_token": self.counted[0],
            "weight_bytes_per_token": self.weights,
            "attention_share_dense": self.share,
            "cache_types": [t.name for t in self.types],
            "kv_memory": self.kv_bytes(),
            "shadow_memory": self.shadow_bytes(),
            "speedup_attention": self.dense / self.read,
            "speedup_token": self.speedup,
        }

    def _layer(self, c: cost.LayerCost) -> dict[str, object]:
        row = asdict(c)
        row |= row.pop("split") | {"counted": row.pop("ours")}
        return {**row, "mean_v": self.uses_mean_v(c)}


def layer_kinds(geo: Geometry) -> dict[str, int]:
    """The number of layers of each kind, by the names of `KINDS`."""
    window = sum(geo.windows.of(il) > 0 for il in geo.kv_layers)
    rest = len(geo.kv_layers) - window
    full, latent = (0, rest) if geo.is_mla else (rest, 0)
    other = geo.n_layer - len(geo.kv_layers) - geo.n_recurrent
    counts = (full, latent, window, geo.n_recurrent, other)
    return dict(zip(KINDS, counts, strict=True))


def kinds_text(geo: Geometry) -> str:
    """What kinds of layers there are, for people."""
    counts = {kind: n for kind, n in layer_kinds(geo).items() if n}
    if len(counts) == 1:
        return f"all {KINDS[next(iter(counts))]}"
    return ", ".join(f"{n} {KINDS[kind]}" for kind, n in counts.items())


# ---- several machines ----


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


def machine_shares(
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
        own = set(part) & set(p.geo.own_layers)
        costs = (c.bytes_read if sparse else c.bytes_dense for c in p.layers if c.il in part)
        result.append(
            Share(
                name,
                part,
                sparse,
                free,
                weights=sum(held[il] for il in part),
                cache=p.kv_bytes(own),
                shadow=p.shadow_bytes(own) if sparse else 0,
                read=sum(used[il] for il in part) + sum(costs),
            )
        )
    return result


def show_shares(shares: Sequence[Share]) -> None:
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
