#pragma once

// Rows of K and V: how each of their types is read, dot products with them, and how they are prefetched. ATTEND is made of these, and so
// is SCORE wherever it reads K itself.
//
// The arithmetic in this folder works on plain pointers and strides, without ggml tensors and threads. Strides called nb_* count bytes,
// those called ld_* count elements. ggml-sparse.h has the contracts, and ref/ has every step again, one float at a time.

#include "ggml-sparse.h"
#include "sparse-hadamard.h"
#include "sparse-vec.h"

#include <algorithm>

namespace sparse {

// the units of the contract, under short names
constexpr int GROUP = GGML_SPARSE_GROUP;
constexpr int SUM   = GGML_SPARSE_SUM;

// ---- the types of K and V ----

// The quantised types of K and V are made of blocks of 32 elements that share a scale: these are ggml's block_q8_0 and block_q4_0. An
// element of 4 bits stands for scale*(code - 8). The low halves of the bytes are the codes of elements 0 to 15, the high halves the rest.
struct q8_0 { uint16_t scale; int8_t  code[32]; };
struct q4_0 { uint16_t scale; uint8_t code[16]; };

// span<T>(row, c) stands for SIZE neighbouring elements of a row, beginning at element c; with blocks it is the block that c lies in.
// vec(j) is the j-th vector of them. tail(row, c, n) is a vector of the n < W elements from c on, with zeros behind them.
template <typename T>
struct span {
    static constexpr int SIZE = W;
    const T * p;

    span() = default;
    span(const char * row, int c) : p((const T *) row + c) {}
    vf vec(int) const { return load(p); }
    static vf tail(const char * row, int c, int n) { return load_n((const T *) row + c, n); }
};

static inline vf block_scale(uint16_t bits) {
#if defined(SPARQ_AVX512)
    return _mm512_cvtph_ps(_mm256_set1_epi16((short) bits));
#elif defined(SPARQ_AVX2)
    return _mm256_cvtph_ps(_mm_set1_epi16((short) bits));
#else
    return set1(to_f32(f16 { bits }));
#endif
}

template <>
struct span<q8_0> {
    static constexpr int SIZE = 32;
    const int8_t * code;
    vf scale;

    span() = default;
    span(const char * row, int c) {
        const q8_0 * b = (const q8_0 *) row + c/SIZE;
        code  = b->code;
        scale = block_scale(b->scale);
    }
    vf vec(int j) const {
#if defined(SPARQ_AVX512)
        return mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) (code + j*W)))), scale);
#elif defined(SPARQ_AVX2)
        return mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) (code + j*W)))), scale);
#else
        float x[W];
        for (int i = 0; i < W; ++i) {
            x[i] = code[j*W + i];
        }
        return mul(load(x), scale);
#endif
    }
    static vf tail(const char *, int, int) { return set1(0.0f); } // rows are whole blocks, so there is none
};

template <>
struct span<q4_0> {
    static constexpr int SIZE = 32;
    const uint8_t * code;
    vf scale; // with AVX-512 these are the 16 values that a code can stand for

    span() = default;
    span(const char * row, int c) {
        const q4_0 * b = (const q4_0 *) row + c/SIZE;
        code  = b->code;
        scale = block_scale(b->scale);
#if defined(SPARQ_AVX512)
        scale = mul(scale, sub(iota(), set1(8.0f)));
#endif
    }
    vf vec(int j) const {
#if defined(SPARQ_AVX512)
        const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) code));
        return _mm512_permutexvar_ps(j == 0 ? x : _mm512_srli_epi32(x, 4), scale); // the instruction looks at the lowest 4 bits only
#elif defined(SPARQ_AVX2)
        const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) (code + j % 2*W)));
        const __m256i y = j < 2 ? _mm256_and_si256(x, _mm256_set1_epi32(15)) : _mm256_srli_epi32(x, 4);
        return mul(_mm256_cvtepi32_ps(_mm256_sub_epi32(y, _mm256_set1_epi32(8))), scale);
#else
        float x[W];
        for (int i = 0; i < W; ++i) {
            const int n = j*W + i;
            x[i] = (float) ((n < 16 ? code[n] & 15 : code[n - 16] >> 4) - 8);
        }
        return mul(load(x), scale);
#endif
    }
    static vf tail(const char *, int, int) { return set1(0.0f); } // rows are whole blocks, so there is none
};

// bytes of n elements of a row
template <typename T> static inline size_t row_bytes(int64_t n) { return n*sizeof(T); }
template <> inline size_t row_bytes<q8_0>(int64_t n) { return n/32*sizeof(q8_0); }
template <> inline size_t row_bytes<q4_0>(int64_t n) { return n/32*sizeof(q4_0); }

