#pragma once

// Step 2: the top k positions, and the mass of the others, of each head: one KV head of one token. A row is a token of a stream, stream*n_tok + token.

#include "sparse-device.cuh"

namespace sparse_cuda {

struct select_args {
    view forced, kl;
    const float * logits;               // [row][n_head][n_kv]
    float       * key;                  // [row][n_head_kv][n_kv] what is ranked; the logits where a KV head has one query head
    float       * run_max, * run_sum;   // [row][n_head][n_run]; where a KV head has several query heads, or rest or top_p is wanted
    unsigned    * bits;                 // [row][n_head_kv][n_bits] scratch: the forced cells
    int32_t     * cand;                 // [row][n_head_kv][n_cand] scratch: cells near or above the cut
    int32_t     * res;                  // [row][n_head_kv][1 + n_group_q + topk_max]
    int64_t n_kv, n_run, n_bits, n_cand;
    int     n_head, n_head_kv, n_group_q, n_tok, n_forced, n_local_max, topk_max, rest;
    float   top_p;                      // in (0, 1), or 0
};

constexpr int G_MAX = 128; // query heads of a KV head

// a query head's largest logit (0 if it sees nothing) and the sum of exp(logit - it), NaN if there is a NaN, from its runs; the work of a warp
__device__ __forceinline__ float2 sum_head(const select_args & a, int64_t head) {
    const float * max = a.run_max + head*a.n_run, * sum = a.run_sum + head*a.n_run;
    float top = neg_inf(), all = 0.0f;
    for (int64_t i = threadIdx.x % 32; i < a.n_run; i += 32) {
        top = fmaxf(top, max[i]);
    }
    top = warp_max(top);
    for (int64_t i = threadIdx.x % 32; i < a.n_run; i += 32) {
        all += max[i] > neg_inf() ? sum[i]*expf(max[i] - top) : sum[i]; // 0, or NaN
    }
    all = lane_sum<32>(all);
    return make_float2(top > neg_inf() ? top : 0.0f, all);
}

constexpr int KEYS = 2048; // positions of a block of rank_keys

// with several query heads: the sum over them of softmax(logits); -inf or NaN where hidden
static __global__ void __launch_bounds__(N_THREAD) rank_keys(const select_args a) {
    __shared__ float top[G_MAX], inv[G_MAX];
    if (a.kl.at<const int32_t>(blockIdx.z % a.n_tok, 0, blockIdx.z/a.n_tok)[0] < 0) {
        return;
    }
    const int64_t u = (int64_t) blockIdx.z*a.n_head_kv + blockIdx.y, head = u*a.n_group_q;
    for (int h = threadIdx.x/32; h < a.n_group_q; h += N_WARP) {
        const float2 x = sum_head(a, head + h);
        if (threadIdx.x % 32 == 0) {
            top[h] = x.x;
            inv[h] = x.y > 0.0f ? __fdiv_rn(1.0f, x.y) : 0.0f;
        }
    }
    __syncthreads();
    const int64_t t0 = (int64_t) blockIdx.x*KEYS + threadIdx.x;
    float key[KEYS/N_THREAD] = {};
    for (int h = 0; h < a.n_group_q; ++h) {
#pragma unroll
        for (int j = 0; j < KEYS/N_THREAD; ++j) {
            const int64_t t = t0 + j*N_THREAD;
            const float   x = t < a.n_kv ? a.logits[(head + h)*a.n_kv + t] : neg_inf();
            key[j] = h == 0 && x == neg_inf() ? x : key[j] + expf(finite_top(x) - top[h])*inv[h];
        }
    }
#pragma unroll
    for (int j = 0; j < KEYS/N_THREAD; ++j) {
        const int64_t t = t0 + j*N_THREAD;
        if (t < a.n_kv) {
            a.key[u*a.n_kv + t] = key[j];
        }
    }
}

// the sum of x over the block, in all threads; buf [NT/32]
template <int NT, typename T>
__device__ __forceinline__ T block_sum(T x, T * buf) {
    x = lane_sum<32>(x);
    __syncthreads(); // the last one was read
    if (threadIdx.x % 32 == 0) {
        buf[threadIdx.x/32] = x;
    }
    __syncthreads();
    return lane_sum<32>(threadIdx.x % 32 < NT/32 ? buf[threadIdx.x % 32] : (T) 0);
}

// the sum of x over the threads before this one; total: over all. buf [NT/32]
template <int NT>
__device__ __forceinline__ int64_t block_before(int64_t x, int64_t * total, int64_t * buf) {
    const int w = threadIdx.x/32, lane = threadIdx.x % 32;
    int64_t before = x;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const int64_t y = __shfl_up_sync(ALL, before, o);
        before += lane >= o ? y : 0;
    }
    __syncthreads(); // the last one was read
    if (lane == 31) {
        buf[w] = before;
    }
    __syncthreads();
    before -= x;
    *total = 0;
    for (int j = 0; j < NT/32; ++j) {
        before += j < w ? buf[j] : 0;
        *total += buf[j];
    }
    return before;
}

