#pragma once

// SCORE_SELECT and ATTEND of a layer in one launch, on Hopper and later: a cluster of blocks has a KV head of a token (a row is stream*n_tok + token).
//
//   own       Each block has some of the runs of the head, and scores, ranks and lists their positions. Groups that are read from K by rows (the tail that
//             is not sealed yet) would keep one block busy while the others wait, so where they are few, each block has a part of their rows instead.
//   scratch   Logits, keys and lists lie in global memory, where they stay in L2: that sets no limit to the context, and leaves shared memory, and with
//             it multiprocessors, to more blocks.
//   barriers  of the cluster: A the softmax of the heads, B the histogram of what is ranked, C the list of selected positions, D the states. With one
//             query head per KV head the logits are ranked: then A and B are one, and bins are guessed from how the components of K spread.
//
// The selection is what SELECT defines, to the last cell: the histogram only tells where the cut is, and the cells of that bin are ranked exactly. Where
// they are too many, the bin gets a histogram of its own; ties that no histogram parts are cut by halving. Everything is added up in an order that
// depends on shapes alone.
//
// Most of this code runs once or a few times in a launch, so what it costs is the fetching of instructions: loops stay loops.

#include "sparse-attend.cuh"
#include "sparse-score.cuh"
#include "sparse-select-args.cuh"

namespace sparse_cuda {

constexpr int LAYER_BINS   = 2048;  // of the histogram; the last one has the forced cells
constexpr int LAYER_CAND   = 512;   // cells of the bin of the cut that are ranked
constexpr int LAYER_HEADS  = 32;    // query heads of a KV head
constexpr int LAYER_ROWS   = 32;    // groups whose rows are read at a time
constexpr int LAYER_OWN    = 65536; // positions of a block
constexpr int LAYER_CHUNK  = 128;   // positions that a warp looks at at a time, 4 a lane
constexpr int LAYER_LIST   = 512;   // selected positions that a block reads at a time
constexpr int LAYER_STATE  = 5;     // of a state, behind o [d_v]: m, l, root; of the selected cells' approximate logits: mass, root
constexpr int LAYER_BLOCKS = 16;    // of a cluster

struct layer_args {
    score_args  score;
    attend_args attend;
    view        forced;
    float   * key;    // [row][n_head_kv][ld], with several query heads per KV head
    int32_t * sel;    // [row][n_head_kv][topk_max]
    int2    * cand;   // [row][n_head_kv][LAYER_CAND] cell, order
    float   * state;  // [row][n_head][n_block][d_v + LAYER_STATE]
    float   * mean;   // [row][n_head_kv][n_block][d_v]
    int64_t ld;       // of logits and keys: whole runs
    int     n_block, n_forced, n_local_max, topk_max, n_lane; // n_lane: that share a row in ATTEND, 8, 16 or 32
};

template <int N_BIT, int GB>
struct alignas(16) layer_shared {
    union {
        struct {
            union {
                score_shared<N_BIT, GB, N_THREAD> score;
                float mean[N_THREAD][8];
            };
            unsigned hist[LAYER_BINS];
        };
        float part[N_WARP][GB][D_MAX + LAYER_STATE];
    };
    float    q[GB][D_MAX];                          // see q_place()
    unsigned coarse[LAYER_BINS/32];                 // sums of 32 bins
    unsigned coded[N_STATE/32], rows[N_STATE/32];   // a bit per group that is seen: read from k_t, from K
    unsigned whole[N_STATE/32], ragged[N_STATE/32]; // the same for the mean: by its sum of V, by rows of V
    alignas(16) unsigned marks[(LAYER_OWN + LAYER_ROWS*GROUP)/32]; // of own positions: the forced cells; later those above the cut
    int      tail[LAYER_ROWS], tail_v[LAYER_ROWS];  // groups: whose rows of K are scored; whose rows of V count for the mean
    float    warp_top[N_WARP][GB], warp_sum[N_WARP][GB], warp_least[N_WARP];
    float    slope[GB];
    float    head_top[LAYER_HEADS], head_sum[LAYER_HEADS], head_least; // of this block
    float    top[LAYER_HEADS], sum[LAYER_HEADS], inv[LAYER_HEADS], least; // of the cluster
    int2     cand[LAYER_CAND];
    int      chosen[LAYER_CAND];                    // of the candidates
    int      list[LAYER_LIST];                      // what is read of K and V; -1: nothing
    float    list_bias[LAYER_LIST];                 // what the mask adds, but for the slope
    int      total[5][N_WARP];
    int      n_warp[N_WARP];
    int      slot[2];                               // what cluster_counter adds up
    int      n_list, n_list_v, cut, n_sel, n_need, n_cand, n_pushed, is_few, at_sel, at_cand, k;
};

// the groups of bits [g0, g1) in turn, LAYER_ROWS at a time: number `batch` of them -> list; returns how many. By all threads; ends at a barrier
static __device__ __forceinline__ int list_groups(int * list, int * n_list, const unsigned * bits, int g0, int g1, int batch) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        int n = 0;
#pragma unroll 1
        for (int w0 = g0/32; w0*32 < g1; w0 += 32) {
            const int i = w0 + lane;
            unsigned x = i*32 < g1 ? bits[i] : 0;
            x &= i*32 < g0 ? ALL << (g0 - i*32) : ALL;
            x &= i*32 + 32 > g1 && i*32 < g1 ? ALL >> (i*32 + 32 - g1) : ALL;
            const int mine = __popc(x), upto = warp_prefix(mine);
            int at = n + upto - mine;
#pragma unroll 1
            while (x) {
                if (at/LAYER_ROWS == batch) {
                    list[at % LAYER_ROWS] = i*32 + __ffs((int) x) - 1;
                }
                x &= x - 1;
                ++at;
            }
            n += __shfl_sync(ALL, upto, 31);
        }
        if (lane == 0) {
            *n_list = min(max(n - batch*LAYER_ROWS, 0), LAYER_ROWS);
        }
    }
    __syncthreads();
    return *n_list;
}

// a number of each block, added up over the cluster; before: over the blocks before this one. Calls take turns with slot[2]
struct cluster_counter {
    int * slot;
    int n_block, rank, turn = 0;

    __device__ __forceinline__ int sum(int x, int * n_warp, int * before) {
        x = warp_sum(x);
        __syncthreads(); // n_warp of the last one was read
        if (threadIdx.x % 32 == 0) {
            n_warp[threadIdx.x/32] = x;
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            const int all = warp_sum(threadIdx.x < N_WARP ? n_warp[threadIdx.x] : 0);
            if (threadIdx.x == 0) {
                slot[turn] = all;
            }
        }
        cluster_arrive();
        cluster_wait();
        const int r = threadIdx.x % 32, y = r < n_block ? *cluster_at(&slot[turn], r) : 0;
        *before = warp_sum(r < rank ? y : 0);
        turn ^= 1;
        return warp_sum(y);
    }
};

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