// calls step(c) for each whole span of a row of d elements; returns where the tail begins. With D, which is d where it is known, there is
// no loop: what a loop adds to each iteration waits behind the rows that are still on their way (ATTEND at 1/8 takes 10 % longer)
template <int D, typename T, typename F>
static SPARQ_INLINE int for_each_span(int d, const F & step) {
    constexpr int N = span<T>::SIZE;
    int c = 0;
    if (D > 0) {
        SPARQ_UNROLL
        for (; c + N <= D; c += N) {
            step(c);
        }
    } else {
        for (; c + N <= d; c += N) {
            step(c);
        }
    }
    return c;
}

// calls f(D) with d where a head of that size has code of its own, else with 0
template <typename F>
static SPARQ_INLINE void with_known_size(int d, const F & f) {
    switch (d) {
        case 128: f(std::integral_constant<int, 128>()); break;
        case 64:  f(std::integral_constant<int, 64>());  break;
        default:  f(std::integral_constant<int, 0>());
    }
}

// res[t, c] = x[t, c] as f32, for n positions. n_rot > 0: K is rotated, and multiplying again by the Hadamard matrix undoes it
template <typename T>
static void load_rows(float * res, const char * x, size_t nb_pos, int n, int d, int n_rot) {
    for (int t = 0; t < n; ++t, res += d) {
        const char * row = x + t*nb_pos;
        const int end = for_each_span<0, T>(d, [&](int c) {
            const span<T> y(row, c);
            for (int j = 0; j < span<T>::SIZE/W; ++j) {
                store(res + c + j*W, y.vec(j));
            }
        });
        if (end < d) {
            store_n(res + end, span<T>::tail(row, end, d - end), d - end);
        }
        ggml_sparse_hadamard(res, d, n_rot);
    }
}

// sum[c] += sum_t x[t, c], over n positions
template <typename T>
static void sum_positions(float * sum, const char * x, size_t nb_pos, int n, int d) {
    for (int t = 0; t < n; ++t) {
        const char * row = x + t*nb_pos;
        const int end = for_each_span<0, T>(d, [&](int c) {
            const span<T> y(row, c);
            for (int j = 0; j < span<T>::SIZE/W; ++j) {
                store(sum + c + j*W, add(load(sum + c + j*W), y.vec(j)));
            }
        });
        if (end < d) {
            store_n(sum + end, add(load_n(sum + end, d - end), span<T>::tail(row, end, d - end)), d - end);
        }
    }
}

// ---- gathered rows, and what is prefetched while they are used ----

// Gathered rows are given by their addresses x [n]; row i begins at x[i] + o. The list must be readable up to a multiple of ROW_BLOCK, so
// its last entry is repeated. A multiple of every W.
constexpr int ROW_BLOCK = 16;

// how many rows before their use K and V are prefetched: a block of rows is too short for the hardware prefetcher to run ahead
constexpr int ROWS_AHEAD = 2*ROW_BLOCK;

// the same in bytes, where all positions are read in the order of memory
constexpr int64_t BYTES_AHEAD = 32*1024;

// An address to be prefetched, n bytes behind p. It may lie behind the buffer, where a pointer must not point: so it is made of a whole number
static inline const char * address_ahead(const char * p, int64_t n) { return (const char *) ((uintptr_t) p + n); }

// Always inlined, and so must be its callers that do nothing else: gcc drops calls of a function that only prefetches
static SPARQ_INLINE void prefetch_bytes(const char * p, size_t size) {
    for (size_t o = 0; o < size; o += 64) {
        prefetch(p + o);
    }
}

// While N rows are used, as much is prefetched, a part of it with each span of columns. The next two types say what; x may be null.

// As many other gathered rows, and each of them at once. To spread their lines evenly instead makes GQA-4 at 1/8 take 13 to 19 % longer
struct prefetch_rows {
    const char * const * x;

    prefetch_rows from(int i, int64_t) const { return { x ? x + i : x }; }

    template <int N, int D, typename T>
    SPARQ_INLINE void part(int c, int d) const {
        constexpr int N_STEP = D > 0 ? D/span<T>::SIZE : 1;
        SPARQ_UNROLL
        for (int i = 0; i < N; ++i) {
            if (i*N_STEP/N == c/span<T>::SIZE) {
                prefetch_bytes(x[i], row_bytes<T>(d));
            }
        }
    }
};

// As many bytes in the order of memory, spread evenly. Whole rows at once make dense GQA-4 take 5 % longer
struct prefetch_stream {
    const char * x;

    prefetch_stream from(int i, int64_t size) const { return { x ? x + i*size : x }; }

    template <int N, int D, typename T>
    SPARQ_INLINE void part(int c, int) const {
        const int64_t o0 = N*row_bytes<T>(c), o1 = o0 + N*row_bytes<T>(span<T>::SIZE);
        for (int64_t o = (o0 + 63)/64*64; o < o1; o += 64) {
            prefetch(x + o);
        }
    }
};