// a mark of cell t as forced; 1: it is visible and was not marked yet
__device__ __forceinline__ int mark(unsigned * bits, const float * key, int32_t t, int64_t n) {
    return t >= 0 && t < n && order_of(key[t]) != ORDER_HIDDEN && !(atomicOr(&bits[t/32], 1u << t % 32) >> t % 32 & 1);
}

// marks the local window (the first n_local of forced) and the sinks (those from n_local_max on), at most topk_max of them. Returns how many
template <int NT>
__device__ __forceinline__ int mark_forced(const select_args & a, unsigned * bits, const float * key, const int32_t * forced, int n_local, int * buf) {
    for (int round = 0; ; ++round) {
        for (int64_t j = threadIdx.x; j < a.n_bits; j += NT) {
            bits[j] = 0;
        }
        __syncthreads();
        int n = 0;
        if (round == 0) {
            for (int j = threadIdx.x; j < a.n_forced; j += NT) {
                n += j < n_local || j >= a.n_local_max ? mark(bits, key, forced[j], a.n_kv) : 0;
            }
        } else if (threadIdx.x == 0) { // there are too many: in their order, which is that of their importance
            for (int j = 0; j < a.n_forced && n < a.topk_max; ++j) {
                n += j < n_local || j >= a.n_local_max ? mark(bits, key, forced[j], a.n_kv) : 0;
            }
        }
        n = block_sum<NT>(n, buf);
        if (n <= a.topk_max) {
            return n;
        }
    }
}

// heads of up to so many positions are selected by small blocks, of which there is room for many at once, and their marks are in shared memory
constexpr int N_SMALL = 4096;

// the words of marks, as they are now
template <int NT>
__device__ __forceinline__ unsigned marks_at(const unsigned * bits, int64_t i) {
    if constexpr (NT == 1024) {
        return __ldcg(&bits[i]); // atomics do not change what L1 holds
    } else {
        return bits[i];
    }
}

// the largest order that at least k of NT sampled keys reach; ORDER_HIDDEN + 1: all that is visible
template <int NT>
__device__ __forceinline__ int sample_cut(const float * key, int64_t n, int k) {
    const int x = order_of(key[threadIdx.x/8*(n/(NT/8)) + threadIdx.x % 8]);
    int64_t a = ORDER_HIDDEN + 1, b = ORDER_MAX;
    while (a < b) {
        const int64_t mid = a + (b - a + 1)/2;
        const int n_ge = __syncthreads_count(x >= mid);
        if (n_ge >= k) {
            a = mid;
        } else {
            b = mid - 1;
        }
        if (n_ge == k) {
            break;
        }
    }
    return (int) a;
}

