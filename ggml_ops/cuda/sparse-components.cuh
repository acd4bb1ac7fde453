#pragma once

// Step 1, first half: the components of q that count, and their coefficients. Arguments and shared memory of step 1.

#include "sparse-codes.h"
#include "sparse-device.cuh"

namespace sparse_cuda {

struct score_args {
    view q, k, k_t, k_range, mask;
    view kl;                            // of SCORE_SELECT: a token with k < 0 is not scored
    view ranks;                         // of SCORE_SELECT: each token's own; no data: all have `rank`
    const int32_t * sealed;             // [n_stream][n_grp]
    float * logits;                     // [row][n_head][n_kv]; row = stream*n_tok + token
    float * run_max, * run_sum;         // [row][n_head][n_run] the largest logit of a run, the sum of exp(logit - it); or NULL
    unsigned long long * stats;
    int64_t n_kv, n_grp, n_run, n_pos_t; // n_pos_t: of the cells, those that a row of k_t in f16 has
    int     n_head, n_head_kv, n_group_q, n_tok, d, rank, n_rot, n_log2, n_pass, row_bytes; // n_pass: of the heads of a KV head, GB at a time
    float   scale, softcap, max_bias;

    __device__ __forceinline__ int rank_of(int64_t i, int64_t s) const {
        return ranks.data ? min(max(ranks.at<const int32_t>(i, 0, s)[0], 1), rank) : rank;
    }
};

// groups whose states are copied to shared memory, a bit each; where there are more, they are read from the cache
constexpr int N_STATE = 16384;

// NT: threads of the block, one per component at least
template <int N_BIT, int GB, int NT>
struct alignas(16) score_shared {
    static constexpr bool HAS_CODES = ggml_sparse_has_codes(N_BIT);
    static constexpr int  N_WARP = NT/32;
    static constexpr int  N_SLOT = N_BIT == 4 && GB > 1 && NT == N_THREAD ? 1 : RUN/GROUP; // a layer scans 4 bits of several heads by groups

    float    q[GB][D_MAX];          // what rows of K are multiplied with, see q_place()
    float    coef[GB][D_MAX];       // per kept component
    float    x[GB][RUN];            // products with rows of K, of one run; before that scratch of choose_components()
    float    size[D_MAX];           // sum over the heads of |q|, times the spread
    float    spread[D_MAX];
    // whole coefficients of each warp, for the groups of its run, see make_coef(). The padding keeps those of several groups in different banks
    int8_t   w0[HAS_CODES ? N_WARP : 1][N_SLOT][GB][NT + 4], w1[N_BIT == 8 ? N_WARP : 1][N_SLOT][GB][NT + 4];
    int16_t  comp[D_MAX];           // kept components, ascending
#if SPARQ_PIPE_SCAN
    alignas(16) unsigned at[D_MAX + 16]; // where their rows of k_t begin, and the last one's again
#endif
    unsigned sealed[HAS_CODES ? N_STATE/32 : 1]; // a bit per group
    unsigned rows[N_WARP];          // the groups of a warp's run that are read from K, a bit each
    int      n_kept[N_WARP];
    float    sums[2][N_WARP][GB];
    int64_t  bytes[N_WARP];         // what a warp had to read; the first pass counts
};

// which groups of the stream are sealed for token i -> m.sealed, if they are few enough; all threads of the block. Ends at a barrier
template <int N_BIT, int GB, int NT>
__device__ __forceinline__ void copy_states(score_shared<N_BIT, GB, NT> & m, const int32_t * sealed, int64_t n_grp, int64_t i) {
    if (n_grp <= N_STATE) {
        const int n = ((int) n_grp + NT - 1)/NT*NT;
#pragma unroll 4
        for (int g = threadIdx.x; g < n; g += NT) {
            const unsigned bits = __ballot_sync(ALL, g < n_grp && ggml_sparse_is_sealed(sealed[g], i));
            if (threadIdx.x % 32 == 0) {
                m.sealed[g/32] = bits;
            }
        }
    }
    __syncthreads();
}

// the ranges of component c in the groups that tell how far it spreads, as they are read
struct spread_ranges {
    static constexpr int N = GGML_SPARSE_SPREAD_GROUPS;
    unsigned raw[N]; // scale and zero, 0: none
    unsigned known;  // a bit each
    int      n_sealed; // groups

