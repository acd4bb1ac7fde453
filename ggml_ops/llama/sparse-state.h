#pragma once

// What a context keeps: its settings, and the counters.

#include "sparse-spec.h"

#include "llama-cparams.h"

#include "ggml-cpp.h"
#include "ggml-sparse.h"

#include <array>
#include <bitset>
#include <map>

struct llama_sparse_state {
    llama_sparse_spec spec;

    int32_t     n_layer = 0;
    std::string reason; // why nothing is sparse, whatever the layer

    // in the present call to llama_decode, the sequences whose only token is a decoded one; all other tokens are of prompts
    std::bitset<LLAMA_MAX_SEQ> replying;

    // layer -> why its attention of decoded tokens is not ours, "" if it is; as of the last graph that had any
    std::map<int, std::string> layers;

    // counters: the ops add to stats when they run; attention left to llama.cpp is counted here, by reason
    uint64_t n_steps = 0; // decoded tokens
    std::map<std::string, uint64_t> n_stock;

    ~llama_sparse_state(); // logs the counters

    bool is_off() const { return spec.method == LLAMA_SPARSE_OFF; }

    // I64 [GGML_SPARSE_STAT_COUNT] in the memory of a device, nullptr: of the host. They are made with the settings, because what throws while a
    // graph is built would leave llama_decode. make_stats() throws std::runtime_error: no memory
    void          make_stats(ggml_backend_dev_t dev);
    ggml_tensor * stats     (ggml_backend_dev_t dev) const { return all_stats.at(dev).t; }

    // the sum over all of them; what runs on a device must be done
    std::array<int64_t, GGML_SPARSE_STAT_COUNT> read_stats() const;

    void reset_counters();

private:
    struct stats_tensor {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
        ggml_tensor           * t = nullptr;
    };
    std::map<ggml_backend_dev_t, stats_tensor> all_stats;
};
