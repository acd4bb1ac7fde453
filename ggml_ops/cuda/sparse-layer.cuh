#pragma once

// SCORE_SELECT and ATTEND of a layer in one launch, on Hopper and later: a cluster of blocks has a KV head of a token (a row is
// stream*n_tok + token). The block is declared in sparse-layer-block.cuh, its steps are defined in three more headers, and here is their order.
//
//   own       Each block has some of the runs of the head, and scores, ranks and lists their positions. Groups that are read from K by rows (the
//             tail that is not sealed yet) would keep one block busy while the others wait, so where they are few, each block has a part of
//             their rows instead.
//   scratch   Logits, keys and lists lie in global memory, where they stay in L2: that sets no limit to the context, and leaves shared memory,
//             and with it multiprocessors, to more blocks.
//   barriers  of the cluster: A the softmax of the heads, B the histogram of what is ranked, C the list of selected positions, D the states.
//             With one query head per KV head the logits are ranked: then A and B are one, and bins are guessed from how the components of K
//             spread.
//
// The selection is what SELECT defines, to the last cell: the histogram only tells where the cut is, and the cells of that bin are ranked exactly.
// Where they are too many, the bin gets a histogram of its own; ties that no histogram parts are cut by halving. Sums depend on shapes and the device.

#include "sparse-layer-attend.cuh"
#include "sparse-layer-score.cuh"
#include "sparse-layer-select.cuh"

namespace sparse_cuda {

// the counters, by a warp of the first block
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::count() {
    const int64_t n_read = every ? n_vis : n_sel, n_seen = n_vis, row_bytes = ta.row_k + ta.row_v, bytes_score = total(3), bytes_mean = total(4);
    if (lane == 0) {
        if (!every) {
            add_stat(ta.stats, GGML_SPARSE_STAT_BYTES_SCORE, bytes_score + ggml_sparse_spread_bytes(sa.d, n_kv, N_BIT));
            add_stat(ta.stats, GGML_SPARSE_STAT_CUT_PASSES, m.n_pass);
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

template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::run() {
    const bool is_early = SPARQ_EARLY > 0 && a.is_early;
    row_state<GB> early;
    clear();
    if (!is_early) {
        begin_kernel();
    }
    see();
    if (GB == 1 && !every) {
        mark_forced();
    }
    if (is_early) {
        begin_kernel();
    }
    if (!every) {
        score();
        if (FORCED_EARLY) {
            list_early();
        }
        if (GB == 1) {
            sum_bins();
        }
    }
    arrive<true>(); // A; with one query head per KV head it is B, too
    if (GB > 1 && !every) {
        mark_forced();
    }
    if (mean_v) {
        sum_v();
    }
    wait();
    if (!every) {
        join_softmax();
        if (GB > 1) {
            make_keys(); // join_softmax() ended at a barrier: the marks are there
            // softmaxes of a head add up to 1 (of G heads to G), so the k-th is not above G/k; 64 bins per octave below it, 32 octaves
            bin.shift = 17;
            bin.base  = max((__float_as_int(__fdividef(1.02f*n_group_q, (float) max(min(kl[0], a.topk_max), 1))) >> 17) - (LAYER_BINS - 3), 0) << 17;
            count_keys();
            sum_bins();
            arrive<true>();
            wait(); // B
        }
        select(early);
    }
    attend(early);
    arrive<SPARQ_DSMEM_FINISH>();
    wait(); // D
    finish();
    if (ta.stats && rank == 0 && warp == 0) {
        count();
    }
    if (SPARQ_DSMEM_FINISH) { // others read what this block has
        arrive<true>();
        wait();
    }
}

// blocks that a multiprocessor shall hold at least: what leaves enough registers
constexpr int layer_blocks(int n_bit, int gb) { return n_bit == 4 && gb == 1 ? 3 : gb > 4 ? 1 : 2; }

template <int N_BIT, int GB, int TYPE>
static __global__ void __launch_bounds__(N_THREAD, layer_blocks(N_BIT, GB)) layer(const layer_args a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    typedef layer_shared<N_BIT, GB> shared;
    SPARQ_DYNAMIC_SHARED(shared, m);
    layer_block<N_BIT, GB, TYPE>(a, m).run();
#endif
}

} // namespace sparse_cuda
