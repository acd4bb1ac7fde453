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
from pyorch.attention.cost import CELLS, GROUP, GROUPS_PER_SUM, SHADOW_BYTES
from pyorch.attention.spec import AttentionSpec
from pyorch.ggml import TensorType
from pyorch.models.geometry import Geometry

CACHE_LINE = 64  # bytes
MAIN_MEMORY = 1 << 62  # bytes that are free on a GPU without memory of its own: counted elsewhere
MARGIN = 1 << 30  # bytes of a GPU that computing takes, as llama.cpp's own --fit leaves free


@dataclass(frozen=True)
class Rates:
    """Of a GPU without our kernels, where attention is dense, and of this machine's memory beside
    it: bytes that each reads per second, and the seconds by which a token waits for a layer whose K
    and V lie in memory."""

    gpu: float
    memory: float
    wait: float

    def gain(self, layer: cost.LayerCost) -> bool:
        """Whether a token takes less time with K and V of a layer in memory."""
        in_memory = layer.bytes_read / self.memory + self.wait
        return in_memory < layer.bytes_dense / self.gpu


@dataclass(frozen=True)
class Cache:
    """K and V of a context, and what sparse attention keeps beside them.

    spec None is llama.cpp's own attention; n_batch are the tokens that a prompt is read in at once:
    layers with a window keep the window and one batch, or all with swa_full.
    """

    geo: Geometry
    spec: AttentionSpec | None
    types: tuple[TensorType, TensorType]
    n_ctx: int
    n_batch: int = cost.N_BATCH
    n_sequences: int = 1
    swa_full: bool = False

    @property
    def element_bytes(self) -> list[float]:
        """Of K and of V."""
        return [t.bytes_per_element for t in self.types]

    def kv_bytes(self, layers: Collection[int] | None = None) -> int:
        """The memory of K and V, in these layers or in all that have a cache of their own."""
        total = 0.0
        for il in self.geo.own_layers if layers is None else layers:
            window, n = self.geo.windows.of(il), self.n_ctx
            if window and not self.swa_full:
                n = -(-min(n, window + self.n_batch) // CELLS) * CELLS
            row = cost.row_bytes(self.geo, il, *self.element_bytes)
            total += n * row * self.geo.n_head_kv[il]
        return int(total) * self.n_sequences

    def shadow_bytes(self, layers: Collection[int] | None = None) -> int:
        """The memory of the transposed K, and of the sums of V if they are used, as `kv_bytes`.

        With d = 128 the transposed K takes 50 % (f16), 26 % (q8) or 13 % (q4) of the bytes of f16 K
        and V, and the sums of V take 0.9 % more. A row is a cache line longer than its groups; each
        row of scales is an odd number of cache lines.
        """
        geo, spec, n_ctx = self.geo, self.spec, self.n_ctx
        if spec is None or spec.method != "sparq" or geo.why_dense:
            return 0
        n_group = n_ctx // GROUP
        n_line = 1 + (0 if spec.shadow == "f16" else -(-n_group // 16) | 1)
        row = n_group * GROUP * SHADOW_BYTES[spec.shadow] + CACHE_LINE * n_line
        # in every layer, where one of them needs the sums
        n_sum = -(-n_ctx // (GROUP * GROUPS_PER_SUM)) * (GROUPS_PER_SUM + 1)
        v_sum = geo.head_dim_v * n_sum * 4 if cost.uses_mean_v(spec) else 0
        own = geo.own_layers if layers is None else layers
        heads = sum(geo.n_head_kv[il] for il in own if not geo.windows.of(il))
        return int(heads * (geo.head_dim_k * row + v_sum)) * self.n_sequences

    def layer_bytes(self) -> dict[int, int]:
        """The bytes of each layer that has K and V of its own, the transposed K included: that of
        SparQ's default while attention reads everything, since it may be switched on later."""
        spec = self.spec if self.spec and self.spec.sparse else AttentionSpec("sparq")
        later = replace(self, spec=spec)
        own = self.geo.own_layers
        return {il: later.kv_bytes([il]) + later.shadow_bytes([il]) for il in own}

    def in_memory(
        self, free: int, layers: Collection[int], rates: Rates | None = None
    ) -> tuple[int, ...]:
        """Those of the layers on a GPU whose K and V stay in memory: those that gain by it, and
        those that must; () if all fit.

        Layers that save a token the most bytes for their size go to the GPU first, and of equal
        ones some from everywhere, so that several GPUs take about as many.

        Args:
            free: bytes of the GPUs, beside the weights and `MARGIN` for each.
            rates: those of GPUs without our kernels, if attention is sparse.
        """
        here = {il: n for il, n in self.layer_bytes().items() if il in layers}
        spec = self.spec or AttentionSpec()
        listed = cost.layer_costs(self.geo, spec, self.n_ctx, *self.element_bytes)
        costs = {c.il: c for c in listed}
        gaining = [il for il in here if rates and rates.gain(costs[il])]
        sizes = {il: n for il, n in here.items() if il not in gaining}
        free -= 2 * self.n_batch * self.n_ctx  # the mask
        if not sizes or sum(sizes.values()) <= free:
            return tuple(gaining)
        # llama.cpp reads a prompt on the GPU, which gets K and V of a layer at a time for it
        free -= max(sizes.values())
        kept: list[int] = []
        order = sorted(sizes, key=lambda il: (-costs[il].bytes_read / sizes[il], sizes[il], il))
        for size, group in groupby(order, lambda il: sizes[il]):
            same = list(group)
            n = min(len(same), max(free, 0) // size)
            kept += [same[i * len(same) // n] for i in range(n)]
            free -= n * size
        return tuple(il for il in here if il not in kept)


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
