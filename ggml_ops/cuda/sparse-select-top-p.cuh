#pragma once

// Step 2, last: of the k largest, those that carry a share top_p of the softmax.

#include "sparse-select-args.cuh"
#include "sparse-select-cut.cuh"

namespace sparse_cuda {

constexpr int TOP_P_THREADS = 1024; // of a block that looks at top_p

// of n_sel cells the forced ones, and of the others those with the largest keys, until the weights add up to top_p of all; ties to the lower cell.
// Returns how many are left, in the order they had
//   copy [n_sel]: scratch
//   a cell weighs what the heads softmax it to: the key, or what the only head's logit gives
template <int NT>
__device__ __forceinline__ int keep_top_p(
        counter<NT> & block, const select_args & a, const head_place & at, int32_t * cells, int2 * copy, int n_sel, int2 * n_warp) {
    __shared__ float sum_f[NT/32];
    const bool    one  = a.n_group_q == 1;
    const int64_t head = at.u*a.n_group_q;
    float2 x = one ? sum_head(a, head) : make_float2(0.0f, 0.0f);
    for (int h = 0; !one && h < a.n_group_q; ++h) {
        x.y += sum_head(a, head + h).y > 0.0f;
    }
    if (!(x.y > 0.0f)) {
        return n_sel; // no head has a softmax
    }
    for (int j = threadIdx.x; j < n_sel; j += NT) {
        copy[j] = make_int2(cells[j], order_at(at, cells[j]));
    }
    __syncthreads();
    const warp_share<NT> mine(n_sel);
    const auto for_all = [&](const auto & f) {
        mine.for_all([&](int j) { return copy[j]; }, f);
    };
    const auto weight = [&](float k) { return one ? expf(finite_top(k) - x.x) : k; };
    // the sum of the weights from an order on; for a higher order never more, since adding a term or 0 rounds in order
    const auto mass_from = [&](int least) {
        float sum = 0.0f;
        for_all([&](int2 c) { sum += c.y != ORDER_FORCED && c.y >= least ? weight(at.key[c.x]) : 0.0f; });
        return block_sum<NT>(sum, sum_f);
    };
    float forced = 0.0f;
    for_all([&](int2 c) { forced += c.y == ORDER_FORCED ? weight(at.key[c.x]) : 0.0f; });
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
    int n_gt = 0, n_eq = 0;
    for_all([&](int2 c) {
        n_gt += c.y > lo;
        n_eq += c.y == lo;
    });
    n_gt = block.sum(n_gt);
    n_eq = block.sum(n_eq);
    float mass = mass_from((int) hi);
    int n_tie = 0;
    for (const float tie = weight(order_value((int) lo)); n_tie < n_eq && mass < want; ++n_tie) {
        mass += tie;
    }
    return write_cells<NT>({ cells, n_warp, (int) lo }, n_gt + n_tie, for_all);
}

} // namespace sparse_cuda
