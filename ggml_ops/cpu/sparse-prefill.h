#pragma once

// Exact attention of many tokens at once, which is a prompt: a block of queries by a block of positions at a time.
//
// Queries lie side by side in the lanes of vectors, BLOCK_Q of them. So both products, q . k and p * v, take the elements of K and V one by
// one, as they lie in memory, times vectors of queries: nothing is transposed, and no sum is across lanes. The softmax is updated from block to
// block (arXiv 1805.02867; the blocks are those of FlashAttention, arXiv 2205.14135). What a query gets does not depend on those beside it.

#include "sparse-vec.h"

#include <algorithm>

namespace sparse {

#if defined(SPARQ_AVX2)
constexpr int NQ = 2;         // vectors of a block of queries
#else
constexpr int NQ = 4;
#endif
constexpr int ROWS_TOGETHER = 6; // so that the sums of so many rows, a vector of each query and one of a row fit the registers
constexpr int BLOCK_Q  = NQ*W;
constexpr int BLOCK_KV = 64;  // positions

// some queries, and what attention knows of each after some positions: the sum of p*v, the largest logit m, and the sum of p
struct query_block {
    int     n;   // how many vectors are in use: 1, 2 or NQ
    float * q;   // [d_k][BLOCK_Q]  times the scale
    float * acc; // [d_v][BLOCK_Q]
    float * m;   // [BLOCK_Q]
    float * l;   // [BLOCK_Q]
};

// c[i] = f*c[i] + sum_j a[i*step_i + j*step_j]*b[j], j < n, for N rows i and V vectors of queries; without f the sum alone.
// HIDES: terms where bias[j] is -inf are left out, whatever a holds
template <int N, int V, bool HIDES>
static SPARQ_NOINLINE void mul_add_block(float * c, const float * f, const float * a, int64_t step_i, int64_t step_j, const float * b, int n,
        const float * bias) {
    vf x[N][V];
    SPARQ_UNROLL
    for (int i = 0; i < N; ++i) {
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            x[i][v] = set1(0.0f);
        }
    }
    for (int j = 0; j < n; ++j) {
        vf y[V];
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            y[v] = load(b + j*BLOCK_Q + v*W);
        }
        SPARQ_UNROLL
        for (int i = 0; i < N; ++i) {
            const vf aij = set1(a[i*step_i + j*step_j]);
            SPARQ_UNROLL
            for (int v = 0; v < V; ++v) {
                const vf sum = fma(aij, y[v], x[i][v]);
                x[i][v] = HIDES ? select(eq(load(bias + j*BLOCK_Q + v*W), set1(-INFINITY)), x[i][v], sum) : sum;
            }
        }
    }
    SPARQ_UNROLL
    for (int i = 0; i < N; ++i) {
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            float * to = c + i*BLOCK_Q + v*W;
            store(to, f ? fma(load(f + v*W), load(to), x[i][v]) : x[i][v]);
        }
    }
}

// the same for any number of rows; bias == NULL means that nothing is hidden
template <int V>
static inline void mul_add(float * c, int n_row, const float * f, const float * a, int64_t step_i, int64_t step_j, const float * b, int n,
        const float * bias) {
    if (bias) {
        for (int i = 0; i < n_row; ++i) {
            mul_add_block<1, V, true>(c + i*BLOCK_Q, f, a + i*step_i, step_i, step_j, b, n, bias);
        }
        return;
    }
    for_blocks<ROWS_TOGETHER>(n_row, [&](auto N, int i) {
        mul_add_block<N(), V, false>(c + i*BLOCK_Q, f, a + i*step_i, step_i, step_j, b, n, nullptr);
    });
}

// x.m = m, the largest logits now; f: what earlier numerators count now. m becomes what logits are taken less
template <int V>
static SPARQ_INLINE void raise_max(const query_block & x, vf * m, float * f) {
    SPARQ_UNROLL
    for (int v = 0; v < V; ++v) {
        const vf old = load(x.m + v*W);
        store(x.m + v*W, m[v]);
        m[v] = select(eq(m[v], set1(-INFINITY)), set1(0.0f), m[v]); // nothing seen yet
        store(f + v*W, exp(sub(old, m[v])));
    }
}

