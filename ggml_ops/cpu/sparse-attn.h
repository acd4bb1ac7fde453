#pragma once

// The CPU side of GGML_OP_SPARSE_ATTN. Called from ggml-cpu.c; n_tasks of the op is the number of threads.

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// bytes of work buffer the node needs with n_threads threads
size_t ggml_sparse_attn_work_size(const struct ggml_tensor * node, int n_threads);

void ggml_compute_forward_sparse_attn(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
