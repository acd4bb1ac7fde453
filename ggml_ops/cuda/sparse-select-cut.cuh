#pragma once

// Step 2: the cut of a selection whose orders the threads of a block hold, or read again and again; the cells above it, in their order.

#include "sparse-select-args.cuh"

namespace sparse_cuda {

// sums and maxima over the block, in all threads. Calls take turns with part [2][NT/32], so each needs but one barrier
template <int NT>
struct counter {
    int (*part)[NT/32];
    int turn = 0;

    __device__ __forceinline__ int all(int x, int none) {
        int * p = part[turn ^= 1];
        if (threadIdx.x % 32 == 0) {
            p[threadIdx.x/32] = x;
        }
        __syncthreads();
        return threadIdx.x % 32 < NT/32 ? p[threadIdx.x % 32] : none;
    }

    __device__ __forceinline__ int sum(int x) { return warp_sum(all(warp_sum(x), 0)); }
    __device__ __forceinline__ int most(int x) { return warp_max(all(warp_max(x), ORDER_HIDDEN)); }
};

// An order that at least k, and as a rule not more than k + slack, of what all threads hold reach; with slack 0 the largest one that k reach
//   lo, n_lo: an order, and how many reach it, k at least; top: the largest that is held, forced ones apart, which are n_in
//   n_ge(order): how many of this thread's reach it
// The number falls about as an exponential function of the value, or of its logarithm where all are positive (which the order of floats is like), so
// the search goes where that would be k; each third step halves what is left
template <int NT, typename F>
__device__ __forceinline__ int find_cut(counter<NT> & block, int lo, int n_lo, int top, int n_in, int k, int slack, const F & n_ge) {
    int64_t a = lo, b = (int64_t) top + 1; // k reach a, but not b
    int n_a = n_lo, n_b = n_in;
    const float want = log2f(k + 0.5f*slack);
    for (int turn = 1; b - a > 1 && n_a > k + slack; ++turn) {
        int64_t mid = a + (b - a)/2;
        if (turn % 3 != 0 && a > ORDER_HIDDEN + 1) {
            const float from = log2f((float) n_a), f = (from - want)/(from - log2f(fmaxf((float) n_b, 0.5f)));
            if (a < 0 && b > 0) {
                const float x = order_value((int) a), y = order_value((int) (b - 1));
                mid = order_of(x + f*(y - x));
            } else {
                mid = a + (int64_t) (f*(float) (b - a));
            }
            mid = mid <= a ? a + 1 : mid >= b ? b - 1 : mid;
        }
        const int n = block.sum(n_ge((int) mid));
        if (n >= k) {
            a   = mid;
            n_a = n;
        } else {
            b   = mid;
            n_b = n;
        }
    }
    return (int) a;
}

// what writes the cells of a selection in their order: those above the cut, and of those equal to it the first ones. Each warp goes through its own
// cells twice, in order: first it counts (see), then, after start(), it writes
template <int NT>
struct cell_writer {
    int32_t * cells;
    int2    * n_warp; // [NT/32] shared
    int cut;
    int n_gt = 0, n_eq = 0, n_tie = 0; // so far; ties that fit

    __device__ __forceinline__ unsigned above(int o) const { return __ballot_sync(ALL, o > cut); }
    __device__ __forceinline__ unsigned equal(int o) const { return __ballot_sync(ALL, o == cut && o != ORDER_HIDDEN); }

    __device__ __forceinline__ void see(int o) {
        n_gt += __popc(above(o));
        n_eq += __popc(equal(o));
    }

    __device__ __forceinline__ void start(int n_sel) {
        const int w = threadIdx.x/32, lane = threadIdx.x % 32;
        if (lane == 0) {
            n_warp[w] = make_int2(n_gt, n_eq);
        }
        __syncthreads();
        const int2 v = lane < NT/32 ? n_warp[lane] : make_int2(0, 0);
        n_tie = n_sel - warp_sum(v.x);
        n_gt  = warp_sum(lane < w ? v.x : 0);
        n_eq  = warp_sum(lane < w ? v.y : 0);
    }

