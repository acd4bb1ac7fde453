"""The geometry of a model, from the header of its file: what the costs of attention depend on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from pyorch.errors import SparqError
from pyorch.models import layers
from pyorch.models.gguf_checks import TEXTLESS, WHOLE_ROPE, check_loadable, is_number
from pyorch.models.gguf_file import GGUFFile
from pyorch.models.layers import Windows

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS, beyond which llama.cpp ends the process
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
_RECURRENCES = ("ssm_", "shortconv", "time_mix")  # how names of their tensors begin


@dataclass(frozen=True)
class Geometry:
    """The sizes that decide the costs of attention, in elements unless a name says bytes."""

    arch: str
    name: str
    n_layer: int
    n_embd: int
    n_head: tuple[int, ...]  # per layer; 0 = a layer without attention
    n_head_kv: tuple[int, ...]  # per layer; 0 = a layer without a KV cache
    head_dim_k: int
    head_dim_v: int
    n_ctx_train: int
    is_mla: bool  # multi-head latent attention: the cache keeps K alone, and V is a part of it
    n_params: int
    weight_bytes: int  # all tensors
    weight_bytes_per_token: int  # the tensors that one decoded token reads
    windows: Windows = Windows()
    head_dims_window: tuple[int, int] | None = None  # of layers with a window, if they differ
    n_own_cache: int = MAX_LAYERS  # layers with a KV cache of their own; the others share these
    n_recurrent: int = 0  # layers with a recurrent state instead of a KV cache

    @property
    def kv_layers(self) -> list[int]:
        """The layers that read a KV cache, by number."""
        return [il for il, n in enumerate(self.n_head_kv) if n > 0]

    @property
    def full_layers(self) -> list[int]:
        """Those of them without a window."""
        return [il for il in self.kv_layers if not self.windows.of(il)]

    @property
    def own_layers(self) -> list[int]:
        """Those of them with a cache of their own."""
        return [il for il in self.kv_layers if il < self.n_own_cache]

    @property
    def why_dense(self) -> str:
        """Why no layer of this model can be sparse, in the words of the library; "" if one can."""
        latent = "multi-head latent attention" if self.is_mla else ""
        return layers.WHY_DENSE.get(self.arch, latent)

    def head_dims(self, il: int) -> tuple[int, int]:
        """The head sizes of K and V in layer `il`."""
        dims = self.head_dims_window if self.windows.of(il) else None
        return dims or (self.head_dim_k, self.head_dim_v)


@lru_cache(maxsize=1)
def geometry(file: GGUFFile) -> Geometry:
    """The attention geometry of a model, from its metadata.

    Raises:
        SparqError: the file is no language model, or lacks a key that every one has.
    """
    arch, m = file.arch, file.metadata

    def number(key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = m.get(f"{arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            shown = "missing" if value is None else f"not a usable number: {value!r:.80}"
            raise SparqError(
                f"{file.path}: metadata key {arch}.{key} is {shown}",
                hint="is this a language model? adapters and projectors have no such key",
            )
        return value

    if not arch:
        raise SparqError(
            f"{file.path}: no general.architecture in its metadata",
            hint="is this a language model? adapters and projectors are GGUF files too",
        )
    if arch in TEXTLESS:
        raise SparqError(f"{file.path}: {arch} writes no text", "llama.cpp's llama-embedding does")
    n_layer, n_embd = number("block_count", most=MAX_LAYERS), number("embedding_length")
    n_expert = number("expert_count", 0, MAX_EXPERTS)
    n_head = _per_layer(file, f"{arch}.attention.head_count", n_layer, None)
    n_head_kv = _per_layer(file, f"{arch}.attention.head_count_kv", n_layer, n_head)
    head_dim = n_embd // max(max(n_head, default=0), 1)
    head_dim_k = number("attention.key_length", head_dim)
    head_dim_v = number("attention.value_length", head_dim)
    keys = {k.removeprefix(f"{arch}."): v for k, v in m.items() if k.startswith(f"{arch}.")}
    n_trunk = n_layer - min(number("nextn_predict_layers", 0), n_layer)
    no_cache = [*layers.recurrent(arch, n_trunk, keys), *[True] * (n_layer - n_trunk)]
    n_head_kv = tuple(0 if no else n for n, no in zip(n_head_kv, no_cache, strict=True))
    geo = Geometry(
        arch=arch,
        name="".join(  # without control characters, which a terminal would obey
            c if c.isprintable() else "?" for c in str(m.get("general.name", file.path.stem))[:200]
        ),
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        n_ctx_train=number("context_length"),
        # without it llama.cpp expands the latent vectors and keeps K and V as other models do
        is_mla=number("attention.key_length_mla", 0) > 0,
        n_params=sum(math.prod(t.shape) for t in file.tensors),
        weight_bytes=sum(t.n_bytes for t in file.tensors),
        weight_bytes_per_token=sum(layer_weights(file, 0)),
        windows=layers.windows(arch, n_trunk, keys),
        head_dims_window=(
            number("attention.key_length_swa", head_dim_k),
            number("attention.value_length_swa", head_dim_v),
        ),
        n_own_cache=layers.n_own_cache(arch, n_layer, keys),
        n_recurrent=_n_recurrent(file, n_head_kv, no_cache[:n_trunk]),
    )
    check_loadable(file, n_layer, n_expert)
    _check_heads(file, geo)
    return geo


def _check_heads(file: GGUFFile, geo: Geometry) -> None:
    """Refuse what would end the process in attention, as `gguf_checks` does: RoPE has to fit the
    head, and K, V and the weights each other."""
    if not geo.kv_layers:
        return
    m = {k.removeprefix(geo.arch + "."): v for k, v in file.metadata.items()}

    def need(what: str, number: object, good: bool) -> None:
        if not good:
            raise SparqError(
                f"{file.path}: {what} is {number!r:.80}, where heads have {geo.head_dim_k} "
                f"elements of K and {geo.head_dim_v} of V"
            )

    lengths = [v for k, v in m.items() if k.startswith("attention.key_length")]
    longest = max((n for n in lengths if isinstance(n, int)), default=geo.head_dim_k)
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        n_rot = m.get(key, 0)
        need(key, n_rot, is_number(n_rot, 0, longest) and n_rot % 2 == 0)
    n_rot = m.get("rope.dimension_count", geo.head_dim_k)
    if geo.is_mla:  # the cache holds the latent vector
        rank, n_k = m.get("attention.kv_lora_rank"), m["attention.key_length_mla"]
        need("attention.kv_lora_rank", rank, rank == geo.head_dim_v == geo.head_dim_k - n_rot)
        need("attention.key_length_mla", n_k, n_k > n_rot)
        need("attention.head_count_kv", max(geo.n_head_kv), max(geo.n_head_kv) == 1)
    elif not any(k.endswith("_length_swa") for k in m):
        _check_shapes(file, geo, need)
    need("rope.dimension_count", n_rot, n_rot == geo.head_dim_k or geo.arch not in WHOLE_ROPE)


def _check_shapes(file: GGUFFile, geo: Geometry, need: Callable[[str, object, bool], None]) -> None:
    """Refuse weights that do not fit the heads."""
    same = geo.head_dim_k == geo.head_dim_v
    shapes = {t.name: t.shape for t in file.tensors if len(t.shape) == 2}
    for i, (n_head, n_head_kv) in enumerate(zip(geo.n_head, geo.n_head_kv, strict=True)):
        fused = f"blk.{i}.attn_qkv.weight"
        need(f"the shape of {fused}", shapes.get(fused), fused not in shapes or same)
        for name, axis, want in (
            (f"blk.{i}.attn_k.weight", 1, n_head_kv * geo.head_dim_k),
            (f"blk.{i}.attn_output.weight", 0, n_head * geo.head_dim_v),
        ):
            if name in shapes and n_head_kv:
                need(f"the shape of {name}", shapes[name], shapes[name][axis] == want)


def _per_layer(
    file: GGUFFile, key: str, n_layer: int, default: tuple[int, ...] | None
) -> tuple[int, ...]:
    value = file.metadata.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        return (0,) * n_layer  # recurrent models have no attention heads
    values = tuple(value) if isinstance(value, list) else (value,) * n_layer
    ok = all(isinstance(v, int) and 0 <= v < 65536 for v in values) and len(values) >= n_layer
    if not ok:
        raise SparqError(f"{file.path}: metadata key {key} is not usable: {value!r:.80}")
    return values[:n_layer]


def _n_recurrent(file: GGUFFile, n_head_kv: tuple[int, ...], listed: list[bool]) -> int:
    """The layers without a KV cache that are listed, or that have weights of a recurrence: those of
    state-space models and delta rules, of short convolutions, or of RWKV."""
    names = (t.name.split(".") for t in file.tensors)
    blocks = ((part[1], part[2]) for part in names if part[0] == "blk" and len(part) > 2)
    numbers = {int(il) for il, what in blocks if il.isdecimal() and what.startswith(_RECURRENCES)}
    numbers |= {il for il, is_recurrent in enumerate(listed) if is_recurrent}
    return sum(il in numbers for il, n in enumerate(n_head_kv) if n == 0)


def layer_weights(file: GGUFFile, n_layer: int, used: bool = True) -> list[int]:
    """The bytes of weights that one decoded token reads: of each layer, then of all the rest.

    Args:
        used: False: those of all experts, as memory holds them.

    All tensors count, except that only the experts in use count of expert tensors (`_exps`), and
    that an embedding table counts only if it is also the output matrix: otherwise one row is read,
    as it is of the embeddings for each layer that some models have. Layers that only predict
    further tokens read nothing.
    """
    arch, m = file.arch, file.metadata
    tied = not any(t.name == "output.weight" for t in file.tensors)
    n_used, n_expert = m.get(f"{arch}.expert_used_count"), m.get(f"{arch}.expert_count")
    share = (
        n_used / n_expert
        if used and isinstance(n_used, int) and isinstance(n_expert, int) and n_expert
        else 1
    )
    n_trunk = m.get(f"{arch}.block_count", 0) - m.get(f"{arch}.nextn_predict_layers", 0)
    total = [0.0] * (n_layer + 1)
    for t in file.tensors:
        if t.name == "per_layer_token_embd.weight" or (t.name == "token_embd.weight" and not tied):
            continue
        part = t.name.split(".")
        il = int(part[1]) if part[0] == "blk" and part[1].isdecimal() else -1
        if used and il >= n_trunk:
            continue
        read = t.n_bytes * (share if "_exps." in t.name else 1)
        total[il if 0 <= il < n_layer else n_layer] += read
    return [int(x) for x in total]