    // c < a.d, or nothing is read; after copy_states()
    template <int N_BIT, int GB, int NT>
    __device__ __forceinline__ void load(const score_shared<N_BIT, GB, NT> & m, const score_args & a, int64_t h_kv, int c, int64_t i, int64_t s) {
        const bool few = a.n_grp <= N_STATE;
        const int32_t * states = a.sealed + s*a.n_grp;
        const auto is_sealed = [&](int g) { return few ? (m.sealed[g/32] >> g % 32 & 1) != 0 : ggml_sparse_is_sealed(states[g], i); };
        n_sealed = (int) ggml_sparse_sealed_groups((int) a.n_kv, is_sealed);
        known    = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int  g     = (int) ggml_sparse_spread_group(j, n_sealed);
            const bool is_in = c < a.d && n_sealed > 0 && is_sealed(g);
            raw[j] = is_in ? *a.k_range.at<const unsigned>(h_kv*a.d + c, g, s) : 0;
            known |= (unsigned) is_in << j;
        }
    }

    // the spread, as the contract of SCORE says; middle: the mean of the ranges' middles
    __device__ __forceinline__ float spread(int code_max, float * middle) const {
        float mean = 0.0f, square = 0.0f;
        const int  n      = __popc(known);
        const auto mid_of = [&](int j) { return f16_pair(raw[j]).y + 0.5f*f16_pair(raw[j]).x*code_max; };
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float x = f16_pair(raw[j]).x*code_max;
            mean   += mid_of(j);
            square += x*x/(GGML_SPARSE_SPREAD_WIDTH*GGML_SPARSE_SPREAD_WIDTH);
        }
        const float inv = __fdiv_rn(1.0f, (float) max(n, 1));
        *middle = mean*inv;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            square += known >> j & 1 ? (mid_of(j) - mean*inv)*(mid_of(j) - mean*inv) : 0.0f;
        }
        return n > 0 ? __fsqrt_rn(square*inv) : 1.0f;
    }
};

// q of all heads of the KV head -> m.q of this pass, and per component m.size, m.spread, m.x[0], see choose_components(). Returns the thread's own size
template <int N_BIT, int GB, int NT>
__device__ __forceinline__ float weigh_components(
        score_shared<N_BIT, GB, NT> & m, const score_args & a, const spread_ranges & ranges, int64_t h_kv, int h0, int64_t i, int64_t s) {
    const int  G = a.n_group_q, c = threadIdx.x;
    const bool in = c < a.d;
    float size = 0.0f;
    const auto take = [&](int j, float x) {
        if (j >= h0 && j < h0 + GB) {
            m.q[j - h0][c] = x;
        }
        size += fabsf(x);
    };
    const auto load = [&](int j) { return in ? a.q.at<const float>(h_kv*G + j, i, s)[c] : 0.0f; };
    if (a.n_rot > 0) {
#pragma unroll 1
        for (int j = 0; j < G; ++j) {
            take(j, hadamard(load(j), a.n_rot, m.size));
        }
    } else {
#pragma unroll 4
        for (int j = 0; j < G; ++j) {
            take(j, load(j));
        }
    }
#pragma unroll 1
    for (int j = G - h0; j < GB; ++j) {
        m.q[j][c] = 0.0f;
    }
    float spread = 1.0f, middle = 0.0f;
    if (ggml_sparse_has_codes(N_BIT)) {
        spread = ranges.spread(ggml_sparse_code_max(N_BIT), &middle);
    }
    spread = in ? spread : 0.0f;
    size  *= spread;
    m.size[c]   = size;
    m.spread[c] = spread;
    m.x[0][c]   = middle;
    return size;
}

// How many components come before number `mine` by their size; this is number `part` of n_part threads beside each other that count for one. Sizes are
// >= 0: what is as large as x comes before it where its number is lower, so x is made a bit smaller for the fours before its own
__device__ __forceinline__ int components_before(const float * size, int mine, int part, int n_part, int d) {
    const float x = size[mine], less = x > 0.0f ? __int_as_float(__float_as_int(x) - 1) : -1.0f;
    int before = 0;
#pragma unroll 4
    for (int o = part*4; o < d; o += n_part*4) {
        const float4 y = *(const float4 *) &size[o];
        const float  z = o + 3 < mine ? less : x;
        before += (y.x > z) + (y.y > z) + (y.z > z) + (y.w > z);
    }
    for (int o = mine & ~3; part == 0 && o < mine; ++o) {
        before += size[o] == x;
    }
#pragma unroll 1
    for (int o = 1; o < n_part; o *= 2) {
        before += __shfl_xor_sync(ALL, before, o);
    }
    return before;
}

