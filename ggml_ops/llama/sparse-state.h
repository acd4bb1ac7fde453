#pragma once

// What a context keeps: its settings, and the counters.

#include "sparse-spec.h"

#include "llama-cparams.h"

#include "ggml-cpp.h"
#include "ggml-sparse.h"

#include <array>
#include <bitset>
#include <map>
#include <memory>

struct llama_sparse_state {
    llama_sparse_spec spec;

    int32_t     n_layer = 0;
    std::string reason; // why nothing is sparse, whatever the layer

    bool prompt_on_cpu = false; // where K lies in memory, though a GPU is in use: SPARQ_PROMPT_ON_CPU=1 when the settings were made

    // in the present call to llama_decode, the sequences whose tokens are decoded ones; all other tokens are of prompts. Those of them that have
    // several tokens, which verify a draft
    std::bitset<LLAMA_MAX_SEQ> replying, verifying;

    // of one sequence: its own settings (nullptr: the context's), and what its decoded tokens read since these were set, as they order it
    struct sequence {
        std::shared_ptr<const llama_sparse_spec> own;
        bool      is_prompt  = false; // what comes next, until a token asks for its logits ..
        llama_pos prompt_end = -1;    // .. whose position this is: a batch that found no room comes again

        llama_pos draft_from = -1, draft_to = -1; // where its tokens are of a reply, however many a call has

        uint64_t n_steps    = 0; // decoded tokens ..
        uint64_t n_verified = 0; // .. and those of them that came several at once
        uint64_t n_sparse = 0; // calls of attention, one for each token and layer ..
        uint64_t n_dense  = 0; // .. exact ones
        uint64_t n_visible = 0, n_read = 0; // positions, over all KV heads; n_read is the most with top_p
        double   bytes_dense = 0, bytes_read = 0;
    };
    std::array<sequence, LLAMA_MAX_SEQ> sequences;

    const llama_sparse_spec & spec_of(int32_t seq) const { return sequences[seq].own ? *sequences[seq].own : spec; }

    // layer -> why its attention of decoded tokens is not ours, "" if it is; as of the last graph that had any
    std::map<int, std::string> layers;

    // counters: the ops add to stats when they run; attention left to llama.cpp is counted here, by reason
    uint64_t n_steps = 0, n_verified = 0; // decoded tokens, and those of them that came several at once
    std::map<std::string, uint64_t> n_stock;

    ~llama_sparse_state(); // logs the counters

    bool is_off() const { return spec.is_off(); }

    // I64 [GGML_SPARSE_STAT_COUNT] in the memory of a device, nullptr: of the host. They are made with the settings, because what throws while a
    // graph is built would leave llama_decode. make_stats() throws std::runtime_error: no memory
    void          make_stats(ggml_backend_dev_t dev);
    ggml_tensor * stats     (ggml_backend_dev_t dev) const { return all_stats.at(dev).t; }

    // what runs on a device must be done
    using counts = std::array<int64_t, GGML_SPARSE_STAT_COUNT>;
    counts read_stats(ggml_backend_dev_t dev) const;
    counts read_stats() const; // the sum over all devices

    template <typename F>
    void for_each_device(F f) const {
        for (const auto & [dev, _] : all_stats) {
            f(dev);
        }
    }

    void reset_counters();

private:
    struct stats_tensor {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
        ggml_tensor           * t = nullptr;
    };
    std::map<ggml_backend_dev_t, stats_tensor> all_stats;
};

// of a context, see llama_sparse_shadow
size_t llama_sparse_shadow_bytes(llama_context & ctx);

// throws llama_sparse_error: there is no such sequence
void llama_sparse_check_seq(const llama_context & ctx, llama_seq_id seq);
