#pragma once

// Step 2, by one block that reads all keys of a head: for what sparse-select.cuh does not do faster, which is top_p, more than two million positions,
// more forced cells than k, and a cut that was guessed too high.

#include "sparse-select-args.cuh"

namespace sparse_cuda {

// a mark of cell t as forced; 1: it is visible and was not marked yet
__device__ __forceinline__ int mark(unsigned * bits, const float * key, int32_t t, int64_t n) {
    return t >= 0 && t < n && order_of(key[t]) != ORDER_HIDDEN && !(atomicOr(&bits[t/32], 1u << t % 32) >> t % 32 & 1);
}

// marks the local window and the sinks, at most topk_max of them. Returns how many
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
                n += is_forced_entry(a, j, n_local) ? mark(bits, key, forced[j], a.n_kv) : 0;
            }
        } else if (threadIdx.x == 0) { // there are too many: in their order, which is that of their importance
            for (int j = 0; j < a.n_forced && n < a.topk_max; ++j) {
                n += is_forced_entry(a, j, n_local) ? mark(bits, key, forced[j], a.n_kv) : 0;
            }
        }
        n = block_sum<NT>(n, buf);
        if (n <= a.topk_max) {
            return n;
        }
    }
}

// a word of marks, as it is now: atomics do not change what L1 holds
__device__ __forceinline__ unsigned marks_at(const unsigned * bits, int64_t i) { return __ldcg(&bits[i]); }

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

constexpr int TOP_P_THREADS = 1024; // of a block that looks at top_p

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
    const auto is_forced = [&](int32_t t) { return (marks_at(bits, t/32) >> t % 32 & 1) != 0; };
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
                if (tj < p1 && (marks_at(bits, tj/32) >> lane & 1)) {
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
        return marks_at(bits, t/32) >> t % 32 & 1 ? ORDER_FORCED : order_of(key[t]);
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

// the k cells with the largest keys, ascending, ties to the lower cell -> cells; returns how many. The result does not depend on the guess
//   cand [n_cand]: scratch
template <int NT>
__device__ __forceinline__ int select_scan(const select_args & a, int64_t u, const float * key, int32_t * cand, const int32_t * forced, const int32_t * kl,
        int32_t * cells) {
    constexpr int NW = NT/32;
    __shared__ int     sum_i[NW];
    __shared__ int64_t sum_l[NW];
    __shared__ float   sum_f[NW];
    __shared__ int     first[NW + 1];

    unsigned * bits = a.bits + u*a.n_bits;
    const int n_in = mark_forced<NT>(a, bits, key, forced, kl[1], sum_i);
    const int k    = max(min(kl[0], a.topk_max), n_in);

    candidates<NT> c;
    c.key   = key;
    c.bits  = bits;
    c.cand  = cand;
    c.first = first;
    c.list((int) a.n_kv, k);
    c.take();
    const int cut = c.cut(k, n_in, sum_i);

    const int n_sel = min(c.n_cand, max(k, 0));
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
    if constexpr (NT == TOP_P_THREADS) {
        return a.top_p > 0.0f ? keep_top_p<NT>(a, u*a.n_group_q, key, bits, cells, cand, n_sel, sum_f, sum_l) : n_sel;
    }
    return n_sel;
}

} // namespace sparse_cuda
