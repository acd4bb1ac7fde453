#pragma once

// The same as sparse-prefill.h with products of few bits, where a block of queries sees all of a block of positions.
//
// q . k is a sum of products of 8-bit numbers: of q, with a scale per query, and of K less the mean of the block, with a scale per position. The
// mean's own share of the logits is added in f32, so that it does not cost K its precision (arXiv 2410.02367 takes one mean for all positions).
// p*v is a sum of products of bf16 numbers, and the sum of p adds what is left of p after the rounding. All sums are in f32 or whole numbers.
//
// Needs AVX-512 with VNNI and BF16; elsewhere there is no such path, and PREFILL remains in f32.

#include "sparse-prefill.h"

#if defined(SPARQ_AVX512) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define SPARQ_PREFILL_FAST
#endif

namespace sparse {

constexpr int N_BYTE = 4; // so many components of a query lie side by side, a product of VNNI

// components of a query, rounded up to whole products
static inline int padded(int d_k) { return (d_k + N_BYTE - 1)/N_BYTE*N_BYTE; }

// queries of a query_block in 8 bits
struct query_bytes {
    uint8_t * q;     // [padded(d_k)/N_BYTE][BLOCK_Q][N_BYTE]  round(q/scale) + 128
    float   * scale; // [BLOCK_Q]
};

// BLOCK_KV positions of K and V
struct kv_bytes {
    int8_t   * k;     // [BLOCK_KV][padded(d_k)]  round((k - mean)/scale)
    float    * scale; // [BLOCK_KV]
    int32_t  * start; // [BLOCK_KV]  -128*(the sum of k): what the 128 of the queries add too much
    float    * mean;  // [d_k]
    uint32_t * v;     // [BLOCK_KV/2][d_v]  two positions: bf16, the first one in the lower half
};

#if defined(SPARQ_PREFILL_FAST)

static inline void make_query_bytes(const query_block & x, int d_k, const query_bytes & to) {
    for (int v = 0; v < NQ; ++v) {
        vf most = set1(0.0f);
        for (int c = 0; c < d_k; ++c) {
            most = vmax(vabs(load(x.q + c*BLOCK_Q + v*W)), most);
        }
        store(to.scale + v*W, mul(most, set1(1.0f/127.0f)));
        const vf by = select(eq(most, set1(0.0f)), set1(0.0f), div(set1(127.0f), most));
        for (int c = 0; c < d_k; c += N_BYTE) {
            __m512i bytes = _mm512_setzero_si512();
            for (int i = 0; i < N_BYTE; ++i) {
                const vf y = c + i < d_k ? mul(load(x.q + (c + i)*BLOCK_Q + v*W), by) : set1(0.0f);
                const __m512i one = _mm512_add_epi32(_mm512_cvtps_epi32(y), _mm512_set1_epi32(128));
                bytes = _mm512_or_si512(bytes, _mm512_sll_epi32(one, _mm_cvtsi32_si128(8*i)));
            }
            _mm512_storeu_si512(to.q + (c*BLOCK_Q/N_BYTE + v*W)*N_BYTE, bytes);
        }
    }
}

// the bf16 that is nearest to x, in the upper half of each lane
static inline __m512i round_bf16(vf x) {
    // half of the last digit that stays, less one bit where that digit is even
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_and_si512(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), _mm512_set1_epi32((int) 0xffff0000));
}

// two bf16 per lane from what round_bf16 gives, the first one in the lower half
static inline __m512i pair_bf16(__m512i a, __m512i b) { return _mm512_or_si512(_mm512_srli_epi32(a, 16), b); }

