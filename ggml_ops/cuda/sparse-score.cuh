#pragma once

// Step 1: the components of q that count, approximate scores from the transposed K, or exact ones from K; what they become as logits.

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

enum group_state : uint8_t { IS_HIDDEN, IS_SEALED, IS_ROWS }; // nothing to see; read from k_t; read from K

constexpr int N_LANE  = RUN/8;            // threads beside each other: each has 8 positions of the run
constexpr int N_SLICE = N_THREAD/N_LANE;  // threads that share these positions, and split the components

// where the 8 positions of a lane are: 4 from the first result on, 4 from the second. Codes: 4 bytes (4 bits) or 8 (8 bits) side by side,
// see sparse-codes.h; f16: 16 bytes
template <int N_BIT>
__device__ __forceinline__ int2 lane_positions(int lane) {
    static_assert(!ggml_sparse_has_codes(N_BIT) || N_BIT == 8 || N_BIT == 4);
    if (!ggml_sparse_has_codes(N_BIT)) {
        return { lane*8, lane*8 + 4 };
    }
    if (N_BIT == 8) {
        const int w = 2*lane, p = w/16*64 + w % 4*16 + w/4 % 4*4;
        return { p, p + 16 };
    }
    const int p = lane/16*128 + lane % 4*16 + lane/4 % 4*4;
    return { p, p + 64 };
}

// byte l of four words, for l = 0..3
__device__ __forceinline__ void zip4(unsigned (&v)[4], const unsigned (&x)[4]) {
    const unsigned a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[0], x[1], 0x7362);
    const unsigned c = __byte_perm(x[2], x[3], 0x5140), d = __byte_perm(x[2], x[3], 0x7362);
    v[0] = __byte_perm(a, c, 0x5410);
    v[1] = __byte_perm(a, c, 0x7632);
    v[2] = __byte_perm(b, d, 0x5410);
    v[3] = __byte_perm(b, d, 0x7632);
}

template <int GB>
struct alignas(16) score_shared {
    float    q[GB][D_MAX];          // what rows of K are multiplied with, see q_place()
    float    coef[GB][D_MAX];       // per kept component
    float    x[GB][RUN];            // products, then logits
    float    size[D_MAX];           // sum over the heads of |q|, times the spread; then scale ..
    float    zero[D_MAX];           // the spread; then .. and zero of the kept components
    int8_t   w0[GB][D_MAX], w1[GB][D_MAX]; // whole coefficients, see make_coef()
    float    step[GB], base[GB];
    int16_t  comp[D_MAX];           // kept components, ascending
    uint16_t mask[RUN];
    uint8_t  state[RUN/GROUP];
    int      n_warp[N_WARP];
    float    top[N_WARP], sum[N_WARP];
    int64_t  bytes[N_WARP];         // what a warp had to read; the first pass counts
};

