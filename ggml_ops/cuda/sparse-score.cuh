#pragma once

// Step 1: approximate scores from the transposed K, or exact ones from K; what they become as logits.

#include "sparse-components.cuh"

namespace sparse_cuda {

enum group_state : uint8_t { IS_HIDDEN, IS_SEALED, IS_ROWS }; // nothing to see; read from k_t; read from K

// A run is the work of a warp. A lane has 16 of its positions, in spans of 4 that lie beside each other; span i of a lane begins at
// span_position(lane, i). So codes are read 8 bytes (4 bits) or 16 (8 bits) at a time, see sparse-codes.h; f16 16, for two spans. Rows of K are
// read in the same places as f16
constexpr int N_SPAN   = 4;
constexpr int PER_LANE = 4*N_SPAN;
static_assert(32*PER_LANE == RUN, "a warp has a run");

template <int N_BIT>
__device__ __forceinline__ int span_position(int lane, int i) {
    static_assert(!ggml_sparse_has_codes(N_BIT) || N_BIT == 8 || N_BIT == 4);
    if (N_BIT == 8) {
        return lane/4*64 + i*16 + lane % 4*4;
    }
    if (N_BIT == 4) {
        return lane/8*128 + (2*(lane % 2) + i/2)*16 + lane/2 % 4*4 + i % 2*64;
    }
    return i/2*256 + lane*8 + i % 2*4;
}

// the groups of a lane: that of its first span, and another one, if its spans lie in two
template <int N_BIT> constexpr bool TWO_GROUPS = !ggml_sparse_has_codes(N_BIT);

template <int N_BIT>
__device__ __forceinline__ bool is_second(int i) { return TWO_GROUPS<N_BIT> && i >= 2; }

// x added up over a run, from what each lane has in its spans. The order follows the numbers of the spans in the run, bit by bit, so that all
// layouts give the same bits
template <int N_BIT>
__device__ __forceinline__ float sum_spans(const float (&x)[N_SPAN]) {
    const auto add = [](float v, auto... lanes) {
        ((v += __shfl_xor_sync(ALL, v, lanes)), ...);
        return v;
    };
    float v[N_SPAN];
#pragma unroll
    for (int i = 0; i < N_SPAN; ++i) {
        v[i] = N_BIT == 8 ? add(x[i], 1, 2) : N_BIT == 4 ? add(x[i], 2, 4) : x[i];
    }
    if (N_BIT == 8) {
        return add((v[0] + v[1]) + (v[2] + v[3]), 4, 8, 16);
    }
    return N_BIT == 4 ? add(add(v[0] + v[2], 1) + add(v[1] + v[3], 1), 8, 16) : add(v[0] + v[1], 1, 2, 4, 8, 16) + add(v[2] + v[3], 1, 2, 4, 8, 16);
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

// codes of a component at a lane's 16 positions
template <int N_BIT> struct codes    { using type = uint2; };
template <>          struct codes<8> { using type = uint4; };

// where those of a lane begin, of the eight that share a group
template <int N_BIT>
__device__ __forceinline__ int codes_at(int group, int lane) { return (group*GROUP + lane % 8*PER_LANE)/(8/N_BIT); }

// components whose codes are read at once
template <int N_BIT, int GB> constexpr int AT_ONCE = N_BIT == 4 && GB == 1 ? 16 : N_BIT != 16 || GB == 1 ? 8 : 4;

constexpr int COEF_PAD = 16; // coefficients are followed by zeros up to a multiple of this

// The coefficients of the warp's heads, times the scales of a group, as whole numbers: logit = sum w*step*code + base; the work of a warp, N_LANE lanes for
// each group
//   4 bits: w = w0, |w0| <= 127; 8 bits: w = 64*w0 + w1, |w0| <= 64, |w1| <= 32, and codes less 128, so that they have a sign
//   range: of the KV head's first component in the lane's group
//   NUMERICS: as on the CPU (make_coef in cpu/sparse-score-codes.h)
template <int N_LANE, int N_BIT, int GB, int NT>
__device__ __forceinline__ void make_coef(score_shared<N_BIT, GB, NT> & m, float (&step)[GB], float (&base)[GB], int w, int n_comp, const char * range,
        int64_t nb_comp) {
    static_assert(N_BIT == 8 || N_BIT == 4);
    constexpr float MOST = (float) ggml_sparse_coef_max(N_BIT), MID = ggml_sparse_code_max(N_BIT)/2.0f;
    const int  lane = threadIdx.x % N_LANE, slot = threadIdx.x % 32/N_LANE, n_pad = (n_comp + COEF_PAD - 1)/COEF_PAD*COEF_PAD;
    static_assert(COEF_PAD % AT_ONCE<N_BIT, GB> == 0, "scans go beyond the last component");
    const auto range_of = [&](int i) { return (const half *) (range + m.comp[i]*nb_comp); };
    constexpr int N = SPARQ_PIPE_SCAN ? 4 : 1; // ranges that are asked for at once

    float top[GB] = {}, inv[GB];
#pragma unroll N
    for (int i = lane; i < n_comp; i += N_LANE) {
        const float size = __half2float(range_of(i)[0]);
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            top[h] = fmaxf(top[h], fabsf(m.coef[h][i]*size));
        }
    }
#pragma unroll
    for (int h = 0; h < GB; ++h) {
        top[h]  = lane_max<N_LANE>(top[h]);
        top[h]  = top[h] > 1e-30f && top[h] <= FLT_MAX ? top[h] : 0.0f;
        inv[h]  = top[h] > 0.0f ? __fdiv_rn(MOST, top[h]) : 0.0f;
        step[h] = __fdiv_rn(top[h], MOST);
        base[h] = 0.0f;
    }
#pragma unroll N
    for (int i = lane; i < n_pad; i += N_LANE) {
        const bool  in = i < n_comp;
        const float size = in ? __half2float(range_of(i)[0]) : 0.0f, zero = in ? __half2float(range_of(i)[1]) : 0.0f;
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            const float c = in ? m.coef[h][i] : 0.0f, f = c*size;
            const float x = rintf(f*inv[h]), y = x == x ? x : 0.0f; // where f is beyond f32 it is NaN
            base[h] += in ? c*zero + (f - y*step[h])*MID : 0.0f;
            if (N_BIT == 8) {
                const float w0 = rintf(y*(1.0f/64.0f));
                m.w0[w][slot][h][i] = (int8_t) w0;
                m.w1[w][slot][h][i] = (int8_t) (y - 64.0f*w0);
                base[h] += 128.0f*y*step[h];
            } else {
                m.w0[w][slot][h][i] = (int8_t) y;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < GB; ++h) {
        base[h] = lane_sum<N_LANE>(base[h]);
    }
    __syncwarp();
}

// sums of the heads, and the codes of four components times their whole coefficients w0(head), w1(head)
template <int N_BIT, int N, typename C, typename F0, typename F1>
__device__ __forceinline__ void add_codes(int (&sum)[N][PER_LANE], const C * raw, const F0 & w0_of, const F1 & w1_of) {
#pragma unroll
    for (int word = 0; word < (N_BIT == 4 ? 2 : 4); ++word) {
        unsigned from[4], v[4]; // of the four at the four positions of a span
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            from[j] = ((const unsigned *) &raw[j])[word];
        }
        zip4(v, from);
#pragma unroll
        for (int h = 0; h < N; ++h) {
            const int w0 = w0_of(h), w1 = w1_of(h);
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                if (N_BIT == 8) {
                    int & y = sum[h][word*4 + l];
                    const int code = (int) (v[l] ^ 0x80808080u);
                    y = __dp4a(code, w1, y) + 64*__dp4a(code, w0, 0);
                } else { // the high halves are of the next span
                    int & y = sum[h][word*8 + l], & z = sum[h][word*8 + 4 + l];
                    y = __dp4a((int) (v[l]      & 0x0F0F0F0Fu), w0, y);
                    z = __dp4a((int) (v[l] >> 4 & 0x0F0F0F0Fu), w0, z);
                }
            }
        }
    }
}

