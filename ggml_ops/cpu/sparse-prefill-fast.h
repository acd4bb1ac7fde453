#pragma once

// The same as sparse-prefill.h with products of few bits, where a block of queries sees all of a block of positions.
//
// q . k is a sum of products of 8-bit numbers: of q, with a scale per query, and of K less the mean of the block, with a scale per position. The
// mean's own share of the logits is added in f32, so that it does not cost K its precision (arXiv 2410.02367 takes one mean for all positions).
// p*v is a sum of products of bf16 numbers, and the sum of p adds what is left of p after the rounding. All sums are in f32 or whole numbers.
//
// Needs an instruction that multiplies four pairs of 8-bit numbers and adds them: AVX-512 or AVX with VNNI, or NEON's dot product. Products with V
// are in f32 where none multiplies pairs of bf16. Elsewhere there is no such path, and PREFILL remains in f32; -DSPARQ_SCALAR_FAST adds one in plain
// code, for tests.

#include "sparse-prefill.h"
#include "sparse-rows.h"
#include "sparse-vec-int.h"

#if (defined(SPARQ_AVX512) && defined(__AVX512VNNI__)) || (defined(SPARQ_AVX2) && defined(__AVXVNNI__)) || \
        (defined(SPARQ_NEON) && defined(__ARM_FEATURE_DOTPROD)) || defined(SPARQ_SCALAR_FAST)
#define SPARQ_PREFILL_FAST
#endif
#if defined(SPARQ_PREFILL_FAST) && (defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)) && !defined(SPARQ_AVX2) && \
        !defined(SPARQ_SCALAR)
#define SPARQ_PREFILL_BF16
#endif