// how far component c of K spreads, as the contract of SCORE says
template <int N_BIT>
__device__ __forceinline__ float find_spread(const score_args & a, int64_t h_kv, int c, int64_t s) {
    if (!ggml_sparse_has_codes(N_BIT)) {
        return 1.0f;
    }
    const int64_t n_run = ggml_sparse_sealed_runs(a.n_kv, [&](int64_t g) { return a.sealed[s*a.n_grp + g] != 0; });
    if (n_run == 0) {
        return 1.0f;
    }
    float mid[GGML_SPARSE_SPREAD_RUNS], mean = 0.0f, square = 0.0f;
    bool  is_in[GGML_SPARSE_SPREAD_RUNS];
    int   n = 0;
#pragma unroll
    for (int j = 0; j < GGML_SPARSE_SPREAD_RUNS; ++j) {
        const int64_t run = ggml_sparse_spread_run(j, n_run);
        bool whole = true;
        for (int64_t g = run*(RUN/GROUP); g < (run + 1)*(RUN/GROUP); ++g) {
            whole &= a.sealed[s*a.n_grp + g] != 0;
        }
        mid[j]   = 0.0f;
        is_in[j] = whole;
        if (whole) {
            const float * range = a.k_range.at<const float>(h_kv*a.d + c, run, s);
            const float   width = range[0]*ggml_sparse_code_max(N_BIT);
            mid[j]  = range[1] + 0.5f*width;
            mean   += mid[j];
            square += width*width/36.0f;
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
// components: fewer where q holds NaN
template <int N_BIT, int GB>
__device__ __forceinline__ int choose_components(score_shared<GB> & m, const score_args & a, int64_t h_kv, int h0, int64_t i, int64_t s) {
    const int c = threadIdx.x;
    float size = 0.0f;
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
    const float spread = c < a.d ? find_spread<N_BIT>(a, h_kv, c, s) : 0.0f;
    size     *= spread;
    m.size[c] = size;
    m.zero[c] = spread;
    __syncthreads();

    int before = 0; // components that come before c
    for (int o = 0; o < a.d; ++o) {
        const float y = m.size[o];
        before += y > size || (y == size && o < c);
    }
    const bool     kept = c < a.d && size == size && before < a.rank_of(i, s);
    const unsigned bits = __ballot_sync(ALL, kept);
    if (c % 32 == 0) {
        m.n_warp[c/32] = __popc(bits);
    }
    __syncthreads();
    int n = 0, place = __popc(bits & ((1u << c % 32) - 1));
    for (int w = 0; w < N_WARP; ++w) {
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
        for (int o = lane; o < a.d; o += 32) {
            all += fabsf(m.q[h][o])*m.zero[o];
        }
        for (int o = lane; o < n; o += 32) {
            part += fabsf(m.q[h][m.comp[o]])*m.zero[m.comp[o]];
        }
        all  = lane_sum<32>(all);
        part = lane_sum<32>(part);
        const float f = part > 0.0f ? __fdiv_rn(a.scale, __fsqrt_rn(__fdiv_rn(part, all))) : 0.0f;
        for (int o = lane; o < n; o += 32) {
            m.coef[h][o] = f <= FLT_MAX ? m.q[h][m.comp[o]]*f : 0.0f; // NaN and inf are not
        }
    }
    __syncthreads();

    // for rows of K: the kept components, rotated as K is
    for (int j = 0; j < GB; ++j) {
        float x = kept ? m.coef[j][place] : 0.0f;
        x = hadamard(x, a.n_rot, m.size);
        if (c < (a.d + 7)/8*8) {
            m.q[j][q_place(c, a.d)] = x;
        }
        __syncthreads();
    }
    return n;
}

// the coefficients of head h, times the scales of the run, as whole numbers: logit = sum w*step*code + base; the work of a warp
//   4 bits: w = w0, |w0| <= 127; 8 bits: w = 64*w0 + w1, |w0| <= 64, |w1| <= 32, and codes less 128, so that they have a sign
//   NUMERICS: as on the CPU (make_coef in cpu/sparse-score-codes.h)
template <int N_BIT, int GB>
__device__ __forceinline__ void make_coef(score_shared<GB> & m, int h, int n_comp) {
    static_assert(N_BIT == 8 || N_BIT == 4);
    const int lane = threadIdx.x % 32;
    float top = 0.0f;
    for (int i = lane; i < n_comp; i += 32) {
        top = fmaxf(top, fabsf(m.coef[h][i]*m.size[i]));
    }
    top = warp_max(top);
    top = top > 1e-30f && top <= FLT_MAX ? top : 0.0f;
    const float most = (float) ggml_sparse_coef_max(N_BIT), mid = ggml_sparse_code_max(N_BIT)/2.0f;
    const float step = __fdiv_rn(top, most), inv = top > 0.0f ? __fdiv_rn(most, top) : 0.0f;

    float base = 0.0f;
    for (int i = lane; i < (n_comp + 3)/4*4; i += 32) {
        const bool  in = i < n_comp;
        const float c = in ? m.coef[h][i] : 0.0f, f = in ? c*m.size[i] : 0.0f;
        const float x = rintf(f*inv), w = x == x ? x : 0.0f; // where f is beyond f32 it is NaN
        base += in ? c*m.zero[i] + (f - w*step)*mid : 0.0f;
        if (N_BIT == 8) {
            const float w0 = rintf(w*(1.0f/64.0f));
            m.w0[h][i] = (int8_t) w0;
            m.w1[h][i] = (int8_t) (w - 64.0f*w0);
            base += 128.0f*w*step;
        } else {
            m.w0[h][i] = (int8_t) w;
        }
    }
    base = lane_sum<32>(base);
    if (lane == 0) {
        m.step[h] = step;
        m.base[h] = base;
    }
}

// codes of one component at a thread's 8 positions
template <int N_BIT> struct codes     { using type = unsigned; }; // 4 bits, or none
template <>          struct codes<8>  { using type = uint2; };

// steps of four components each whose codes are prefetched before their coefficients are known
template <int GB> constexpr int EARLY = GB == 8 ? 1 : 2;

// codes of the four components from i on; k_t: at the thread's positions
template <int N_BIT, int GB>
__device__ __forceinline__ void load_codes(
        typename codes<N_BIT>::type (&x)[4], const score_shared<GB> & m, const char * k_t, int64_t nb_comp, int n_comp, int i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        x[j] = *(const typename codes<N_BIT>::type *) (k_t + m.comp[min(i + j, n_comp - 1)]*nb_comp);
    }
}

// sums over this thread's components, for its 8 positions
//   k_t: the head's first component at the thread's positions; early: its first codes, by load_codes()
template <int N_BIT, int GB>
__device__ __forceinline__ void score_components(float (&acc)[GB][8], const score_shared<GB> & m, const char * k_t, int64_t nb_comp, int n_comp, int slice,
        const typename codes<N_BIT>::type (&early)[EARLY<GB>][4]) {
    if (!ggml_sparse_has_codes(N_BIT)) {
        constexpr int AT_ONCE = GB == 1 ? 8 : GB == 4 ? 4 : 1;
#pragma unroll AT_ONCE
        for (int i = slice; i < n_comp; i += N_SLICE) {
            float x[8];
            unpack_f16(x, *(const uint4 *) (k_t + m.comp[i]*nb_comp));
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                const float c = m.coef[h][i];
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    acc[h][j] += c*x[j];
                }
            }
        }
        return;
    }
    static_assert(!ggml_sparse_has_codes(N_BIT) || N_BIT == 8 || N_BIT == 4);
    int sum[GB][8] = {};
    const auto add = [&](const typename codes<N_BIT>::type (&raw)[4], int i) {
        unsigned lo[4], hi[4]; // codes of four components at the first four positions, and at the others
        if constexpr (N_BIT == 8) {
            unsigned x[4], y[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[j] = raw[j].x ^ 0x80808080u;
                y[j] = raw[j].y ^ 0x80808080u;
            }
            zip4(lo, x);
            zip4(hi, y);
        } else if constexpr (N_BIT == 4) {
            unsigned v[4];
            zip4(v, raw);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                lo[j] = v[j] & 0x0F0F0F0Fu;
                hi[j] = v[j] >> 4 & 0x0F0F0F0Fu;
            }
        }
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            const int w0 = *(const int *) &m.w0[h][i], w1 = N_BIT == 8 ? *(const int *) &m.w1[h][i] : 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (N_BIT == 8) {
                    sum[h][j]     = __dp4a((int) lo[j], w1, sum[h][j])     + 64*__dp4a((int) lo[j], w0, 0);
                    sum[h][4 + j] = __dp4a((int) hi[j], w1, sum[h][4 + j]) + 64*__dp4a((int) hi[j], w0, 0);
                } else {
                    sum[h][j]     = __dp4a((int) lo[j], w0, sum[h][j]);
                    sum[h][4 + j] = __dp4a((int) hi[j], w0, sum[h][4 + j]);
                }
            }
        }
    };
