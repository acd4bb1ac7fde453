// GGML_OP_SPARSE_ATTN on the CPU: which step a node is.

#include "sparse-work.h"

#include <thread>

size_t ggml_sparse_attn_work_size(const ggml_tensor * node, int n_threads) {
    switch ((ggml_sparse_attn_op) node->op_params[0]) {
        case GGML_SPARSE_ATTN_SEAL:         return seal_work_size(node, n_threads);
        case GGML_SPARSE_ATTN_SCORE:        return score_work_size(node, n_threads);
        case GGML_SPARSE_ATTN_SELECT:       return select_work_size(node, n_threads);
        case GGML_SPARSE_ATTN_SCORE_SELECT:         return score_select_work_size(node, n_threads);
        case GGML_SPARSE_ATTN_ATTEND:       return attend_work_size(node, n_threads);
        case GGML_SPARSE_ATTN_PREFILL:      return prefill_work_size(node, n_threads);
        default:                            return 0;
    }
}

void ggml_compute_forward_sparse_attn(const ggml_compute_params * params, ggml_tensor * dst) {
    switch ((ggml_sparse_attn_op) dst->op_params[0]) {
        case GGML_SPARSE_ATTN_SEAL:         forward_seal        (params, dst); break;
        case GGML_SPARSE_ATTN_VISIBLE:      forward_visible     (params, dst); break;
        case GGML_SPARSE_ATTN_SCORE:        forward_score       (params, dst); break;
        case GGML_SPARSE_ATTN_SELECT:       forward_select      (params, dst); break;
        case GGML_SPARSE_ATTN_SCORE_SELECT:         forward_score_select(params, dst); break;
        case GGML_SPARSE_ATTN_ATTEND:       forward_attend      (params, dst); break;
        case GGML_SPARSE_ATTN_PREFILL:      forward_prefill     (params, dst); break;
        default: GGML_ABORT("sparse_attn: unknown sub-operation %d", dst->op_params[0]);
    }
}

void ggml_sparse_wait(void) {
    constexpr unsigned N_SPIN = 1024; // between two offers; no other number was tried
    static thread_local unsigned n = 0;
    if (++n % N_SPIN != 0) {
        return;
    }
    std::this_thread::yield();
}
