#pragma once

// A layer in one launch, see sparse-layer.cuh: what the launch is given, what the threads of a block share, and the block itself. Its work is declared
// here, and defined in the headers that are named beside it.

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
    bool    is_early; // see SPARQ_EARLY
    int     n_key;    // floats behind layer_shared, see SPARQ_SMEM_KEYS; behind them those of SPARQ_DSMEM_FINISH
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
    int      n_list, n_list_v, cut, n_sel, n_need, n_cand, n_pushed, is_few, at_sel, at_cand, k, n_early, all_early;
    int      at_list, at_lists[LAYER_BLOCKS], at_cands[LAYER_BLOCKS]; // where the lists of this block, and of all, begin in those of the cluster
    int      n_pass;                                // over the keys beyond the first: what the first thread counts
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

// Bins of what is ranked: with one query head, of logits by their value, from lo on; else of sums of softmaxes, which are >= 0, by their bits, from
// base on. The other two numbers are not set. The higher the key, the higher the bin. What is hidden, or below all bins, has none
template <int GB>
struct layer_bins {
    float lo, inv;
    int   base, shift;

    __device__ __forceinline__ int at(float x) const {
        const int b = GB == 1 ? __float2int_rd((x - lo)*inv) : (__float_as_int(x) - base) >> shift;
        return x > neg_inf() ? min(b, x == INFINITY ? LAYER_BINS - 1 : LAYER_BINS - 2) : -1;
    }
    // all that is seen: logits from `least` to `top`
    __device__ __forceinline__ void complete(float least, float top) {
        if (GB == 1) {
            lo  = least;
            inv = top > least ? __fdiv_rn(LAYER_BINS - 2, fminf(top - least, FLT_MAX)) : 0.0f;
        } else {
            base  = 0;
            shift = 20;
        }
    }
    // the bin of the cut: of logits with half a bin on either side, of sums of softmaxes from its lower end on
    __device__ __forceinline__ void narrow(int cut) {
        if (GB == 1) {
            lo  += __fdiv_rn(cut - 0.5f, inv);
            inv *= LAYER_BINS/2 - 2;
        } else {
            base += cut << shift;
            shift = max(shift - 10, 0);
        }
    }
};

struct running_softmax;
template <int GB> struct row_state;

// one block of a cluster, and its work in the order of its steps
template <int N_BIT, int GB, int TYPE>
struct layer_block {
    static constexpr bool HAS_CODES = ggml_sparse_has_codes(N_BIT), OWN_MASS = SPARQ_SMEM_KEYS && GB == 1; // the owner of a position counts its mass
    static constexpr bool FORCED_EARLY = SPARQ_FORCED_EARLY && GB == 1;
    using shared = layer_shared<N_BIT, GB>;

    const layer_args  & a;
    const score_args  & sa;
    const attend_args & ta;
    shared            & m;
    const int     n_block, rank; // of the cluster: how many blocks, and which this is
    const int     tid, lane, warp;
    const int2    token;
    const int64_t h_kv, row, i_tok, s;
    const int     n_group_q, n_kv, n_grp, n_run;
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
    float mass, mass_root;      // of what this thread counts, see row_state and OWN_MASS
    layer_bins<GB> bin;

    __device__ __forceinline__ layer_block(const layer_args & a, shared & m) :
        a(a), sa(a.score), ta(a.attend), m(m), n_block(a.n_block), rank((int) blockIdx.x % n_block), tid(threadIdx.x), lane(tid % 32), warp(tid/32),
        token(split_index(blockIdx.y, sa.n_tok)), h_kv(blockIdx.x/n_block), row(blockIdx.y), i_tok(token.y), s(token.x),
        n_group_q(GB == 1 ? 1 : sa.n_group_q), n_kv((int) sa.n_kv), n_grp((int) sa.n_grp), n_run((int) sa.n_run),
        u(row*sa.n_head_kv + h_kv), head0(row*sa.n_head + h_kv*n_group_q), run0(n_run*rank/n_block), run1(n_run*(rank + 1)/n_block),
        kl(sa.kl.at<const int32_t>(i_tok, 0, s)), mask(sa.mask.at<const uint16_t>(i_tok, 0, s)),
        logits(sa.logits + head0*a.ld), keys(SPARQ_SMEM_KEYS ? room(0) : GB > 1 ? a.key + u*a.ld : logits), n_item(0),
        n_chunk((run1 - run0)*(RUN/LAYER_CHUNK)), n_sel(0), n_above(0), mass(0.0f), mass_root(0.0f) {}

    // the barrier of the cluster, in two halves; SHARED: no other block reads what this one wrote to global memory before, until one without it
    __device__ __forceinline__ bool is_single() const { return SPARQ_SINGLE && n_block == 1; }
    template <bool SHARED = false>
    __device__ __forceinline__ void arrive() const { is_single() ? (void) 0 : cluster_arrive<SHARED && SPARQ_FENCE>(); }
    __device__ __forceinline__ void wait()   const { is_single() ? __syncthreads() : cluster_wait(); }