// ---- dot products with gathered rows: s[h, i] = sum_c q[h, c]*x[i, c] ----
//
// dot_rows_block takes HB heads and up to W rows, dot_rows_d any number of either, with the head size D where it is known when compiling, else 0,
// and dot_rows chooses D.

// How many rows are used together: they share the loads of q and of the sums. A single head does better with one row after another, because
// lines of several rows in turn are read more slowly (MHA at 1/8 by one thread: 8 to 13 %)
constexpr int rows_together(int n_head) { return n_head == 1 ? 1 : N_ACC/4 < W ? N_ACC/4 : W; }

// calls f(c, x) for each vector of the span at c, where x are the elements of N rows from column c on
template <int N, typename T, typename F>
static SPARQ_INLINE void for_vectors(const char * const * row, int c, const F & f) {
    span<T> y[N];
    SPARQ_UNROLL
    for (int i = 0; i < N; ++i) {
        y[i] = span<T>(row[i], c);
    }
    SPARQ_UNROLL
    for (int v = 0; v < span<T>::SIZE/W; ++v) {
        vf x[N];
        SPARQ_UNROLL
        for (int i = 0; i < N; ++i) {
            x[i] = y[i].vec(v);
        }
        f(c + v*W, x);
    }
}

// With D, d and the distance between the heads of q are both D. Not inlined: its pointers would no longer fit the registers (2x slower)
template <int HB, int D, typename T, typename P>
static SPARQ_NOINLINE void dot_rows_block(float * s, int64_t ld_s, const float * q, int64_t any_ld_q, const char * const * x, int64_t o, int n,
        int any_d, P ahead) {
    const int      d       = D > 0 ? D : any_d;
    const int64_t  ld_q    = D > 0 ? D : any_ld_q;
    constexpr int  N       = rows_together(HB);
    constexpr bool AT_ONCE = HB*N == W; // all sums together fill one vector
    constexpr int  CHAIN   = 16;        // with one lane, 16 columns are summed and then added: d roundings in a row would be too many
    vf part[HB][W];
    for (int j = 0; j < W && j < n; j += N) {
        const char * row[N];
        SPARQ_UNROLL
        for (int i = 0; i < N; ++i) {
            row[i] = x[j + i] + o;
        }
        vf a[HB*N], chains[HB*N];
        SPARQ_UNROLL
        for (int i = 0; i < HB*N; ++i) {
            a[i] = chains[i] = set1(0.0f);
        }
        const int end = for_each_span<D, T>(d, [&](int c) {
            if (ahead.x) {
                ahead.from(j, row_bytes<T>(d)).template part<N, D, T>(c, d);
            }
            for_vectors<N, T>(row, c, [&](int cv, const vf * y) {
                SPARQ_UNROLL
                for (int h = 0; h < HB; ++h) {
                    const vf qx = in_register(load(q + h*ld_q + cv));
                    SPARQ_UNROLL
                    for (int i = 0; i < N; ++i) {
                        a[h*N + i] = fma(qx, y[i], a[h*N + i]);
                    }
                }
            });
            if (W == 1 && (c + span<T>::SIZE) % CHAIN == 0) {
                for (int i = 0; i < HB*N; ++i) {
                    chains[i] = add(chains[i], a[i]);
                    a[i]      = set1(0.0f);
                }
            }
        });
        for (int h = 0; h < HB && end < d; ++h) {
            const vf qx = load_n(q + h*ld_q + end, d - end);
            for (int i = 0; i < N; ++i) {
                a[h*N + i] = fma(qx, span<T>::tail(row[i], end, d - end), a[h*N + i]);
            }
        }
        for (int i = 0; W == 1 && i < HB*N; ++i) {
            a[i] = add(chains[i], a[i]);
        }
        if (AT_ONCE) {
            float sum[W];
            store(sum, sum_rows(a));
            SPARQ_UNROLL
            for (int h = 0; h < HB; ++h) {
                if (j + N <= n) {
                    memcpy(s + h*ld_s + j, sum + h*N, N*sizeof(float));
                } else {
                    std::copy_n(sum + h*N, n - j, s + h*ld_s + j);
                }
            }
        } else {
            SPARQ_UNROLL
            for (int i = 0; i < HB*N; ++i) {
                part[i/N][j + i % N] = a[i];
            }
        }
    }
    for (int h = 0; h < HB && !AT_ONCE; ++h) {
        store_n(s + h*ld_s, sum_rows(part[h]), n);
    }
}