// the products at a lane's positions, from codes; k_t: the KV head's first component at these positions
//   make: makes the coefficients, step and base, while the first codes are on their way; N: components whose codes are read at once
template <int N, int N_BIT, int GB, int NT, typename F>
__device__ __forceinline__ void scan_codes(
        float (&x)[GB][PER_LANE], const score_shared<N_BIT, GB, NT> & m, const float (&step)[GB], const float (&base)[GB], int w, int n_comp, const char * k_t,
        int64_t nb_comp, const F & make) {
    static_assert(N_BIT == 8 || N_BIT == 4);
    const int slot = threadIdx.x % 32/8; // the lane's group
    int sum[GB][PER_LANE] = {};
    typename codes<N_BIT>::type raw[N];
    const auto load = [&](int i0, int begin, int end) { // raw[begin .. end - 1] of those from i0 on
#pragma unroll
        for (int j = begin; j < end; ++j) {
#if SPARQ_PIPE_SCAN
            raw[j] = *(const typename codes<N_BIT>::type *) (k_t + m.at[i0 + j]);
#else
            raw[j] = *(const typename codes<N_BIT>::type *) (k_t + m.comp[min(i0 + j, n_comp - 1)]*nb_comp);
#endif
        }
    };
    load(0, 0, N);
    make();
#pragma unroll 1
    for (int i0 = 0; i0 < n_comp; i0 += N) {
        if (i0 > 0 && !SPARQ_PIPE_SCAN) {
            load(i0, 0, N);
        }
#pragma unroll
        for (int b = 0; b < N; b += 4) {
            const auto w0 = [&](int h) { return *(const int *) &m.w0[w][slot][h][i0 + b]; };
            const auto w1 = [&](int h) { return N_BIT == 8 ? *(const int *) &m.w1[w][slot][h][i0 + b] : 0; };
            add_codes<N_BIT>(sum, raw + b, w0, w1);
            if (SPARQ_PIPE_SCAN && i0 + N < n_comp) {
                load(i0 + N, b, b + 4);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < GB; ++h) {
#pragma unroll
        for (int p = 0; p < PER_LANE; ++p) {
            x[h][p] = (float) sum[h][p]*step[h] + base[h];
        }
    }
}

// the products from f16; n: positions that the rows have from the run's first on. Rows are whole spans of 8, so one that begins within may be read
template <int N_BIT, int GB, int NT>
__device__ __forceinline__ void scan_f16(
        float (&x)[GB][PER_LANE], const score_shared<N_BIT, GB, NT> & m, int n_comp, const char * k_t, int64_t nb_comp, int64_t n) {
    const int lane = threadIdx.x % 32;
    const bool in[2] = { span_position<16>(lane, 0) < n, span_position<16>(lane, 2) < n };
    constexpr int N = AT_ONCE<N_BIT, GB>;
#pragma unroll N
    for (int i = 0; i < n_comp; ++i) {
        uint4 raw[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            raw[j] = in[j] ? *(const uint4 *) (k_t + m.comp[i]*nb_comp + j*256*2) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float y[8];
            unpack_f16(y, raw[j]);
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                const float c = m.coef[h][i];
#pragma unroll
                for (int l = 0; l < 8; ++l) {
                    x[h][j*8 + l] += c*y[l];
                }
            }
        }
    }
}

// the largest logit of a run and the sum of exp(logit - it), NaN if there is a NaN; x: those of a lane. The work of a warp
template <int N_BIT>
__device__ __forceinline__ void finish_run(const float (&x)[PER_LANE], float * run_max, float * run_sum, int64_t at) {
    float top = neg_inf();
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p) {
        top = fmaxf(top, x[p]);
    }
    top = fminf(warp_max(top), FLT_MAX);
    const float ref = top > neg_inf() ? top : 0.0f;
    float sum[N_SPAN];
#pragma unroll
    for (int i = 0; i < N_SPAN; ++i) {
        float e[4];
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            e[l] = expf(finite_top(x[i*4 + l]) - ref);
        }
        sum[i] = (e[0] + e[1]) + (e[2] + e[3]);
    }
    const float all = sum_spans<N_BIT>(sum);
    if (threadIdx.x % 32 == 0) {
        run_max[at] = top;
        run_sum[at] = all;
    }
}