    __device__ __forceinline__ int row_at(const int * list, int i, int row0, int n_per) const { return list[i/n_per]*GROUP + row0 + i % n_per; }
    // floats behind `m`; the state of a head in block r, and its sum of V; what they hold
    __device__ __forceinline__ float * room(int i) const { return (float *) (&m + 1) + i; }
    __device__ __forceinline__ float * state_at(int h, int r, int ld) const {
        return SPARQ_DSMEM_FINISH ? cluster_at(room(a.n_key + h*ld), r) : a.state + ((head0 + h)*n_block + r)*ld;
    }
    __device__ __forceinline__ float * mean_at(int r) const {
        return SPARQ_DSMEM_FINISH ? state_at(n_group_q, r, ta.d_v + LAYER_STATE) : a.mean + (u*n_block + r)*ta.d_v;
    }
    static __device__ __forceinline__ float of_block(const float * p) { return SPARQ_DSMEM_FINISH ? *p : __ldcg(p); }
    __device__ __forceinline__ int2 * own_cand() const { return (int2 *) room(a.n_key) - LAYER_CAND; }
    // the block whose list has number j, of lists that begin at at[]
    __device__ __forceinline__ int owner_of(int j, const int * at) const {
        int r = 0;
#pragma unroll 1
        while (r + 1 < n_block && at[r + 1] <= j) {
            ++r;
        }
        return r;
    }
    // where in `keys` that of position t is, which is number i of the own ones
    __device__ __forceinline__ int key_at(int t, int i) const { return SPARQ_SMEM_KEYS ? i : t; }
    __device__ __forceinline__ int total(int j) const { return warp_sum(lane < N_WARP ? m.total[j][lane] : 0); }

    __device__ __forceinline__ int forced_at(int j) const {
        const bool in = j < a.n_forced && (j < kl[1] || j >= a.n_local_max);
        return in ? a.forced.at<const int32_t>(i_tok, 0, s)[j] : -1;
    }

    // ---- what there is to see ----

    __device__ __forceinline__ void clear();
    __device__ __forceinline__ void see_groups(int (&sum)[5]);
    __device__ __forceinline__ void see();

    // ---- sparse-layer-score.cuh: step 1 ----

    // a logit that is ranked: NaN is hidden, +inf counts as FLT_MAX
    static __device__ __forceinline__ float as_key(float x) { return fminf(fmaxf(x, neg_inf()), FLT_MAX); }
    __device__ __forceinline__ void guess_bins(int n_comp);
    __device__ __forceinline__ void count_key(float x, unsigned mark);
    template <bool LINE, int N>
    __device__ __forceinline__ void scan_unit(float (&x)[GB][N], int n_comp, int run, int line, unsigned coded);
    template <int N, typename F>
    __device__ __forceinline__ void rank_unit(float (&x)[N], float & least, bool counts, int first, const F & place);
    template <bool LINE>
    __device__ __forceinline__ void score_unit(running_softmax (&softmax)[GB], float & least, int h0, int n_head, int n_comp, int run, int line);
    __device__ __forceinline__ void score_rows(running_softmax (&softmax)[GB], float & least, int h0, int n_head);
    __device__ __forceinline__ void join_warps(const running_softmax (&softmax)[GB], float least, int h0, int n_head);
    __device__ __forceinline__ void score();
    __device__ __forceinline__ void join_softmax();

    // ---- sparse-layer-select.cuh: the cut of step 1 ----

    // of LAYER_CHUNK positions: those of own runs, then those of rows that all blocks share
    __device__ __forceinline__ int n_chunks() const { return n_chunk + (n_item + LAYER_CHUNK - 1)/LAYER_CHUNK; }
    __device__ __forceinline__ int own_place(int t) const;
    __device__ __forceinline__ void mark_forced();
    __device__ __forceinline__ int place4(int c) const;
    template <typename F>
    __device__ __forceinline__ void for_keys(const F & f) const;
    __device__ __forceinline__ void make_keys();
    __device__ __forceinline__ void count_keys();
    __device__ __forceinline__ void sum_bins();
    __device__ __forceinline__ void find_bin();
    __device__ __forceinline__ void find_cut(row_state<GB> & early);
    __device__ __forceinline__ int mark_selected(bool has_ties);
    __device__ __forceinline__ void add_mass(float key);
    __device__ __forceinline__ void write_list(int at);
    __device__ __forceinline__ int selected(int j) const;
    __device__ __forceinline__ int2 candidate(int i) const;
    __device__ __forceinline__ void choose(int n_cand);
    __device__ __forceinline__ void select(row_state<GB> & early);

