"""The memory that the processes of a measurement take, and synthetic models that fit into it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pyorch.attention.placement import Cache
from pyorch.engine import cache_type
from pyorch.engine.bandwidth import BUFFER_BYTES
from pyorch.measure import records
from pyorch.measure.process import FORGET_BYTES
from pyorch.measure.turns import Side
from pyorch.models import cards, synth
from pyorch.models.geometry import Geometry, geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.models.memory import of_nodes

MAX_POSITIONS = 1 << 20  # the positions that a synthetic model claims to be trained on
FILL = 0.75  # the share of memory that a model of our choice may take
PROCESS_BYTES = 300 << 20  # per measured process, besides the model, the cache and FORGET_BYTES
# The types of weights that llama.cpp rearranges for a CPU (ggml-cpu/repack.cpp, amx/common.h).
_ON_X86 = frozenset(("q4_0", "q2_k", "q4_k", "iq4_nl", "mxfp4"))
_ON_AMX = frozenset(("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs"))
_ELSEWHERE = _ON_X86 | {"q1_0", "q8_0", "q5_k", "q6_k"}


@dataclass(frozen=True)
class Synthetic:
    """A model of random weights with `n_layer` layers, and the output head in proportion, or
    whole."""

    like: str
    n_layer: int
    quant: str
    whole_head: bool = False

    @property
    def shape(self) -> synth.Shape:
        if self.whole_head:
            return synth.shape_like(self.like, n_layer=self.n_layer, n_ctx=MAX_POSITIONS)
        return replace(synth.fewer_layers(self.like, self.n_layer), n_ctx=MAX_POSITIONS)

    @property
    def path(self) -> Path:
        whole = "gpu-" if self.whole_head else ""
        return (
            synth.folder() / f"{whole}{self.like}-{self.n_layer}-{self.quant}-v{synth.VERSION}.gguf"
        )

    @property
    def n_bytes(self) -> int:
        return synth.file_bytes(self.shape, self.quant)

    def written(self) -> Path:
        """Write the model, unless the cache has it. Returns its file."""
        if not self.path.exists():
            full = synth.shape_like(self.like).n_layer
            fewer = f", {self.n_layer} of {full} layers" if self.n_layer != full else ""
            self.path.parent.mkdir(parents=True, exist_ok=True)
            name = f"{self.like} {self.quant}{fewer}"
            synth.write(self.path, self.shape, self.quant, name=name)
        return self.path

    @property
    def geometry(self) -> Geometry:
        """What `needs` has to know about the model, which need not exist."""
        whole = cards.load(self.like).geometry
        return replace(
            whole,
            n_layer=self.n_layer,
            n_head=whole.n_head[: self.n_layer],
            n_head_kv=whole.n_head_kv[: self.n_layer],
            weight_bytes=self.n_bytes,
        )


@dataclass(frozen=True)
class Place:
    """Where the processes of a run lie."""

    n_gpu_layers: int | None = None
    kv_offload: bool = True
    repack: bool = True

    @property
    def on_gpu(self) -> bool:
        """Whether K and V go to a GPU."""
        return "gpu_gib" in records.machine() and self.n_gpu_layers != 0 and self.kv_offload

    @property
    def memory(self) -> float:
        """The bytes of the memory that K and V go to, whether or not they are free."""
        machine = records.machine()
        total = float(machine["gpu_gib" if self.on_gpu else "memory_gib"] * 2**30)
        return total if self.on_gpu else min(total, of_nodes("MemTotal") or total)

    def needs(
        self,
        sides: Iterable[Side],
        cache: tuple[int, str, str],
        geo: Geometry,
        types: Iterable[str],
        buffers: int = BUFFER_BYTES,
    ) -> int:
        """The bytes of memory, the GPU's or the machine's, that the sides take.

        Each process has its own cache, which is filled from a copy. It has its own weights too if
        llama.cpp rearranges them; otherwise all share one mapping of the file. On a GPU each
        process has its own weights, and there is no copy.

        Args:
            cache: its positions, and the types of K and V.
            types: those of the weights.
            buffers: the bytes of the MemoryReader.
        """
        n_positions, type_k, type_v = cache
        types_of, specs = (cache_type(type_k), cache_type(type_v)), {x.place: x.spec for x in sides}
        caches = [Cache(geo, spec, types_of, n_positions) for spec in specs.values()]
        each, shadows = caches[0].kv_bytes(), sum(cache.shadow_bytes() for cache in caches)
        weights = geo.weight_bytes
        if self.on_gpu:
            return int((weights + each + PROCESS_BYTES) * len(caches) + shadows)
        if self.repack and any(t.lower() in rearranged_types() for t in types):
            weights *= 1 + len(caches)
        each_process = each + FORGET_BYTES + PROCESS_BYTES
        return weights + each_process * len(caches) + shadows + each + buffers

    def fitting(
        self, like: str, quant: str, sides: Sequence[Side], cache: tuple[int, str, str]
    ) -> int:
        """The layers of the largest synthetic model that fits, a power of two or all. The size of
        the memory decides, not how much is free, so that another run has the same cases."""
        full, types = synth.shape_like(like).n_layer, [quant.removesuffix("_m")]
        for n in (full, *(2**i for i in range(10, 0, -1) if 2**i < full)):
            # what the buffers of more threads take is left to the rest of the memory
            geo = Synthetic(like, n, quant).geometry
            if self.needs(sides, cache, geo, types) < FILL * self.memory:
                return int(n)
        return 1


@cache
def rearranged_types() -> frozenset[str]:
    """The types of weights, in small letters, that llama.cpp rearranges for this machine's CPU."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return _ELSEWHERE
    info = Path("/proc/cpuinfo")
    has_amx = info.exists() and "amx_int8" in info.read_text("utf-8", "replace")
    return _ON_X86 | _ON_AMX if has_amx else _ON_X86


@cache
def geometry_of(path: Path) -> Geometry:
    return geometry(read_gguf(path))