// the mask of a lane's spans, two positions each, hidden from n on; place(j): where span j begins behind t0, in a run or a line
template <int N, typename F>
__device__ __forceinline__ void load_mask(unsigned (&seen)[N], const uint16_t * mask, int t0, int n, const F & place) {
    if (t0 + RUN <= n && (uintptr_t) mask % 8 == 0) {
#pragma unroll
        for (int j = 0; j < N/2; ++j) {
            const uint2 raw = *(const uint2 *) &mask[t0 + place(j)];
            seen[j*2]     = raw.x;
            seen[j*2 + 1] = raw.y;
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int t = t0 + place(j/2) + j % 2*2;
            seen[j]  = t     < n ? mask[t]     : F16_NEG_INF;
            seen[j] |= (unsigned) (t + 1 < n ? mask[t + 1] : F16_NEG_INF) << 16;
        }
    }
}

// what a lane sees of its warp's run
template <int N_BIT>
struct seen_run {
    unsigned    mask[PER_LANE/2];                 // two positions each
    unsigned    visible  = 0;                     // a bit per position
    group_state state[2] = { IS_HIDDEN, IS_HIDDEN };
    unsigned    rows     = 0;                     // the lane's groups that are read from K, a bit for each of the run

    // returns the bytes of step 1 that this lane counts
    __device__ __forceinline__ int64_t look(const score_args & a, const int32_t * sealed, int run, int64_t i, int64_t s) {
        const int lane = threadIdx.x % 32, n_kv = (int) a.n_kv;
        load_mask(mask, a.mask.at<const uint16_t>(i, 0, s), run*RUN, n_kv, [&](int j) { return span_position<N_BIT>(lane, j); });
        int n_seen[2] = {};
#pragma unroll
        for (int p = 0; p < PER_LANE; ++p) {
            visible |= (unsigned) ((mask[p/2] >> p % 2*16 & 0xFFFF) != F16_NEG_INF) << p;
        }
#pragma unroll
        for (int j = 0; j < N_SPAN; ++j) {
            n_seen[is_second<N_BIT>(j)] += __popc(visible >> j*4 & 0xF);
        }
        int64_t bytes = 0;
#pragma unroll
        for (int b = 0; b <= (int) TWO_GROUPS<N_BIT>; ++b) {
            constexpr int N_LANE = TWO_GROUPS<N_BIT> ? 16 : 8; // that share a group
            const int n = lane_sum<N_LANE>(n_seen[b]), j = span_position<N_BIT>(lane, 2*b)/GROUP, g = run*(RUN/GROUP) + j;
            if (n > 0) {
                const bool in_k_t = N_BIT > 0 && ggml_sparse_is_sealed(sealed[g], i);
                state[b] = in_k_t ? IS_SEALED : IS_ROWS;
                rows    |= in_k_t ? 0 : 1u << j;
                if (lane % N_LANE == 0) {
                    bytes += in_k_t ? a.rank_of(i, s)*ggml_sparse_scan_bytes(N_BIT) : (int64_t) n*a.row_bytes;
                }
            }
        }
        return bytes;
    }
};

