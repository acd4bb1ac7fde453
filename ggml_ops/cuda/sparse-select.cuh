#pragma once

// Step 2: the top k positions, and the mass of the others, of each head: one KV head of one token. A row is a token of a stream, stream*n_tok + token.
//
// A head is listed first, by many blocks: each guesses the cut from the same sample and lists those of its cells that reach it (list_keys); then a block
// finds the cut among what was listed (select). The result does not depend on the guess: where it was too high, the block reads all keys.

#include "sparse-score.cuh"
#include "sparse-select-top-p.cuh"

namespace sparse_cuda {

constexpr int N_SMALL   = 4096; // positions of a head that is listed whole
constexpr int LIST_KEYS = 2048; // positions that a block of list_keys() looks at
constexpr int LIST_MAX  = 1024; // lists of a head at most
constexpr int N_SAMPLE  = 1024; // positions of a head that the cut is guessed from

// what score() says of runs, bit for bit, where the logits come from another node; a warp per (run, query head)
static __global__ void __launch_bounds__(N_THREAD) sum_runs(const select_args a) {
    begin_kernel();
    const int64_t run = (int64_t) blockIdx.x*N_WARP + threadIdx.x/32, head = (int64_t) blockIdx.z*a.n_head + blockIdx.y;
    if (run >= a.n_run) {
        return;
    }
    float x[PER_LANE];
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p) {
        const int64_t t = run*RUN + span_position<16>(threadIdx.x % 32, p/4) + p % 4;
        x[p] = t < a.n_kv ? a.logits[head*a.n_kv + t] : neg_inf();
    }
    finish_run<16>(x, a.run_max, a.run_sum, head*a.n_run + run);
}

// which of the sample's keys, by size, the cut is guessed to be, where `want` of them are above it on average: five standard deviations later, since
// after a guess that is too high one block reads all keys
__device__ __host__ __forceinline__ float sample_rank(float want) { return want + 5.0f*sqrtf(want) + 4.0f; }

// what is ranked at position t: the logit, or the sum over the query heads of softmax(logits), -inf or NaN where hidden
//   logits: of the KV head's first query head; top, inv: of each, see softmax_heads()
template <int N>
__device__ __forceinline__ void load_keys(
        float (&key)[N], const select_args & a, const float * logits, const float * top, const float * inv, const int (&t)[N]) {
    if (a.n_group_q == 1) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            key[j] = t[j] < a.n_kv ? logits[t[j]] : neg_inf();
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
        key[j] = 0.0f;
    }
    for (int h = 0; h < a.n_group_q; ++h) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float x = t[j] < a.n_kv ? logits[h*a.n_kv + t[j]] : neg_inf();
            key[j] = h == 0 && x == neg_inf() ? x : key[j] + expf(finite_top(x) - top[h])*inv[h];
        }
    }
}

// of the query heads from `head` on, with several: what their softmax subtracts and multiplies with. By a block of N_THREAD; ends at a barrier
__device__ __forceinline__ void softmax_heads(const select_args & a, int64_t head, float * top, float * inv) {
    for (int h = threadIdx.x/32; a.n_group_q > 1 && h < a.n_group_q; h += N_WARP) {
        const float2 x = sum_head(a, head + h);
        if (threadIdx.x % 32 == 0) {
            top[h] = x.x;
            inv[h] = x.y > 0.0f ? __fdiv_rn(1.0f, x.y) : 0.0f;
        }
    }
    __syncthreads();
}

// marks [n/32]: which of the cells t0 .. t0 + n - 1 are forced, visible or not. By all threads; ends at a barrier
__device__ __forceinline__ void mark_cells(const select_args & a, const int32_t * forced, int n_local, unsigned * marks, int64_t t0, int n) {
    for (int j = threadIdx.x; j < n/32; j += N_THREAD) {
        marks[j] = 0;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < a.n_forced; j += N_THREAD) {
        const int64_t t = is_forced_entry(a, j, n_local) ? forced[j] - t0 : -1;
        if (t >= 0 && t < n) {
            atomicOr(&marks[t/32], 1u << t % 32);
        }
    }
    __syncthreads();
}