// 8 elements of a row as they are read; K and V in f16 are kept packed until they are used
template <int TYPE> struct raw_span {
    float x[8];
    __device__ __forceinline__ void load(int type, const char * row, int c, int d) { load8(x, type, row, c, d); }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = 0.0f;
        }
    }
    __device__ __forceinline__ void unpack(float (&y)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            y[i] = x[i];
        }
    }
};
template <> struct raw_span<GGML_TYPE_F16> { // rows begin at multiples of 16 bytes, and have a multiple of 8 elements
    uint4 x;
    __device__ __forceinline__ void load(int, const char * row, int c, int) { x = *(const uint4 *) (row + c*2); }
    __device__ __forceinline__ void clear() { x = make_uint4(0, 0, 0, 0); }
    __device__ __forceinline__ void unpack(float (&y)[8]) const { unpack_f16(y, x); }
};

// attention of GB heads over the rows that a lane has seen; o: its 8 columns of V
template <int GB>
struct row_state {
    float top[GB], l[GB], root[GB], o[GB][8];
    float mass[GB], mass_root[GB]; // of the approximate logits of what the thread has listed

    __device__ __forceinline__ row_state() {
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            top[h] = neg_inf();
            l[h] = root[h] = mass[h] = mass_root[h] = 0.0f;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                o[h][c] = 0.0f;
            }
        }
    }

    // N rows by their logits, -inf for none, and what the lane has read of V
    template <int N, typename V>
    __device__ __forceinline__ void add(float (&y)[N][GB], const V (&v)[N], bool roots) {
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            float most = top[h];
#pragma unroll
            for (int r = 0; r < N; ++r) {
                most = fmaxf(most, y[r][h]);
            }
            const float ref = most > neg_inf() ? most : 0.0f, f = expf(top[h] - ref), f4 = expf(0.25f*(top[h] - ref));
            top[h]   = most;
            l[h]    *= f;
            root[h] *= f4;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                o[h][c] *= f;
            }
#pragma unroll
            for (int r = 0; r < N; ++r) {
                root[h] += roots ? expf(0.25f*(y[r][h] - ref)) : 0.0f;
                y[r][h]  = expf(y[r][h] - ref);
                l[h]    += y[r][h];
            }
        }
#pragma unroll
        for (int r = 0; r < N; ++r) {
            float x[8];
            v[r].unpack(x);
#pragma unroll
            for (int h = 0; h < GB; ++h) {
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    o[h][c] += y[r][h]*x[c];
                }
            }
        }
    }

    // together with the lane at this distance
    __device__ __forceinline__ void join(int distance) {
        const auto sum = [&](float x) { return x + __shfl_xor_sync(ALL, x, distance); };
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            const float all = fmaxf(top[h], __shfl_xor_sync(ALL, top[h], distance)), ref = all > neg_inf() ? all : 0.0f;
            const float f = expf(top[h] - ref), f4 = expf(0.25f*(top[h] - ref));
            top[h]  = all;
            l[h]    = sum(l[h]*f);
            root[h] = sum(root[h]*f4);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                o[h][c] = sum(o[h][c]*f);
            }
        }
    }
};

// one block of a cluster, and its work in the order of its steps
template <int N_BIT, int GB, int TYPE>
struct layer_block {
    static constexpr bool HAS_CODES = ggml_sparse_has_codes(N_BIT);
    using shared = layer_shared<N_BIT, GB>;

    // Bins of what is ranked: of logits by their value, from lo on; of sums of softmaxes, which are >= 0, by their bits, from base on. The higher the
    // key, the higher the bin. What is hidden, or below all bins, has none
    struct bins {
        float lo, inv;
        int   base, shift;

        __device__ __forceinline__ int at(float x) const {
            const int b = GB == 1 ? __float2int_rd((x - lo)*inv) : (__float_as_int(x) - base) >> shift;
            return x > neg_inf() ? min(b, x == INFINITY ? LAYER_BINS - 1 : LAYER_BINS - 2) : -1;
        }
        // all that is seen: logits from `least` to `top`
        __device__ __forceinline__ void complete(float least, float top) {
            lo    = least;
            inv   = top > least ? __fdiv_rn(LAYER_BINS - 2, fminf(top - least, FLT_MAX)) : 0.0f;
            base  = 0;
            shift = 20;
        }
        // the bin of the cut, and half a bin on either side
        __device__ __forceinline__ void narrow(int cut) {
            lo   += __fdiv_rn(cut - 0.5f, inv);
            inv  *= LAYER_BINS/2 - 2;
            base += cut << shift;
            shift = max(shift - 10, 0);
        }
    };

    const layer_args  & a;
    const score_args  & sa;
    const attend_args & ta;
    shared            & m;
    const int     C, rank, tid, lane, w;
    const int2    token;
    const int64_t h_kv, row, i_tok, s;
    const int     G, n_kv, n_grp, n_run;
    const int64_t u, head0;     // number of the KV head, of its first query head
    const int     run0, run1;   // own runs
    const int32_t  * kl;
    const uint16_t * mask;
    float * logits, * keys;     // of the first query head; what is ranked, which are the logits of an only head
    bool every, mean_v;
    int  n_vis, n_row_group, n_ragged, n_item, n_chunk;
    bool shared_rows;
    int  row0, n_per;           // of a group that is read by rows: the own ones
    int  n_sel, n_above;        // selected; of them those above the bin of the cut
    int  next_forced;           // the thread's first forced cell
    bins bin;

    __device__ __forceinline__ layer_block(const layer_args & a, shared & m) :
        a(a), sa(a.score), ta(a.attend), m(m), C(a.n_block), rank((int) blockIdx.x % C), tid(threadIdx.x), lane(tid % 32), w(tid/32),
        token(split_index(blockIdx.y, sa.n_tok)), h_kv(blockIdx.x/C), row(blockIdx.y), i_tok(token.y), s(token.x),
        G(GB == 1 ? 1 : sa.n_group_q), n_kv((int) sa.n_kv), n_grp((int) sa.n_grp), n_run((int) sa.n_run),
        u(row*sa.n_head_kv + h_kv), head0(row*sa.n_head + h_kv*G), run0(n_run*rank/C), run1(n_run*(rank + 1)/C),
        kl(sa.kl.at<const int32_t>(i_tok, 0, s)), mask(sa.mask.at<const uint16_t>(i_tok, 0, s)),
        logits(sa.logits + head0*a.ld), keys(GB > 1 ? a.key + u*a.ld : logits), n_item(0), n_chunk((run1 - run0)*(RUN/LAYER_CHUNK)), n_sel(0), n_above(0) {}

    __device__ __forceinline__ int row_at(const int * list, int i, int row0, int n_per) const { return list[i/n_per]*GROUP + row0 + i % n_per; }
    __device__ __forceinline__ int total(int j) const { return warp_sum(lane < N_WARP ? m.total[j][lane] : 0); }

