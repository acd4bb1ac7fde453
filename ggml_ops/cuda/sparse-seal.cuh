#pragma once

// "Store K twice": the transposed K, the sums of V; the visible positions of a group. Layouts as on the CPU, byte for byte.

#include "sparse-codes.h"
#include "sparse-device.cuh"

namespace sparse_cuda {

struct seal_args {
    view k_t, k_range, v_sum, k, v;
    const int32_t * list;           // [n_stream][n_list]
    unsigned long long * stats;
    int64_t n_kv;
    int     n_list, d_k, d_v, n_bit, n_rot; // d_v = 0: no sums of V
};

// rows of K that are in shared memory at a time, to be rotated there
constexpr int SEAL_ROWS = 16;

constexpr float SHADOW_MAX = GGML_SPARSE_SHADOW_MAX;

__device__ __forceinline__ float clamp_f16(float x) { return fminf(fmaxf(x, -SHADOW_MAX), SHADOW_MAX); }

// K as the codes see it: finite
__device__ __forceinline__ float seal_value(float x) { return x == x ? clamp_f16(x) : 0.0f; }

// rows [SEAL_ROWS][d] of K from position t on, as f32 and rotated back
__device__ inline void load_rows(float (*rows)[D_MAX], const seal_args & a, int64_t h, int64_t s, int64_t t) {
    const int n_span = (a.d_k + 7)/8;
    for (int u = threadIdx.x; u < SEAL_ROWS*n_span; u += N_THREAD) {
        const int r = u/n_span, c = u % n_span*8;
        float x[8] = {};
        load_span<ANY>(x, a.k.type, a.k.at(h, t + r, s), c, a.d_k);
        for (int j = 0; j < 8; ++j) {
            rows[r][c + j] = x[j];
        }
    }
    __syncthreads();
    hadamard_rows(rows, SEAL_ROWS, a.d_k, a.n_rot);
}

// the group of f16 that begins at position t0
__device__ inline void seal_f16(const seal_args & a, int64_t h, int64_t s, int64_t t0, float (*rows)[D_MAX]) {
    for (int r0 = 0; r0 < GROUP; r0 += SEAL_ROWS) {
        load_rows(rows, a, h, s, t0 + r0);
        for (int u = threadIdx.x; u < SEAL_ROWS*a.d_k; u += N_THREAD) {
            const float x = rows[u % SEAL_ROWS][u/SEAL_ROWS];
            a.k_t.at<half>(h*a.d_k + u/SEAL_ROWS, s)[t0 + r0 + u % SEAL_ROWS] = __float2half_rn(x != x ? x : clamp_f16(x));
        }
        __syncthreads();
    }
}

// group g to codes; cpu/sparse-seal.h describes codes, sparse-codes.h their lines
__device__ inline void seal_codes(const seal_args & a, int64_t h, int64_t s, int64_t g, float (*rows)[D_MAX], uint8_t (*code)[D_MAX]) {
    const int   c   = threadIdx.x;
    const float top = (float) ggml_sparse_code_max(a.n_bit);
    float lo = SHADOW_MAX, hi = -SHADOW_MAX; // of component c
    for (int t = 0; t < GROUP; t += SEAL_ROWS) {
        load_rows(rows, a, h, s, g*GROUP + t);
        for (int r = 0; r < SEAL_ROWS && c < a.d_k; ++r) {
            const float x = seal_value(rows[r][c]);
            lo = fminf(lo, x);
            hi = fmaxf(hi, x);
        }
        __syncthreads();
    }
    const half range[2] = { __float2half_rn(__fdiv_rn(hi - lo, top)), __float2half_rn(lo) };
    const float scale = __half2float(range[0]), zero = __half2float(range[1]), inv = scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
    if (c < a.d_k) {
        half * to = a.k_range.at<half>(h*a.d_k + c, g, s);
        to[0] = range[0];
        to[1] = range[1];
    }

    const int line_pos = ggml_sparse_line_pos(a.n_bit);
    for (int t0 = 0; t0 < GROUP; t0 += line_pos) {
        for (int t = 0; t < line_pos; t += SEAL_ROWS) {
            load_rows(rows, a, h, s, g*GROUP + t0 + t);
            for (int r = 0; r < SEAL_ROWS && c < a.d_k; ++r) {
                const uint8_t y = (uint8_t) fminf(fmaxf(rintf((seal_value(rows[r][c]) - zero)*inv), 0.0f), top);
                uint8_t & dst = code[(t + r) % 64][c];
                dst = t < 64 ? y : (uint8_t) (dst | y << 4);
            }
            __syncthreads();
        }
        for (int u = threadIdx.x; u < 64*a.d_k; u += N_THREAD) {
            const int t = u % 64;
            uint8_t * line = (uint8_t *) a.k_t.at(h*a.d_k + u/64, s) + ggml_sparse_shadow_bytes(g*GROUP + t0, a.n_bit);
            line[ggml_sparse_line_byte(t)] = code[t][u/64];
        }
        __syncthreads();
    }
}

// the sum of V over a group: of some rows each, then together
__device__ inline void sum_v(const seal_args & a, int64_t h, int64_t s, int64_t g, float (*part)[D_MAX]) {
    const int n_col = (a.d_v + 7)/8, n_part = min(N_THREAD/n_col, SEAL_ROWS), c = threadIdx.x % n_col*8, r = threadIdx.x/n_col;
    if (r < n_part) {
        float sum[8] = {};
        for (int t = r; t < GROUP; t += n_part) {
            add8(sum, a.v.type, a.v.at(h, g*GROUP + t, s), c, a.d_v);
        }
        for (int l = 0; l < 8; ++l) {
            part[r][c + l] = sum[l];
        }
    }
    __syncthreads();
    if ((int) threadIdx.x < a.d_v) {
        float sum = 0.0f;
        for (int j = 0; j < n_part; ++j) {
            sum += part[j][threadIdx.x];
        }
        a.v_sum.at<float>(ggml_sparse_sum_row(g), s)[h*a.d_v + threadIdx.x] = sum;
    }
    __syncthreads();
}

// one block per (entry of the list, KV head, stream). The first entry of a sum block does all of the list that lie in it, so that sums are summed once,
// and nobody waits for anybody
static __global__ void __launch_bounds__(N_THREAD, 2) seal(const seal_args a) {
    begin_kernel();
    __shared__ float   rows[SEAL_ROWS][D_MAX];
    __shared__ uint8_t code[64][D_MAX];
    __shared__ uint8_t listed[SUM];

    const int64_t h = blockIdx.y, s = blockIdx.z;
    const int32_t * list = a.list + s*a.n_list;
    const int       i    = blockIdx.x;

    const auto ok = [&](int32_t g) { return g >= 0 && (g + 1)*(int64_t) GROUP <= a.n_kv; };
    if (!ok(list[i])) {
        return;
    }
    const int block = list[i]/SUM;
    bool before = false;
    for (int j = threadIdx.x; j < i; j += N_THREAD) {
        before = before || (ok(list[j]) && list[j]/SUM == block);
    }
    if (threadIdx.x < SUM) {
        listed[threadIdx.x] = 0;
    }
    if (h == 0 && threadIdx.x == 0) {
        add_stat(a.stats, GGML_SPARSE_STAT_GROUPS_SEALED, 1);
    }
    if (__syncthreads_or(before)) {
        return;
    }
    for (int j = i + threadIdx.x; j < a.n_list; j += N_THREAD) {
        if (ok(list[j]) && list[j]/SUM == block) {
            listed[list[j] % SUM] = 1;
        }
    }
    __syncthreads();

    const int64_t g0 = (int64_t) block*SUM;
    for (int j = 0; j < SUM; ++j) {
        if (!listed[j]) {
            continue;
        }
        if (ggml_sparse_has_codes(a.n_bit)) {
            seal_codes(a, h, s, g0 + j, rows, code);
        } else {
            seal_f16(a, h, s, (g0 + j)*GROUP, rows);
        }
        if (a.d_v > 0) {
            sum_v(a, h, s, g0 + j, rows);
        }
    }
    for (int c = threadIdx.x; c < a.d_v; c += N_THREAD) {
        float sum = 0.0f;
        for (int j = 0; j < SUM; ++j) {
            sum += a.v_sum.at<float>(ggml_sparse_sum_row(g0 + j), s)[h*a.d_v + c];
        }
        a.v_sum.at<float>(ggml_sparse_total_row(g0), s)[h*a.d_v + c] = sum;
    }
}

// ---- visible ----

// a warp per group
static __global__ void __launch_bounds__(N_THREAD) visible(int32_t * res, const view mask, int64_t n_kv, int64_t n_grp) {
    begin_kernel();
    const int64_t g = (int64_t) blockIdx.x*N_WARP + threadIdx.x/32;
    const int64_t i = blockIdx.y, s = blockIdx.z;
    const uint16_t * m = mask.at<const uint16_t>(i, 0, s);
    int n = 0;
    for (int64_t t = g*GROUP + threadIdx.x % 32; t < n_kv && t < (g + 1)*GROUP; t += 32) {
        n += m[t] != F16_NEG_INF;
    }
    n = lane_sum<32>(n);
    if (g < n_grp && threadIdx.x % 32 == 0) {
        res[(s*gridDim.y + i)*n_grp + g] = n;
    }
}

} // namespace sparse_cuda