namespace sparse {

constexpr int N_BYTE = 4; // so many components of a query lie side by side, those of one instruction
#if defined(SPARQ_AVX512) || defined(SPARQ_AVX2)
constexpr int OFFSET = 128; // VNNI takes one of the two without a sign
#else
constexpr int OFFSET = 0;
#endif

// components of a query, rounded up to whole products
static inline int padded(int d_k) { return (d_k + N_BYTE - 1)/N_BYTE*N_BYTE; }

// queries of a query_block in 8 bits
struct query_bytes {
    uint8_t * q;     // [padded(d_k)/N_BYTE][BLOCK_Q][N_BYTE]  round(q/scale) + OFFSET
    float   * scale; // [BLOCK_Q]
};

// BLOCK_KV positions of K and V
struct kv_bytes {
    int8_t   * k;     // [BLOCK_KV][padded(d_k)]  round((k - mean)/scale)
    float    * scale; // [BLOCK_KV]
    int32_t  * start; // [BLOCK_KV]  -OFFSET*(the sum of k): what the OFFSET of the queries adds too much
    float    * mean;  // [d_k]
    uint32_t * v;     // [BLOCK_KV/2][d_v]  two positions: bf16, the first one in the lower half; where bf16 can be multiplied
};

#if defined(SPARQ_PREFILL_FAST)

// acc + the products of the four bytes of each lane, those of k with a sign
static inline vi dot4(vi acc, vi q, vi k) {
#if defined(SPARQ_AVX512) || defined(SPARQ_AVX2)
    return dot_bytes(acc, q, k);
#elif defined(SPARQ_NEON)
    return vdotq_s32(acc, vreinterpretq_s8_s32(q), vreinterpretq_s8_s32(k));
#else
    for (int i = 0; i < N_BYTE; ++i) {
        acc += (int8_t) ((uint32_t) q >> 8*i)*(int8_t) ((uint32_t) k >> 8*i);
    }
    return acc;
#endif
}

// the lowest byte of each lane, moved up by i bytes
static inline vi low_bytes(vi x, int i) { return (x & set1_int(0xff)) << set1_int(8*i); }

#if defined(SPARQ_PREFILL_BF16)
// The bits of x, rounded to bf16; the others are 0: half of the last digit that stays is added, less one bit where that digit is even
static inline vi bf16_bits(vf x) {
    const vi bits = as_bits(x);
    return (bits + set1_int(0x7fff) + ((bits >> 16) & set1_int(1))) & set1_int((int) 0xffff0000);
}
// two bf16 per lane from those, the first one in the lower half
static inline vi pair_bf16(vi a, vi b) { return ((a >> 16) & set1_int(0xffff)) | b; }
#endif

// ---- numbers of few bits ----

constexpr float LEAST = 1e-30f; // a largest magnitude below this counts as 0, so that 127 over it is finite

// most loads and stores are of whole vectors
static inline vf load_up_to(const float * p, int n) { return n == W ? load(p) : load_n(p, n); }
static inline void store_up_to(float * p, vf x, int n) {
    if (n == W) {
        store(p, x);
    } else {
        store_n(p, x, n);
    }
}

static inline void make_query_bytes(const query_block & x, int d_k, const query_bytes & to) {
    for (int v = 0; v < NQ; ++v) {
        vf most = set1(0.0f);
        for (int c = 0; c < d_k; ++c) {
            most = vmax(vabs(load(x.q + c*BLOCK_Q + v*W)), most);
        }
        store(to.scale + v*W, mul(most, set1(1.0f/127.0f)));
        const vf by = select(ge(most, set1(LEAST)), div(set1(127.0f), most), set1(0.0f));
        for (int c = 0; c < d_k; c += N_BYTE) {
            vi bytes = set1_int(0);
            for (int i = 0; i < N_BYTE; ++i) {
                const vf y = c + i < d_k ? round_even(mul(load(x.q + (c + i)*BLOCK_Q + v*W), by)) : set1(0.0f);
                bytes = bytes | low_bytes(to_int(y) + set1_int(OFFSET), i);
            }
            store_int(to.q + (c*BLOCK_Q/N_BYTE + v*W)*N_BYTE, bytes);
        }
    }
}

// W elements of a row from c on, or the last n < W of it, with zeros behind them
template <typename T>
static SPARQ_INLINE vf vector_of(const char * row, int c, int n) {
    return n == W ? span<T>(row, c).vec(c % span<T>::SIZE/W) : span<T>::tail(row, c, n);
}

// calls f(i, c, n) for N vectors of a row of d elements: vector i has the n elements from c on. Those after the row are left out
constexpr int N_COLUMN = 8; // so many sums of columns fit the registers
template <typename F>
static SPARQ_INLINE void for_columns(int c0, int d, const F & f) {
    SPARQ_UNROLL
    for (int i = 0; i < N_COLUMN; ++i) {
        if (c0 + i*W < d) {
            f(i, c0 + i*W, std::min(W, d - c0 - i*W));
        }
    }
}

// BLOCK_KV rows of K of any type, nb bytes apart, become those of kv_bytes: they are read twice, and nothing is written but the result. Prefetches the
// rows that lie `ahead` bytes behind, unless it is 0. False: something is not finite, and the result is none
template <int D, typename T>
static SPARQ_NOINLINE bool make_k_bytes_d(const char * k, size_t nb, int64_t ahead, int any_d, const kv_bytes & to) {
    const int d = D > 0 ? D : any_d;
    vf zero = set1(0.0f);
    for (int c0 = 0; c0 < d; c0 += N_COLUMN*W) {
        vf sum[N_COLUMN];
        for_columns(c0, d, [&](int i, int, int) { sum[i] = set1(0.0f); });
        for (int j = 0; j < BLOCK_KV; ++j) {
            const char * row = k + j*nb;
            if (ahead && c0 == 0) {
                prefetch_bytes(address_ahead(row, ahead), row_bytes<T>(d));
            }
            for_columns(c0, d, [&](int i, int c, int n) { sum[i] = add(sum[i], vector_of<T>(row, c, n)); });
        }
        for_columns(c0, d, [&](int i, int c, int n) {
            const vf mean = mul(sum[i], set1(1.0f/BLOCK_KV));
            zero = fma(mean, set1(0.0f), zero);
            store_up_to(to.mean + c, mean, n);
        });
    }
    if (reduce_add(zero) != 0.0f) {
        return false;
    }
    for (int j = 0; j < BLOCK_KV; ++j) {
        const char * row = k + j*nb;
        const auto less_mean = [&](int c, int n) { return sub(vector_of<T>(row, c, n), load_up_to(to.mean + c, n)); };
        vf most = set1(0.0f);
        SPARQ_UNROLL
        for (int c = 0; c < d; c += W) {
            most = vmax(vabs(less_mean(c, std::min(W, d - c))), most);
        }
        const float range = reduce_max(most);
        const vf by = set1(range >= LEAST ? 127.0f/range : 0.0f);
        vf sum = set1(0.0f); // of whole numbers, exactly
        SPARQ_UNROLL
        for (int c = 0; c < padded(d); c += W) {
            const vf x = c < d ? round_even(mul(less_mean(c, std::min(W, d - c)), by)) : set1(0.0f);
            sum = add(sum, x);
            store_low(to.k + j*padded(d) + c, to_int(x), std::min(W, padded(d) - c));
        }
        to.scale[j] = range*(1.0f/127.0f);
        to.start[j] = -OFFSET*(int32_t) reduce_add(sum);
    }
    return true;
}

template <typename T>
static bool make_k_bytes(const char * k, size_t nb, int64_t ahead, int d, const kv_bytes & to) {
    bool res = false;
    with_known_size(d, [&](auto D) { res = make_k_bytes_d<D(), T>(k, nb, ahead, d, to); });
    return res;
}

// The same with V. plain [BLOCK_KV][d]: V as f32 where bf16 cannot be multiplied
template <int D, typename T>
static SPARQ_NOINLINE bool make_v_pairs_d(const char * v, size_t nb, int64_t ahead, int any_d, const kv_bytes & to, float * plain) {
    const int d = D > 0 ? D : any_d;
    vf zero = set1(0.0f);
    for (int c0 = 0; c0 < d; c0 += N_COLUMN*W) {
        vf zeros[N_COLUMN];
        for_columns(c0, d, [&](int i, int, int) { zeros[i] = set1(0.0f); });
        for (int j = 0; j < BLOCK_KV; j += 2) {
            const char * row = v + j*nb;
            if (ahead && c0 == 0) {
                prefetch_bytes(address_ahead(row, ahead), row_bytes<T>(d));
                prefetch_bytes(address_ahead(row + nb, ahead), row_bytes<T>(d));
            }
            for_columns(c0, d, [&](int i, int c, int n) {
                const vf a = vector_of<T>(row, c, n), b = vector_of<T>(row + nb, c, n);
                zeros[i] = fma(add(a, b), set1(0.0f), zeros[i]);
#if defined(SPARQ_PREFILL_BF16)
                GGML_UNUSED(plain);
                store_up_to((float *) to.v + j/2*d + c, as_float(pair_bf16(bf16_bits(a), bf16_bits(b))), n);
#else
                GGML_UNUSED(to);
                store_up_to(plain + j*d + c, a, n);
                store_up_to(plain + (j + 1)*d + c, b, n);
#endif
            });
        }
        for_columns(c0, d, [&](int i, int, int) { zero = add(zero, zeros[i]); });
    }
    return reduce_add(zero) == 0.0f;
}

template <typename T>
static bool make_v_pairs(const char * v, size_t nb, int64_t ahead, int d, const kv_bytes & to, float * plain) {
    bool res = false;
    with_known_size(d, [&](auto D) { res = make_v_pairs_d<D(), T>(v, nb, ahead, d, to, plain); });
    return res;
}

// s[j] = the logit of position j, for N positions and V vectors of queries; about: the logit of the mean
template <int N, int V>
static SPARQ_NOINLINE void score_bytes(float * s, const query_bytes & q, const kv_bytes & kv, int d_k, int j, const float * about) {
    vi x[N][V];
    SPARQ_UNROLL
    for (int i = 0; i < N; ++i) {
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            x[i][v] = set1_int(kv.start[j + i]);
        }
    }
    const int8_t * k = kv.k + j*padded(d_k);
    for (int c = 0; c < d_k; c += N_BYTE) {
        vi y[V];
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            y[v] = load_int(q.q + (c*BLOCK_Q/N_BYTE + v*W)*N_BYTE);
        }
        SPARQ_UNROLL
        for (int i = 0; i < N; ++i) {
            const vi z = four(k + i*padded(d_k) + c);
            SPARQ_UNROLL
            for (int v = 0; v < V; ++v) {
                x[i][v] = dot4(x[i][v], y[v], z);
            }
        }
    }
    SPARQ_UNROLL
    for (int i = 0; i < N; ++i) {
        const vf scale = set1(kv.scale[j + i]);
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            store(s + (j + i)*BLOCK_Q + v*W, fma(to_float(x[i][v]), mul(scale, load(q.scale + v*W)), load(about + v*W)));
        }
    }
}