    // what needs nothing that another kernel writes
    __device__ __forceinline__ void clear() {
        for (int j = tid; j < LAYER_BINS; j += N_THREAD) {
            m.hist[j] = 0;
        }
        for (int j = tid; j < (run1 - run0)*(RUN/32) + LAYER_ROWS*GROUP/32; j += N_THREAD) {
            m.marks[j] = 0;
        }
    }

    __device__ __forceinline__ int forced_at(int j) const {
        const bool in = j < a.n_forced && (j < kl[1] || j >= a.n_local_max);
        return in ? a.forced.at<const int32_t>(i_tok, 0, s)[j] : -1;
    }

    // what there is to see: a bit per group, and sums; the groups whose rows all blocks share
    __device__ __forceinline__ void see() {
        every  = kl[0] < 0;
        mean_v = ta.mean_v && !every;
        next_forced = forced_at(tid);
        const int32_t * vis = ta.visible.at<const int32_t>(i_tok, 0, s), * sealed = sa.sealed + s*n_grp;
        const int n_rank = sa.rank_of(i_tok, s), coded_bytes = n_rank*(int) ggml_sparse_scan_bytes(GROUP, N_BIT);
        int sum[5] = {}; // visible positions; groups by rows of K, of V; bytes of step 1, of the mean of V: at most 1 GB, N_STATE groups of D_MAX elements
        constexpr int N = 4; // loads of a thread at once
#pragma unroll 1
        for (int g0 = tid; g0 < (n_grp + N_THREAD - 1)/N_THREAD*N_THREAD; g0 += N*N_THREAD) {
            int seen[N], is_sealed[N];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const int g = g0 + j*N_THREAD;
                seen[j]      = g < n_grp ? vis[g] : 0;
                is_sealed[j] = g < n_grp ? sealed[g] : 0;
            }
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const int  g = g0 + j*N_THREAD, v = seen[j];
                if (g - tid >= n_grp) { // for all
                    break;
                }
                const bool in_k_t = is_sealed[j] != 0 && v > 0 && (!HAS_CODES || (g + 1)*GROUP <= n_kv), is_whole = is_sealed[j] != 0 && v == GROUP;
                const unsigned b0 = __ballot_sync(ALL, is_sealed[j] != 0), b1 = __ballot_sync(ALL, in_k_t), b2 = __ballot_sync(ALL, v > 0 && !in_k_t);
                const unsigned b3 = __ballot_sync(ALL, is_whole), b4 = __ballot_sync(ALL, v > 0 && !is_whole);
                sum[0] += v;
                sum[3] += !in_k_t ? v*sa.row_bytes : HAS_CODES || (g + 1)*GROUP <= n_kv ? coded_bytes : n_rank*(n_kv - g*GROUP)*N_BIT/8;
                sum[4] += is_whole ? 0 : v*ta.row_v;
                if (lane == 0) {
                    m.score.sealed[HAS_CODES ? g/32 : 0] = b0;
                    m.coded [g/32] = b1;
                    m.rows  [g/32] = b2;
                    m.whole [g/32] = b3;
                    m.ragged[g/32] = b4;
                    sum[1] += __popc(b2);
                    sum[2] += __popc(b4);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const unsigned x = b3 >> half*SUM & 0xFFFFu;
                        sum[4] += (x == 0xFFFFu ? 1 : __popc(x))*ta.d_v*(int) sizeof(float);
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 5; ++j) {
            sum[j] = warp_sum(sum[j]);
            if (lane == 0) {
                m.total[j][w] = sum[j];
            }
        }
        __syncthreads();
        n_vis       = total(0);
        n_row_group = total(1);
        n_ragged    = total(2);
        shared_rows = C > 1 && n_row_group <= LAYER_ROWS;
        row0        = shared_rows ? GROUP/C*rank : 0;
        n_per       = shared_rows ? GROUP/C : GROUP;
        if (shared_rows && n_row_group > 0) {
            n_item = list_groups(m.tail, &m.n_list, m.rows, 0, n_grp, 0)*n_per;
        }
    }

    // ---- step 1 ----

