#pragma once

// A layer in one launch: own logits, the histogram of an only head's, and the softmax of each head.

#include "sparse-layer-block.cuh"
#include "sparse-line.cuh"

namespace sparse_cuda {

// the largest logit so far, the sum of exp(logit - it), NaN if there is a NaN; of what a lane has seen
struct running_softmax {
    float top = -INFINITY, sum = 0.0f;

    template <int N>
    __device__ __forceinline__ void add(const float (&x)[N]) {
        float most = top;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            most = fmaxf(most, x[i]);
        }
        const bool is_inf = most > FLT_MAX;
        most = is_inf ? FLT_MAX : most;
        const float ref = most > neg_inf() ? most : 0.0f;
        sum *= expf(top - ref); // 0 where nothing was seen
#pragma unroll
        for (int i = 0; i < N; ++i) {
            sum += expf(is_inf ? finite_top(x[i]) - ref : x[i] - ref);
        }
        top = most;
    }
};

// Where logits of an only head lie, if components were normal and independent: bins from two standard deviations below the mean on. Each warp does it
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::guess_bins(int n_comp) {
    float mean = 0.0f, square = 0.0f;
#pragma unroll 1
    for (int o = lane; o < n_comp; o += 32) {
        const float x = m.score.coef[0][o], y = x*m.score.spread[m.score.comp[o]];
        mean   += x*m.score.x[0][m.score.comp[o]];
        square += y*y;
    }
    const float sigma = fmaxf(__fsqrt_rn(lane_sum<32>(square)), 1e-20f);
    bin.lo  = lane_sum<32>(mean) - 2.0f*sigma;
    bin.inv = __fdividef(LAYER_BINS/16.0f, sigma);
}

// counts a key in the histogram; a marked cell goes to the last bin
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::count_key(float x, unsigned mark) {
    const int b = bin.at(mark && x > neg_inf() ? INFINITY : x);
    if (b >= 0) {
        atomicAdd(&m.hist[b], 1u);
    }
}

// the products of a run, or of the `line`-th group of it, from the transposed K; coded: the groups of the run that are there, a bit each
template <int N_BIT, int GB, int TYPE>
template <bool LINE, int N>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::scan_unit(float (&x)[GB][N], int n_comp, int run, int line, unsigned coded) {
    const char * k_t = sa.k_t.at(h_kv*sa.d, s);
    if constexpr (HAS_CODES) {
        float step[GB], base[GB];
        const int  j = LINE ? line : lane/8, group = coded >> j & 1 ? run*(RUN/GROUP) + j : 0; // any one that is there
        const auto make = [&] {
            make_coef<LINE ? 32 : 8>(m.score, step, base, warp, n_comp, sa.k_range.at(h_kv*sa.d, group, s), sa.k_range.nb1);
        };
        if constexpr (LINE && USES_MMA<GB>) {
            scan_line_mma(x, m.score, step, base, warp, n_comp, k_t + codes_at<N_BIT>(group, 0), sa.k_t.nb1, make);
        } else if constexpr (LINE) {
            scan_line(x, m.score, step, base, warp, n_comp, k_t + codes_at<N_BIT>(group, 0), sa.k_t.nb1, make);
        } else {
            scan_codes<8>(x, m.score, step, base, warp, n_comp, k_t + codes_at<N_BIT>(group, lane), sa.k_t.nb1, make);
        }
    } else {
        scan_f16(x, m.score, n_comp, k_t + (int64_t) run*RUN*N_BIT/8 + lane*16, sa.k_t.nb1, sa.n_pos_t - run*RUN);
    }
}

// Logits of an only head are what is ranked: as keys, and into the histogram if they count. first: number of the run's first position, of the own ones
template <int N_BIT, int GB, int TYPE>
template <int N, typename F>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::rank_unit(float (&x)[N], float & least, bool counts, int first, const F & place) {
#pragma unroll
    for (int p = 0; p < N; ++p) {
        x[p] = as_key(x[p]);
        least = fminf(least, x[p] > neg_inf() ? x[p] : least);
    }
    if (counts) {
#pragma unroll
        for (int j = 0; j < N/4; ++j) {
            const int i = first + place(j);
            const unsigned marks = m.marks[i/32] >> i % 32;
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                count_key(x[j*4 + l], marks >> l & 1);
            }
        }
    }
}