// products with rows of K, 8 lanes each, by all warps, run by run, from number r0 on: for the warps whose runs have groups that are read so
template <int TYPE, int N_BIT, int GB, int NT>
__device__ __forceinline__ void multiply_rows(
        float (&x)[GB][PER_LANE], score_shared<N_BIT, GB, NT> & m, const score_args & a, const seen_run<N_BIT> & seen, int r0, int64_t h_kv, int64_t i,
        int64_t s) {
    const int tid = threadIdx.x, lane = tid % 32, w = tid/32, n_kv = (int) a.n_kv;
    const uint16_t * mask = a.mask.at<const uint16_t>(i, 0, s);
    unsigned rows = seen.rows;
    for (int o = 1; o < 32; o *= 2) {
        rows |= __shfl_xor_sync(ALL, rows, o);
    }
    if (lane == 0) {
        m.rows[w] = rows;
    }
    __syncthreads();
#pragma unroll 1
    for (int v = 0; v < NT/32; ++v) {
        if (m.rows[v] == 0) {
            continue;
        }
#pragma unroll 1
        for (int p = tid/8; p < RUN; p += NT/8) {
            if (m.rows[v] >> p/GROUP & 1) {
                const int t = (r0 + v)*RUN + p;
                float y[GB] = {};
                dot_row<TYPE, GB>(y, m.q, a.k.type, t >= n_kv || mask[t] == F16_NEG_INF ? nullptr : a.k.at(h_kv, t, s), a.d);
                store_products<GB>(m.x, y, p);
            }
        }
        __syncthreads();
        if (v == w) {
#pragma unroll
            for (int j = 0; j < N_SPAN; ++j) {
                if (seen.state[is_second<N_BIT>(j)] == IS_ROWS) {
                    const int p = span_position<N_BIT>(lane, j);
#pragma unroll
                    for (int h = 0; h < GB; ++h) {
                        const float4 y = *(const float4 *) &m.x[h][p];
                        x[h][j*4]     = y.x;
                        x[h][j*4 + 1] = y.y;
                        x[h][j*4 + 2] = y.z;
                        x[h][j*4 + 3] = y.w;
                    }
                }
            }
        }
        __syncthreads();
    }
}

