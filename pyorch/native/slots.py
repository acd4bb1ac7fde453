"""Which slot of `src[]` holds which source of a node of ours, for what reads nodes as they run.

ggml_ops/ggml-sparse-nodes.h in Python; a test compares the two.
"""

from __future__ import annotations

_PICK = ("q", "k", "k_t", "sealed", "mask", "forced", "kl", "sinks", "stats", "k_range")
_ATTEND = ("q", "k", "v", "mask", "visible", "sel", "v_sum", "sealed", "sinks", "stats")

SLOTS: dict[str, dict[str, int]] = {
    step: {name: i for i, name in enumerate(names)}
    for step, names in {
        "seal": ("k_t", "v_sum", "k", "v", "list", "stats", "k_range", "sealed"),
        "visible": ("mask",),
        "pick": _PICK,
        "attend": _ATTEND,
        "prefill": ("q", "k", "v", "mask", "sinks", "stats"),
    }.items()
}
# SCORE and SELECT have PICK's slots, but for what they are given in its place
SLOTS["score"] = {"visible": SLOTS["pick"]["forced"]}
SLOTS["select"] = {"logits": SLOTS["pick"]["q"]}