// of n_sel cells the forced ones, and of the others those with the largest keys, until the weights add up to top_p of all; ties
// to the lower cell. Returns how many are left, in the order they had; copy [n_sel]: scratch
//   a cell weighs what the heads softmax it to: the key, or what the only head's logit gives
template <int NT>
__device__ __forceinline__ int keep_top_p(const select_args & a, int64_t head, const float * key, const unsigned * bits, int32_t * cells, int32_t * copy,
        int n_sel, float * sum_f, int64_t * sum_l) {
    const int per = (n_sel + NT - 1)/NT, j0 = min((int) threadIdx.x*per, n_sel), j1 = min(j0 + per, n_sel);
    for (int j = j0; j < j1; ++j) {
        copy[j] = cells[j];
    }
    const bool one = a.n_group_q == 1;
    float2 x = one ? sum_head(a, head) : make_float2(0.0f, 0.0f);
    for (int h = 0; !one && h < a.n_group_q; ++h) {
        x.y += sum_head(a, head + h).y > 0.0f;
    }
    if (!(x.y > 0.0f)) {
        return n_sel; // no head has a softmax
    }
    const auto is_forced = [&](int32_t t) { return (marks_at<NT>(bits, t/32) >> t % 32 & 1) != 0; };
    const auto weight    = [&](int32_t t) { return one ? expf(finite_top(key[t]) - x.x) : key[t]; };
    // the sum of the weights from an order on; for a higher order never more, since adding a term or 0 rounds in order
    const auto mass_from = [&](int least) {
        float sum = 0.0f;
        for (int j = j0; j < j1; ++j) {
            sum += !is_forced(copy[j]) && order_of(key[copy[j]]) >= least ? weight(copy[j]) : 0.0f;
        }
        return block_sum<NT>(sum, sum_f);
    };
    float forced = 0.0f;
    for (int j = j0; j < j1; ++j) {
        forced += is_forced(copy[j]) ? weight(copy[j]) : 0.0f;
    }
    const float want = a.top_p*x.y - block_sum<NT>(forced, sum_f);

    int64_t lo = ORDER_HIDDEN + 1, hi = (int64_t) ORDER_MAX + 1;
    if (!(mass_from((int) lo) >= want)) {
        return n_sel; // all of them do not carry it
    }
    while (hi - lo > 1) {
        const int64_t mid = lo + (hi - lo)/2;
        if (mass_from((int) mid) >= want) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    float mass = mass_from((int) hi);

    int64_t mine = 0, total; // cells above the cut, in the upper half; those equal to it
    float   tie  = 0.0f;     // what one of these weighs
    for (int j = j0; j < j1; ++j) {
        const int o = order_of(key[copy[j]]);
        const bool in = is_forced(copy[j]) || o > lo;
        mine += in ? (int64_t) 1 << 32 : o == lo ? 1 : 0;
        tie = !in && o == lo ? weight(copy[j]) : tie;
    }
    const int64_t before = block_before<NT>(mine, &total, sum_l);
    tie = warp_max(tie);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        sum_f[threadIdx.x/32] = tie;
    }
    __syncthreads();
    tie = warp_max(threadIdx.x % 32 < NT/32 ? sum_f[threadIdx.x % 32] : 0.0f);

    int n_tie = 0;
    for (; n_tie < (int) total && mass < want; ++n_tie) {
        mass += tie;
    }
    int n_gt = (int) (before >> 32), n_eq = (int) before;
    for (int j = j0; j < j1; ++j) {
        const int  o  = order_of(key[copy[j]]);
        const bool in = is_forced(copy[j]) || o > lo, eq = !in && o == lo;
        if (in || (eq && n_eq < n_tie)) {
            cells[n_gt + min(n_eq, n_tie)] = copy[j];
        }
        n_gt += in;
        n_eq += eq;
    }
    __syncthreads();
    return (int) (total >> 32) + n_tie;
}

// a token that reads every visible position: nothing is ranked
template <int NT>
__device__ __forceinline__ void select_every(const select_args & a, int32_t * res) {
    for (int j = threadIdx.x; j < a.topk_max; j += NT) {
        res[1 + a.n_group_q + j] = -1;
    }
    for (int j = threadIdx.x; j < a.n_group_q; j += NT) {
        ((float *) res)[1 + j] = neg_inf();
    }
    if (threadIdx.x == 0) {
        res[0] = GGML_SPARSE_SELECT_ALL;
    }
}

// The cells of a head that reach a guess of the cut, in order: each warp has a part of them and lists those of its part. A thread has the
// candidates j0 .. j1 - 1 of all of them
template <int NT>
struct candidates {
    static constexpr int NW      = NT/32;
    static constexpr int N_REG   = 8; // candidates that a thread keeps in registers
    static constexpr int AT_ONCE = 8; // keys that a lane waits for at a time

    const float    * key;
    const unsigned * bits;
    int32_t        * cand;
    int            * first; // [NW + 1] shared: candidates before those of each warp
    int part, n_cand, guess;
    int per, j0, j1, w0;
    int x[N_REG];