    // Where logits of an only head lie, if components were normal and independent: bins from two standard deviations below the mean on. Each warp does it
    __device__ __forceinline__ void guess_bins(int n_comp) {
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

    // own position number i, with this key, into the histogram
    __device__ __forceinline__ void count_key(float x, unsigned mark) {
        const int b = bin.at(mark && x > neg_inf() ? INFINITY : x);
        if (b >= 0) {
            atomicAdd(&m.hist[b], 1u);
        }
    }

    // a logit that is ranked: NaN is hidden, +inf counts as FLT_MAX
    static __device__ __forceinline__ float as_key(float x) { return fminf(fmaxf(x, neg_inf()), FLT_MAX); }

    // a run, or a line of it, by a warp
    template <bool LINE>
    __device__ __forceinline__ void score_unit(running_softmax (&softmax)[GB], float & least, int h0, int n_head, int n_comp, int run, int line) {
        constexpr int NS = LINE ? 1 : N_SPAN; // spans of a lane
        const auto place = [&](int j) { return LINE ? span_position<N_BIT>(line*8 + lane % 8, line_span(lane)) : span_position<N_BIT>(lane, j); };
        const unsigned coded = m.coded[run/4] >> run % 4*8 & 0xFF, by_rows = m.rows[run/4] >> run % 4*8 & 0xFF;
        const int t0 = run*RUN;
        float x[GB][NS*4] = {};
        unsigned seen[NS*2] = {}; // the mask, two positions each
        bool plain = false;       // all are seen, without a bias
        if (coded != 0) {
            if (t0 + RUN <= n_kv && (uintptr_t) mask % 8 == 0) {
#pragma unroll
                for (int j = 0; j < NS; ++j) {
                    const uint2 raw = *(const uint2 *) &mask[t0 + place(j)];
                    seen[j*2]     = raw.x;
                    seen[j*2 + 1] = raw.y;
                }
            } else {
#pragma unroll
                for (int j = 0; j < NS*2; ++j) {
                    const int t = t0 + place(j/2) + j % 2*2;
                    seen[j]  = t     < n_kv ? mask[t]     : F16_NEG_INF;
                    seen[j] |= (unsigned) (t + 1 < n_kv ? mask[t + 1] : F16_NEG_INF) << 16;
                }
            }
            if (n_comp > 0) {
                const char * k_t = sa.k_t.at(h_kv*sa.d, s) + (int64_t) t0*N_BIT/8;
                if constexpr (HAS_CODES) {
                    float step[GB], base[GB];
                    const auto make = [&] { make_coef(m.score, step, base, w, n_comp, sa.k_range.at(h_kv*sa.d, run, s), sa.k_range.nb1); };
                    if constexpr (LINE) {
                        scan_line(x, m.score, step, base, w, n_comp, k_t + line*GGML_SPARSE_LINE, sa.k_t.nb1, make);
                    } else {
                        scan_codes<8>(x, m.score, step, base, w, n_comp, k_t + lane*(PER_LANE*N_BIT/8), sa.k_t.nb1, make);
                    }
                } else {
                    scan_f16(x, m.score, n_comp, k_t + lane*16, sa.k_t.nb1, n_kv - t0);
                }
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
            plain = coded == 0xFF && __ballot_sync(ALL, bits != 0) == 0;
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
#pragma unroll
            for (int p = 0; p < NS*4; ++p) {
                x[0][p] = as_key(x[0][p]);
                least = fminf(least, x[0][p] > neg_inf() ? x[0][p] : least);
            }
            if (coded != 0) {
#pragma unroll
                for (int j = 0; j < NS; ++j) {
                    const int i = (run - run0)*RUN + place(j);
                    const unsigned marks = m.marks[i/32] >> i % 32;
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        count_key(x[0][j*4 + l], marks >> l & 1);
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < NS; ++j) {
            const int p = place(j);
            if (!(by_rows >> p/GROUP & 1)) {
#pragma unroll
                for (int h = 0; h < GB; ++h) {
                    if (h < n_head) {
                        *(float4 *) &logits[(h0 + h)*a.ld + t0 + p] = make_float4(x[h][j*4], x[h][j*4 + 1], x[h][j*4 + 2], x[h][j*4 + 3]);
                    }
                }
            }
        }
    }

    // rows of K, 8 lanes each
    __device__ __forceinline__ void score_rows(running_softmax (&softmax)[GB], float & least, int h0, int n_head) {
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
                    logits[(h0 + h)*a.ld + t] = GB == 1 ? as_key(x) : x;
                    if (GB == 1) {
                        const int o = shared_rows ? n_chunk*LAYER_CHUNK + i : t - run0*RUN;
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

    // own logits, and the softmax of each head over them
    __device__ __forceinline__ void score() {
#pragma unroll 1
        for (int h0 = 0; h0 < G; h0 += GB) {
            const int n_head = min(GB, G - h0);
            if (tid < GB) {
                m.slope[tid] = head_slope((int) h_kv*G + h0 + tid, sa.n_log2, sa.max_bias);
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
                for (int run = run0 + w; run < lines0; run += N_WARP) {
                    score_unit<false>(softmax, least, h0, n_head, n_comp, run, 0);
                }
            }
            if constexpr (N_BIT == 4) {
#pragma unroll 1
                for (int unit = lines0*4 + w; unit < run1*4; unit += N_WARP) {
                    score_unit<true>(softmax, least, h0, n_head, n_comp, unit/4, unit % 4);
                }
            }
            if (n_row_group > 0) {
                score_rows(softmax, least, h0, n_head);
            }
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                const float top = warp_max(softmax[h].top), ref = top > neg_inf() ? top : 0.0f;
                const float sum = lane_sum<32>(softmax[h].sum*expf(softmax[h].top - ref)); // 0, or NaN
                if (lane == 0) {
                    m.warp_top[w][h] = top;
                    m.warp_sum[w][h] = sum;
                }
            }
            if (GB == 1) {
                least = -warp_max(-least);
                if (lane == 0) {
                    m.warp_least[w] = least;
                }
            }
            __syncthreads();
            if (w < n_head) { // a warp per head
                const float t = lane < N_WARP ? m.warp_top[lane][w] : neg_inf(), x = lane < N_WARP ? m.warp_sum[lane][w] : 0.0f;
                const float top = warp_max(t), sum = lane_sum<32>(x*expf(t - (top > neg_inf() ? top : 0.0f)));
                const float low = GB == 1 ? -warp_max(lane < N_WARP ? -m.warp_least[lane] : neg_inf()) : 0.0f;
                if (lane == 0) {
                    m.head_top[h0 + w] = top;
                    m.head_sum[h0 + w] = sum;
                    m.head_least = low;
                }
            }
        }
    }

    // ---- beside it ----

    // own position t: its number among them, -1 for another block's
    __device__ __forceinline__ int own_place(int t) const {
        const int g = t/GROUP;
        if (shared_rows && (m.rows[g/32] >> g % 32 & 1)) {
            if (t % GROUP/n_per != rank) {
                return -1;
            }
            int place = 0;
#pragma unroll 1
            while (m.tail[place] != g) {
                ++place;
            }
            return n_chunk*LAYER_CHUNK + place*n_per + t % n_per;
        }
        return t >= run0*RUN && t < run1*RUN ? t - run0*RUN : -1;
    }

    // a bit for each own forced cell; after a barrier they are there
    __device__ __forceinline__ void mark_forced() {
#pragma unroll 1
        for (int j = tid; j < a.n_forced; j += N_THREAD) {
            const int t = next_forced, i = t >= 0 && t < n_kv ? own_place(t) : -1;
            next_forced = forced_at(j + N_THREAD);
            if (i >= 0) {
                atomicOr(&m.marks[i/32], 1u << i % 32);
            }
        }
    }

    // this block's part of the sum of V over what is seen
    __device__ __forceinline__ void sum_v() {
        const int n_lane = a.n_lane, col = lane % n_lane*8, place = tid/n_lane, n_place = N_THREAD/n_lane; // rows of the block at a time
        const bool in = col < ta.d_v;
        float sum[8] = {};
        const auto add = [&](const char * r) {
            float x[8];
            load8(x, GGML_TYPE_F32, r, col, ta.d_v);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                sum[c] += x[c];
            }
        };
        const auto whole_of = [&](int b) { return m.whole[b/2] >> b % 2*SUM & 0xFFFFu; };
        static_assert(SUM == 16, "the bits of two sums are a word");
        const auto sum_at = [&](int64_t r) { return (const char *) (ta.v_sum.at<const float>(r, s) + h_kv*ta.d_v); };
        const int n_sum = (n_grp + SUM - 1)/SUM, b0 = n_sum*rank/C, b1 = n_sum*(rank + 1)/C;
#pragma unroll 1
        for (int b = b0 + place; b < b1; b += n_place) { // sums of which all groups count
            if (whole_of(b) == 0xFFFF && in) {
                add(sum_at(ggml_sparse_total_row((int64_t) b*SUM)));
            }
        }
#pragma unroll 1
        for (int b = b0; b < b1; ++b) { // the others, group by group
            if (whole_of(b) != 0xFFFF && whole_of(b) != 0) {
#pragma unroll 1
                for (int j = place; j < SUM; j += n_place) {
                    if ((whole_of(b) >> j & 1) && in) {
                        add(sum_at(ggml_sparse_sum_row((int64_t) b*SUM + j)));
                    }
                }
            }
        }
        const bool shared_v = C > 1 && n_ragged <= LAYER_ROWS; // as with the rows of K
        const int  r0 = shared_v ? GROUP/C*rank : 0, n_each = shared_v ? GROUP/C : GROUP;
#pragma unroll 1
        for (int batch = 0; n_ragged > 0; ++batch) {
            const int g0 = shared_v ? 0 : min(run0*(RUN/GROUP), n_grp), g1 = shared_v ? n_grp : min(run1*(RUN/GROUP), n_grp);
            const int n = list_groups(m.tail_v, &m.n_list_v, m.ragged, g0, g1, batch)*n_each;
#pragma unroll 2
            for (int i = place; i < n; i += n_place) {
                const int t = row_at(m.tail_v, i, r0, n_each);
                if (t < n_kv && mask[t] != F16_NEG_INF && in) {
                    float x[8];
                    load_span<TYPE>(x, ta.v.type, ta.v.at(h_kv, t, s), col, ta.d_v);
#pragma unroll
                    for (int c = 0; c < 8; ++c) {
                        sum[c] += x[c];
                    }
                }
            }
            if (n < LAYER_ROWS*n_each || shared_v) {
                break;
            }
            __syncthreads(); // the list was read
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            m.mean[tid][c] = sum[c];
        }
        __syncthreads();
        if (tid < ta.d_v) {
            float x = 0.0f;
#pragma unroll 4
            for (int j = 0; j < n_place; ++j) {
                x += m.mean[j*n_lane + tid/8][tid % 8];
            }
            a.mean[(u*C + rank)*ta.d_v + tid] = x;
        }
    }

    // the softmax of each head over the cluster, a warp per head; ends at a barrier
    __device__ __forceinline__ void join_softmax() {
#pragma unroll 1
        for (int h = w; h < G; h += N_WARP) {
            const bool in = lane < C;
            const float t = in ? *cluster_at(&m.head_top[h], lane) : neg_inf(), x = in ? *cluster_at(&m.head_sum[h], lane) : 0.0f;
            const float low = GB == 1 && in ? *cluster_at(&m.head_least, lane) : INFINITY;
            const float top = warp_max(t), ref = top > neg_inf() ? top : 0.0f, sum = lane_sum<32>(x*expf(t - ref)), least = -warp_max(-low);
            if (lane == 0) {
                m.top[h] = ref;
                m.sum[h] = sum;
                m.inv[h] = sum > 0.0f ? __fdiv_rn(1.0f, sum) : 0.0f;
                m.least  = least;
            }
        }
        __syncthreads();
    }

    // ---- step 2 ----

    // the first of a lane's 4 positions of chunk c; -1: they are no own ones
    __device__ __forceinline__ int place4(int c) const {
        const int i = c*LAYER_CHUNK + lane*4, j = i - n_chunk*LAYER_CHUNK, t = run0*RUN + i;
        if (c >= n_chunk) {
            return j < n_item ? row_at(m.tail, j, row0, n_per) : -1; // 4 rows beside each other
        }
        return shared_rows && (m.rows[t/GROUP/32] >> t/GROUP % 32 & 1) ? -1 : t;
    }

    // f(c, t, keys of t .. t + 3) for the chunks c of the warp: +inf where they are forced, -inf where they are hidden. Keys are read a chunk ahead
    template <typename F>
    __device__ __forceinline__ void for_keys(const F & f) const {
        const auto load = [&](int t) { return t >= 0 ? *(const float4 *) &keys[t] : make_float4(neg_inf(), neg_inf(), neg_inf(), neg_inf()); };
        const int n = n_chunks();
        int next_t = w < n ? place4(w) : -1;
        float4 next = load(next_t);
#pragma unroll 1
        for (int c = w; c < n; c += N_WARP) {
            const int t = next_t, i = c*LAYER_CHUNK + lane*4;
            float y[4] = { next.x, next.y, next.z, next.w };
            if (c + N_WARP < n) {
                next_t = place4(c + N_WARP);
                next   = load(next_t);
            }
            const unsigned marks = m.marks[i/32] >> i % 32 & 0xF;
            if (marks) {
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    y[l] = marks >> l & 1 && y[l] > neg_inf() ? INFINITY : y[l];
                }
            }
            f(c, t, y);
        }
    }
    __device__ __forceinline__ int n_chunks() const { return n_chunk + (n_item + LAYER_CHUNK - 1)/LAYER_CHUNK; }

    // what is ranked, with several query heads: the sum of their softmaxes, -inf where hidden
    __device__ __forceinline__ void make_keys() {
#pragma unroll 1
        for (int c = w; c < n_chunks(); c += N_WARP) {
            const int t = place4(c);
            if (t < 0) {
                continue;
            }
            float y[4] = {}, first[4];
#pragma unroll 4
            for (int h = 0; h < G; ++h) {
                const float4 z = *(const float4 *) &logits[h*a.ld + t];
                const float x[4] = { z.x, z.y, z.z, z.w }, top = m.top[h], inv = m.inv[h];
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    first[l] = h == 0 ? x[l] : first[l];
                    y[l] += expf(finite_top(x[l]) - top)*inv;
                }
            }
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                y[l] = first[l] == neg_inf() ? neg_inf() : fmaxf(y[l], neg_inf()); // NaN is hidden
            }
            *(float4 *) &keys[t] = make_float4(y[0], y[1], y[2], y[3]);
        }
        __syncwarp(); // a warp reads the keys that it made itself
    }

    // where the cut is, from the histograms of all blocks; the work of a warp. m.cut -1: the bins hold fewer than k
    __device__ __forceinline__ void find_bin() {
        static_assert(LAYER_BINS/32 == 64, "a lane has two groups of bins, the highest first");
        const int hi = 63 - 2*lane, k_wanted = min(kl[0], a.topk_max);
        int n1 = 0, n0 = 0, before1 = 0, before0 = 0, n_in = 0; // before: of the blocks before this one
#pragma unroll 8
        for (int r = 0; r < C; ++r) {
            const uint2 x = *(const uint2 *) cluster_at(&m.coarse[hi - 1], r);
            n_in += (int) *cluster_at(&m.hist[LAYER_BINS - 1], r);
            n1 += (int) x.y;
            n0 += (int) x.x;
            before1 += r < rank ? (int) x.y : 0;
            before0 += r < rank ? (int) x.x : 0;
        }
        const int p = warp_prefix(n1 + n0), pb = warp_prefix(before1 + before0), n_all = __shfl_sync(ALL, p, 31), n_all_before = __shfl_sync(ALL, pb, 31);
        const int k = max(k_wanted, n_in);
        int cut = -1, need = 0, n_cand = 0, at_sel = n_all_before, at_cand = 0; // all
        if (k < n_all) {
            const int l = __ffs((int) __ballot_sync(ALL, p >= k)) - 1; // k <= 0: the first
            const int above = __shfl_sync(ALL, p - n1 - n0, l), above_before = __shfl_sync(ALL, pb - before1 - before0, l);
            const int m1 = __shfl_sync(ALL, n1, l), m1_before = __shfl_sync(ALL, before1, l);
            const bool upper = above + m1 >= k;
            const int group = upper ? 63 - 2*l : 62 - 2*l, from = upper ? above : above + m1, from_before = upper ? above_before : above_before + m1_before;
            int n = 0, before = 0;
#pragma unroll 8
            for (int r = 0; r < C; ++r) {
                const int x = (int) *cluster_at(&m.hist[group*32 + 31 - lane], r);
                n      += x;
                before += r < rank ? x : 0;
            }
            const int q = warp_prefix(n), qb = warp_prefix(before), f = __ffs((int) __ballot_sync(ALL, from + q >= k)) - 1;
            cut     = group*32 + 31 - f;
            n_cand  = __shfl_sync(ALL, n, f);
            at_cand = __shfl_sync(ALL, before, f);
            need    = k - from - __shfl_sync(ALL, q - n, f);
            at_sel  = from_before + __shfl_sync(ALL, qb - before, f);
            if (need == n_cand) { // the bin is in, whole
                cut--;
                at_sel += at_cand;
                need = n_cand = at_cand = 0;
            }
        }
        if (lane == 0) {
            m.k       = k;
            m.n_sel   = min(k, n_all);
            m.is_few  = k > n_all;
            m.cut     = cut;
            m.n_need  = need;
            m.n_cand  = n_cand;
            m.at_sel  = at_sel;
            m.at_cand = at_cand;
            m.n_pushed = 0;
        }
    }

    // the histogram of own keys, once more
    __device__ __forceinline__ void count_keys() {
        for_keys([&](int, int, const float (&y)[4]) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                count_key(y[l], 0);
            }
        });
    }

    // after all keys of the block were counted
    __device__ __forceinline__ void sum_bins() {
        __syncthreads();
#pragma unroll 2
        for (int j = w; j < LAYER_BINS/32; j += N_WARP) {
            const int n = warp_sum((int) m.hist[j*32 + lane]);
            if (lane == 0) {
                m.coarse[j] = (unsigned) n;
            }
        }
    }

    // own cells that have a bit in m.marks -> sel
    __device__ __forceinline__ void write_list(int at) {
        const int n_word = n_chunks()*4, per = (n_word + N_WARP - 1)/N_WARP, w0 = min(w*per, n_word), w1 = min(w0 + per, n_word);
        int n = 0;
#pragma unroll 1
        for (int j = w0 + lane; j < w1; j += 32) {
            n += __popc(m.marks[j]);
        }
        n = warp_sum(n);
        if (lane == 0) {
            m.n_warp[w] = n;
        }
        __syncthreads();
        int32_t * to = a.sel + u*a.topk_max + at + warp_sum(lane < w ? m.n_warp[lane] : 0); // lane < N_WARP, since w is
#pragma unroll 1
        for (int j0 = w0; j0 < w1; j0 += 32) {
            const unsigned mine = j0 + lane < w1 ? m.marks[j0 + lane] : 0;
#pragma unroll 1
            for (unsigned words = __ballot_sync(ALL, mine != 0); words; words &= words - 1) {
                const int      j    = __ffs((int) words) - 1;
                const unsigned bits = __shfl_sync(ALL, mine, j);
                if (bits >> lane & 1) {
                    const int i = (j0 + j)/4*LAYER_CHUNK + lane*4 + (j0 + j) % 4, o = i - n_chunk*LAYER_CHUNK;
                    to[__popc(bits & ((1u << lane) - 1))] = o < 0 ? run0*RUN + i : row_at(m.tail, o, row0, n_per);
                }
                to += __popc(bits);
            }
        }
    }

    // The cut; then own cells above it -> sel, those of its bin -> cand. Begins behind barrier B of the first histogram
    __device__ __forceinline__ void select() {
        bool is_complete = false;
#pragma unroll 1
        for (int round = 0; ; ++round) {
            if (w == 0) {
                find_bin();
            }
            __syncthreads();
            // too few are in the bins, or too many where the last bin has all that is above it: then all that is seen. Else the bin of the cut by itself
            const bool is_open = !is_complete && (m.is_few || (m.n_cand > LAYER_CAND && m.cut >= LAYER_BINS - 2));
            if (!is_open && (m.n_cand <= LAYER_CAND || round == 3)) {
                break;
            }
            cluster_arrive();
            cluster_wait(); // the histograms were read
            if (is_open) {
                bin.complete(m.least, m.top[0]);
                is_complete = true;
            } else {
                bin.narrow(m.cut);
            }
            for (int j = tid; j < LAYER_BINS; j += N_THREAD) {
                m.hist[j] = 0;
            }
            __syncthreads();
            count_keys();
            sum_bins();
            cluster_arrive();
            cluster_wait();
        }
        n_sel = m.n_sel;
        // ties: an order, and of those equal to it the cells below a bound are in
        const bool has_ties = m.n_cand > LAYER_CAND, ranks = m.n_need > 0;
        cluster_counter counter = { m.slot, C, rank };
        int64_t least = (int64_t) ORDER_HIDDEN + 1, most = ORDER_FORCED; // the largest order that k reach
        int  t0 = 0, t1 = n_kv; // the first bound below which there are enough
        int2 * cand = a.cand + u*LAYER_CAND + m.at_cand;
        int  at_sel = m.at_sel;
#pragma unroll 1
        for (bool last = !has_ties; ; ) {
            const int64_t mid = least < most ? least + (most - least + 1)/2 : least + 1; // above mid - 1
            const int cut = has_ties ? (int) (mid - 1) : m.cut, bound = least < most ? 0 : t0 < t1 ? t0 + (t1 - t0)/2 : t0;
            int n = 0; // of the lane, above the cut
            for_keys([&](int c, int t, const float (&y)[4]) {
                unsigned above[4]; // a bit per lane
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    const int x = has_ties ? y[l] == INFINITY ? ORDER_FORCED : order_of(y[l]) : bin.at(y[l]);
                    const bool in = x > cut || (has_ties && x == cut && t + l < bound);
                    n += in;
                    above[l] = __ballot_sync(ALL, in);
                    if (x == cut && ranks && !has_ties) {
                        cand[atomicAdd(&m.n_pushed, 1)] = make_int2(t + l, order_of(y[l]));
                    }
                }
                if (last && lane == 0) { // in place of the marks, which are not needed any more
                    *(uint4 *) &m.marks[c*4] = make_uint4(above[0], above[1], above[2], above[3]);
                }
            });
            if (last) {
                break;
            }
            int before;
            const int all = counter.sum(n, m.n_warp, &before);
            if (least < most) {
                least = all >= m.k ? mid : least;
                most  = all >= m.k ? most : mid - 1;
            } else if (t0 < t1) {
                t1 = all >= m.k ? bound : t1;
                t0 = all >= m.k ? t0 : bound + 1;
            } else {
                at_sel = before;
                last   = true;
            }
        }
        __syncthreads();
        write_list(at_sel);
        n_above = has_ties ? n_sel : n_sel - m.n_need;
        cluster_arrive();
        cluster_wait(); // C
        const int n_cand = has_ties ? 0 : m.n_cand;
        for (int i = tid; i < n_cand; i += N_THREAD) {
            m.cand[i] = __ldcg(&a.cand[u*LAYER_CAND + i]);
        }
        __syncthreads();
        for (int i = tid; i < n_cand; i += N_THREAD) {
            const int2 x = m.cand[i];
            int better = 0;
#pragma unroll 4
            for (int j = 0; j < n_cand; ++j) {
                const int2 y = m.cand[j];
                better += y.y > x.y || (y.y == x.y && y.x < x.x);
            }
            if (better < m.n_need) {
                m.chosen[better] = x.x;
            }
        }
    }

    // ---- steps 2 and 3: attention over this block's part of what is selected -> its states ----

    // n rows from number `first` of what is selected on, or of all positions -> m.list; their approximate mass
    __device__ __forceinline__ void list_rows(row_state<GB> & st, int first, int n, int h0, int n_head) {
#pragma unroll 1
        for (int i = tid; i < n; i += N_THREAD) {
            const int j = first + i, t = every ? j : j < n_above ? __ldcg(&a.sel[u*a.topk_max + j]) : m.chosen[j - n_above];
            const uint16_t mt = mask[t];
            m.list[i]      = mt == F16_NEG_INF ? -1 : t;
            m.list_bias[i] = f16_value(mt);
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                if (mean_v && h < n_head) {
                    const float x = finite_top(__ldcg(&logits[(h0 + h)*a.ld + t])) - m.top[h0 + h];
                    st.mass[h]      += expf(x);
                    st.mass_root[h] += expf(0.25f*x); // not the root of the former, which is 0 below -104
                }
            }
        }
    }

    // the rows of m.list; n_lane lanes share one
    __device__ __forceinline__ void read_rows(row_state<GB> & st, int n) {
        constexpr int AT_A_TIME = TYPE != GGML_TYPE_F16 ? 1 : GB == 1 ? 4 : 2;
        const int  n_lane = a.n_lane, col = lane % n_lane*8, sub = lane/n_lane, n_sub = 32/n_lane, n_span = (ta.d_k + 7)/8;
        const bool has_k = col < ta.d_k, has_v = col < ta.d_v;
        const char * k_base = ta.k.at(h_kv, 0, s), * v_base = ta.v.at(h_kv, 0, s);
#pragma unroll 1
        for (int i0 = w*n_sub + sub; i0 - sub < n; i0 += N_WARP*n_sub*AT_A_TIME) {
            raw_span<TYPE> k[AT_A_TIME], v[AT_A_TIME];
            int   t[AT_A_TIME];
            float y[AT_A_TIME][GB];
#pragma unroll
            for (int r = 0; r < AT_A_TIME; ++r) {
                const int i = i0 + r*N_WARP*n_sub;
                t[r] = i < n ? m.list[i] : -1;
            }
#pragma unroll
            for (int r = 0; r < AT_A_TIME; ++r) {
                k[r].clear();
                v[r].clear();
                if (t[r] >= 0 && has_k) {
                    k[r].load(ta.k.type, k_base + t[r]*ta.k.nb2, col, ta.d_k);
                }
                if (t[r] >= 0 && has_v) {
                    v[r].load(ta.v.type, v_base + t[r]*ta.v.nb2, col, ta.d_v);
                }
            }
#pragma unroll
            for (int r = 0; r < AT_A_TIME; ++r) {
                float x[8];
                k[r].unpack(x);
#pragma unroll
                for (int h = 0; h < GB; ++h) {
                    y[r][h] = 0.0f;
                }
                if (has_k) {
                    dot_span<GB>(y[r], m.q, col/8, n_span, x);
                }
            }
#pragma unroll 1
            for (int o = n_lane/2; o > 0; o /= 2) {
#pragma unroll
                for (int r = 0; r < AT_A_TIME*GB; ++r) {
                    y[r/GB][r % GB] += __shfl_xor_sync(ALL, y[r/GB][r % GB], o);
                }
            }
#pragma unroll
            for (int r = 0; r < AT_A_TIME; ++r) {
                const float bias = t[r] >= 0 ? m.list_bias[i0 + r*N_WARP*n_sub] : 0.0f;
#pragma unroll
                for (int h = 0; h < GB; ++h) {
                    y[r][h] *= ta.scale;
                    if (ta.softcap > 0.0f) {
                        y[r][h] = soft_cap(y[r][h], ta.softcap);
                    }
                    y[r][h] = t[r] >= 0 ? y[r][h] + m.slope[h]*bias : neg_inf();
                }
            }
            st.add(y, v, mean_v);
        }
    }

    // the states of all lanes -> a.state
    __device__ __forceinline__ void write_states(row_state<GB> & st, int h0, int n_head) {
        const int d_v = ta.d_v, ld = d_v + LAYER_STATE, col = lane % a.n_lane*8;
#pragma unroll 1
        for (int o = a.n_lane; o < 32; o *= 2) {
            st.join(o);
        }
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            float * p = m.part[w][h];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                if (lane < a.n_lane && col + c < d_v) {
                    p[col + c] = st.o[h][c];
                }
            }
            const float mass = lane_sum<32>(st.mass[h]), mass_root = lane_sum<32>(st.mass_root[h]);
            if (lane == 0) {
                p[d_v]     = st.top[h];
                p[d_v + 1] = st.l[h];
                p[d_v + 2] = st.root[h];
                p[d_v + 3] = mass;
                p[d_v + 4] = mass_root;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int i = tid; i < n_head*ld; i += N_THREAD) {
            const int h = i/ld, c = i - h*ld;
            float most = neg_inf(), x = 0.0f;
#pragma unroll
            for (int j = 0; j < N_WARP; ++j) {
                most = fmaxf(most, m.part[j][h][d_v]);
            }
            const float ref = most > neg_inf() ? most : 0.0f, part = c == d_v + 2 ? 0.25f : c > d_v + 2 ? 0.0f : 1.0f; // exp((top - ref)*part)
#pragma unroll
            for (int j = 0; j < N_WARP; ++j) {
                x += m.part[j][h][c]*expf(part == 0.0f ? 0.0f : part*(m.part[j][h][d_v] - ref));
            }
            a.state[((head0 + h0 + h)*C + rank)*ld + c] = c == d_v ? most : x;
        }
    }

    __device__ __forceinline__ void attend() {
        const int n_list = every ? n_kv : n_sel, first = (int) ((int64_t) n_list*rank/C), n_own = (int) ((int64_t) n_list*(rank + 1)/C) - first, d = ta.d_k;
#pragma unroll 1
        for (int h0 = 0; h0 < G; h0 += GB) {
            const int n_head = min(GB, G - h0);
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                if (tid < (d + 7)/8*8) {
                    m.q[h][q_place(tid, d)] = h < n_head && tid < d ? ta.q.at<const float>(h_kv*G + h0 + h, i_tok, s)[tid] : 0.0f;
                }
            }
            if (tid < GB) {
                m.slope[tid] = head_slope((int) h_kv*G + h0 + tid, ta.n_log2, ta.max_bias);
            }
            row_state<GB> st;
#pragma unroll 1
            for (int i = 0; i < n_own; i += LAYER_LIST) {
                const int n = min(LAYER_LIST, n_own - i);
                __syncthreads(); // the candidates are chosen; the list was read
                list_rows(st, first + i, n, h0, n_head);
                __syncthreads();
                read_rows(st, n);
            }
            __syncthreads(); // what lies where the parts go was read
            write_states(st, h0, n_head);
            if (h0 + GB < G) {
                __syncthreads(); // the parts were read
            }
        }
    }

    // the states together, the sink, eq. 10: this block's part of the result, a thread per state and element
    __device__ __forceinline__ void finish() {
        const int d_v = ta.d_v, ld_state = d_v + LAYER_STATE, r = tid % C, e1 = G*d_v*(rank + 1)/C;
#pragma unroll 1
        for (int e0 = G*d_v*rank/C; e0 < e1; e0 += N_THREAD/C) {
            const int e = min(e0 + tid/C, e1 - 1), h = e/d_v, c = e - h*d_v;
            const float * st = a.state + ((head0 + h)*C + r)*ld_state;
            const float top = __ldcg(&st[d_v]), sink = ta.sink_logits ? ta.sink_logits[h_kv*G + h] : neg_inf();
            float x[6] = { __ldcg(&st[c]), __ldcg(&st[d_v + 1]), __ldcg(&st[d_v + 2]), __ldcg(&st[d_v + 3]), __ldcg(&st[d_v + 4]),
                mean_v ? __ldcg(&a.mean[(u*C + r)*d_v + c]) : 0.0f };
            float ref = fmaxf(top, sink);
#pragma unroll 1
            for (int o = 1; o < C; o *= 2) {
                ref = fmaxf(ref, __shfl_xor_sync(ALL, ref, o));
            }
            ref = ref > neg_inf() ? ref : 0.0f;
            const float f = expf(top - ref), f4 = expf(0.25f*(top - ref));
            x[0] *= f;
            x[1] *= f;
            x[2] *= f4;
#pragma unroll 1
            for (int o = 1; o < C; o *= 2) {
#pragma unroll
                for (int j = 0; j < 6; ++j) {
                    x[j] += __shfl_xor_sync(ALL, x[j], o);
                }
            }
            const float all = x[1] + (ta.sink_logits ? expf(sink - ref) : 0.0f);
            float o = all > 0.0f ? __fdiv_rn(x[0], all) : 0.0f;
            if (mean_v) {
                const float sum = m.sum[h], left = n_above == n_sel && m.cut < 0 ? 0.0f : sum - x[3]; // nothing, where all are selected
                float alpha = 1.0f;
                if (x[4] > 0.0f && left > MIN_LEFT*sum && x[2] > 0.0f) { // not where a head has a NaN
                    alpha = __fsqrt_rn(__fdiv_rn(all, all + expf(logf(left) + 4.0f*(logf(x[2]) - logf(x[4])))));
                }
                o = alpha*o + (1.0f - alpha)*(n_vis > 0 ? __fdiv_rn(x[5], (float) n_vis) : 0.0f);
            }
            if (r == 0 && e0 + tid/C < e1) {
                ta.res[row*ta.ld_res + (h_kv*G + h)*d_v + c] = o;
            }
        }
    }

    // the counters, by a warp of the first block
    __device__ __forceinline__ void count() {
        const int64_t n_read = every ? n_vis : n_sel, n_seen = n_vis, row_bytes = ta.row_k + ta.row_v, bytes_score = total(3), bytes_mean = total(4);
        if (lane == 0) {
            if (!every) {
                add_stat(ta.stats, GGML_SPARSE_STAT_BYTES_SCORE, bytes_score + ggml_sparse_spread_bytes(sa.d, n_kv, N_BIT));
            }
            if (h_kv == 0) {
                add_stat(ta.stats, every ? GGML_SPARSE_STAT_ATTEND_DENSE : GGML_SPARSE_STAT_ATTEND_SPARSE, n_vis > 0);
            }
            add_stat(ta.stats, GGML_SPARSE_STAT_POS_VISIBLE,  n_seen);
            add_stat(ta.stats, GGML_SPARSE_STAT_POS_READ,     n_read);
            add_stat(ta.stats, GGML_SPARSE_STAT_BYTES_ATTEND, n_read*row_bytes + (mean_v ? bytes_mean : 0));
            add_stat(ta.stats, GGML_SPARSE_STAT_BYTES_DENSE,  n_seen*row_bytes);
        }
    }

    __device__ __forceinline__ void run() {
        clear();
        begin_kernel();
        see();
        if (!every) {
            if (GB == 1) {
                mark_forced();
            }
            score();
            if (GB == 1) {
                sum_bins();
            }
        }
        cluster_arrive(); // A; with one query head per KV head it is B, too
        if (GB > 1 && !every) {
            mark_forced();
        }
        if (mean_v) {
            sum_v();
        }
        cluster_wait();
        if (!every) {
            join_softmax();
            if (GB > 1) {
                make_keys(); // join_softmax() ended at a barrier: the marks are there
                // softmaxes of a head add up to 1 (of G heads to G), so the k-th is not above G/k; 64 bins per octave below it, 32 octaves
                bin.shift = 17;
                bin.base  = max((__float_as_int(__fdividef(1.02f*G, (float) max(min(kl[0], a.topk_max), 1))) >> 17) - (LAYER_BINS - 3), 0) << 17;
                count_keys();
                sum_bins();
                cluster_arrive();
                cluster_wait(); // B
            }
            select();
        }
        attend();
        cluster_arrive();
        cluster_wait(); // D
        finish();
        if (ta.stats && rank == 0 && w == 0) {
            count();
        }
    }
};

// blocks that a multiprocessor shall hold at least: what leaves enough registers
constexpr int layer_blocks(int n_bit, int gb) { return n_bit == 4 && gb == 1 ? 3 : 2; }

template <int N_BIT, int GB, int TYPE>
static __global__ void __launch_bounds__(N_THREAD, layer_blocks(N_BIT, GB)) layer(const layer_args a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    typedef layer_shared<N_BIT, GB> shared;
    SPARQ_DYNAMIC_SHARED(shared, m);
    layer_block<N_BIT, GB, TYPE>(a, m).run();
#endif
}

} // namespace sparse_cuda