// a lane's logits of a run, from products -> x and a.logits; head: of the row, head number h of its token
template <int N_BIT>
__device__ __forceinline__ void write_run(float (&x)[PER_LANE], const score_args & a, const seen_run<N_BIT> & seen, int64_t head, int h, int run) {
    const int   lane = threadIdx.x % 32, n_kv = (int) a.n_kv, t0 = run*RUN;
    const float slope = head_slope(h, a.n_log2, a.max_bias), scale = N_BIT == 0 && !(a.softcap > 0.0f) ? a.scale : 1.0f;
#pragma unroll
    for (int p = 0; p < PER_LANE; p += 2) {
        const float2 bias = f16_pair(seen.mask[p/2]);
        x[p]     = seen.visible >> p       & 1 ? x[p]    *scale + slope*bias.x : neg_inf(); // whatever the product is
        x[p + 1] = seen.visible >> (p + 1) & 1 ? x[p + 1]*scale + slope*bias.y : neg_inf();
    }
    float * logits = a.logits + head*a.n_kv + t0;
    if (t0 + RUN <= n_kv && n_kv % 4 == 0 && (uintptr_t) a.logits % 16 == 0) {
#pragma unroll
        for (int j = 0; j < N_SPAN; ++j) {
            *(float4 *) &logits[span_position<N_BIT>(lane, j)] = make_float4(x[j*4], x[j*4 + 1], x[j*4 + 2], x[j*4 + 3]);
        }
    } else {
#pragma unroll
        for (int p = 0; p < PER_LANE; ++p) {
            const int t = span_position<N_BIT>(lane, p/4) + p % 4;
            if (t0 + t < n_kv) {
                logits[t] = x[p];
            }
        }
    }
    if (a.run_max) {
        finish_run<N_BIT>(x, a.run_max, a.run_sum, head*a.n_run + run);
    }
}

// blocks that a multiprocessor shall hold at least: what leaves enough registers
constexpr int score_blocks(int n_bit, int gb, int nt) { return (gb > 1 ? 1 : n_bit == 0 ? 3 : 2)*N_THREAD/nt; }