    __device__ __forceinline__ void write(int o, int cell) {
        const unsigned gt = above(o), eq = equal(o), below = (1u << threadIdx.x % 32) - 1;
        const int before = n_eq + __popc(eq & below);
        if (o > cut || (o == cut && o != ORDER_HIDDEN && before < n_tie)) {
            cells[n_gt + __popc(gt & below) + min(before, n_tie)] = cell;
        }
        n_gt += __popc(gt);
        n_eq += __popc(eq);
    }
};

// the cut of n cells of which k are wanted and n_in forced; for_each(f) calls f(order) for those of this thread, whose others are ORDER_HIDDEN
template <int NT, typename F>
__device__ __forceinline__ int cut_of(counter<NT> & block, int n, int k, int n_in, const F & for_each) {
    if (k == n_in) {
        return ORDER_FORCED - 1;
    }
    if (n <= k) {
        return ORDER_HIDDEN; // all
    }
    int most = ORDER_HIDDEN, least = ORDER_FORCED;
    for_each([&](int o) {
        most  = o == ORDER_FORCED ? most : max(most, o);
        least = o == ORDER_HIDDEN ? least : min(least, o);
    });
    most  = block.most(most);
    least = -block.most(-least);
    return find_cut<NT>(block, least, n, most, n_in, k, 0, [&](int from) {
        int c = 0;
        for_each([&](int o) { c += o >= from; });
        return c;
    });
}

// writes n_sel cells of those that for_all(f) gives a warp in order, as f((cell, order))
template <int NT, typename F>
__device__ __forceinline__ int write_cells(cell_writer<NT> to, int n_sel, const F & for_all) {
    for_all([&](int2 x) { to.see(x.y); });
    to.start(n_sel);
    for_all([&](int2 x) { to.write(x.y, x.x); });
    return n_sel;
}

// the k largest of n cells, n_in of them forced, ties to the lower cell -> cells, ascending; returns how many. They are read again and again
template <int NT, typename F>
__device__ __forceinline__ int select_read(counter<NT> & block, int n, int k, int n_in, int32_t * cells, int2 * n_warp, const F & for_all) {
    const int cut = cut_of(block, n, k, n_in, [&](const auto & f) { for_all([&](int2 x) { f(x.y); }); });
    return write_cells<NT>({ cells, n_warp, cut }, min(n, max(k, 0)), for_all);
}

// a warp's part of n things
template <int NT>
struct warp_share {
    int begin, end;

    __device__ __forceinline__ explicit warp_share(int n) {
        const int per = (n + NT - 1)/NT*32;
        begin = min((int) threadIdx.x/32*per, n);
        end   = min(begin + per, n);
    }

    // f(of(i)) for each, in order; by whole warps, so the lanes that have none get (-1, ORDER_HIDDEN)
    template <typename OF, typename F>
    __device__ __forceinline__ void for_all(const OF & of, const F & f) const {
        const int lane = threadIdx.x % 32;
#pragma unroll 4
        for (int i = begin; i < end; i += 32) {
            f(i + lane < end ? of(i + lane) : make_int2(-1, ORDER_HIDDEN));
        }
    }
};

// ---- all keys of a head, by one block ----

// a mark of cell t as forced; 1: it is visible and was not marked yet
__device__ __forceinline__ int mark(const head_place & at, int32_t t, int64_t n) {
    return t >= 0 && t < n && order_of(at.key[t]) != ORDER_HIDDEN && !(atomicOr(&at.bits[t/32], 1u << t % 32) >> t % 32 & 1);
}

// marks the local window and the sinks, at most topk_max of them. Returns how many; ends at a barrier
template <int NT>
__device__ __forceinline__ int mark_forced(counter<NT> & block, const select_args & a, const head_place & at) {
    const auto mark_entry = [&](int j) { return is_forced_entry(a, j, at.kl[1]) ? mark(at, at.forced[j], a.n_kv) : 0; };
    for (int round = 0; ; ++round) {
        for (int64_t j = threadIdx.x; j < a.n_bits; j += NT) {
            at.bits[j] = 0;
        }
        __syncthreads();
        int n = 0;
        if (round == 0) {
            for (int j = threadIdx.x; j < a.n_forced; j += NT) {
                n += mark_entry(j);
            }
        } else if (threadIdx.x == 0) { // there are too many: in their order, which is that of their importance
            for (int j = 0; j < a.n_forced && n < a.topk_max; ++j) {
                n += mark_entry(j);
            }
        }
        n = block.sum(n);
        if (n <= a.topk_max) {
            return n;
        }
    }
}

// of a cell with its mark, as that is now: atomics do not change what L1 holds
__device__ __forceinline__ int order_at(const head_place & at, int t) {
    return __ldcg(&at.bits[t/32]) >> t % 32 & 1 ? ORDER_FORCED : order_of(at.key[t]);
}

// the k largest of what is visible, n_in of them marked -> cells; returns how many
template <int NT>
__device__ __forceinline__ int select_all(counter<NT> & block, const select_args & a, const head_place & at, int k, int n_in, int32_t * cells, int2 * n_warp) {
    const warp_share<NT> mine((int) a.n_kv);
    const auto for_all = [&](const auto & f) {
        mine.for_all([&](int t) { return make_int2(t, order_at(at, t)); }, f);
    };
    int n = 0;
    for_all([&](int2 x) { n += x.y != ORDER_HIDDEN; });
    return select_read(block, block.sum(n), k, n_in, cells, n_warp, for_all);
}

} // namespace sparse_cuda