#if defined(SPARQ_PREFILL_BF16)
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
    raise_max<V>(x, m, f);
    for (int j = 0; j < BLOCK_KV; j += 2) {
        SPARQ_UNROLL
        for (int v = 0; v < V; ++v) {
            const vi a = bf16_bits(exp_few(sub(load(s + j*BLOCK_Q + v*W), m[v])));
            const vi b = bf16_bits(exp_few(sub(load(s + (j + 1)*BLOCK_Q + v*W), m[v])));
            sum[v] = add(sum[v], add(as_float(a), as_float(b)));
            store_int(p + j/2*BLOCK_Q + v*W, pair_bf16(a, b));
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
        vi y[V];
        SPARQ_UNROLL
        for (int u = 0; u < V; ++u) {
            y[u] = load_int(p + j*BLOCK_Q + u*W);
        }
        SPARQ_UNROLL
        for (int i = 0; i < N; ++i) {
            const vi z = set1_int((int) v[j*d_v + i]);
            SPARQ_UNROLL
            for (int u = 0; u < V; ++u) {
                x[i][u] = dot_bf16(x[i][u], y[u], z);
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

#endif

// adds BLOCK_KV positions to the attention of V vectors of queries. v [BLOCK_KV][d_v]: V where bf16 cannot be multiplied; hides [BLOCK_Q]: -inf for a query
// that sees none of them, else 0; s [BLOCK_KV][BLOCK_Q] and p [BLOCK_KV/2][BLOCK_Q] are scratch
template <int V>
static inline void attend_bytes_v(const query_block & x, const query_bytes & q, const kv_bytes & kv, int d_k, const float * v, int d_v,
        const float * hides, float softcap, float * s, uint32_t * p) {
    float f[BLOCK_Q], about[BLOCK_Q];
    mul_add_block<1, V, false>(about, nullptr, kv.mean, 0, 1, x.q, d_k, nullptr);
    if (softcap <= 0.0f) {
        for (int i = 0; i < V; ++i) {
            store(about + i*W, add(load(about + i*W), load(hides + i*W)));
        }
    }
    for_blocks<ROWS_TOGETHER>(BLOCK_KV, [&](auto N, int j) { score_bytes<N(), V>(s, q, kv, d_k, j, about); });
    for (int j = 0; j < BLOCK_KV && softcap > 0.0f; ++j) {
        for (int i = 0; i < V; ++i) {
            float * y = s + j*BLOCK_Q + i*W;
            store(y, add(soft_cap(load(y), softcap), load(hides + i*W)));
        }
    }
#if defined(SPARQ_PREFILL_BF16)
    GGML_UNUSED(v);
    softmax_pairs<V>(x, s, p, f);
    for_blocks<ROWS_TOGETHER>(d_v, [&](auto N, int c) { add_values<N(), V>(x.acc + c*BLOCK_Q, f, kv.v + c, d_v, p); });
#else
    GGML_UNUSED(p);
    softmax_block<V>(x, s, f, nullptr, BLOCK_KV, 0.0f);
    mul_add<V>(x.acc, d_v, f, v, 1, d_v, s, BLOCK_KV, nullptr);
#endif
}

static inline void attend_bytes(const query_block & x, const query_bytes & q, const kv_bytes & kv, int d_k, const float * v, int d_v,
        const float * hides, float softcap, float * s, uint32_t * p) {
    with_vectors(x.n, [&](auto V) { attend_bytes_v<V()>(x, q, kv, d_k, v, d_v, hides, softcap, s, p); });
}

#endif

} // namespace sparse
