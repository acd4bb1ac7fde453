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
    int64_t n_kv, n_grp, n_run;
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

    float    q[GB][D_MAX];          // what rows of K are multiplied with, see q_place()
    float    coef[GB][D_MAX];       // per kept component
    float    x[GB][RUN];            // products with rows of K, of one run
    float    size[D_MAX];           // sum over the heads of |q|, times the spread
    float    spread[D_MAX];
    int8_t   w0[HAS_CODES ? N_WARP : 1][GB][D_MAX], w1[N_BIT == 8 ? N_WARP : 1][GB][D_MAX]; // whole coefficients of each warp, see make_coef()
    int16_t  comp[D_MAX];           // kept components, ascending
    unsigned sealed[HAS_CODES ? N_STATE/32 : 1]; // a bit per group
    unsigned rows[N_WARP];          // the groups of a warp's run that are read from K, a bit each
    int      n_warp[N_WARP];
    int64_t  bytes[N_WARP];         // what a warp had to read; the first pass counts
};

// which groups of the stream are sealed -> m.sealed, if they are few enough; all threads of the block. Ends at a barrier
template <int N_BIT, int GB, int NT>
__device__ __forceinline__ void copy_states(score_shared<N_BIT, GB, NT> & m, const int32_t * sealed, int64_t n_grp) {
    if (n_grp <= N_STATE) {
        const int n = ((int) n_grp + NT - 1)/NT*NT;
#pragma unroll 4
        for (int g = threadIdx.x; g < n; g += NT) {
            const unsigned bits = __ballot_sync(ALL, g < n_grp && sealed[g] != 0);
            if (threadIdx.x % 32 == 0) {
                m.sealed[g/32] = bits;
            }
        }
    }
    __syncthreads();
}

// how far component c of K spreads, as the contract of SCORE says; after copy_states()
template <int N_BIT, int GB, int NT>
__device__ __forceinline__ float find_spread(const score_shared<N_BIT, GB, NT> & m, const score_args & a, int64_t h_kv, int c, int64_t s) {
    if (!ggml_sparse_has_codes(N_BIT)) {
        return 1.0f;
    }
    static_assert(RUN/GROUP == 8, "the states of a run are a byte of m.sealed");
    const bool few = a.n_grp <= N_STATE;
    const int32_t * states = a.sealed + s*a.n_grp;
    const int64_t n_run = ggml_sparse_sealed_runs(a.n_kv, [&](int64_t g) { return few ? (m.sealed[g/32] >> g % 32 & 1) != 0 : states[g] != 0; });
    if (n_run == 0) {
        return 1.0f;
    }
    float mid[GGML_SPARSE_SPREAD_RUNS], width[GGML_SPARSE_SPREAD_RUNS], mean = 0.0f, square = 0.0f;
    bool  is_in[GGML_SPARSE_SPREAD_RUNS];
    int   n = 0;
    if (few) {
#pragma unroll
        for (int j = 0; j < GGML_SPARSE_SPREAD_RUNS; ++j) {
            const int run = (int) ggml_sparse_spread_run(j, n_run);
            is_in[j] = (m.sealed[run/4] >> run % 4*8 & 0xFF) == 0xFF;
        }
    } else {
#pragma unroll
        for (int j = 0; j < GGML_SPARSE_SPREAD_RUNS; ++j) {
            is_in[j] = true;
#pragma unroll 1
            for (int g = 0; g < RUN/GROUP; ++g) {
                is_in[j] = is_in[j] && states[ggml_sparse_spread_run(j, n_run)*(RUN/GROUP) + g] != 0;
            }
        }
    }
#pragma unroll
    for (int j = 0; j < GGML_SPARSE_SPREAD_RUNS; ++j) { // all loads first
        const float * range = a.k_range.at<const float>(h_kv*a.d + c, ggml_sparse_spread_run(j, n_run), s);
        width[j] = is_in[j] ? range[0] : 0.0f;
        mid[j]   = is_in[j] ? range[1] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < GGML_SPARSE_SPREAD_RUNS; ++j) {
        if (is_in[j]) {
            const float x = width[j]*ggml_sparse_code_max(N_BIT);
            mid[j] += 0.5f*x;
            mean   += mid[j];
            square += x*x/36.0f;
            n++;
        }
    }
#pragma unroll
    for (int j = 0; j < GGML_SPARSE_SPREAD_RUNS; ++j) {
        square += is_in[j] ? (mid[j] - mean/n)*(mid[j] - mean/n) : 0.0f;
    }
    return n > 0 ? __fsqrt_rn(square/n) : 1.0f;
}

