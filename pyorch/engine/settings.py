"""The settings of a context, checked against the model and the memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pyorch.attention.cost import N_BATCH
from pyorch.attention.placement import Cache
from pyorch.attention.saved import resolve
from pyorch.attention.spec import AttentionSpec, check_against_model, parse_spec
from pyorch.errors import SparqError
from pyorch.ggml import CACHE_TYPES, MAX_THREADS, ROPE_SCALING, TensorType
from pyorch.models.geometry import Geometry, geometry
from pyorch.models.gguf_file import GGUFFile
from pyorch.models.memory import check_memory
from pyorch.native import probe

MASK_BYTES = 128 << 20  # the most of a mask, by default
DEFAULT_CTX = 8192  # by default; less if the model was trained on less
# the fields of `Rope` that llama_context_params calls otherwise
_ROPE_PARAMS = {"scaling": "rope_scaling_type"}
_ROPE_PARAMS |= {"freq_scale": "rope_freq_scale", "freq_base": "rope_freq_base"}


def cache_type(name: str) -> TensorType:
    """The type of this name.

    Raises:
        SparqError: there is no such type, or the cache cannot have it.
    """
    if name not in CACHE_TYPES:
        raise SparqError(f"unknown cache type {name!r}", ", ".join(CACHE_TYPES), exit_code=2)
    return CACHE_TYPES[name]


@dataclass(frozen=True)
class Rope:
    """llama.cpp's settings of how positions become rotations of q and k; None is the model's own.

    They let a model read longer texts than it was trained on, more or less well:
    `Rope("linear", freq_scale=1/4)`, `Rope("yarn", freq_scale=1/4, yarn_orig_ctx=4096)`.

    scaling        how frequencies are stretched, a key of `ROPE_SCALING`
    freq_scale     a factor of the frequencies; 1/4 makes a context four times as long
    yarn_orig_ctx  the positions that the model was trained on
    freq_base      the base of the frequencies
    """

    scaling: str | None = None
    freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    freq_base: float | None = None

    def __post_init__(self) -> None:
        """Raises:
        SparqError: the scaling is unknown, or llama.cpp would take a number for "not given".
        """
        if self.scaling is not None and self.scaling not in ROPE_SCALING:
            raise SparqError(
                f"unknown RoPE scaling {self.scaling!r}", ", ".join(ROPE_SCALING), exit_code=2
            )
        for f in fields(self)[1:]:
            value = getattr(self, f.name)
            if value is not None and not 0 < value < math.inf:
                raise SparqError(f"RoPE {f.name} {value} is out of range", "it is above 0", 2)

    @classmethod
    def parse(cls, text: str) -> Rope:
        """The settings that `str` wrote, `scaling=yarn,freq_scale=0.25`; "" is the model's own."""
        values = dict(part.split("=") for part in text.split(",") if part)
        kind: dict[str, type] = {"scaling": str, "yarn_orig_ctx": int}
        return cls(**{k: kind.get(k, float)(v) for k, v in values.items()})

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in self.values.items())

    @property
    def values(self) -> dict[str, str | float]:
        """The settings that are not the model's own."""
        return {k: v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True)
class Placement:
    """Where a model goes; its fields are keywords of `load` and `load_model`.

    n_gpu_layers    how many layers go to the GPU, or to the workers; None is llama.cpp's default,
                    all. The first layers stay
    kv_offload      whether K and V of the layers on a GPU lie there, too. False keeps them in
                    memory, where our attention reads them on the CPU. None does so with those of as
                    many layers as do not fit on GPUs of this machine when a session is made, or
                    gain by it where these lack our kernels; its `kv_in_memory` names them
    placed          called with each session that keeps K and V in memory, or might
    workers         HOST:PORT of the other machines that hold these layers, in their order
    tensor_split    in what proportion the GPUs, or the devices of the workers, share them; by
                    default as their free memory
    numa            one of llama.cpp's strategies, a key of `NUMA`; a process's first one counts
    repack          whether llama.cpp may rearrange the weights for its CPU kernels, as it does by
                    default: it may decode faster with that, and read prompts faster without. It may
                    not where the weights exceed the memory: its copy of them cannot be dropped
    """

    n_gpu_layers: int | None = None
    kv_offload: bool | None = None
    placed: Callable[[Any], None] | None = None
    workers: Sequence[str] = ()
    tensor_split: Sequence[float] = ()
    numa: str = ""
    repack: bool = True

    def n_away(self, has_memory: bool) -> int | None:
        """That of `SessionOptions`. has_memory: of a GPU's own. The output counts as a layer."""
        if not (self.workers or (has_memory and self.kv_offload is not False)):
            return 0
        return None if self.n_gpu_layers is None else max(self.n_gpu_layers - 1, 0)


