#pragma once

// Steps 2 and 3: exact attention over a selection, or over all positions; interpolation with the mean of V.
//
// A head is one KV head of a row. The positions of a head are split over blocks, in tiles of 64; a state {o, m, l, ..} per block and query head is
// merged by a second launch, or written as the result where one block has it all.

#include "sparse-device.cuh"

namespace sparse_cuda {

struct attend_args {
    view q, k, v, mask, v_sum;
    view visible;
    const int32_t * sel;                // [row][n_head_kv][ld_sel] or NULL: all positions
    const int32_t * sealed;             // [n_stream][n_grp], with mean_v
    const float   * sink_logits;        // [n_head] or NULL
    float * state;                      // [row][n_head][n_grid][ATTEND_STATE + d_v], or NULL with one split: straight to res
    float * mean;                       // [row][n_head_kv][d_v], with mean_v
    float * res;                        // [row][n_head*d_v], rows ld_res floats apart
    unsigned long long * stats;
    int64_t n_kv, n_grp, ld_res;
    int     n_head, n_head_kv, n_group_q, n_tok, n_row, d_k, d_v, ld_sel, n_split_sel, n_split_all, n_grid, n_log2, n_pass, row_k, row_v, mean_v;
    float   scale, softcap, max_bias;
};

constexpr int ATTEND_TILE  = 64; // positions
constexpr int ATTEND_STATE = 3;     // of a state, behind o [d_v]: m, l, and with mean_v the sum of the fourth roots of exp(logit - m)

__device__ __forceinline__ int n_selected(const attend_args & a, const int32_t * sel) { return min(max(sel[0], 0), a.ld_sel - 1 - a.n_group_q); }

// the selection of a head; NULL: it reads all it sees
__device__ __forceinline__ const int32_t * selection(const attend_args & a, int64_t row, int64_t h_kv) {
    const int32_t * sel = a.sel ? a.sel + (row*a.n_head_kv + h_kv)*a.ld_sel : nullptr;
    return sel && sel[0] != GGML_SPARSE_SELECT_ALL ? sel : nullptr;
}

// over how many blocks the positions of a head are split: as many as if all heads were like it
__device__ __forceinline__ int split_of(const attend_args & a, const int32_t * sel) { return sel ? a.n_split_sel : a.n_split_all; }

template <int GB>
struct alignas(16) attend_shared {
    float    q[GB][D_MAX];          // see q_place()
    float    s[GB][ATTEND_TILE];    // products, then softmax numerators
    float    sum[N_THREAD*8];       // to add up what threads have summed of V
    float    m[GB], l[GB], f[GB];   // largest logit, sum of exp(logit - it), what brings older sums to it
    float    root[GB];              // with mean_v: sum of the fourth roots of exp(logit - largest logit)
    int32_t  cell[2][ATTEND_TILE];  // of this tile and of the one before; < 0: none, or hidden
    uint16_t mask[2][ATTEND_TILE];
};

// products of a tile -> softmax numerators, against the largest logit so far; a warp per head
template <int GB>
__device__ __forceinline__ void softmax_tile(const attend_args & a, attend_shared<GB> & m, const uint16_t (&mask)[ATTEND_TILE], int head) {
    const int r = threadIdx.x % 32;
    for (int h = threadIdx.x/32; h < GB; h += N_WARP) {
        const float slope = head_slope(head + h, a.n_log2, a.max_bias);
        const float x0 = make_logit(m.s[h][r], mask[r], a.scale, a.softcap, slope);
        const float x1 = make_logit(m.s[h][r + 32], mask[r + 32], a.scale, a.softcap, slope);
        const float old = m.m[h], top = fmaxf(old, warp_max(fmaxf(x0, x1))), ref = top > neg_inf() ? top : 0.0f;
        const float p0 = expf(x0 - ref), p1 = expf(x1 - ref);
        const float f = expf(old - ref), l = lane_sum<32>(p0 + p1);
        __syncwarp(); // all have read what is replaced
        m.s[h][r]      = p0;
        m.s[h][r + 32] = p1;
        if (r == 0) {
            m.f[h] = f;
            m.m[h] = top;
            m.l[h] = m.l[h]*f + l;
        }
        if (a.mean_v) {
            const float root = lane_sum<32>(fourth_root(p0) + fourth_root(p1));
            if (r == 0) {
                m.root[h] = m.root[h]*fourth_root(f) + root;
            }
        }
    }
}

// what the slices have summed of V, together, head by head: the state of the block, or the result where it is the only one
template <int GB>
__device__ __forceinline__ void write_split(
        const attend_args & a, attend_shared<GB> & m, const float (&acc)[GB][8], int64_t row, int head, int n_head, int d_v) {
    const int tid = threadIdx.x, n_col = (d_v + 7)/8, n_slice = N_THREAD/n_col;
#pragma unroll
    for (int h = 0; h < GB; ++h) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            m.sum[tid*8 + c] = acc[h][c];
        }
        __syncthreads();
        if (h < n_head && tid < d_v) {
            float o = 0.0f;
            for (int j = 0; j < n_slice; ++j) {
                o += m.sum[j*n_col*8 + tid];
            }
            if (a.state) {
                float * st = a.state + ((row*a.n_head + head + h)*a.n_grid + blockIdx.x)*(d_v + ATTEND_STATE);
                st[tid] = o;
                if (tid == 0) {
                    st[d_v]     = m.m[h];
                    st[d_v + 1] = m.l[h];
                    st[d_v + 2] = m.root[h];
                }
            } else {
                float top = m.m[h], l = m.l[h];
                if (a.sink_logits) {
                    const float sink = a.sink_logits[head + h], all = fmaxf(top, sink), f = expf(top - all);
                    o *= f;
                    l  = l*f + expf(sink - all);
                }
                a.res[row*a.ld_res + (int64_t) (head + h)*d_v + tid] = l > 0.0f ? __fdiv_rn(o, l) : 0.0f;
            }
        }
        __syncthreads();
    }
}

