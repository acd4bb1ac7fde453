"""Where K and V of a model on a GPU lie, and the time of a token that follows.

llama.cpp puts K and V of a layer where its weights are. What does not fit there may stay in memory,
where our attention reads it on the CPU: of as many layers as it must, since a layer in memory costs
a token many times what it costs on the GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pyorch.attention import bytes as cost
from pyorch.attention.spec import AttentionSpec
from pyorch.ggml import TensorType
from pyorch.models.geometry import Geometry

MARGIN = 1 << 30  # bytes of a GPU that computing takes, as llama.cpp's own --fit leaves free
_OFF = AttentionSpec()


@dataclass(frozen=True)
class Rates:
    """Bytes per second: those that the CPU's threads read from memory, that a GPU reads from its
    own, and that reach it from memory."""

    memory: float
    gpu: float
    link: float


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
        found = {}
        for il in (il for il in self.geo.kv_layers if il < self.geo.n_own_cache):
            alone = tuple(n if i == il else 0 for i, n in enumerate(self.geo.n_head_kv))
            geo, cut = replace(self.geo, n_head_kv=alone), None if self.swa_full else self.n_batch
            n = cost.cache_bytes(geo, self.n_ctx, *self.types, cut)
            n += cost.shadow_bytes(geo, self.n_ctx, spec)
            found[il] = n * self.n_sequences
        return found

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
        read = {c.il: c.bytes_read for c in self._costs(self.n_ctx)}
        kept: list[int] = []
        order = sorted(sizes, key=lambda il: (-read[il] / sizes[il], sizes[il], il))
        for size, group in groupby(order, lambda il: sizes[il]):
            same = list(group)
            n = min(len(same), max(free, 0) // size)
            kept += [same[i * len(same) // n] for i in range(n)]
            free -= n * size
        return tuple(il for il in sizes if il not in kept)

    def token_s(self, n_pos: int, rates: Rates, in_memory: Collection[int]) -> float:
        """The least seconds that a token takes after `n_pos` positions, all weights on a GPU: the
        bytes that it reads, each where it lies. Without our attention K and V in memory go to the
        GPU for each token."""
        total = self.geo.weight_bytes_per_token / rates.gpu
        spec = self.spec or _OFF
        for c in self._costs(n_pos):
            ours = c.ours and spec.method != "off"
            if c.il in in_memory:
                total += c.bytes_read / rates.memory if ours else c.bytes_dense / rates.link
            else:
                is_short = c.bytes_dense < 1e6 * spec.gpu_min_mb
                total += (c.bytes_dense if is_short else c.bytes_read) / rates.gpu
        return total

    def _costs(self, n_pos: int) -> Sequence[cost.LayerCost]:
        sizes = (t.bytes_per_element for t in self.types)
        return cost.layer_costs(self.geo, self.spec or _OFF, n_pos, *sizes)


def layers_on_gpu(n_layer: int, n_gpu_layers: int | None) -> range:
    """The layers that llama.cpp puts on GPUs: the last ones, the output counting as one more."""
    n = n_layer + 1 if n_gpu_layers is None else min(n_gpu_layers, n_layer + 1)
    return range(n_layer + 1 - n, n_layer)