// k [BLOCK_KV][d_k] and v [BLOCK_KV][d_v] must be finite; k is overwritten
static inline void make_kv_bytes(float * k, int d_k, const float * v, int d_v, const kv_bytes & to) {
    for (int c = 0; c < d_k; c += W) {
        const int n = std::min(W, d_k - c);
        vf sum = set1(0.0f);
        for (int j = 0; j < BLOCK_KV; ++j) {
            sum = add(sum, load_n(k + j*d_k + c, n));
        }
        const vf mean = mul(sum, set1(1.0f/BLOCK_KV));
        store_n(to.mean + c, mean, n);
        for (int j = 0; j < BLOCK_KV; ++j) {
            store_n(k + j*d_k + c, sub(load_n(k + j*d_k + c, n), mean), n);
        }
    }
    for (int j = 0; j < BLOCK_KV; ++j) {
        vf most = set1(0.0f);
        for (int c = 0; c < d_k; c += W) {
            most = vmax(vabs(load_n(k + j*d_k + c, std::min(W, d_k - c))), most);
        }
        const float range = reduce_max(most);
        const vf by = set1(range > 0.0f ? 127.0f/range : 0.0f);
        __m512i sum = _mm512_setzero_si512();
        for (int c = 0; c < d_k; c += W) {
            const int n = std::min(W, d_k - c), room = std::min(W, padded(d_k) - c);
            const __m512i x = _mm512_cvtps_epi32(mul(load_n(k + j*d_k + c, n), by));
            sum = _mm512_add_epi32(sum, x);
            _mm512_mask_cvtepi32_storeu_epi8(to.k + j*padded(d_k) + c, (__mmask16) ((1u << room) - 1), x);
        }
        to.scale[j] = range*(1.0f/127.0f);
        to.start[j] = -128*_mm512_reduce_add_epi32(sum);
    }
    for (int j = 0; j < BLOCK_KV; j += 2) {
        for (int c = 0; c < d_v; c += W) {
            const int n = std::min(W, d_v - c);
            const __m512i a = round_bf16(load_n(v + j*d_v + c, n)), b = round_bf16(load_n(v + (j + 1)*d_v + c, n));
            _mm512_mask_storeu_epi32(to.v + j/2*d_v + c, (__mmask16) ((1u << n) - 1), pair_bf16(a, b));
        }
    }
}

// gcc 12 keeps an array of __m512i in memory, because the products of VNNI take another type
typedef int32_t products __attribute__((vector_size(64)));

// s[j] = the logit of position j, for N positions and V vectors of queries; about: the logit of the mean
template <int N, int V>
static SPARQ_NOINLINE void score_bytes(float * s, const query_bytes & q, const kv_bytes & kv, int d_k, int j, const float * about) {
    products x[N][V];
    SPARQ_UNROLL
    for (int i = 0; i < N; ++i) {
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            x[i][v] = (products) _mm512_set1_epi32(kv.start[j + i]);
        }
    }
    const int8_t * k = kv.k + j*padded(d_k);
    for (int c = 0; c < d_k; c += N_BYTE) {
        __m512i y[V];
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            y[v] = _mm512_loadu_si512(q.q + (c*BLOCK_Q/N_BYTE + v*W)*N_BYTE);
        }
        SPARQ_UNROLL
        for (int i = 0; i < N; ++i) {
            int32_t four;
            memcpy(&four, k + i*padded(d_k) + c, sizeof(four));
            const __m512i z = _mm512_set1_epi32(four);
            SPARQ_UNROLL
            for (int v = 0; v < V; ++v) {
                x[i][v] = (products) _mm512_dpbusd_epi32((__m512i) x[i][v], y[v], z);
            }
        }
    }
    SPARQ_UNROLL
    for (int i = 0; i < N; ++i) {
        const vf scale = set1(kv.scale[j + i]);
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            store(s + (j + i)*BLOCK_Q + v*W, fma(_mm512_cvtepi32_ps((__m512i) x[i][v]), mul(scale, load(q.scale + v*W)), load(about + v*W)));
        }
    }
}

// e^x for x <= 0, with a relative error of at most 2^-13
static inline vf exp_few(vf x) {
    vf f;
    const vf n = split_2n(mul(x, set1(1.44269504f)), f);
    vf p = fma(f, set1(0.07802371f), set1(0.22606677f)); // fitted to the least relative error on [0, 1]
    p = fma(p, f, set1(0.69583451f));
    p = fma(p, f, set1(0.99992503f));
    return mul_2n(p, n);
}

// p[j/2] = exp(s[j] - m) and exp(s[j + 1] - m) as bf16; m, l and f as in softmax_block
template <int V>
static inline void softmax_pairs(const query_block & x, const float * s, uint32_t * p, float * f) {
    const vf inf = set1(-INFINITY);
    vf m[V], sum[V];
    SPARQ_UNROLL
    for (int v = 0; v < V; ++v) {
        m[v] = load(x.m + v*W);
        sum[v] = set1(0.0f);
    }
    for (int j = 0; j < BLOCK_KV; ++j) {
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            m[v] = vmax(load(s + j*BLOCK_Q + v*W), m[v]);
        }
    }
    SPARQ_UNROLL
    for (int v = 0; v < V; ++v) {
        const vf old = load(x.m + v*W);
        store(x.m + v*W, m[v]);
        m[v] = select(eq(m[v], inf), set1(0.0f), m[v]); // nothing seen yet
        store(f + v*W, exp(sub(old, m[v])));
    }
    for (int j = 0; j < BLOCK_KV; j += 2) {
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            const __m512i a = round_bf16(exp_few(sub(load(s + j*BLOCK_Q + v*W), m[v])));
            const __m512i b = round_bf16(exp_few(sub(load(s + (j + 1)*BLOCK_Q + v*W), m[v])));
            sum[v] = add(sum[v], add(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
            _mm512_storeu_si512(p + j/2*BLOCK_Q + v*W, pair_bf16(a, b));
        }
    }
    SPARQ_UNROLL
    for (int v = 0; v < V; ++v) {
        store(x.l + v*W, fma(load(f + v*W), load(x.l + v*W), sum[v]));
    }
}