// the token's `rank` components with the largest spread times the sum over the KV head's query heads of |q| (ties: the lowest) -> m.comp, ascending, and
// per head of this pass the coefficients q*scale/sqrt(|p_r|_1/|p|_1) with p = q*spread, 0 where the sums of a head are 0 or beyond f32. Returns the number
// of components: fewer where q holds NaN. After copy_states(); ends at a barrier
//   for_rows: the coefficients are rotated as K is, too, for rows of K -> m.q
//   m.x[0][c]: what component c is on average, as far as the ranges tell
template <int N_BIT, int GB, int NT>
__device__ __forceinline__ int choose_components(
        score_shared<N_BIT, GB, NT> & m, const score_args & a, int64_t h_kv, int h0, int64_t i, int64_t s, bool for_rows) {
    const int  d = a.d, c = threadIdx.x, w = c/32, lane = c % 32;
    const bool in = c < d;
    spread_ranges ranges;
    if (ggml_sparse_has_codes(N_BIT)) {
        ranges.load(m, a, h_kv, c, i, s);
    }
    const float size = weigh_components(m, a, ranges, h_kv, h0, i, s);
    const int n_comp = min(__syncthreads_count(in && size == size), a.rank_of(i, s)); // NaN is never kept

    // a component is kept where fewer than n_comp come before it; n_part threads count for one
    const int   n_part = d <= NT/4 ? 4 : d <= NT/2 ? 2 : 1, mine = c/n_part, part = c % n_part;
    const float x = m.size[mine];
    const int before = components_before(m.size, mine, part, n_part, d);
    const bool     kept = mine < d && x == x && before < n_comp;
    const unsigned bits = __ballot_sync(ALL, kept && part == 0);
    if (lane == 0) {
        m.n_kept[w] = __popc(bits);
    }
#pragma unroll
    for (int h = 0; h < GB; ++h) { // sums of |p|: of all, of those that are kept
        const float y = mine < d && part == 0 ? fabsf(m.q[h][mine])*m.spread[mine] : 0.0f;
        const float all = lane_sum<32>(y), some = lane_sum<32>(kept ? y : 0.0f);
        if (lane == 0) {
            m.sums[0][w][h] = all;
            m.sums[1][w][h] = some;
        }
    }
    __syncthreads();
    int place = __popc(bits & ((1u << lane) - 1));
#pragma unroll
    for (int j = 0; j < NT/32; ++j) {
        place += j < w ? m.n_kept[j] : 0;
    }
    if (kept && part == 0) {
        m.comp[place] = (int16_t) mine;
#if SPARQ_PIPE_SCAN
        for (int j = place; j == place || (place == n_comp - 1 && j % 16 != 0); ++j) {
            m.at[j] = (unsigned) (mine*a.k_t.nb1);
        }
#endif
    }
    float f[GB];
#pragma unroll
    for (int h = 0; h < GB; ++h) {
        float all = 0.0f, some = 0.0f;
#pragma unroll
        for (int j = 0; j < NT/32; ++j) {
            all  += m.sums[0][j][h];
            some += m.sums[1][j][h];
        }
        f[h] = some > 0.0f ? __fdiv_rn(a.scale, __fsqrt_rn(__fdiv_rn(some, all))) : 0.0f;
        f[h] = f[h] <= FLT_MAX ? f[h] : 0.0f; // NaN and inf are not
        if (kept && part == 0) {
            m.coef[h][place] = f[h] > 0.0f ? m.q[h][mine]*f[h] : 0.0f; // q may hold inf
        }
    }
    if (for_rows) {
        constexpr int BUF = RUN - D_MAX; // behind the middles
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            if (part == 0) {
                m.x[h][BUF + mine] = kept && f[h] > 0.0f ? m.q[h][mine]*f[h] : 0.0f;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int h = 0; h < GB; ++h) {
            const float y = hadamard(c < d ? m.x[h][BUF + c] : 0.0f, a.n_rot, m.size);
            if (c < (d + 7)/8*8) {
                m.q[h][q_place(c, d)] = y;
            }
        }
    }
    __syncthreads();
    return n_comp;
}

} // namespace sparse_cuda