// a run, or a group of it, by a warp
template <int N_BIT, int GB, int TYPE>
template <bool LINE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::score_unit(
        running_softmax (&softmax)[GB], float & least, int h0, int n_head, int n_comp, int run, int line) {
    constexpr int NS = LINE ? 1 : N_SPAN; // spans of a lane
    const auto place = [&](int j) { return LINE ? line_position<GB>(line, lane) : span_position<N_BIT>(lane, j); };
    constexpr int PER_WORD = 32*GROUP/RUN; // runs
    const unsigned own   = LINE ? 1u << line : (1u << RUN/GROUP) - 1; // groups
    const auto of_run = [&](const unsigned * bits) { return bits[run/PER_WORD] >> run % PER_WORD*(RUN/GROUP) & own; };
    const unsigned coded = of_run(m.coded), by_rows = of_run(m.rows);
    const int t0 = run*RUN;
    float x[GB][NS*4] = {};
    unsigned seen[NS*2] = {}; // the mask, two positions each
    bool plain = false;       // all are seen, without a bias
    if (coded != 0) {
        load_mask(seen, mask, t0, n_kv, place);
        if (n_comp > 0) {
            scan_unit<LINE>(x, n_comp, run, line, coded);
        }
        if (sa.softcap > 0.0f) {
#pragma unroll
            for (int p = 0; p < GB*NS*4; ++p) {
                x[p/(NS*4)][p % (NS*4)] = soft_cap(x[p/(NS*4)][p % (NS*4)], sa.softcap);
            }
        }
        unsigned bits = 0;
#pragma unroll
        for (int j = 0; j < NS*2; ++j) {
            bits |= seen[j];
        }
        plain = coded == own && __ballot_sync(ALL, bits != 0) == 0;
    }
    if (!plain) {
#pragma unroll
        for (int p = 0; p < NS*4; ++p) {
            const uint16_t mp = (uint16_t) (seen[p/2] >> p % 2*16);
            const bool     in = coded >> (place(p/4)/GROUP) & 1 && mp != F16_NEG_INF;
            const float  bias = f16_value(mp);
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                x[h][p] = in ? x[h][p] + m.slope[h]*bias : neg_inf(); // whatever the product is
            }
        }
    }
    if (coded != 0) {
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            softmax[h].add(x[h]);
        }
    }
    if constexpr (GB == 1) {
        rank_unit(x[0], least, coded != 0, (run - run0)*RUN, place);
    }
#pragma unroll
    for (int j = 0; j < NS; ++j) {
        const int p = place(j);
        if (!(by_rows >> p/GROUP & 1)) {
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                if (h < n_head) {
                    float * to = GB == 1 ? keys + key_at(t0, (run - run0)*RUN) : logits + (h0 + h)*a.ld + t0;
                    *(float4 *) &to[p] = make_float4(x[h][j*4], x[h][j*4 + 1], x[h][j*4 + 2], x[h][j*4 + 3]);
                }
            }
        }
    }
}

// rows of K, 8 lanes each
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::score_rows(running_softmax (&softmax)[GB], float & least, int h0, int n_head) {
    const int group0 = shared_rows ? 0 : min(run0*(RUN/GROUP), n_grp), group1 = shared_rows ? n_grp : min(run1*(RUN/GROUP), n_grp);
#pragma unroll 1
    for (int batch = 0; ; ++batch) {
        const int n = shared_rows ? n_item : list_groups(m.tail, &m.n_list, m.rows, group0, group1, batch)*n_per;
#pragma unroll 1
        for (int i0 = 0; i0 < n; i0 += N_THREAD/8) {
            const int  i = i0 + tid/8, t = i < n ? row_at(m.tail, i, row0, n_per) : n_kv;
            const uint16_t mt = t < n_kv ? mask[t] : F16_NEG_INF;
            float y[GB] = {}, mine = 0.0f;
            dot_row<TYPE, GB>(y, m.score.q, sa.k.type, mt == F16_NEG_INF ? nullptr : sa.k.at(h_kv, t, s), sa.d);
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                const float z = lane_sum<8>(y[h]);
                mine = lane % 8 == h ? z : mine;
            }
            const int h = lane % 8;
            if (h < n_head && i < n) {
                const float x = make_logit(mine, mt, 1.0f, sa.softcap, m.slope[h]);
                if (GB > 1 || !SPARQ_SMEM_KEYS) {
                    logits[(h0 + h)*a.ld + t] = GB == 1 ? as_key(x) : x;
                }
                if (GB == 1) {
                    const int o = shared_rows ? n_chunk*LAYER_CHUNK + i : t - run0*RUN;
                    if (SPARQ_SMEM_KEYS) {
                        keys[o] = as_key(x);
                    }
                    count_key(as_key(x), m.marks[o/32] >> o % 32 & 1);
                }
#pragma unroll
                for (int j = 0; j < GB; ++j) {
                    const float one[1] = { x };
                    if (j == h) {
                        softmax[j].add(one);
                    }
                }
                least = x > neg_inf() ? fminf(least, x) : least;
            }
        }
        if (n < LAYER_ROWS*n_per || shared_rows) {
            break;
        }
        __syncthreads(); // the list was read
    }
}