// acc[c] = f*acc[c] + sum_j p[j]*v[j, c] for N components and V vectors of queries
template <int N, int V>
static SPARQ_NOINLINE void add_values(float * acc, const float * f, const uint32_t * v, int d_v, const uint32_t * p) {
    vf x[N][V];
    SPARQ_UNROLL
    for (int i = 0; i < N; ++i) {
        SPARQ_UNROLL
        for (int u = 0; u < V; ++u) {
            x[i][u] = set1(0.0f);
        }
    }
    for (int j = 0; j < BLOCK_KV/2; ++j) {
        __m512i y[V];
        SPARQ_UNROLL
        for (int u = 0; u < V; ++u) {
            y[u] = _mm512_loadu_si512(p + j*BLOCK_Q + u*W);
        }
        SPARQ_UNROLL
        for (int i = 0; i < N; ++i) {
            const __m512i z = _mm512_set1_epi32((int) v[j*d_v + i]);
            SPARQ_UNROLL
            for (int u = 0; u < V; ++u) {
                x[i][u] = _mm512_dpbf16_ps(x[i][u], (__m512bh) y[u], (__m512bh) z);
            }
        }
    }
    SPARQ_UNROLL
    for (int i = 0; i < N; ++i) {
        SPARQ_UNROLL
        for (int u = 0; u < V; ++u) {
            float * to = acc + i*BLOCK_Q + u*W;
            store(to, fma(load(f + u*W), load(to), x[i][u]));
        }
    }
}

// adds BLOCK_KV positions to the attention of V vectors of queries. hides [BLOCK_Q]: -inf for a query that sees none of them, else 0;
// s [BLOCK_KV][BLOCK_Q] and p [BLOCK_KV/2][BLOCK_Q] are scratch
template <int V>
static inline void attend_bytes_v(const query_block & x, const query_bytes & q, const kv_bytes & kv, int d_k, int d_v, const float * hides, float softcap,
        float * s, uint32_t * p) {
    constexpr int N = 6; // as in mul_add
    float f[BLOCK_Q], about[BLOCK_Q];
    mul_add_block<1, V, false>(about, nullptr, kv.mean, 0, 1, x.q, d_k, nullptr);
    if (softcap <= 0.0f) {
        for (int v = 0; v < V; ++v) {
            store(about + v*W, add(load(about + v*W), load(hides + v*W)));
        }
    }
    int j = 0;
    for (; j + N <= BLOCK_KV; j += N) {
        score_bytes<N, V>(s, q, kv, d_k, j, about);
    }
    for (; j < BLOCK_KV; j += 2) {
        score_bytes<2, V>(s, q, kv, d_k, j, about);
    }
    for (j = 0; j < BLOCK_KV && softcap > 0.0f; ++j) {
        for (int v = 0; v < V; ++v) {
            float * y = s + j*BLOCK_Q + v*W;
            store(y, add(soft_cap(load(y), softcap), load(hides + v*W)));
        }
    }
    softmax_pairs<V>(x, s, p, f);
    int c = 0;
    for (; c + N <= d_v; c += N) {
        add_values<N, V>(x.acc + c*BLOCK_Q, f, kv.v + c, d_v, p);
    }
    for (; c + 2 <= d_v; c += 2) {
        add_values<2, V>(x.acc + c*BLOCK_Q, f, kv.v + c, d_v, p);
    }
    for (; c < d_v; ++c) {
        add_values<1, V>(x.acc + c*BLOCK_Q, f, kv.v + c, d_v, p);
    }
}

static inline void attend_bytes(const query_block & x, const query_bytes & q, const kv_bytes & kv, int d_k, int d_v, const float * hides, float softcap,
        float * s, uint32_t * p) {
    const auto attend = x.n == 1 ? attend_bytes_v<1> : x.n == 2 ? attend_bytes_v<2> : attend_bytes_v<NQ>;
    attend(x, q, kv, d_k, d_v, hides, softcap, s, p);
}

#endif

} // namespace sparse