@dataclass(frozen=True)
class SessionOptions:
    """The settings of a session; its fields are keywords of `load` and `Model.session`.

    n_ctx           its positions; None takes what the model was trained on, at most 8192. More than
                    the model was trained on needs a `rope`
    n_threads       threads that compute; None takes one per physical core, as llama.cpp does
    n_batch         tokens that are evaluated at once in prefill; None takes 512, or fewer where the
                    context is so long that llama.cpp's mask, (n_batch, n_ctx) float16, would
                    take more than 128 MiB
    type_k, type_v  types of K and V in the cache: f16, f32, bf16, q8_0 or q4_0
    flash_attn      sparse attention needs True; False is llama.cpp's other path, for comparison
    attention       settings, or their text; None takes llama.cpp's own. SPARQ_ATTN is for other
                    programs and is ignored here
    rope            other rotations than the model's own, for longer contexts
    n_sequences     sequences that `parallel` decodes together, each with `n_ctx` positions
    n_mapped        positions of a document that is opened next: their K and V are pages of its
                    file, which the system can drop, so they do not count as memory
    n_away          layers whose weights, K and V are in a GPU's own memory or on other machines;
                    None is all
    swa_full        layers with a sliding window keep all positions, so that a session can go back
                    to any of them at once; otherwise the window and a batch, as llama.cpp's own
                    programs do
    """

    n_ctx: int | None = None
    n_threads: int | None = None
    n_batch: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: bool = True
    attention: AttentionSpec | str | None = None
    rope: Rope | None = None
    n_sequences: int = 1
    n_mapped: int = 0
    n_away: int | None = 0
    swa_full: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings(Cache):
    """The settings of a context; `spec` is None if none was given. `left` is how many bytes of
    memory all of it leaves, below 0 where the weights do not fit."""

    n_threads: int
    flash_attn: bool
    rope: Rope
    left: int

    @property
    def lacking(self) -> int:
        """The bytes of the weights that do not fit into the memory."""
        return max(-self.left, 0)

    def params(self, lib: ModuleType) -> ctypes.Structure:
        """A new `llama_context_params` with these settings."""
        params: ctypes.Structure = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = self.n_ctx * self.n_sequences, self.n_sequences
        params.kv_unified = False  # each sequence reads its own cache only
        params.n_batch = params.n_ubatch = self.n_batch
        params.n_threads = params.n_threads_batch = self.n_threads
        params.flash_attn_type = int(self.flash_attn)
        params.type_k, params.type_v = (t.number for t in self.types)
        params.swa_full, params.no_perf = self.swa_full, True
        for name, value in self.rope.values.items():
            number = ROPE_SCALING[value] if isinstance(value, str) else value
            setattr(params, _ROPE_PARAMS.get(name, name), number)
        return params


def settings_for(file: GGUFFile, options: SessionOptions) -> Settings:
    """The settings of a context for this model.

    Raises:
        SparqError: they do not fit the model, or its cache does not fit the memory.
    """
    o, geo, rope = options, geometry(file), options.rope or Rope()
    for name, value in (("n_threads", o.n_threads), ("n_batch", o.n_batch)):
        if value is not None and value < 1:
            raise SparqError(f"{name} {value} is below 1", "leave it out for the default", 2)
    n_ctx = context_size(geo, o.n_ctx, rope)
    types = cache_type(o.type_k), cache_type(o.type_v)
    spec = attention_for(o.attention, file.path, geo) if o.attention is not None else None
    n_batch = min(o.n_batch or batch_size(n_ctx), n_ctx)
    cache = Cache(geo, spec, types, n_ctx, n_batch, o.n_sequences, o.swa_full)
    mapped = replace(cache, n_ctx=min(o.n_mapped, n_ctx), n_sequences=1)
    kv = cache.kv_bytes() - mapped.kv_bytes(set(geo.own_layers) & set(geo.full_layers))
    share = share_here(geo, o.n_away)
    left = check_memory(file, int(share * kv), int(share * cache.shadow_bytes()), share, n_batch)
    n_threads = min(o.n_threads or usable_cores(), MAX_THREADS)
    more: dict[str, Any] = {"n_threads": n_threads, "flash_attn": o.flash_attn, "left": left}
    return Settings(**vars(cache), rope=rope, **more)


def share_here(geo: Geometry, n_away: int | None) -> float:
    """The share of the layers that are not away, as `SessionOptions` has it."""
    return 1 - (geo.n_layer if n_away is None else min(n_away, geo.n_layer)) / max(geo.n_layer, 1)


def attention_for(attention: AttentionSpec | str, model: Path, geo: Geometry) -> AttentionSpec:
    """The settings, with those that were calibrated for this model in place of such a budget.

    Raises:
        SparqError: they do not fit the model, or it is not calibrated.
    """
    spec = parse_spec(attention) if isinstance(attention, str) else attention
    spec = resolve(spec, model)
    check_against_model(spec, geo.head_dim_k)
    return spec


def context_size(geo: Geometry, n_ctx: int | None, rope: Rope | None = None) -> int:
    """The positions of a context: `n_ctx`, or by default those that the model was trained on, but
    at most `DEFAULT_CTX`.

    Raises:
        SparqError: `n_ctx` is below 1, or beyond the model's training without a `rope`.
    """
    limit = geo.n_ctx_train
    if n_ctx is None:
        return min(DEFAULT_CTX, limit) if limit else DEFAULT_CTX
    if n_ctx < 1:
        raise SparqError(f"context {n_ctx} is below 1", "--ctx 4096", exit_code=2)
    if limit and n_ctx > limit and not (rope and rope.values):
        raise SparqError(
            f"context {n_ctx} is beyond the {limit} positions this model was trained on",
            f"at most {limit} positions; or stretch it: --rope-scaling yarn "
            f"--rope-scale {-(-n_ctx // limit)}",
            exit_code=2,
        )
    return n_ctx


def batch_size(n_ctx: int) -> int:
    """The tokens of a prompt that are evaluated at once by default."""
    return min(N_BATCH, max(MASK_BYTES // (2 * n_ctx), 32), n_ctx)


def usable_cores() -> int:
    """The default number of threads, but no more than ggml allows."""
    return min(probe.compute_cores(), MAX_THREADS)