// s[j] = exp(logit[j] - m), logit[j] = softcap(s[j]) + bias[j]: from the dot products of n positions, for V vectors of queries, in place. Updates m,
// the largest logit so far, and l of x; f [BLOCK_Q] is what earlier numerators count now.
//   bias [n][BLOCK_Q]: -inf hides, whatever s is; NULL: all zero
template <int V>
static inline void softmax_block(const query_block & x, float * s, float * f, const float * bias, int n, float softcap) {
    const vf inf = set1(-INFINITY);
    vf m[V], sum[V];
    SPARQ_UNROLL
    for (int v = 0; v < V; ++v) {
        m[v]   = load(x.m + v*W);
        sum[v] = set1(0.0f);
    }
    for (int j = 0; j < n; ++j) {
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            float * p = s + j*BLOCK_Q + v*W;
            vf y = load(p);
            if (softcap > 0.0f) {
                y = soft_cap(y, softcap);
            }
            if (bias) {
                const vf b = load(bias + j*BLOCK_Q + v*W);
                y = select(eq(b, inf), inf, add(y, b));
            }
            if (bias || softcap > 0.0f) {
                store(p, y);
            }
            m[v] = vmax(y, m[v]);
        }
    }
    raise_max<V>(x, m, f);
    for (int j = 0; j < n; ++j) {
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            float * p = s + j*BLOCK_Q + v*W;
            const vf y = exp(sub(load(p), m[v]));
            store(p, y);
            sum[v] = add(sum[v], y);
        }
    }
    SPARQ_UNROLL
    for (int v = 0; v < V; ++v) {
        store(x.l + v*W, fma(load(f + v*W), load(x.l + v*W), sum[v]));
    }
}

// calls f(V) for a block of queries of n vectors: 1, 2, or NQ, which has room for all
template <typename F>
static inline void with_vectors(int n, const F & f) {
    switch (n) {
        case 1:  f(std::integral_constant<int, 1>()); break;
        case 2:  f(std::integral_constant<int, 2>()); break;
        default: f(std::integral_constant<int, NQ>());
    }
}

// s[j] = q . k[j] for n positions and V vectors of queries, whose q is [d_k][BLOCK_Q]
template <int V>
static inline void dot_products_v(float * s, const float * q, const float * k, int d_k, int n) {
    constexpr int N = 32; // so many components are added up one after another; all of them would round twice as much
    float one[BLOCK_Q];
    std::fill(one, one + BLOCK_Q, 1.0f);
    for (int c = 0; c < d_k; c += N) {
        mul_add<V>(s, n, c > 0 ? one : nullptr, k + c, d_k, 1, q + c*BLOCK_Q, std::min(N, d_k - c), nullptr);
    }
}

static inline void dot_products(float * s, int n_vector, const float * q, const float * k, int d_k, int n) {
    with_vectors(n_vector, [&](auto V) { dot_products_v<V()>(s, q, k, d_k, n); });
}

// acc[c] = f*acc[c] + sum_t exp(sum_c q[c]*k[t, c] - m)*v[t, c]: adds n positions to the attention of V vectors of queries
//   k [n][d_k], v [n][d_v]; s [n][BLOCK_Q] is scratch, bias as above; finite: v has neither inf nor NaN
template <int V>
static inline void attend_block_v(const query_block & x, const float * k, int d_k, const float * v, int d_v, int n, bool finite, const float * bias,
        float softcap, float * s) {
    float f[BLOCK_Q];
    dot_products_v<V>(s, x.q, k, d_k, n);
    softmax_block<V>(x, s, f, bias, n, softcap);
    mul_add<V>(x.acc, d_v, f, v, 1, d_v, s, n, finite ? nullptr : bias);
}

static inline void attend_block(const query_block & x, const float * k, int d_k, const float * v, int d_v, int n, bool finite, const float * bias,
        float softcap, float * s) {
    with_vectors(x.n, [&](auto V) { attend_block_v<V()>(x, k, d_k, v, d_v, n, finite, bias, softcap, s); });
}

// adds what y knows of the same queries after other positions
static inline void merge(const query_block & x, const query_block & y, int d_v) {
    for (int v = 0; v < x.n; ++v) {
        const vf m = load(x.m + v*W), m_y = load(y.m + v*W), most = vmax(m_y, m);
        const vf at = select(eq(most, set1(-INFINITY)), set1(0.0f), most); // nothing seen by either
        const vf f = exp(sub(m, at)), f_y = exp(sub(m_y, at));
        store(x.m + v*W, most);
        store(x.l + v*W, fma(f, load(x.l + v*W), mul(f_y, load(y.l + v*W))));
        for (int c = 0; c < d_v; ++c) {
            float * acc = x.acc + c*BLOCK_Q + v*W;
            store(acc, fma(f, load(acc), mul(f_y, load(y.acc + c*BLOCK_Q + v*W))));
        }
    }
}

// has x [n] neither inf nor NaN?
static inline bool is_finite(const float * x, int n) {
    vf zero = set1(0.0f);
    int i = 0;
    for (; i + W <= n; i += W) {
        zero = fma(load(x + i), set1(0.0f), zero);
    }
    if (i < n) {
        zero = fma(load_n(x + i, n - i), set1(0.0f), zero);
    }
    return reduce_add(zero) == 0.0f;
}

} // namespace sparse
