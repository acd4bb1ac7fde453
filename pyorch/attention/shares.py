"""Predicts what each of several machines holds and reads, and what passes between them.

llama.cpp splits a model by layers: the first ones here if not all are to be elsewhere, then so many
on each worker as its share says, the output on the last. A token goes through them one after the
other, so their times add up.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyorch.attention import bytes as cost
from pyorch.attention.spec import AttentionSpec
from pyorch.ggml import TensorType
from pyorch.models.geometry import Geometry

# Bytes that a token's requests take besides activations and masks, measured; and where the
# transposed K is, those that say what to seal: some, and one number of 8 bytes for each group.
_REQUESTS, _SEALING, _PER_GROUP = 1920, 1260, 8


@dataclass(frozen=True)
class Share:
    """One machine's part of a model.

    layers: their numbers, `n_layer` being the output; weights, cache, shadow: bytes of memory;
    weights_read: those of the weights that a token reads; read, dense: bytes of K, V and shadow
    that a token reads, and those of dense attention; sent, received: bytes of a token to this
    machine, and from it.
    """

    layers: range
    weights: int
    weights_read: int
    cache: int
    shadow: int
    read: int
    dense: int
    sent: int
    received: int

    @property
    def memory(self) -> int:
        return self.weights + self.cache + self.shadow


def split_layers(
    n_layer: int, parts: Sequence[float], n_gpu_layers: int | None = None
) -> list[range]:
    """The layers that are here, and those of each worker (llama.cpp's `load_tensors`).

    Args:
        parts: how the workers share, in any unit.
        n_gpu_layers: layers that are elsewhere, with the output as one; None: all.
    """
    n_away = n_layer + 1 if n_gpu_layers is None else min(n_gpu_layers, n_layer + 1)
    first = n_layer + 1 - n_away
    ends = [sum(parts[: i + 1]) / sum(parts) for i in range(len(parts))]
    owner = [bisect.bisect_right(ends, i / n_away) for i in range(n_away)]
    res = [range(first)]
    for i in range(len(parts)):
        n = owner.count(i)
        start = res[-1].stop
        res.append(range(start, start + n))
    return res


def shares(
    geo: Geometry,
    spec: AttentionSpec,
    n_pos: int,
    types: tuple[TensorType, TensorType],
    weights: Sequence[int],
    weights_read: Sequence[int],
    n_vocab: int,
    layers: Sequence[range],
) -> list[Share]:
    """What each machine holds and reads at `n_pos` positions, the first being this one.

    Args:
        weights, weights_read: the bytes of each layer and of the output, and those of them that a
            token reads (`layer_weights`).
        layers: of `split_layers`.
    """
    costs = cost.layer_costs(geo, spec, n_pos, *(t.bytes_per_element for t in types))
    n_cells = -(-n_pos // cost.CELLS) * cost.CELLS
    res = []
    for i, part in enumerate(layers):
        own = replace(
            geo, n_head_kv=tuple(n if il in part else 0 for il, n in enumerate(geo.n_head_kv))
        )
        here = [c for c in costs if c.il in part]
        sent = received = 0
        if i and part:
            masks = len({bool(geo.windows.of(c.il)) for c in here})  # of f16, one for each kind
            sent = 4 * geo.n_embd + 2 * masks * n_cells + _REQUESTS
            if spec.method == "sparq" and any(c.ours for c in here):
                sent += _SEALING + n_cells // cost.GROUP * _PER_GROUP
            received = 4 * (n_vocab if geo.n_layer in part else geo.n_embd)
        res.append(
            Share(
                layers=part,
                weights=sum(weights[il] for il in part),
                weights_read=sum(weights_read[il] for il in part),
                cache=cost.cache_bytes(own, n_pos, *types, cost.N_BATCH),
                shadow=cost.shadow_bytes(own, n_pos, spec),
                read=sum(c.bytes_read for c in here),
                dense=sum(c.bytes_dense for c in here),
                sent=sent,
                received=received,
            )
        )
    return res


def wire_s(found: Sequence[Share], round_trips: Sequence[float], rates: Sequence[float]) -> float:
    """The seconds that a token is under way: one round trip to each worker, and its bytes.

    Args:
        found: those of the workers; round_trips: seconds; rates: bytes per second.
    """
    every = zip(found, round_trips, rates, strict=True)
    return math.fsum(trip + (x.sent + x.received) / rate for x, trip, rate in every if x.layers)
