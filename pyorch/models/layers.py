"""Which layers of a model see every position, the newest ones only, or keep no positions at all.

A file gives the length of a window, but seldom its layers. Those are in the code of each
architecture, `load_arch_hparams` in src/models/*.cpp of the pinned source, and a test compares it
with these tables. llama.cpp ignores a window in a file of any other architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Windows:
    """The window of each layer in positions, including the token's own; 0 = all are visible.

    A window slides with the token, or, `chunked`, begins anew each time it is full.
    """

    sizes: tuple[int, ...] = ()
    chunked: bool = False

    def of(self, il: int) -> int:
        return self.sizes[il] if self.sizes else 0

    def visible(self, il: int, n_pos: int) -> int:
        """How many of `n_pos` positions the newest token sees in layer `il`."""
        size = self.of(il)
        if not size:
            return n_pos
        return (n_pos - 1) % size + 1 if self.chunked else min(size, n_pos)


@dataclass(frozen=True)
class _Rule:
    """One layer of each `period` sees every position: the last, or the first if `dense_first`.

    A period of 0 gives every layer a window, None only those that the file lists. The window is
    `fixed`, or the file's, or `default` if the file gives none; with a default of 0 there is none.
    """

    period: int | None
    dense_first: bool = False
    default: int = 0
    fixed: int = 0
    chunked: bool = False
    n_layer: int = 0  # only in models with this many layers; 0 = in all


WINDOWS = {
    "afmoe": _Rule(4),
    "cohere2": _Rule(4),
    "cohere2moe": _Rule(4, dense_first=True),
    "dots3note": _Rule(None),
    "exaone-moe": _Rule(4, default=128),
    "exaone4": _Rule(4, default=4096, n_layer=64),
    "gemma2": _Rule(2, default=4096),
    "gemma3": _Rule(6),
    "gemma3n": _Rule(5),
    "gemma4": _Rule(None),
    "gpt-oss": _Rule(2),
    "granite_swa": _Rule(None),
    "laguna": _Rule(4, dense_first=True),
    "lfm2": _Rule(0),
    "llama4": _Rule(4, default=8192, fixed=8192, chunked=True),
    "maple": _Rule(None),
    "mellum": _Rule(4),
    "mimo2": _Rule(None),
    "muse-glimmer": _Rule(4),
    "olmo2": _Rule(4),
    "plamo3": _Rule(8),
    "smallthinker": _Rule(4, dense_first=True, fixed=4096),
    "spark2_5": _Rule(None),
    "step35": _Rule(None),
}

# the last of this many layers attends, and the others are recurrent; a file may say otherwise
INTERVALS = {"minimax-01": 8, "qwen35": 4, "qwen35moe": 4, "qwen3next": 4, "qwen4exp": 4}

# Architectures without a layer that we can serve, and what the library says of them. The suite of
# all architectures (make test-archs) compares the two. Latent attention is told by the file's keys.
_OTHER_CACHE = (
    "deepseek32 deepseek4 dots3note dream glm-dsa glm5-next hy_v4 llada llada-moe mamba mamba2"
    " minimax-m3 qwen4exp rnd1"
)
WHY_DENSE = {
    **dict.fromkeys(_OTHER_CACHE.split(), "this architecture has no plain KV cache"),
    "grok": "sparse attention lacks the scale of Grok's logits",
    "t5": "attention with a learned bias",
}


def windows(arch: str, n_layer: int, keys: Mapping[str, Any]) -> Windows:
    """The windows that llama.cpp gives the layers of a model.

    Args:
        n_layer: layers of the trunk; layers that only predict further tokens have no window.
        keys: metadata without the name of the architecture: `attention.sliding_window` and
            `attention.sliding_window_pattern`, a list with an entry per layer, or a period.
    """
    rule = WINDOWS.get(arch)
    if rule is None or rule.n_layer not in (0, n_layer):
        return Windows()
    value, pattern = (keys.get(f"attention.sliding_window{x}") for x in ("", "_pattern"))
    size = rule.default if value is None else value and (rule.fixed or value)
    if not isinstance(size, int) or size <= 0:
        return Windows()
    if isinstance(pattern, list):
        has_window = [bool(x) for x in pattern[:n_layer]]
        has_window += [False] * (n_layer - len(has_window))
    elif rule.period is None:
        return Windows()  # llama.cpp refuses such a file
    else:
        period = pattern if isinstance(pattern, int) and pattern >= 0 else rule.period
        full = 0 if rule.dense_first else period - 1
        has_window = [period == 0 or il % period != full for il in range(n_layer)]
    return Windows(tuple(size * x for x in has_window), rule.chunked)


def recurrent(arch: str, n_layer: int, keys: Mapping[str, Any]) -> list[bool]:
    """Which layers have no KV cache, if their heads do not show it: those with a recurrent state,
    and in Nemotron-H those that are a feed-forward network.

    Args:
        n_layer, keys: as for `windows`: `attention.recurrent_layers`, a list with an entry per
            layer, or `full_attention_interval`; `feed_forward_length`, a list too.
    """
    n_ff = keys.get("feed_forward_length")
    if arch in ("nemotron_h", "nemotron_h_moe") and isinstance(n_ff, list):
        return [il < len(n_ff) and bool(n_ff[il]) for il in range(n_layer)]
    if arch not in INTERVALS:
        return [False] * n_layer
    listed, interval = keys.get("attention.recurrent_layers"), keys.get("full_attention_interval")
    if isinstance(listed, list):
        return [il < len(listed) and bool(listed[il]) for il in range(n_layer)]
    if not isinstance(interval, int) or interval < 1:
        interval = INTERVALS[arch]
    return [(il + 1) % interval != 0 for il in range(n_layer)]


def n_own_cache(arch: str, n_layer: int, keys: Mapping[str, Any]) -> int:
    """The number of layers with a KV cache of their own; the layers that follow share these."""
    if arch == "gemma3n":
        return min(20, n_layer)
    shared = keys.get("attention.shared_kv_layers", 0) if arch == "gemma4" else 0
    return n_layer - shared if isinstance(shared, int) and 0 <= shared <= n_layer else n_layer