#pragma unroll
    for (int e = 0; e < EARLY<GB>; ++e) {
        if (const int i = 4*(slice + e*N_SLICE); i < n_comp) {
            add(early[e], i);
        }
    }
    for (int i = 4*(slice + EARLY<GB>*N_SLICE); i < n_comp; i += 4*N_SLICE) {
        typename codes<N_BIT>::type raw[4];
        load_codes<N_BIT, GB>(raw, m, k_t, nb_comp, n_comp, i);
        add(raw, i);
    }
#pragma unroll
    for (int h = 0; h < GB; ++h) {
        const float step = m.step[h], base = slice == 0 ? m.base[h] : 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            acc[h][j] = (float) sum[h][j]*step + base;
        }
    }
}

// the largest logit of the run and the sum of exp(logit - it), NaN if there is a NaN, per head
template <int GB>
__device__ __forceinline__ void finish_run(score_shared<GB> & m, const score_args & a, int64_t head, int n_head, int64_t run) {
    constexpr int N = N_WARP/GB; // warps per head
    const int w = threadIdx.x/32, h = w/N;
    const float * x = m.x[h] + w % N*(RUN/N);
    float top = neg_inf(), sum = 0.0f;
    for (int t = threadIdx.x % 32; t < RUN/N; t += 32) {
        top = fmaxf(top, x[t]);
    }
    top = fminf(warp_max(top), FLT_MAX);
    const float ref = top > neg_inf() ? top : 0.0f;
    for (int t = threadIdx.x % 32; t < RUN/N; t += 32) {
        sum += expf(finite_top(x[t]) - ref);
    }
    sum = lane_sum<32>(sum);
    if (threadIdx.x % 32 == 0) {
        m.top[w] = top;
        m.sum[w] = sum;
    }
    __syncthreads();
    if ((int) threadIdx.x < n_head) {
        const int j = threadIdx.x;
        float all = neg_inf(), total = 0.0f;
        for (int i = 0; i < N; ++i) {
            all = fmaxf(all, m.top[j*N + i]);
        }
        for (int i = 0; i < N; ++i) {
            const float part = m.top[j*N + i];
            total += part > neg_inf() ? m.sum[j*N + i]*expf(part - all) : m.sum[j*N + i]; // 0, or NaN
        }
        a.run_max[(head + j)*a.n_run + run] = all;
        a.run_sum[(head + j)*a.n_run + run] = total;
    }
}