// an order that somewhat more than k keys of a head reach, from a sample of them; the work of a block
__device__ __forceinline__ int guess_cut(
        const select_args & a, counter<N_THREAD> & block, const float * logits, const float * top, const float * inv, int wanted) {
    constexpr int N_OWN = N_SAMPLE/N_THREAD; // of a thread
    const int n = (int) a.n_kv;
    int guess = ORDER_HIDDEN + 1; // all that is visible
    if (n <= N_SMALL) {
        return guess;
    }
    const float want = (float) min(wanted, a.topk_max)*N_SAMPLE/n, rank = sample_rank(want);
    if (rank < N_SAMPLE/2) {
        int   t[N_OWN], y[N_OWN];
        float x[N_OWN];
#pragma unroll
        for (int j = 0; j < N_OWN; ++j) { // eight beside each other, all over the head
            const int o = j*N_THREAD + threadIdx.x;
            t[j] = o/8*(n/(N_SAMPLE/8)) + o % 8;
        }
        load_keys(x, a, logits, top, inv, t);
        int most = ORDER_HIDDEN, least = ORDER_FORCED, seen = 0;
#pragma unroll
        for (int j = 0; j < N_OWN; ++j) {
            y[j]  = order_of(x[j]);
            most  = max(most, y[j]);
            least = y[j] == ORDER_HIDDEN ? least : min(least, y[j]);
            seen += y[j] != ORDER_HIDDEN;
        }
        most  = block.most(most);
        least = -block.most(-least);
        seen  = block.sum(seen);
        const int k = (int) rank;
        if (seen > k) {
            guess = find_cut<N_THREAD>(block, least, seen, most, 0, k, k/4, [&](int o) {
                int c = 0;
#pragma unroll
                for (int j = 0; j < N_OWN; ++j) {
                    c += y[j] >= o;
                }
                return c;
            });
        }
    }
    return guess;
}

// one block: lists blockIdx.x, + gridDim.x, .. of a head, each of the cells of LIST_KEYS positions that are forced or reach a guess of the cut -> list,
// count; with several query heads key, too
static __global__ void __launch_bounds__(N_THREAD) list_keys(const select_args a) {
    begin_kernel();
    constexpr int N = LIST_KEYS/N_THREAD; // keys of a thread
    __shared__ float    top[G_MAX], inv[G_MAX];
    __shared__ unsigned marks[LIST_KEYS/32];
    __shared__ int      part[2][N_WARP], n_warp[N_WARP];

    const head_place at(a, blockIdx.y, blockIdx.z);
    const int32_t * kl = at.kl;
    if (kl[0] < 0) {
        return;
    }
    const int64_t u = at.u, head = u*a.n_group_q;
    const float * logits = a.logits + head*a.n_kv;
    const int n = (int) a.n_kv, w = threadIdx.x/32, lane = threadIdx.x % 32;
    counter<N_THREAD> block = { part };
    softmax_heads(a, head, top, inv);

    const int guess = guess_cut(a, block, logits, top, inv, kl[0]);
    for (int b = blockIdx.x; b < a.n_list; b += gridDim.x) {
        int   t[N];
        float key[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            t[j] = b*LIST_KEYS + w*(N*32) + j*32 + lane;
        }
        load_keys(key, a, logits, top, inv, t);
        mark_cells(a, at.forced, kl[1], marks, (int64_t) b*LIST_KEYS, LIST_KEYS);

        int o[N], mine = 0, n_in = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            o[j] = order_of(key[j]);
            if (a.n_group_q > 1 && t[j] < n) {
                a.key[u*a.n_kv + t[j]] = key[j];
            }
            if (o[j] != ORDER_HIDDEN && (marks[w*N + j] >> lane & 1)) {
                o[j] = ORDER_FORCED;
            }
            mine += __popc(__ballot_sync(ALL, o[j] >= guess));
            n_in += o[j] == ORDER_FORCED;
        }
        if (lane == 0) {
            n_warp[w] = mine;
        }
        n_in = block.sum(n_in); // with a barrier
        const int v = lane < N_WARP ? n_warp[lane] : 0, all = warp_sum(v);
        int before = warp_sum(lane < w ? v : 0);
        int2 * list = a.list + (u*a.n_list + b)*LIST_KEYS;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const unsigned in = __ballot_sync(ALL, o[j] >= guess);
            if (o[j] >= guess) {
                list[before + __popc(in & ((1u << lane) - 1))] = make_int2(t[j], o[j]);
            }
            before += __popc(in);
        }
        if (threadIdx.x == 0) {
            a.count[u*a.n_list + b] = make_int2(all | n_in << 16, guess);
        }
    }
}

