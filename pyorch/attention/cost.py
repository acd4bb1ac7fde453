"""Predicts how many bytes a decoded token reads.

The same split of a ratio into (rank, topk) is done by the native library at every token;
`test_byte_model_agrees_with_the_library` in tests/e2e/test_engine.py holds the two together. `S` is
the number of visible positions, the current token included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pyorch.attention.spec import AttentionSpec
from pyorch.models.geometry import Geometry

SHADOW_BYTES = {"f16": 2.0, "q8": 1.0, "q4": 0.5}  # bytes per element of the transposed K
GROUP = 128  # positions sealed together, with a scale and a zero (two f16) where K is quantised ..
GROUPS_PER_SUM = 8  # .. and a sum of V, and one more per this many groups
SPREAD_GROUPS = 8  # groups whose scales say how far each component spreads
CELLS = 256  # llama.cpp looks at the cache in blocks of this many positions
N_BATCH = 512  # tokens of a prompt that are evaluated at once, by default


@dataclass(frozen=True)
class Split:
    """The share of S positions that a layer reads. `dense` means all of them; `reason` says why.

    With top_p a head reads fewer than topk, or more if its cap allows, depending on the text.
    """

    rank: int
    topk: int
    local: int
    sinks: int
    dense: bool = False
    reason: str = ""


@dataclass(frozen=True)
class LayerCost:
    """The bytes of K, V and the shadow that a decoded token reads in one layer.

    `ours`: our ops can make this layer sparse, and count its bytes. Layers with a sliding window,
    and all layers of some architectures, never are; decoded tokens of latent attention go through
    our exact attention on the CPU, which reads one row for all heads.
    """

    il: int
    n_head: int
    n_head_kv: int
    split: Split
    bytes_dense: int
    bytes_read: int
    ours: bool

    def made_dense(self, reason: str) -> LayerCost:
        split = replace(self.split, dense=True, reason=reason)
        return replace(self, split=split, bytes_read=self.bytes_dense)


def split(
    spec: AttentionSpec,
    n_pos: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    il: int = 0,
    n_layer: int = 1,
    cached: Sequence[int] | None = None,
) -> Split:
    """Rank and k of layer `il` at `n_pos` visible positions, as the library chooses them. A ratio
    is a share of K and V in f16, as the papers count, and selects the same from any type of cache.

    head_dim_v: of V, None = as K's, 0 = V lies in K.
    cached: the layers with a KV cache, which share a ramp; None = all `n_layer`.
    """
    if not spec.sparse:
        return _dense(n_pos, head_dim, spec.method)
    n_cells = -(-n_pos // CELLS) * CELLS  # the library decides for whole blocks of the cache
    if n_cells <= -(-spec.min_ctx // CELLS) * CELLS:
        return _dense(n_pos, head_dim, f"not above min_ctx {spec.min_ctx}")
    n_values = head_dim + (head_dim if head_dim_v is None else head_dim_v)
    rank = _rank(spec, head_dim, n_values, il)
    share = rank * _group_bytes(spec) / (GROUP * 2 * n_values)
    cached = range(n_layer) if cached is None else cached
    if _topk(spec, n_cells, share, il, cached) >= n_cells:
        return _dense(n_pos, head_dim, "k covers every position")
    topk = _topk(spec, n_pos, share, il, cached)
    local = max(topk // 4, 1) if spec.local is None else spec.local
    return Split(rank, topk, local, spec.sinks)


def _dense(n_pos: int, head_dim: int, reason: str) -> Split:
    return Split(head_dim, n_pos, n_pos, 0, dense=True, reason=reason)


def _rank(spec: AttentionSpec, head_dim: int, n_values: int, il: int) -> int:
    """Half of the bytes pay for the scores: `r*shadow_bytes = ratio/2 * 2*n_values`.

    But half of the components is enough; beyond that, rows are worth more (docs/numerics.md, 11b).
    """
    if spec.method == "topk":
        return head_dim  # exact scores
    if spec.rank_layers is not None:
        return spec.rank_layers[il]
    if spec.rank is not None:
        return spec.rank
    rank = _round((spec.ratio or 0) * n_values / SHADOW_BYTES[spec.shadow])
    return min(max(rank, 1), max(head_dim // 2, 1))


def _topk(
    spec: AttentionSpec, n_pos: int, score_share: float, il: int, cached: Sequence[int]
) -> int:
    """The bytes that the scores leave pay for rows. For top-k the ratio is the share of rows."""
    least = spec.sinks + (spec.local or 0) + 1
    k: float
    if spec.k_layers is not None:
        k, is_share = spec.k_layers[il]
        if is_share:
            k, least = k * n_pos, max(least, spec.min_k)
    elif spec.topk is not None:
        k = spec.topk
    else:
        k = ((spec.ratio or 0) - (score_share if spec.method == "sparq" else 0)) * n_pos
        least = max(least, spec.min_k)
    if spec.budget.startswith("ramp") and spec.k_layers is None:
        i, n = cached.index(il), len(cached)
        k *= 2 * (i + 1 if spec.budget == "ramp" else n - i) / (n + 1)
    return min(max(_round(k), least), max(n_pos, 1))


def _round(x: float) -> int:
    """Round half away from zero, as C does."""
    return math.floor(x + 0.5)


def layer_costs(
    geo: Geometry, spec: AttentionSpec, n_pos: int, k_bytes: float = 2, v_bytes: float = 2
) -> list[LayerCost]:
    """The bytes per token of every layer that has a cache; k_bytes and v_bytes are per element."""
    out = []
    for il in geo.kv_layers:
        n_head, n_head_kv, (d_k, d_v) = geo.n_head[il], geo.n_head_kv[il], geo.head_dims(il)
        row = row_bytes(geo, il, k_bytes, v_bytes)
        window = geo.windows.of(il)
        n_seen = geo.windows.visible(il, n_pos)
        if window:
            s = _dense(n_seen, d_k, f"sliding window of {window}")
        elif geo.why_dense:
            s = _dense(n_seen, d_k, geo.why_dense)
        else:
            s = split(spec, n_pos, d_k, 0 if geo.is_mla else d_v, il=il, cached=geo.full_layers)
        dense = read = n_seen * row
        if not s.dense:
            sums = 0.0
            if uses_mean_v(spec):
                sums = mean_bytes(n_pos, geo.head_dim_v, geo.head_dim_v * v_bytes)
            read = _scan_bytes(spec, s, geo, n_pos, k_bytes) + sums + s.topk * row
        dense, read = int(dense * n_head_kv), int(read * n_head_kv)
        ours = not window and not geo.why_dense
        out.append(LayerCost(il, n_head, n_head_kv, s, dense, read, ours))
    return out


def row_bytes(geo: Geometry, il: int, k_bytes: float, v_bytes: float) -> float:
    """The bytes of one position of a KV head in the cache."""
    d_k, d_v = geo.head_dims(il)
    return d_k * k_bytes + (0 if geo.is_mla else d_v * v_bytes)


def _scan_bytes(spec: AttentionSpec, s: Split, geo: Geometry, n_pos: int, k_bytes: float) -> float:
    """The bytes per KV head that scoring every position takes."""
    if spec.method == "topk":
        return n_pos * geo.head_dim_k * k_bytes
    groups = n_pos // GROUP
    spread = min(SPREAD_GROUPS, groups) * _scale_bytes(spec) * geo.head_dim_k
    rows = n_pos % GROUP * geo.head_dim_k * k_bytes
    return groups * s.rank * _group_bytes(spec) + spread + rows


def mean_bytes(n_pos: int, d_v: int, row_bytes: float) -> float:
    """Bytes per KV head of the sums of V: totals, then groups, then rows of V itself."""
    groups = n_pos // GROUP
    n_sum = groups // GROUPS_PER_SUM + groups % GROUPS_PER_SUM
    return n_sum * d_v * 4 + n_pos % GROUP * row_bytes


def _scale_bytes(spec: AttentionSpec) -> int:
    """The bytes of the scale and zero of a group of one component of the transposed K."""
    return 0 if spec.shadow == "f16" else 4


def _group_bytes(spec: AttentionSpec) -> float:
    """The bytes of a group of one component of the transposed K."""
    return GROUP * SHADOW_BYTES[spec.shadow] + _scale_bytes(spec)


def uses_mean_v(spec: AttentionSpec) -> bool:
    """Whether the mean of V stands for what is not read."""
    return spec.method == "sparq" and spec.mean_v != "off"


def per_token(counters: Mapping[str, float]) -> tuple[float, float]:
    """Bytes that a decoded token read, and those that dense attention would have read, by the
    counters of the library or of a method; 0 if no token was decoded."""
    n = max(counters.get("steps", 0), 1)
    return counters.get("bytes_read", 0) / n, counters.get("bytes_dense", 0) / n