    // at least k of n cells, if so many are visible
    __device__ __forceinline__ void list(int n, int k) {
        const int w = threadIdx.x/32;
        part   = (n + NW*32 - 1)/(NW*32)*32; // cells of a warp
        guess  = ORDER_HIDDEN + 1;
        n_cand = 0;
        for (float want = (float) k*NT/n; k > 0; want *= 4.0f) {
            const float rank = want + 3.0f*__fsqrt_rn(want) + 2.0f;
            guess = n > 4*NT && rank < NT/2 ? sample_cut<NT>(key, n, (int) rank) : ORDER_HIDDEN + 1;
            const int mine = list_part(w*part, min(w*part + part, n));
            __syncthreads(); // first[] of the last round was read
            if (threadIdx.x % 32 == 0) {
                first[w + 1] = mine;
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                first[0] = 0;
                for (int j = 0; j < NW; ++j) {
                    first[j + 1] += first[j];
                }
            }
            __syncthreads();
            n_cand = first[NW];
            if (n_cand >= k || guess == ORDER_HIDDEN + 1) {
                break;
            }
        }
    }

    // the cells p0 .. p1 - 1 that reach the guess, by a warp. Returns how many
    __device__ __forceinline__ int list_part(int p0, int p1) {
        const int lane = threadIdx.x % 32;
        int mine = 0;
        for (int t = p0; t < p1; t += AT_ONCE*32) {
            int o[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int tj = t + j*32;
                o[j] = tj + lane < p1 ? order_of(key[tj + lane]) : ORDER_HIDDEN;
                if (tj < p1 && (marks_at<NT>(bits, tj/32) >> lane & 1)) {
                    o[j] = ORDER_FORCED;
                }
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const unsigned in = __ballot_sync(ALL, o[j] >= guess);
                if (o[j] >= guess) {
                    cand[p0 + mine + __popc(in & ((1u << lane) - 1))] = t + j*32 + lane;
                }
                mine += __popc(in);
            }
        }
        return mine;
    }

    // after list(): those of this thread
    __device__ __forceinline__ void take() {
        per = (n_cand + NT - 1)/NT;
        j0  = min((int) threadIdx.x*per, n_cand);
        j1  = min(j0 + per, n_cand);
        w0  = 0;
        while (w0 < NW - 1 && first[w0 + 1] <= j0) {
            ++w0;
        }
        int wj = w0;
#pragma unroll
        for (int j = 0; j < N_REG; ++j) {
            x[j] = j0 + j < j1 ? order_at(cell_at(j0 + j, wj)) : ORDER_HIDDEN;
        }
    }

    __device__ __forceinline__ int32_t cell_at(int j, int & wj) const { // j ascending
        while (first[wj + 1] <= j) {
            ++wj;
        }
        return cand[wj*part + j - first[wj]];
    }

    __device__ __forceinline__ int order_at(int32_t t) const {
        return marks_at<NT>(bits, t/32) >> t % 32 & 1 ? ORDER_FORCED : order_of(key[t]);
    }

    // candidates of all threads that reach lim
    __device__ __forceinline__ int count_ge(int lim, int * buf) const {
        if (per <= 2) { // as a rule: the barrier counts
            return __syncthreads_count(x[0] >= lim) + __syncthreads_count(x[1] >= lim);
        }
        int c = 0;
        if (per <= N_REG) {
#pragma unroll
            for (int j = 0; j < N_REG; ++j) {
                c += x[j] >= lim;
            }
        } else {
            for (int j = j0, wj = w0; j < j1; ++j) {
                c += order_at(cell_at(j, wj)) >= lim;
            }
        }
        return block_sum<NT>(c, buf);
    }

    // the largest order that at least k candidates reach, by bisection; the first n_in of them are forced
    __device__ __forceinline__ int cut(int k, int n_in, int * buf) const {
        if (n_cand <= k) {
            return ORDER_HIDDEN; // all candidates
        }
        int64_t lo = k == n_in ? ORDER_FORCED : guess, hi = k == n_in ? ORDER_FORCED : ORDER_MAX;
        while (lo < hi) {
            const int64_t mid = lo + (hi - lo + 1)/2;
            const int c = count_ge((int) mid, buf);
            if (c >= k) {
                lo = mid;
            } else {
                hi = mid - 1;
            }
            if (c == k) {
                break;
            }
        }
        return (int) lo;
    }

    // f(cell, order) for the candidates of this thread, in order
    template <typename F>
    __device__ __forceinline__ void for_each(const F & f) const {
        int wj = w0;
        if (per <= N_REG) {
#pragma unroll
            for (int j = 0; j < N_REG; ++j) {
                if (j0 + j < j1) {
                    f(cell_at(j0 + j, wj), x[j]);
                }
            }
        } else {
            for (int j = j0; j < j1; ++j) {
                const int32_t t = cell_at(j, wj);
                f(t, order_at(t));
            }
        }
    }
};

