"""Where layers lie: on which machine, and on a GPU or with K and V in memory.

llama.cpp puts K and V of a layer where its weights are. What does not fit on a GPU may stay in
memory, where our attention reads it on the CPU: of as many layers as it must, since a layer in
memory costs a token many times what it costs on the GPU.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pyorch.attention import cost
from pyorch.attention.spec import AttentionSpec
from pyorch.ggml import TensorType
from pyorch.models.geometry import Geometry

MARGIN = 1 << 30  # bytes of a GPU that computing takes, as llama.cpp's own --fit leaves free


@dataclass(frozen=True)
class Cache:
    """K and V of a context, and what sparse attention keeps beside them.

    spec None is llama.cpp's own attention; n_batch are the tokens that a prompt is read in at once;
    swa_full as in `SessionOptions`.
    """

    geo: Geometry
    spec: AttentionSpec | None
    types: tuple[TensorType, TensorType]
    n_ctx: int
    n_batch: int = cost.N_BATCH
    n_sequences: int = 1
    swa_full: bool = False

    def layer_bytes(self) -> dict[int, int]:
        """The bytes of each layer that has K and V of its own, the transposed K included: that of
        SparQ's default while attention reads everything, since it may be switched on later."""
        spec = self.spec if self.spec and self.spec.sparse else AttentionSpec("sparq")
        of_layer = {}
        for il in (il for il in self.geo.kv_layers if il < self.geo.n_own_cache):
            alone = tuple(n if i == il else 0 for i, n in enumerate(self.geo.n_head_kv))
            geo, cut = replace(self.geo, n_head_kv=alone), None if self.swa_full else self.n_batch
            n = cost.cache_bytes(geo, self.n_ctx, *self.types, cut)
            n += cost.shadow_bytes(geo, self.n_ctx, spec)
            of_layer[il] = n * self.n_sequences
        return of_layer

    def in_memory(self, free: int, layers: Collection[int]) -> tuple[int, ...]:
        """Those of the layers on a GPU whose K and V must stay in memory; () if all fit.

        Layers that save a token the most bytes for their size go to the GPU first, and of equal
        ones some from everywhere, so that several GPUs take about as many.

        Args:
            free: bytes of the GPUs, beside the weights and `MARGIN` for each.
        """
        sizes = {il: n for il, n in self.layer_bytes().items() if il in layers}
        free -= 2 * self.n_batch * self.n_ctx  # the mask
        if not sizes or sum(sizes.values()) <= free:
            return ()
        # llama.cpp reads a prompt on the GPU, which gets K and V of a layer at a time for it
        free -= max(sizes.values())
        bytes_each = (t.bytes_per_element for t in self.types)
        costs = cost.layer_costs(self.geo, self.spec or AttentionSpec(), self.n_ctx, *bytes_each)
        read = {c.il: c.bytes_read for c in costs}
        kept: list[int] = []
        order = sorted(sizes, key=lambda il: (-read[il] / sizes[il], sizes[il], il))
        for size, group in groupby(order, lambda il: sizes[il]):
            same = list(group)
            n = min(len(same), max(free, 0) // size)
            kept += [same[i * len(same) // n] for i in range(n)]
            free -= n * size
        return tuple(il for il in sizes if il not in kept)


def layers_on_gpu(n_layer: int, n_gpu_layers: int | None) -> range:
    """The layers that llama.cpp puts on GPUs: the last ones, the output counting as one more."""
    n = n_layer + 1 if n_gpu_layers is None else min(n_gpu_layers, n_layer + 1)
    return range(n_layer + 1 - n, n_layer)


def split_layers(
    n_layer: int, parts: Sequence[float], n_gpu_layers: int | None = None
) -> list[range]:
    """The layers that are here, and those of each worker (llama.cpp's `load_tensors`): the first
    ones here if not all are to be elsewhere, then as each worker's part says, the output last.

    Args:
        parts: how the workers share, in any unit.
        n_gpu_layers: layers that are elsewhere, with the output as one; None: all.
    """
    n_away = n_layer + 1 if n_gpu_layers is None else min(n_gpu_layers, n_layer + 1)
    shares = [sum(parts[: i + 1]) / sum(parts) for i in range(len(parts))]
    owner = [bisect.bisect_right(shares, i / n_away) for i in range(n_away)]
    ends = [n_layer + 1 - n_away]
    for i in range(len(parts)):
        ends.append(ends[-1] + owner.count(i))
    return [range(ends[0]), *map(range, ends, ends[1:])]
