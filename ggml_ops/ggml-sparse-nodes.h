#pragma once

// The sources and parameters of a node: for the constructors, which write them, and for whoever runs or watches a node.

#include "ggml-sparse.h"

#include <string.h>

// Which slot of src[] holds which tensor, by step: X(tensor, slot). A slot that a step does not name, or a tensor that is not given, is NULL.
// A tensor has the same slot in every step, but for SEAL's v and v_sum, and there are at most GGML_MAX_SRC = 10. For one more tensor of a shadow
// slots 3 and 9 are free in SCORE_SELECT, slot 3 in SCORE, slots 3 and 5 in SEAL; ATTEND is full.
#define GGML_SPARSE_SRC_SEAL(X)         X(list, 0)   X(k, 1)                        X(stats, 4)              X(k_t, 6) X(k_range, 7) X(v, 8)      X(v_sum, 9)
#define GGML_SPARSE_SRC_VISIBLE(X)                           X(mask, 2)
#define GGML_SPARSE_SRC_SCORE(X)        X(q, 0)      X(k, 1) X(mask, 2)             X(stats, 4) X(sealed, 5) X(k_t, 6) X(k_range, 7)              X(visible, 9)
#define GGML_SPARSE_SRC_SELECT(X)       X(logits, 0)                                                                                 X(wanted, 8)
#define GGML_SPARSE_SRC_SCORE_SELECT(X) X(q, 0)      X(k, 1) X(mask, 2)             X(stats, 4) X(sealed, 5) X(k_t, 6) X(k_range, 7) X(wanted, 8)
#define GGML_SPARSE_SRC_ATTEND(X)       X(q, 0)      X(k, 1) X(mask, 2) X(sinks, 3) X(stats, 4) X(sealed, 5) X(v, 6)   X(v_sum, 7)   X(sel, 8)    X(visible, 9)
#define GGML_SPARSE_SRC_PREFILL(X)      X(q, 0)      X(k, 1) X(mask, 2) X(sinks, 3) X(stats, 4)              X(v, 6)

static inline struct ggml_sparse_src ggml_sparse_src_of(const struct ggml_tensor * node) {
    struct ggml_sparse_src res;
    memset(&res, 0, sizeof(res));
    switch ((enum ggml_sparse_attn_op) node->op_params[0]) {
#define READ(tensor, slot) res.tensor = node->src[slot];
#define X(step) case GGML_SPARSE_ATTN_##step: GGML_SPARSE_SRC_##step(READ) break;
        GGML_SPARSE_STEPS(X)
#undef X
#undef READ
        case GGML_SPARSE_ATTN_COUNT: break;
    }
    return res;
}

static inline void ggml_sparse_set_src(struct ggml_tensor * node, const struct ggml_sparse_src * src) {
    switch ((enum ggml_sparse_attn_op) node->op_params[0]) {
#define WRITE(tensor, slot) node->src[slot] = src->tensor;
#define X(step) case GGML_SPARSE_ATTN_##step: GGML_SPARSE_SRC_##step(WRITE) break;
        GGML_SPARSE_STEPS(X)
#undef X
#undef WRITE
        case GGML_SPARSE_ATTN_COUNT: break;
    }
}

#ifdef __cplusplus

// the parameters of a node, which stand behind the number of its step
template <typename P>
P ggml_sparse_params_of(const ggml_tensor * node) {
    P p;
    memcpy(&p, node->op_params + 1, sizeof(p));
    return p;
}

// of SCORE or SCORE_SELECT
inline ggml_sparse_score_params ggml_sparse_score_params_of(const ggml_tensor * node) {
    const bool is_score = node->op_params[0] == GGML_SPARSE_ATTN_SCORE;
    return is_score ? ggml_sparse_params_of<ggml_sparse_score_params>(node) : ggml_sparse_params_of<ggml_sparse_score_select_params>(node).score;
}

// of SELECT or SCORE_SELECT
inline ggml_sparse_select_params ggml_sparse_select_params_of(const ggml_tensor * node) {
    const bool is_select = node->op_params[0] == GGML_SPARSE_ATTN_SELECT;
    return is_select ? ggml_sparse_params_of<ggml_sparse_select_params>(node) : ggml_sparse_params_of<ggml_sparse_score_select_params>(node).select;
}

#endif