    // ---- sparse-layer-attend.cuh: steps 2 and 3 ----

    __device__ __forceinline__ void add_sums(float (&sum)[8], int col, int place, int n_place);
    __device__ __forceinline__ void add_rows(float (&sum)[8], int col, int place, int n_place);
    __device__ __forceinline__ void sum_v();
    __device__ __forceinline__ void list_rows(row_state<GB> & st, int first, int n, int h0, int n_head);
    template <int WARP0>
    __device__ __forceinline__ void read_rows(row_state<GB> & st, int n);
    __device__ __forceinline__ void write_states(row_state<GB> & st, int h0, int n_head);
    __device__ __forceinline__ void list_early();
    __device__ __forceinline__ void attend(const row_state<GB> & early);
    __device__ __forceinline__ void finish();

    // ---- sparse-layer.cuh ----

    __device__ __forceinline__ void count();
    __device__ __forceinline__ void run();
};

// what needs nothing that another kernel writes
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::clear() {
    for (int j = tid; j < LAYER_BINS; j += N_THREAD) {
        m.hist[j] = 0;
    }
    for (int j = tid; j < (run1 - run0)*(RUN/32) + LAYER_ROWS*GROUP/32; j += N_THREAD) {
        m.marks[j] = 0;
    }
    if (tid == 0) {
        m.n_early = 0;
    }
}

// the bits of all groups; sum: of what the thread has seen
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::see_groups(int (&sum)[5]) {
    const int32_t * vis = ta.visible.at<const int32_t>(i_tok, 0, s), * sealed = sa.sealed + s*n_grp;
    const int n_rank = sa.rank_of(i_tok, s), coded_bytes = n_rank*(int) ggml_sparse_scan_bytes(N_BIT);
    constexpr int N = 4; // loads of a thread at once
#pragma unroll 1
    for (int g0 = tid; g0 < (n_grp + N_THREAD - 1)/N_THREAD*N_THREAD; g0 += N*N_THREAD) {
        int  seen[N];
        bool is_sealed[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int g = g0 + j*N_THREAD;
            seen[j]      = g < n_grp ? vis[g] : 0;
            is_sealed[j] = g < n_grp && ggml_sparse_is_sealed(sealed[g], i_tok);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int  g = g0 + j*N_THREAD, v = seen[j];
            if (g - tid >= n_grp) { // for all
                break;
            }
            const bool in_k_t = is_sealed[j] && v > 0, is_whole = is_sealed[j] && v == GROUP;
            const unsigned b0 = __ballot_sync(ALL, is_sealed[j]), b1 = __ballot_sync(ALL, in_k_t), b2 = __ballot_sync(ALL, v > 0 && !in_k_t);
            const unsigned b3 = __ballot_sync(ALL, is_whole), b4 = __ballot_sync(ALL, v > 0 && !is_whole);
            sum[0] += v;
            sum[3] += in_k_t ? coded_bytes : v*sa.row_bytes;
            sum[4] += is_whole ? 0 : v*ta.row_v;
            if (lane == 0) {
                if constexpr (HAS_CODES) {
                    m.score.sealed[g/32] = b0;
                }
                m.coded [g/32] = b1;
                m.rows  [g/32] = b2;
                m.whole [g/32] = b3;
                m.ragged[g/32] = b4;
                sum[1] += __popc(b2);
                sum[2] += __popc(b4);
#pragma unroll
                for (int i = 0; i < 32/SUM; ++i) {
                    const unsigned x = b3 >> i*SUM & SUM_BITS;
                    sum[4] += (x == SUM_BITS ? 1 : __popc(x))*ta.d_v*(int) sizeof(float);
                }
            }
        }
    }
}

// what there is to see: a bit per group, and sums; the groups whose rows all blocks share
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::see() {
    every  = kl[0] < 0;
    mean_v = ta.mean_v && !every;
    next_forced = forced_at(tid);
    int sum[5] = {}; // visible positions; groups by rows of K, of V; bytes of step 1, of the mean of V: at most 1 GB
    see_groups(sum);
#pragma unroll
    for (int j = 0; j < 5; ++j) {
        sum[j] = warp_sum(sum[j]);
        if (lane == 0) {
            m.total[j][warp] = sum[j];
        }
    }
    __syncthreads();
    n_vis       = total(0);
    n_row_group = total(1);
    n_ragged    = total(2);
    shared_rows = n_block > 1 && n_row_group <= LAYER_ROWS;
    row0        = shared_rows ? GROUP/n_block*rank : 0;
    n_per       = shared_rows ? GROUP/n_block : GROUP;
    if (shared_rows && n_row_group > 0) {
        n_item = list_groups(m.tail, &m.n_list, m.rows, 0, n_grp, 0)*n_per;
    }
}

} // namespace sparse_cuda
