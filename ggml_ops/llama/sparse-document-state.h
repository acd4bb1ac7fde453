#pragma once

// What a document has beside K and V of all positions: the state, after some positions, of layers that forget. Recurrent ones know a text to its end
// alone, and of layers with a sliding window only the newest positions are kept.

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"

#include <vector>

// What a context keeps of a text
struct llama_sparse_memory {
    llama_kv_cache *         kv;        // of layers that read everything
    llama_kv_cache *         windows;   // nullptr: no layer has a window
    llama_memory_recurrent * recurrent; // nullptr: no layer is recurrent

    bool has_state() const { return windows || recurrent; }

    // of one sequence: the bytes of its state, whatever it has read. 0: there is none
    uint64_t state_bytes() const;

    // The state after n_pos positions. Throws std::runtime_error: they are too long ago
    std::vector<char> state(llama_seq_id seq_id, uint32_t n_pos) const;

    // Gives it to an empty sequence. Throws std::runtime_error: it is damaged, or there is no room for it
    void set_state(llama_seq_id seq_id, uint32_t n_pos, const std::vector<char> & state) const;
};

// throws std::runtime_error: no document can be kept of this context
llama_sparse_memory llama_sparse_memory_of(llama_context & ctx);