// the token's `rank` components with the largest spread times the sum over the KV head's query heads of |q| (ties: the lowest), and per head of this pass
// the coefficients q*scale/sqrt(|p_r|_1/|p|_1) with p = q*spread, 0 where the sums of a head are 0 or beyond f32. Returns the number of
// components: fewer where q holds NaN. After copy_states()
template <int N_BIT, int GB, int NT>
__device__ __forceinline__ int choose_components(score_shared<N_BIT, GB, NT> & m, const score_args & a, int64_t h_kv, int h0, int64_t i, int64_t s) {
    const int c = threadIdx.x;
    float size = 0.0f;
#pragma unroll 1
    for (int j = 0; j < a.n_group_q; ++j) {
        float x = c < a.d ? a.q.at<const float>(h_kv*a.n_group_q + j, i, s)[c] : 0.0f;
        x = hadamard(x, a.n_rot, m.size);
        if (j >= h0 && j < h0 + GB) {
            m.q[j - h0][c] = x;
        }
        size += fabsf(x);
    }
    for (int j = a.n_group_q - h0; j < GB; ++j) {
        m.q[j][c] = 0.0f;
    }
    const float spread = c < a.d ? find_spread(m, a, h_kv, c, s) : 0.0f;
    size       *= spread;
    m.size[c]   = size;
    m.spread[c] = spread;
    __syncthreads();

    // components that come before c; the zeros behind d come before nothing. A tie comes before c if its number is lower, which is so for all
    // components of the warps before this one and for none of those after it; within the warp it is looked at
    const int w0 = c/32*32;
    int before = 0;
    if (w0 < a.d) {
        const auto count = [&](int from, int to, const auto & is_before) {
#pragma unroll 2
            for (int o = from; o < to; o += 4) {
                const float4 y = *(const float4 *) &m.size[o];
                before += is_before(y.x, o) + is_before(y.y, o + 1) + is_before(y.z, o + 2) + is_before(y.w, o + 3);
            }
        };
        count(0, w0, [&](float y, int) { return y >= size; });
        count(w0, w0 + 32, [&](float y, int o) { return y > size || (y == size && o < c); });
        count(w0 + 32, a.d, [&](float y, int) { return y > size; });
    }
    const bool     kept = c < a.d && size == size && before < a.rank_of(i, s);
    const unsigned bits = __ballot_sync(ALL, kept);
    if (c % 32 == 0) {
        m.n_warp[c/32] = __popc(bits);
    }
    __syncthreads();
    int n = 0, place = __popc(bits & ((1u << c % 32) - 1));
    for (int w = 0; w < NT/32; ++w) {
        place += w < c/32 ? m.n_warp[w] : 0;
        n     += m.n_warp[w];
    }
    if (kept) {
        m.comp[place] = (int16_t) c;
    }
    __syncthreads();

    const int h = c/32, lane = c % 32; // a warp per head
    if (h < GB) {
        float all = 0.0f, part = 0.0f;
#pragma unroll 1
        for (int o = lane; o < a.d; o += 32) {
            all += fabsf(m.q[h][o])*m.spread[o];
        }
#pragma unroll 1
        for (int o = lane; o < n; o += 32) {
            part += fabsf(m.q[h][m.comp[o]])*m.spread[m.comp[o]];
        }
        all  = lane_sum<32>(all);
        part = lane_sum<32>(part);
        const float f = part > 0.0f ? __fdiv_rn(a.scale, __fsqrt_rn(__fdiv_rn(part, all))) : 0.0f;
#pragma unroll 1
        for (int o = lane; o < n; o += 32) {
            m.coef[h][o] = f <= FLT_MAX ? m.q[h][m.comp[o]]*f : 0.0f; // NaN and inf are not
        }
    }
    __syncthreads();

    // for rows of K: the kept components, rotated as K is
#pragma unroll 1
    for (int j = 0; j < GB; ++j) {
        float x = kept ? m.coef[j][place] : 0.0f;
        x = hadamard(x, a.n_rot, m.size);
        if (c < (a.d + 7)/8*8) {
            m.q[j][q_place(c, a.d)] = x;
        }
    }
    __syncthreads();
    return n;
}

} // namespace sparse_cuda