// A row is loaded from memory once for all heads; after the first four heads it comes from the first level of the cache
template <int D, typename T, typename P>
static SPARQ_INLINE void dot_rows_d(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * const * x, int64_t o, int n,
        int d, P ahead) {
    for (int i = 0; i < n; i += W) {
        for_blocks<4>(n_head, [&](auto HB, int h) {
            const P pi = h == 0 ? ahead.from(i, row_bytes<T>(d)) : P {};
            dot_rows_block<HB(), D, T>(s + h*ld_s + i, ld_s, q + h*ld_q, ld_q, x + i, o, std::min(n - i, W), d, pi);
        });
    }
}

// ahead: the rows to prefetch, as many as are used
template <typename T>
static void dot_rows(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * const * x, int64_t o, int n, int d,
        const char * const * ahead) {
    with_known_size(ld_q == d ? d : 0, [&](auto D) { dot_rows_d<D(), T>(s, ld_s, q, ld_q, n_head, x, o, n, d, prefetch_rows { ahead }); });
}

// ---- dot products with whole positions: s[h, t] = sum_c q[h, c]*x[t, h/n_group, c] ----
//
// Where all positions are read, they are read in the order of memory, all KV heads of one position before the next position. With 32 heads,
// 16 rows of one head after another arrive at 22 GB/s, whole positions at 28 to 30 (one thread; with two 31 and 34).
// The rows of the KV heads of a position lie nb bytes apart. `ahead` points to as many bytes as are used, and these are prefetched on the
// way: without that, the whole takes twice as long.

// one position, and one query head per KV head: s[h*ld_s] = sum_c q[h, c]*x[h, c]. The loop over spans is written out, here and in add_position_d: by
// for_each_span, dense attention with an only head took 1.7 times as long
template <int D, typename T>
static SPARQ_NOINLINE void dot_position_d(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * x, int64_t nb,
        int any_d, const char * ahead) {
    const int     d = D > 0 ? D : any_d;
    constexpr int N = span<T>::SIZE;
    for (int h0 = 0; h0 < n_head; h0 += W) {
        const int n = n_head - h0 < W ? n_head - h0 : W;
        vf part[W];
        for (int h = 0; h < n; ++h) { // one after another: in any other order the hardware does not read ahead
            vf  a = set1(0.0f);
            int c = 0;
            SPARQ_UNROLL
            for (; c + N <= d; c += N) {
                if (row_bytes<T>(c) % 64 < row_bytes<T>(N)) {
                    prefetch_bytes(ahead + row_bytes<T>(c), row_bytes<T>(N));
                }
                const span<T> y(x, c);
                SPARQ_UNROLL
                for (int v = 0; v < N/W; ++v) {
                    a = fma(load(q + c + v*W), y.vec(v), a);
                }
            }
            if (c < d) {
                a = fma(load_n(q + c, d - c), span<T>::tail(x, c, d - c), a);
            }
            part[h] = a;
            q     += ld_q;
            x     += nb;
            ahead += nb;
        }
        for (int h = n; h < W; ++h) {
            part[h] = set1(0.0f);
        }
        float sum[W];
        store(sum, sum_rows(part));
        for (int h = 0; h < n; ++h) {
            s[(h0 + h)*ld_s] = sum[h];
        }
    }
}

// Positions whose rows are used head by head, where query heads share a KV head. A loop that only reads (8 heads of 128, f16) gets 36 GB/s
// with 16 of them, 45 with 4 and 54 with 1; the arithmetic wants 4
constexpr int POS_BLOCK = 4;

// x [n]: the addresses of the positions, readable up to a multiple of POS_BLOCK
template <int D, typename T>
static void dot_positions_d(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, int n_group, const char * const * x, int64_t nb,
        int n, int d, const char * ahead) {
    const int64_t size = row_bytes<T>(d);
    for (int i = 0; i < n && n_group == 1; ++i, ahead += n_head*size) {
        dot_position_d<D, T>(s + i, ld_s, q, ld_q, n_head, x[i], nb, d, ahead);
    }
    for (int i = 0; i < n && n_group > 1; i += POS_BLOCK) {
        const int ni = n - i < POS_BLOCK ? n - i : POS_BLOCK;
        for (int h = 0; h*n_group < n_head; ++h, ahead += POS_BLOCK*size) {
            dot_rows_d<D, T>(s + h*n_group*ld_s + i, ld_s, q + h*n_group*ld_q, ld_q, n_group, x + i, h*nb, ni, d, prefetch_stream { ahead });
        }
    }
}

template <typename T>
static void dot_positions(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, int n_group, const char * const * x, int64_t nb,
        int n, int d, const char * ahead) {
    with_known_size(ld_q == d ? d : 0, [&](auto D) { dot_positions_d<D(), T>(s, ld_s, q, ld_q, n_head, n_group, x, nb, n, d, ahead); });
}

} // namespace sparse
