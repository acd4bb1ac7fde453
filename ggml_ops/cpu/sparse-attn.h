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

// Called at each turn of the loop in which a thread of ggml's own pool waits for the others. It spins without an end there, and beside a busy program
// takes the very core that they need; so it offers the core to others now and then. GNU's OpenMP sleeps: see pyorch/native/__init__.py
void ggml_sparse_wait(void);

#ifdef __cplusplus
}
#endif
