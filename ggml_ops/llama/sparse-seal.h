#pragma once

// Outside of any decoding: seal what is complete, and check what is sealed.

#include "sparse-shadow.h"
#include "sparse-state.h"

// Seals complete groups of all layers and streams, on the backends of `like`: all of them, or n_most and the rest of the run in which that number is
// reached, so that it does not matter in how many calls. None that goes beyond cell `end` of a stream. Returns how many (layer, group) that were; < 0:
// not computed
int64_t llama_sparse_seal(llama_kv_cache & kv, llama_sparse_state & state, ggml_backend_sched_t like, size_t n_most = SIZE_MAX,
        uint32_t end = UINT32_MAX);

// Seals all that is sealed once more. Returns in how many (layer, group) that gave other bytes, and leaves those that were there. Throws
// std::runtime_error
int64_t llama_sparse_count_stale(llama_kv_cache & kv, ggml_backend_sched_t like);
