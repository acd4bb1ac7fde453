// GGML_OP_SPARSE_ATTN on the CPU: which step a node is.

#include "sparse-work.h"

#include <thread>

static size_t none(const ggml_tensor *, int) { return 0; }

struct step {
    void   (*forward)  (const ggml_compute_params * params, ggml_tensor * dst);
    size_t (*work_size)(const ggml_tensor * dst, int n_threads);
};

// by number
static const step STEPS[] = {
    { forward_seal,         seal_work_size },
    { forward_visible,      none },
    { forward_score,        score_work_size },
    { forward_select,       select_work_size },
    { forward_score_select, score_select_work_size },
    { forward_attend,       attend_work_size },
    { forward_prefill,      prefill_work_size },
};
static_assert(sizeof(STEPS)/sizeof(STEPS[0]) == GGML_SPARSE_ATTN_COUNT);

static const step & step_of(const ggml_tensor * node) {
    GGML_ASSERT(node->op_params[0] >= 0 && node->op_params[0] < GGML_SPARSE_ATTN_COUNT); // a worker gets it from a network
    return STEPS[node->op_params[0]];
}

size_t ggml_sparse_attn_work_size(const ggml_tensor * node, int n_threads) { return step_of(node).work_size(node, n_threads); }

void ggml_compute_forward_sparse_attn(const ggml_compute_params * params, ggml_tensor * dst) { step_of(dst).forward(params, dst); }

void ggml_sparse_wait(void) {
    constexpr unsigned N_SPIN = 1024; // between two offers; no other number was tried
    static thread_local unsigned n = 0;
    if (++n % N_SPIN != 0) {
        return;
    }
    std::this_thread::yield();
}