// one block: tiles blockIdx.x, + n_split, .. for GB query heads of a KV head of a token
//   TYPE_K, TYPE_V: ANY where not known; D: size of the rows of V (and K) if known, 0 if not. With D all rows begin at multiples of 16 bytes
template <int GB, int TYPE_K, int TYPE_V, int D>
__device__ __forceinline__ void attend_split(const attend_args & a, attend_shared<GB> & m) {
    const int2    heads = split_index(blockIdx.y, a.n_pass), token = split_index(blockIdx.z, a.n_tok);
    const int64_t h_kv = heads.x, row = blockIdx.z, i = token.y, s = token.x;
    const int     h0   = heads.y*GB, n_head = min(GB, a.n_group_q - h0), head = (int) h_kv*a.n_group_q + h0;
    const int     tid  = threadIdx.x, d_k = D > 0 ? D : a.d_k, d_v = D > 0 ? D : a.d_v;
    const int32_t  * sel  = selection(a, row, h_kv);
    const int32_t  * vis  = a.visible.at<const int32_t>(i, 0, s);
    const int        n_split = split_of(a, sel);
    if ((int) blockIdx.x >= n_split) {
        return;
    }
    const uint16_t * mask = a.mask.at<const uint16_t>(i, 0, s);
    const char     * k    = a.k.at(h_kv, 0, s), * v = a.v.at(h_kv, 0, s);
    const int      n_sel  = sel ? n_selected(a, sel) : 0;
    const int64_t  n_tile = ((sel ? n_sel : a.n_kv) + ATTEND_TILE - 1)/ATTEND_TILE;

    // V: a thread has 8 columns of every n_slice-th row of a tile
    const int  n_col = (d_v + 7)/8, n_slice = N_THREAD/n_col, col = tid % n_col, slice = tid/n_col;
    const bool has_v = slice < n_slice;
    constexpr int N_V = D > 0 ? ATTEND_TILE*D/8/N_THREAD : 1; // rows of V that are on their way while K is worked on

    load_queries<GB>(m.q, a.q, head, n_head, i, s, d_k);
    if (tid < GB) {
        m.m[tid] = neg_inf();
        m.l[tid] = 0.0f;
        m.root[tid] = 0.0f;
    }
    float acc[GB][8] = {};

    // the tiles of this block that have something to see
    const auto next = [&](int64_t tile) {
        while (!sel && tile < n_tile && vis[tile*ATTEND_TILE/GROUP] == 0) {
            tile += n_split;
        }
        return tile;
    };
    int64_t tile = next(blockIdx.x);
    for (int turn = 0; tile < n_tile; ++turn) {
        const int par = turn & 1; // the cells of the tile before may still be read
        if (tid < ATTEND_TILE) {
            const int64_t j = tile*ATTEND_TILE + tid;
            const int64_t t = sel ? (j < n_sel ? sel[1 + a.n_group_q + j] : -1) : j;
            const uint16_t mt = t >= 0 && t < a.n_kv ? mask[t] : F16_NEG_INF;
            m.cell[par][tid] = mt == F16_NEG_INF ? -1 : (int32_t) t;
            m.mask[par][tid] = mt;
        }
        __syncthreads();

        uint4 v_raw[N_V];
        if (D > 0) { // all loads first
            constexpr int N_K = D/64 + (D == 0);
            uint4 k_raw[2][N_K];
            const int32_t t[2] = { m.cell[par][tid/8], m.cell[par][tid/8 + 32] };
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int j = 0; j < N_K; ++j) {
                    k_raw[r][j] = t[r] < 0 ? make_uint4(0, 0, 0, 0) : *(const uint4 *) (k + t[r]*a.k.nb2 + (tid % 8 + 8*j)*16);
                }
            }
#pragma unroll
            for (int j = 0; j < N_V; ++j) {
                const int32_t tv = m.cell[par][slice + j*n_slice];
                v_raw[j] = tv < 0 ? make_uint4(0, 0, 0, 0) : *(const uint4 *) (v + tv*a.v.nb2 + col*16);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float x[GB] = {};
#pragma unroll
                for (int j = 0; j < N_K; ++j) {
                    float y[8];
                    unpack_f16(y, k_raw[r][j]);
                    dot_span<GB>(x, m.q, tid % 8 + 8*j, D/8, y);
                }
                store_products<GB>(m.s, x, tid/8 + 32*r);
            }
        } else {
            for (int r = tid/8; r < ATTEND_TILE; r += N_THREAD/8) {
                const int32_t t = m.cell[par][r];
                float x[GB] = {};
                dot_row<TYPE_K, GB>(x, m.q, a.k.type, t < 0 ? nullptr : k + t*a.k.nb2, d_k);
                store_products<GB>(m.s, x, r);
            }
        }
        __syncthreads();

        softmax_tile(a, m, m.mask[par], head);
        __syncthreads();