// rest of each query head, beside the n_sel cells -> out [n_group_q] (ggml-sparse.h, SELECT); -inf where it is not asked for
template <int NT>
__device__ __forceinline__ void write_rest(const select_args & a, int64_t u, const int32_t * cells, int n_sel, float * out, float * buf) {
    for (int h = 0; h < a.n_group_q; ++h) {
        float rest = neg_inf();
        if (a.rest && n_sel >= 0) {
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

// what a selection ends with: n_sel cells are there; GGML_SPARSE_SELECT_ALL: nothing is ranked, the token reads every visible position
template <int NT>
__device__ __forceinline__ void finish_select(const select_args & a, int64_t u, int32_t * res, int n_sel) {
    __shared__ float sum_f[NT/32];
    int32_t * cells = res + 1 + a.n_group_q;
    static_assert(GGML_SPARSE_SELECT_ALL < 0, "it is no number of cells");
    for (int j = max(n_sel, 0) + (int) threadIdx.x; j < a.topk_max; j += NT) {
        cells[j] = -1;
    }
    if (threadIdx.x == 0) {
        res[0] = n_sel;
    }
    __syncthreads();
    write_rest<NT>(a, u, cells, n_sel, (float *) res + 1, sum_f);
}

// where each list begins among all that is listed -> first, and how many forced cells this thread has seen -> n_in; returns how many are listed
template <int NT>
__device__ __forceinline__ int place_lists(int * first, int & n_in, const int2 * count, int n_list, int2 * n_warp) {
    const int w = threadIdx.x/32, lane = threadIdx.x % 32;
    int n = 0;
    for (int b0 = 0; b0 < n_list; b0 += NT) {
        const int b = b0 + threadIdx.x, c = b < n_list ? count[b].x : 0;
        int before = warp_prefix(c & 0xFFFF);
        n_in += c >> 16;
        if (lane == 31) {
            n_warp[w].x = before;
        }
        __syncthreads();
        const int x = lane < NT/32 ? n_warp[lane].x : 0;
        before += n + warp_sum(lane < w ? x : 0);
        if (b < n_list) {
            first[b + 1] = before;
        }
        n += warp_sum(x);
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        first[0] = 0;
    }
    return n;
}

// one block per head, after list_keys(); its threads hold N_HELD cells each, if that is enough
template <int NT, int N_HELD>
static __global__ void __launch_bounds__(NT, NT == 1024 ? 1 : 3) select(const select_args a) {
    begin_kernel();
    constexpr int NW = NT/32;
    __shared__ int  first[LIST_MAX + 1]; // listed before each list
    __shared__ int  part[2][NW];
    __shared__ int2 n_warp[NW];

    const head_place at(a, blockIdx.x, blockIdx.y);
    const int64_t u = at.u;
    const int32_t * kl = at.kl;
    int32_t * res = at.res, * cells = res + 1 + a.n_group_q;
    if (kl[0] < 0) {
        finish_select<NT>(a, u, res, GGML_SPARSE_SELECT_ALL);
        return;
    }
    const int w = threadIdx.x/32, lane = threadIdx.x % 32;
    counter<NT> block = { part };
    const int2 * count = a.count + u*a.n_list;
    const int guess = count[0].y;
    int n_in = 0;
    const int n = place_lists<NT>(first, n_in, count, a.n_list, n_warp);
    n_in = block.sum(n_in); // with a barrier
    const bool is_top_p = NT == TOP_P_THREADS && a.top_p > 0.0f;
    int k = max(min(kl[0], a.topk_max), n_in);
    const bool is_read = n_in > a.topk_max || (n < k && guess != ORDER_HIDDEN + 1);
    if (is_read || is_top_p) {
        n_in = mark_forced(block, a, at);
        k    = max(min(kl[0], a.topk_max), n_in);
    }
    int n_sel;
    if (is_read) {
        n_sel = select_all(block, a, at, k, n_in, cells, n_warp);
    } else if (n > NT*N_HELD) {
        const int n_list = (int) a.n_list, lists = (n_list + NW - 1)/NW, b0 = min(w*lists, n_list), b1 = min(b0 + lists, n_list); // of a warp
        n_sel = select_read(block, n, k, n_in, cells, n_warp, [&](const auto & f) { // from the lists in memory, by whole warps
            for (int b = b0; b < b1; ++b) {
                const int2 * list = a.list + (u*n_list + b)*LIST_KEYS;
                const int c = first[b + 1] - first[b];
#pragma unroll 4
                for (int j = 0; j < c; j += 32) {
                    f(j + lane < c ? list[j + lane] : make_int2(-1, ORDER_HIDDEN));
                }
            }
        });
    } else {
        const int per = (n + NT - 1)/NT;
        int x[N_HELD], cell[N_HELD];
#pragma unroll
        for (int j = 0; j < N_HELD; ++j) {
            x[j]    = ORDER_HIDDEN;
            cell[j] = -1;
        }
#pragma unroll
        for (int j = 0; j < N_HELD; ++j) {
            if (j >= per) {
                break;
            }
            const int o = (w*per + j)*32 + lane;
            int b = 0; // the list that it is in
#pragma unroll 1
            for (int d = LIST_MAX/2; d > 0; d /= 2) {
                b += b + d < a.n_list && first[b + d] <= o ? d : 0;
            }
            if (o < n) {
                const int2 found = a.list[(u*a.n_list + b)*LIST_KEYS + o - first[b]];
                cell[j] = found.x;
                x[j]    = found.y;
            }
        }
        n_sel = select_read(block, n, k, n_in, cells, n_warp, [&](const auto & f) { // in the order of (warp, j, lane)
#pragma unroll
            for (int j = 0; j < N_HELD; ++j) {
                if (j >= per) {
                    break;
                }
                f(make_int2(cell[j], x[j]));
            }
        });
    }
    if constexpr (NT == TOP_P_THREADS) {
        if (is_top_p) {
            __syncthreads(); // the cells of all threads are in memory
            n_sel = keep_top_p(block, a, at, cells, a.list + u*a.n_list*LIST_KEYS, n_sel, n_warp);
        }
    }
    finish_select<NT>(a, u, res, n_sel);
}

} // namespace sparse_cuda
