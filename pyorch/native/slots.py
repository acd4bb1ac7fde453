"""What a node of ours does, and which slot of its `src[]` holds which source, for what reads nodes
as they run.

ggml_ops/ggml-sparse.h and ggml-sparse-nodes.h in Python; tests compare them.
"""

from __future__ import annotations

# ggml_sparse_attn_op, the first of a node's op_params
SEAL, VISIBLE, SCORE, SELECT, SCORE_SELECT, ATTEND, PREFILL = range(7)

_SCORE_SELECT = ("q", "k", "k_t", "sealed", "mask", "forced", "kl", "sinks", "stats", "k_range")
_ATTEND = ("q", "k", "v", "mask", "visible", "sel", "v_sum", "sealed", "sinks", "stats")

SLOTS: dict[str, dict[str, int]] = {
    step: {name: i for i, name in enumerate(names)}
    for step, names in {
        "seal": ("k_t", "v_sum", "k", "v", "list", "stats", "k_range", "sealed"),
        "visible": ("mask",),
        "score_select": _SCORE_SELECT,
        "attend": _ATTEND,
        "prefill": ("q", "k", "v", "mask", "sinks", "stats"),
    }.items()
}
# SCORE and SELECT have SCORE_SELECT's slots, but for what they are given in its place
SLOTS["score"] = {"visible": SLOTS["score_select"]["forced"]}
SLOTS["select"] = {"logits": SLOTS["score_select"]["q"]}