#pragma unroll
        for (int h = 0; h < GB; ++h) {
            const float f = m.f[h];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                acc[h][c] *= f;
            }
        }
        const auto add = [&](const float (&x)[8], int r) {
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                const float p = m.s[h][r];
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    acc[h][c] += p*x[c];
                }
            }
        };
        if (D > 0) {
#pragma unroll
            for (int j = 0; j < N_V; ++j) {
                float x[8];
                unpack_f16(x, v_raw[j]);
                add(x, slice + j*n_slice);
            }
        } else {
            for (int r = slice; has_v && r < ATTEND_TILE; r += n_slice) {
                const int32_t t = m.cell[par][r];
                if (t >= 0) { // what is hidden may hold NaN
                    float x[8];
                    load_span<TYPE_V>(x, a.v.type, v + t*a.v.nb2, col*8, d_v);
                    add(x, r);
                }
            }
        }
        tile = next(tile + n_split);
    }
    __syncthreads();

    write_split(a, m, acc, row, head, n_head, d_v);
}

// sums of V that attend_mean() looks at in one round
constexpr int MEAN_SUMS = 1024;

struct mean_shared {
    unsigned whole[MEAN_SUMS*SUM/32]; // a bit per group: all of it is seen, and sealed
    int64_t  part[N_WARP];
};