// blocks that a multiprocessor shall hold at least: what leaves enough registers
constexpr int score_blocks(int gb) { return gb == 1 ? 3 : 2; }

// one block: runs blockIdx.x, + gridDim.x, .. for GB query heads of a KV head of a token. What a run is to be read with (its mask, what of it
// is sealed, the scales of its codes) is on its way while the run before is worked on
//   N_BIT: of k_t, 0: exact scores from K; TYPE: of K, or ANY
template <int N_BIT, int GB, int TYPE>
static __global__ void __launch_bounds__(N_THREAD, score_blocks(GB)) score(const score_args a) {
    __shared__ score_shared<GB> m;

    const int64_t h_kv = blockIdx.y/a.n_pass, row = blockIdx.z, i = row % a.n_tok, s = row/a.n_tok;
    const int     h0   = (int) (blockIdx.y % a.n_pass)*GB, n_head = min(GB, a.n_group_q - h0);
    const int64_t head = row*a.n_head + h_kv*a.n_group_q + h0;
    const int     tid  = threadIdx.x, lane = tid % N_LANE, slice = tid/N_LANE;

    if (a.kl.data && a.kl.at<const int32_t>(i, 0, s)[0] < 0) {
        return;
    }
    int n_comp = 0;
    if (N_BIT == 0) {
        for (int j = 0; j < GB; ++j) {
            if (tid < (a.d + 7)/8*8) {
                m.q[j][q_place(tid, a.d)] = j < n_head && tid < a.d ? a.q.at<const float>(h_kv*a.n_group_q + h0 + j, i, s)[tid] : 0.0f;
            }
        }
    } else {
        n_comp = choose_components<N_BIT, GB>(m, a, h_kv, h0, i, s);
    }
    const uint16_t * mask   = a.mask.at<const uint16_t>(i, 0, s);
    const int32_t  * sealed = N_BIT == 0 ? nullptr : a.sealed + s*a.n_grp;

    static_assert(D_MAX <= N_THREAD && N_WARP == RUN/GROUP, "a thread per component, a warp per group");
    constexpr bool HAS_CODES = ggml_sparse_has_codes(N_BIT);
    const int w = tid/32;
    uint16_t next_mask[GROUP/32];
    int32_t  next_sealed = 0;
    float    next_size = 0.0f, next_zero = 0.0f;
    const int n_kv = (int) a.n_kv, n_run = (int) a.n_run;
    const auto fetch = [&](int run) {
        const int t = run*RUN + w*GROUP + tid % 32, g = run*(RUN/GROUP) + w;
#pragma unroll
        for (int j = 0; j < GROUP/32; ++j) {
            next_mask[j] = t + j*32 < n_kv ? mask[t + j*32] : F16_NEG_INF;
        }
        if (N_BIT > 0) {
            next_sealed = g < a.n_grp ? sealed[g] : 0;
        }
        if (HAS_CODES && tid < n_comp && run < n_run) {
            const float * range = a.k_range.at<const float>(h_kv*a.d + m.comp[tid], run, s);
            next_size = range[0];
            next_zero = range[1];
        }
    };
    fetch(blockIdx.x);

    if (tid % 32 == 0) {
        const bool first = w == 0 && blockIdx.x == 0 && h0 == 0; // of this KV head: it counts what choosing components reads
        m.bytes[w] = first ? ggml_sparse_spread_bytes(a.d, a.n_kv, N_BIT) : 0;
    }
    for (int run = blockIdx.x; run < n_run; run += gridDim.x) {
        const int t0 = run*RUN;
        { // what there is to see
            int n = 0;
#pragma unroll
            for (int j = 0; j < GROUP/32; ++j) {
                m.mask[w*GROUP + tid % 32 + j*32] = next_mask[j];
                n += __popc(__ballot_sync(ALL, next_mask[j] != F16_NEG_INF));
            }
            const int g = run*(RUN/GROUP) + w;
            const bool in_k_t = next_sealed != 0 && ggml_sparse_is_coded(g, n_kv, N_BIT);
            if (tid % 32 == 0) {
                m.state[w] = n == 0 ? IS_HIDDEN : in_k_t ? IS_SEALED : IS_ROWS;
                if (n > 0 && h0 == 0) {
                    m.bytes[w] += in_k_t ? a.rank_of(i, s)*ggml_sparse_scan_bytes(min(GROUP, n_kv - g*GROUP), N_BIT) : (int64_t) n*a.row_bytes;
                }
            }
        }
        if (HAS_CODES && tid < n_comp) {
            m.size[tid] = next_size;
            m.zero[tid] = next_zero;
        }
        __syncthreads();

        if (N_BIT > 0) {
            const int2 p = lane_positions<N_BIT>(lane);
            const char * k_t = a.k_t.at(h_kv*a.d, s) + (int64_t) t0*N_BIT/8 + lane*N_BIT;
            float acc[GB][8] = {};
            const bool in = n_comp > 0 && (HAS_CODES || t0 + p.x < n_kv) && // rows of f16 end there, rounded up to 8
                    (m.state[p.x/GROUP] == IS_SEALED || m.state[p.y/GROUP] == IS_SEALED);
            typename codes<N_BIT>::type early[EARLY<GB>][4] = {};
            if constexpr (HAS_CODES) {
#pragma unroll
                for (int e = 0; e < EARLY<GB>; ++e) {
                    if (const int c = 4*(slice + e*N_SLICE); in && c < n_comp) {
                        load_codes<N_BIT, GB>(early[e], m, k_t, a.k_t.nb1, n_comp, c);
                    }
                }
            }
            fetch(run + gridDim.x);
            if constexpr (HAS_CODES) {
                if (w < GB) {
                    make_coef<N_BIT, GB>(m, w, n_comp);
                }
                __syncthreads();
            }
            if (in) {
                score_components<N_BIT, GB>(acc, m, k_t, a.k_t.nb1, n_comp, slice, early);
            }
            for (int o = 0; o < N_SLICE; ++o) { // slice by slice, in order
                if (o == slice) {
#pragma unroll
                    for (int h = 0; h < GB; ++h) {
                        float4 * x = (float4 *) &m.x[h][p.x], * y = (float4 *) &m.x[h][p.y];
                        const float4 u = o == 0 ? make_float4(0, 0, 0, 0) : *x, v = o == 0 ? make_float4(0, 0, 0, 0) : *y;
                        *x = make_float4(u.x + acc[h][0], u.y + acc[h][1], u.z + acc[h][2], u.w + acc[h][3]);
                        *y = make_float4(v.x + acc[h][4], v.y + acc[h][5], v.z + acc[h][6], v.w + acc[h][7]);
                    }
                }
                __syncthreads();
            }
        } else {
            fetch(run + gridDim.x);
        }
        for (int g = 0; g < RUN/GROUP; ++g) { // products with rows of K, 8 lanes each
            if (m.state[g] != IS_ROWS) {
                continue;
            }
            for (int r = g*GROUP + tid/8; r < (g + 1)*GROUP; r += N_THREAD/8) {
                float x[GB] = {};
                dot_row<TYPE, GB>(x, m.q, a.k.type, m.mask[r] == F16_NEG_INF ? nullptr : a.k.at(h_kv, t0 + r, s), a.d);
                store_products<GB>(m.x, x, r);
            }
        }
        __syncthreads();

        for (int h = 0; h < n_head; ++h) {
            const float slope = head_slope((int) h_kv*a.n_group_q + h0 + h, a.n_log2, a.max_bias);
            for (int t = tid; t < RUN; t += N_THREAD) {
                const float x = make_logit(m.x[h][t], m.mask[t], N_BIT == 0 ? a.scale : 1.0f, a.softcap, slope);
                m.x[h][t] = x;
                if (t0 + t < n_kv) {
                    a.logits[(head + h)*a.n_kv + t0 + t] = x;
                }
            }
        }
        __syncthreads();
        if (a.run_max) {
            finish_run<GB>(m, a, head, n_head, run);
        }
    }
    if (tid % 32 == 0 && m.bytes[w] > 0) {
        add_stat(a.stats, GGML_SPARSE_STAT_BYTES_SCORE, m.bytes[w]);
    }
}

// the same where the logits come from another node, bit for bit; a block per (run, GB heads of a KV head)
template <int GB>
static __global__ void __launch_bounds__(N_THREAD) sum_runs(const score_args a) {
    __shared__ score_shared<GB> m;
    const int     h0   = (int) (blockIdx.y % a.n_pass)*GB, n_head = min(GB, a.n_group_q - h0);
    const int64_t run  = blockIdx.x, head = (int64_t) blockIdx.z*a.n_head + (int64_t) (blockIdx.y/a.n_pass)*a.n_group_q + h0;
    for (int i = threadIdx.x; i < n_head*RUN; i += N_THREAD) {
        const int64_t t = run*RUN + i % RUN;
        m.x[i/RUN][i % RUN] = t < a.n_kv ? a.logits[(head + i/RUN)*a.n_kv + t] : neg_inf();
    }
    __syncthreads();
    finish_run<GB>(m, a, head, n_head, run);
}

} // namespace sparse_cuda
