#pragma once

// What the kernels of step 2 share: arguments, softmax sums of heads, sums over a block.

#include "sparse-device.cuh"

namespace sparse_cuda {

struct select_args {
    view forced, kl;
    const float * logits;               // [row][n_head][n_kv]
    float       * key;                  // [row][n_head_kv][n_kv] what is ranked; NULL where a KV head has one query head: then it is the logits
    float       * run_max, * run_sum;   // [row][n_head][n_run]; where a KV head has several query heads, or rest or top_p is wanted
    unsigned    * bits;                 // [row][n_head_kv][n_bits] scratch: the forced cells, where keys are read again, or top_p is wanted
    int2        * list;                 // [row][n_head_kv][n_list*LIST_KEYS] cells near or above the cut, with their orders; scratch of keep_top_p()
    int2        * count;                // [row][n_head_kv][n_list] of each part of them: how many, with the forced ones << 16, and the guessed cut
    int32_t     * res;                  // [row][n_head_kv][1 + n_group_q + topk_max]
    int64_t n_kv, n_run, n_bits, n_list;
    int     n_head, n_head_kv, n_group_q, n_tok, n_forced, n_local_max, topk_max, rest;
    float   top_p;                      // in (0, 1), or 0
};

// a KV head of a row: its number, what its token wants, what is ranked, the marks of forced cells, and where its selection goes
struct head_place {
    int64_t u;
    const int32_t * kl, * forced;
    const float * key;
    unsigned    * bits;
    int32_t * res;

    __device__ __forceinline__ head_place(const select_args & a, unsigned h_kv, unsigned row) : u((int64_t) row*a.n_head_kv + h_kv) {
        const int2 token = split_index(row, a.n_tok);
        kl     = a.kl.at<const int32_t>(token.y, 0, token.x);
        forced = a.forced.at<const int32_t>(token.y, 0, token.x);
        key    = (a.n_group_q > 1 ? a.key : a.logits) + u*a.n_kv;
        bits   = a.bits + u*a.n_bits;
        res    = a.res + u*(1 + a.n_group_q + a.topk_max);
    }
};

// of the forced cells: the first n_local are the token's local window, those from n_local_max on the sinks
__device__ __forceinline__ bool is_forced_entry(const select_args & a, int j, int n_local) { return j < n_local || j >= a.n_local_max; }

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

} // namespace sparse_cuda
