#pragma once

// "Store K twice": the transposed K, the sums of V, the visible positions of a group.
// On plain pointers and strides: no ggml tensors, no threads. Contracts in ggml-sparse.h; the same step, one float at a time, in ref/.
// Strides called nb_* are in bytes, ld_* in elements.

#include "ggml-sparse.h"
#include "sparse-hadamard.h"
#include "sparse-vec.h"

namespace sparse {

constexpr int GROUP = GGML_SPARSE_GROUP;
constexpr int SUM   = GGML_SPARSE_SUM;

// ---- seal: "store K twice" ----

static inline f16 clamp_f16(f16 x) {
    return (x.bits & 0x7FFF) == 0x7C00 ? f16 { (uint16_t) (x.bits - 1) } : x; // +-inf -> +-65504
}
static inline f16 clamp_f16(float x) { return to_f16(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }
static inline f16 clamp_f16(bf16  x) { return clamp_f16(to_f32(x)); }

// the n <= GROUP positions of a group of one KV head: k [n][d] -> k_t [d][n]
template <typename T>
static void seal_k(char * k_t, size_t nb_chan, const char * k, size_t nb_pos, int n, int d) {
    constexpr int NC = 32; // one line of K per position, then whole lines of k_t
    for (int c0 = 0; c0 < d; c0 += NC) {
        const int nc = d - c0 < NC ? d - c0 : NC;

        f16 tile[NC][GROUP];
        for (int t = 0; t < n; ++t) {
            const T * row = (const T *) (k + t*nb_pos) + c0;
            for (int c = 0; c < nc; ++c) {
                tile[c][t] = clamp_f16(row[c]);
            }
        }
        for (int c = 0; c < nc; ++c) {
            memcpy(k_t + (c0 + c)*nb_chan, tile[c], n*sizeof(f16));
        }
    }
}

// rows of n positions as f32: res [n][d]; turned back, see sparse-hadamard.h
template <typename T>
static void load_rows(float * res, const char * x, size_t nb_pos, int n, int d, int n_rot) {
    for (int t = 0; t < n; ++t, res += d) {
        const char * row = x + t*nb_pos;
        int c = 0;
        for (; c + span<T>::SIZE <= d; c += span<T>::SIZE) {
            const span<T> y(row, c);
            for (int j = 0; j < span<T>::SIZE/W; ++j) {
                store(res + c + j*W, y.vec(j));
            }
        }
        if (c < d) {
            store_n(res + c, span<T>::tail(row, c, d - c), d - c);
        }
        ggml_sparse_hadamard(res, d, n_rot);
    }
}

// sum[c] += v[t][c] over n positions
template <typename T>
static void sum_v(float * sum, const char * v, size_t nb_pos, int n, int d) {
    for (int t = 0; t < n; ++t) {
        const char * row = v + t*nb_pos;
        int c = 0;
        for (; c + span<T>::SIZE <= d; c += span<T>::SIZE) {
            const span<T> y(row, c);
            for (int j = 0; j < span<T>::SIZE/W; ++j) {
                store(sum + c + j*W, add(load(sum + c + j*W), y.vec(j)));
            }
        }
        if (c < d) {
            store_n(sum + c, add(load_n(sum + c, d - c), span<T>::tail(row, c, d - c)), d - c);
        }
    }
}

// ---- visible ----

// is the mask zero all over? Then nothing is hidden and nothing is added
static inline bool is_zero(const f16 * mask, int64_t n) {
    uint32_t any = 0;
    for (int64_t t = 0; t < n; ++t) {
        any |= mask[t].bits;
    }
    return any == 0;
}

static inline int count_visible(const f16 * mask, int n) {
    int res = 0;
    for (int t = 0; t < n; ++t) {
        res += mask[t].bits != F16_NEG_INF;
    }
    return res;
}

} // namespace sparse
