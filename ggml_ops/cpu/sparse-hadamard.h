#pragma once

// The Hadamard matrix, for the CPU ops. On a GPU: cuda/sparse-device.cuh.

#include "ggml.h"

#include <math.h>
#include <string.h>

// one pass: neighbours added, and the lowest bit of the index moved to the top. The same loop every time, in place after log2(n) of them
static inline void ggml_sparse_hadamard_pass(float * GGML_RESTRICT to, const float * GGML_RESTRICT from, int n) {
    for (int i = 0; i < n/2; ++i) {
        to[i]       = from[2*i] + from[2*i + 1];
        to[i + n/2] = from[2*i] - from[2*i + 1];
    }
}

// x [d] times the Hadamard matrix, in blocks of n_rot components (a power of two), scaled so that it is its own inverse; n_rot = 0: nothing
static inline void ggml_sparse_hadamard(float * x, int d, int n_rot) {
    enum { N = 1024 };
    GGML_ASSERT(n_rot <= N);
    float buf[N];
    const float scale = n_rot > 0 ? 1.0f/sqrtf((float) n_rot) : 1.0f;
    for (int c = 0; n_rot > 0 && c < d; c += n_rot) {
        float * from = x + c;
        float * to   = buf;
        for (int i = 0; i < n_rot; ++i) {
            from[i] *= scale;
        }
        for (int n = 1; n < n_rot; n *= 2) {
            ggml_sparse_hadamard_pass(to, from, n_rot);
            float * t = from; from = to; to = t;
        }
        if (from == buf) {
            memcpy(x + c, buf, n_rot*sizeof(float));
        }
    }
}