// rest of each query head, beside the n_sel cells -> out [n_group_q] (ggml-sparse.h, SELECT); -inf where it is not asked for
template <int NT>
__device__ __forceinline__ void write_rest(const select_args & a, int64_t u, const int32_t * cells, int n_sel, float * out, float * buf) {
    for (int h = 0; h < a.n_group_q; ++h) {
        float rest = neg_inf();
        if (a.rest) {
            const int64_t head = u*a.n_group_q + h;
            const float2  x    = sum_head(a, head);
            float kept = 0.0f, root = 0.0f;
            for (int j = threadIdx.x; j < n_sel; j += NT) {
                const float y = finite_top(a.logits[head*a.n_kv + cells[j]]) - x.x;
                kept += expf(y);
                root += expf(0.25f*y); // not the root of the former, which is 0 below -104
            }
            kept = block_sum<NT>(kept, buf);
            root = block_sum<NT>(root, buf);
            const float left = x.y - kept;
            if (root > 0.0f && left > MIN_LEFT*x.y) { // not where a head has a NaN
                rest = logf(left) - 4.0f*logf(root);
            }
        }
        if (threadIdx.x == 0) {
            out[h] = rest;
        }
    }
}

// one block per head: the k cells with the largest keys, ascending, ties to the lower cell; rest. The result does not depend on the guess
template <int NT>
static __global__ void __launch_bounds__(NT, NT == 1024 ? 1 : 4) select(const select_args a) {
    constexpr int NW = NT/32;
    __shared__ int     sum_i[NW];
    __shared__ int64_t sum_l[NW];
    __shared__ float   sum_f[NW];
    __shared__ int     first[NW + 1];

    const int64_t row = blockIdx.y, u = row*a.n_head_kv + blockIdx.x;
    const int64_t i = row % a.n_tok, s = row/a.n_tok;
    const float   * key   = a.key + u*a.n_kv;
    int32_t       * res   = a.res + u*(1 + a.n_group_q + a.topk_max);
    int32_t       * cells = res + 1 + a.n_group_q;
    const int32_t * kl    = a.kl.at<const int32_t>(i, 0, s);
    unsigned      * bits;
    if constexpr (NT == 1024) {
        bits = a.bits + u*a.n_bits;
    } else {
        __shared__ unsigned marks[N_SMALL/32];
        bits = marks;
    }
    if (kl[0] < 0) {
        select_every<NT>(a, res);
        return;
    }
    const int n_in = mark_forced<NT>(a, bits, key, a.forced.at<const int32_t>(i, 0, s), kl[1], sum_i);
    const int k    = max(min(kl[0], a.topk_max), n_in);

    candidates<NT> c;
    c.key   = key;
    c.bits  = bits;
    c.cand  = a.cand + u*a.n_cand;
    c.first = first;
    c.list((int) a.n_kv, k);
    c.take();
    const int cut = c.cut(k, n_in, sum_i);

    int n_sel = min(c.n_cand, max(k, 0));
    int64_t mine = 0, total; // candidates above the cut, in the upper half; those equal to it
    c.for_each([&](int32_t, int o) { mine += o > cut ? (int64_t) 1 << 32 : o == cut ? 1 : 0; });
    const int64_t before = block_before<NT>(mine, &total, sum_l);
    const int n_tie = n_sel - (int) (total >> 32); // ties that still fit
    int n_gt = (int) (before >> 32), n_eq = (int) before;
    c.for_each([&](int32_t t, int o) {
        if (o > cut || (o == cut && n_eq < n_tie)) {
            cells[n_gt + min(n_eq, n_tie)] = t;
        }
        n_gt += o > cut;
        n_eq += o == cut;
    });
    __syncthreads();
    if (a.top_p > 0.0f) {
        n_sel = keep_top_p<NT>(a, u*a.n_group_q, key, bits, cells, c.cand, n_sel, sum_f, sum_l);
    }
    for (int j = n_sel + (int) threadIdx.x; j < a.topk_max; j += NT) {
        cells[j] = -1;
    }
    if (threadIdx.x == 0) {
        res[0] = n_sel;
    }
    __syncthreads();
    write_rest<NT>(a, u, cells, n_sel, (float *) res + 1, sum_f);
}

} // namespace sparse_cuda