// one block: GB query heads of a KV head of a token; each of its warps has a run, blockIdx.x*N_WARP + its number, then others
//   N_BIT: of k_t, 0: exact scores from K; TYPE: of K, or ANY
template <int N_BIT, int GB, int TYPE, int NT>
static __global__ void __launch_bounds__(NT, score_blocks(N_BIT, GB, NT)) score(const score_args a) {
    begin_kernel();
    constexpr int N_WARP = NT/32;
    __shared__ score_shared<N_BIT, GB, NT> m;

    const int2    heads = split_index(blockIdx.y, a.n_pass), token = split_index(blockIdx.z, a.n_tok);
    const int64_t h_kv = heads.x, row = blockIdx.z, i = token.y, s = token.x;
    const int     h0   = heads.y*GB, n_head = min(GB, a.n_group_q - h0), head = (int) h_kv*a.n_group_q + h0;
    const int     tid  = threadIdx.x, lane = tid % 32, w = tid/32;

    if (a.kl.data && a.kl.at<const int32_t>(i, 0, s)[0] < 0) {
        return;
    }
    int n_comp = 0;
    if (N_BIT == 0) {
        load_queries<GB>(m.q, a.q, head, n_head, i, s, a.d);
        __syncthreads();
    } else {
        if (ggml_sparse_has_codes(N_BIT)) {
            copy_states(m, a.sealed + s*a.n_grp, a.n_grp, i);
        }
        n_comp = choose_components(m, a, h_kv, h0, i, s, true);
    }
    const int32_t * sealed = N_BIT == 0 ? nullptr : a.sealed + s*a.n_grp;

    // of this KV head: the first block counts what choosing components reads
    int64_t bytes = tid == 0 && blockIdx.x == 0 && h0 == 0 ? ggml_sparse_spread_bytes(a.d, a.n_kv, N_BIT) : 0;
    const int stride = (int) gridDim.x*N_WARP;
#pragma unroll 1
    for (int r0 = blockIdx.x*N_WARP; r0 < (int) a.n_run; r0 += stride) {
        const int run = r0 + w;
        seen_run<N_BIT> seen;
        const int64_t bytes_run = seen.look(a, sealed, run, i, s);
        bytes += h0 == 0 ? bytes_run : 0;

        float x[GB][PER_LANE] = {};
        if (N_BIT > 0 && n_comp > 0 && __ballot_sync(ALL, seen.state[0] == IS_SEALED || seen.state[1] == IS_SEALED) != 0) {
            const char * k_t = a.k_t.at(h_kv*a.d, s);
            if constexpr (ggml_sparse_has_codes(N_BIT)) {
                float step[GB], base[GB];
                const int group = seen.state[0] == IS_SEALED ? run*(RUN/GROUP) + lane/8 : 0; // any one that is there
                scan_codes<AT_ONCE<N_BIT, GB>>(x, m, step, base, w, n_comp, k_t + codes_at<N_BIT>(group, lane), a.k_t.nb1, [&] {
                    make_coef<8>(m, step, base, w, n_comp, a.k_range.at(h_kv*a.d, group, s), a.k_range.nb1);
                });
            } else {
                scan_f16(x, m, n_comp, k_t + (int64_t) run*RUN*N_BIT/8 + lane*16, a.k_t.nb1, a.n_pos_t - run*RUN);
            }
        }
        if (__syncthreads_or(seen.rows != 0)) {
            multiply_rows<TYPE>(x, m, a, seen, r0, h_kv, i, s);
        }
        if (run >= (int) a.n_run) {
            continue;
        }
        if (a.softcap > 0.0f) {
#pragma unroll
            for (int p = 0; p < GB*PER_LANE; ++p) {
                float & y = x[p/PER_LANE][p % PER_LANE];
                y = soft_cap(N_BIT == 0 ? y*a.scale : y, a.softcap);
            }
        }
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            if (h < n_head) {
                write_run(x[h], a, seen, row*a.n_head + head + h, head + h, run);
            }
        }
    }
    if (!a.stats) {
        return;
    }
    bytes = block_sum<NT>(bytes, m.bytes);
    if (tid == 0 && bytes > 0) { // once per block: additions to one place wait for each other
        add_stat(a.stats, GGML_SPARSE_STAT_BYTES_SCORE, bytes);
    }
}

} // namespace sparse_cuda
