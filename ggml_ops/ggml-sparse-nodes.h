#pragma once

// Which slot of src[] holds which source of a node: for the constructors and for whoever runs a node.
//
// PICK is SCORE and SELECT in one node, so the three share their numbers; a slot that a step does not use is NULL. ATTEND and PICK fill all
// GGML_MAX_SRC slots.

enum ggml_sparse_seal_src {
    GGML_SPARSE_SEAL_K_T,
    GGML_SPARSE_SEAL_V_SUM,
    GGML_SPARSE_SEAL_K,
    GGML_SPARSE_SEAL_V,
    GGML_SPARSE_SEAL_LIST,
    GGML_SPARSE_SEAL_STATS,
    GGML_SPARSE_SEAL_K_RANGE,
    GGML_SPARSE_SEAL_SEALED,
};

enum ggml_sparse_visible_src {
    GGML_SPARSE_VISIBLE_MASK,
};

// SCORE, SELECT and PICK
enum ggml_sparse_pick_src {
    GGML_SPARSE_PICK_Q,
    GGML_SPARSE_PICK_K,
    GGML_SPARSE_PICK_K_T,
    GGML_SPARSE_PICK_SEALED,
    GGML_SPARSE_PICK_MASK,
    GGML_SPARSE_PICK_FORCED,
    GGML_SPARSE_PICK_KL,
    GGML_SPARSE_PICK_SINKS,
    GGML_SPARSE_PICK_STATS,
    GGML_SPARSE_PICK_K_RANGE,
    GGML_SPARSE_SCORE_VISIBLE = GGML_SPARSE_PICK_FORCED, // SCORE is given what PICK counts
    GGML_SPARSE_SELECT_LOGITS = GGML_SPARSE_PICK_Q,
};

enum ggml_sparse_attend_src {
    GGML_SPARSE_ATTEND_Q,
    GGML_SPARSE_ATTEND_K,
    GGML_SPARSE_ATTEND_V,
    GGML_SPARSE_ATTEND_MASK,
    GGML_SPARSE_ATTEND_VISIBLE,
    GGML_SPARSE_ATTEND_SEL,
    GGML_SPARSE_ATTEND_V_SUM,
    GGML_SPARSE_ATTEND_SEALED,
    GGML_SPARSE_ATTEND_SINKS,
    GGML_SPARSE_ATTEND_STATS,
};

enum ggml_sparse_prefill_src {
    GGML_SPARSE_PREFILL_Q,
    GGML_SPARSE_PREFILL_K,
    GGML_SPARSE_PREFILL_V,
    GGML_SPARSE_PREFILL_MASK,
    GGML_SPARSE_PREFILL_SINKS,
    GGML_SPARSE_PREFILL_STATS,
};
