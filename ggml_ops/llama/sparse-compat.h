#pragma once

// What only one of the pinned releases of llama.cpp has, or has with other arguments. Each function asks the compiler: called with 0 as the last
// argument, the first overload is taken where upstream has the member, the second elsewhere.

#include "llama-graph.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <utility>
#include <vector>

// is this context training? From 0.3.36 on
template <typename T> auto sparse_is_training(const T & cparams, int) -> decltype(cparams.training) { return cparams.training; }
template <typename T> bool sparse_is_training(const T &, long) { return false; }

// (position, cell) of a sequence, ordered. From 0.3.36 on the cells keep that order; before, it is made anew for every token
struct sparse_positions : std::vector<std::pair<llama_pos, uint32_t>> {
    const_iterator lower_bound(const value_type & x) const { return std::lower_bound(begin(), end(), x); }
    const_iterator upper_bound(const value_type & x) const { return std::upper_bound(begin(), end(), x); }
};

template <typename T> auto sparse_positions_of(const T & cells, llama_seq_id seq, int) -> decltype(cells.seq_pos_get(seq)) {
    return cells.seq_pos_get(seq);
}

template <typename T> sparse_positions sparse_positions_of(const T & cells, llama_seq_id seq, long) {
    sparse_positions res;
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (!cells.is_empty(i) && cells.seq_has(i, seq)) {
            res.emplace_back(cells.pos_get(i), i);
        }
    }
    if (!std::is_sorted(res.begin(), res.end())) {
        std::sort(res.begin(), res.end());
    }
    return res;
}

// llama.cpp's own attention of a layer, without a learned bias. From 0.3.36 on it may be told how many positions a mask leaves; 0: it is not
template <typename G>
auto sparse_build_attn_mha(const G & g, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask, ggml_tensor * sinks, ggml_tensor * v_mla,
        float scale, int il, int) -> decltype(g.build_attn_mha(q, k, v, nullptr, mask, sinks, v_mla, int64_t(0), scale, il)) {
    return g.build_attn_mha(q, k, v, nullptr, mask, sinks, v_mla, int64_t(0), scale, il);
}
template <typename G>
ggml_tensor * sparse_build_attn_mha(const G & g, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask, ggml_tensor * sinks,
        ggml_tensor * v_mla, float scale, int il, long) {
    return g.build_attn_mha(q, k, v, nullptr, mask, sinks, v_mla, scale, il);
}