// the mean of V over the positions that a token sees, one KV head, and the counters; the work of a block
__device__ inline void attend_mean(const attend_args & a, mean_shared & m, float * buf) {
    const int2    token = split_index(blockIdx.z, a.n_tok);
    const int64_t h = blockIdx.y, row = blockIdx.z, i = token.y, s = token.x;
    const int     tid = threadIdx.x;
    const int32_t * vis = a.visible.at<const int32_t>(i, 0, s);
    const bool sparse = selection(a, row, 0), mean_v = a.mean_v && sparse;
    if (!mean_v && h > 0) { // the first one counts for all
        return;
    }
    const int32_t  * sealed = mean_v ? a.sealed + s*a.n_grp : nullptr;
    const uint16_t * mask   = a.mask.at<const uint16_t>(i, 0, s);
    const int n_col = (a.d_v + 7)/8, n_slice = N_THREAD/n_col, col = tid % n_col, slice = tid/n_col;

    int64_t n_vis = 0, bytes = 0; // bytes: of the mean
    float sum[8] = {};
    for (int64_t g0 = 0; g0 < a.n_grp; g0 += MEAN_SUMS*SUM) {
        const int n = (int) min((int64_t) MEAN_SUMS*SUM, a.n_grp - g0);
        __syncthreads(); // whole[] of the last round was read
#pragma unroll 1
        for (int g = tid; g < (n + N_THREAD - 1)/N_THREAD*N_THREAD; g += N_THREAD) {
            const int v = g < n ? vis[g0 + g] : 0;
            const unsigned bits = __ballot_sync(ALL, mean_v && v == GROUP && ggml_sparse_is_sealed(sealed[g0 + g], i));
            n_vis += v;
            if (tid % 32 == 0) {
                m.whole[g/32] = bits;
            }
        }
        __syncthreads();
        if (!mean_v || slice >= n_slice) {
            continue;
        }
        const int n_sum = (n + SUM - 1)/SUM;
        const auto whole = [&](int b) { return m.whole[b*SUM/32] >> b*SUM % 32 & SUM_BITS; };
        const auto add = [&](int type, const char * row, int n_byte) {
            add8(sum, type, row, col*8, a.d_v);
            bytes += n_byte;
        };
        const auto add_sum = [&](int64_t r) { add(GGML_TYPE_F32, (const char *) (a.v_sum.at<const float>(r, s) + h*a.d_v), a.d_v*(int) sizeof(float)); };
#pragma unroll 2
        for (int b = slice; b < n_sum; b += n_slice) { // sums of which all groups count
            if (whole(b) == SUM_BITS) {
                add_sum(ggml_sparse_total_row(g0 + (int64_t) b*SUM));
            }
        }
#pragma unroll 1
        for (int b = slice; b < n_sum; b += n_slice) {
#pragma unroll 1
            for (int j = 0; whole(b) != SUM_BITS && j < SUM && b*SUM + j < n; ++j) {
                const int64_t g = g0 + (int64_t) b*SUM + j;
                const bool is_whole = whole(b) >> j & 1;
                if (is_whole) {
                    add_sum(ggml_sparse_sum_row(g));
                }
                for (int64_t t = g*GROUP; !is_whole && vis[g] > 0 && t < min((g + 1)*GROUP, a.n_kv); ++t) {
                    if (mask[t] != F16_NEG_INF) {
                        add(a.v.type, a.v.at(h, t, s), a.row_v);
                    }
                }
            }
        }
    }
    for (int c = 0; mean_v && c < 8; ++c) {
        buf[tid*8 + c] = sum[c];
    }
    n_vis = block_sum<N_THREAD>(n_vis, m.part);
    bytes = block_sum<N_THREAD>(col == 0 ? bytes : 0, m.part);
    if (mean_v && tid < a.d_v) {
        float x = 0.0f;
        for (int j = 0; j < n_slice; ++j) {
            x += buf[j*n_col*8 + tid];
        }
        a.mean[(row*a.n_head_kv + h)*a.d_v + tid] = n_vis > 0 ? __fdiv_rn(x, (float) n_vis) : 0.0f;
    }

    if (a.stats && h > 0 && tid == 0 && bytes > 0) {
        add_stat(a.stats, GGML_SPARSE_STAT_BYTES_ATTEND, bytes);
    }
    if (a.stats && h == 0 && tid < 32) {
        int64_t n_read = 0; // of all KV heads
        for (int j = tid; j < a.n_head_kv; j += 32) {
            n_read += sparse ? n_selected(a, a.sel + (row*a.n_head_kv + j)*a.ld_sel) : n_vis;
        }
        n_read = lane_sum<32>(n_read);
        if (tid == 0) {
            add_stat(a.stats, sparse ? GGML_SPARSE_STAT_ATTEND_SPARSE : GGML_SPARSE_STAT_ATTEND_DENSE, n_vis > 0);
            add_stat(a.stats, GGML_SPARSE_STAT_POS_VISIBLE,  n_vis*a.n_head_kv);
            add_stat(a.stats, GGML_SPARSE_STAT_POS_READ,     n_read);
            add_stat(a.stats, GGML_SPARSE_STAT_BYTES_ATTEND, n_read*(a.row_k + a.row_v) + bytes);
            add_stat(a.stats, GGML_SPARSE_STAT_BYTES_DENSE,  n_vis*a.n_head_kv*(a.row_k + a.row_v));
        }
    }
}