// the softmax of each head over the block, from what lanes have seen. Ends behind a barrier, a warp per head
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::join_warps(const running_softmax (&softmax)[GB], float least, int h0, int n_head) {
#pragma unroll
    for (int h = 0; h < GB; ++h) {
        const float top = warp_max(softmax[h].top), ref = top > neg_inf() ? top : 0.0f;
        const float sum = lane_sum<32>(softmax[h].sum*expf(softmax[h].top - ref)); // 0, or NaN
        if (lane == 0) {
            m.warp_top[warp][h] = top;
            m.warp_sum[warp][h] = sum;
        }
    }
    if (GB == 1) {
        least = -warp_max(-least);
        if (lane == 0) {
            m.warp_least[warp] = least;
        }
    }
    __syncthreads();
    if (warp < n_head) { // a warp per head
        const float t = lane < N_WARP ? m.warp_top[lane][warp] : neg_inf(), x = lane < N_WARP ? m.warp_sum[lane][warp] : 0.0f;
        const float top = warp_max(t), sum = lane_sum<32>(x*expf(t - (top > neg_inf() ? top : 0.0f)));
        const float low = GB == 1 ? -warp_max(lane < N_WARP ? -m.warp_least[lane] : neg_inf()) : 0.0f;
        if (lane == 0) {
            m.head_top[h0 + warp] = top;
            m.head_sum[h0 + warp] = sum;
            if (GB == 1) {
                m.head_least = low;
            }
        }
    }
}

// own logits, and the softmax of each head over them
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::score() {
#pragma unroll 1
    for (int h0 = 0; h0 < n_group_q; h0 += GB) {
        const int n_head = min(GB, n_group_q - h0);
        if (tid < GB) {
            m.slope[tid] = head_slope((int) h_kv*n_group_q + h0 + tid, sa.n_log2, sa.max_bias);
        }
        const int n_comp = choose_components(m.score, sa, h_kv, h0, i_tok, s, n_row_group > 0);
        if (GB == 1) {
            guess_bins(n_comp);
        }
        running_softmax softmax[GB];
        float least = INFINITY;
        // runs as long as there is one for each warp, then lines; lines alone with several heads, whose sums over a run would not fit into registers
        const int lines0 = N_BIT != 4 ? run1 : GB == 1 ? run0 + (run1 - run0)/N_WARP*N_WARP : run0;
        if constexpr (N_BIT != 4 || GB == 1) {
#pragma unroll 1
            for (int run = run0 + warp; run < lines0; run += N_WARP) {
                score_unit<false>(softmax, least, h0, n_head, n_comp, run, 0);
            }
        }
        if constexpr (N_BIT == 4) {
#pragma unroll 1
            for (int unit = lines0*4 + warp; unit < run1*4; unit += N_WARP) {
                score_unit<true>(softmax, least, h0, n_head, n_comp, unit/4, unit % 4);
            }
        }
        if (n_row_group > 0) {
            score_rows(softmax, least, h0, n_head);
        }
        join_warps(softmax, least, h0, n_head);
    }
}

// the softmax of each head over the cluster, a warp per head; ends at a barrier
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::join_softmax() {
#pragma unroll 1
    for (int h = warp; h < n_group_q; h += N_WARP) {
        const bool in = lane < n_block;
        const float t = in ? *cluster_at(&m.head_top[h], lane) : neg_inf(), x = in ? *cluster_at(&m.head_sum[h], lane) : 0.0f;
        const float low = GB == 1 && in ? *cluster_at(&m.head_least, lane) : INFINITY;
        const float top = warp_max(t), ref = top > neg_inf() ? top : 0.0f, sum = lane_sum<32>(x*expf(t - ref)), least = -warp_max(-low);
        if (lane == 0) {
            m.top[h] = ref;
            m.sum[h] = sum;
            m.inv[h] = sum > 0.0f ? __fdiv_rn(1.0f, sum) : 0.0f;
            if (GB == 1) {
                m.least = least;
            }
        }
    }
    __syncthreads();
}

} // namespace sparse_cuda