// alpha (ggml-sparse.h, ATTEND) from the states at st; top, all: the largest logit and the sum of exp(logit - top), sink included. Each warp
// does all of it
__device__ __forceinline__ float kept_share(const float * st, int ld, int d_v, int n_state, float top, float all, float rest) {
    float root = 0.0f;
    for (int i = threadIdx.x % 32; i < n_state; i += 32) {
        root += st[i*ld + d_v + 2]*expf(0.25f*(st[i*ld + d_v] - top)); // 0 times 0 of a state that saw nothing
    }
    root = lane_sum<32>(root);
    return root > 0.0f ? __fsqrt_rn(__fdiv_rn(all, all + expf(rest + 4.0f*logf(root)))) : 1.0f;
}

// the states of a query head in order, then the sink; eq. 10. One block per (query head, row)
static __global__ void __launch_bounds__(N_THREAD) merge(const attend_args a) {
    begin_kernel();
    __shared__ float f[N_THREAD], l[N_THREAD], part[N_THREAD];
    const int64_t row = blockIdx.y, j = blockIdx.x, h_kv = j/a.n_group_q;
    const int     tid = threadIdx.x, ld = a.d_v + ATTEND_STATE;
    const float * st = a.state + (row*a.n_head + j)*a.n_grid*ld;
    const int32_t * sel = selection(a, row, h_kv);
    const int n_split = split_of(a, sel);

    const float sink = a.sink_logits ? a.sink_logits[j] : neg_inf();
    f[tid] = tid < n_split ? st[tid*ld + a.d_v]     : neg_inf();
    l[tid] = tid < n_split ? st[tid*ld + a.d_v + 1] : 0.0f;
    __syncthreads();
    float top = sink;
    for (int i = tid % 32; i < N_THREAD; i += 32) {
        top = fmaxf(top, f[i]);
    }
    top = warp_max(top);
    const float ref = top > neg_inf() ? top : 0.0f;
    __syncthreads();
    f[tid] = expf(f[tid] - ref);
    __syncthreads();
    float all = 0.0f;
    for (int i = tid % 32; i < N_THREAD; i += 32) {
        all += l[i]*f[i];
    }
    all = lane_sum<32>(all) + (a.sink_logits ? expf(sink - ref) : 0.0f);

    const bool mean_v = a.mean_v && sel;
    const float alpha = mean_v ? kept_share(st, ld, a.d_v, n_split, ref, all, ((const float *) sel)[1 + j % a.n_group_q]) : 1.0f;

    const int n_slice = N_THREAD/a.d_v, c = tid % a.d_v, slice = tid/a.d_v;
    float o = 0.0f;
    if (slice < n_slice) {
#pragma unroll 8
        for (int i = slice; i < n_split; i += n_slice) {
            o += st[i*ld + c]*f[i];
        }
    }
    part[tid] = o;
    __syncthreads();
    if (tid >= a.d_v) {
        return;
    }
    for (int i = 1; i < n_slice; ++i) {
        o += part[i*a.d_v + c];
    }
    o = all > 0.0f ? __fdiv_rn(o, all) : 0.0f;
    if (mean_v) {
        o = alpha*o + (1.0f - alpha)*a.mean[(row*a.n_head_kv + h_kv)*a.d_v + c];
    }
    a.res[row*a.ld_res + j*a.d_v + c] = o;
}

// blocks that a multiprocessor shall hold at least: what leaves enough registers
constexpr int attend_blocks(int gb, int d) { return gb == 1 ? (d == 256 ? 2 : 3) : gb == 4 && d < 256 ? 2 : 1; }

// block n_grid of each row: the mean, and counting
template <int GB, int TYPE_K, int TYPE_V, int D>
static __global__ void __launch_bounds__(N_THREAD, attend_blocks(GB, D)) attend(const attend_args a) {
    begin_kernel();
    __shared__ union shared_memory {
        attend_shared<GB> split;
        struct { mean_shared mean; float sum[N_THREAD*8]; };
    } m;
    if ((int) blockIdx.x < a.n_grid) {
        attend_split<GB, TYPE_K, TYPE_V, D>(a, m.split);
    }
    if ((int) blockIdx.x == a.n_grid && (int) blockIdx.y < a.n_head_kv) {
        attend_mean(a, m.mean, m.sum);
    }
}

} // namespace sparse_cuda
