#pragma once

// Outside of any decoding: seal what is complete, and check what is sealed.

#include "sparse-shadow.h"
#include "sparse-state.h"

// Seals complete groups of all layers and streams: all of them, or those that hold n_bytes of K and V. None that goes beyond cell `end` of a stream.
// Returns how many (layer, group) that were, 0 without a shadow. Throws std::exception: they count as not sealed
int64_t llama_sparse_seal(llama_context & ctx, size_t n_bytes = SIZE_MAX, uint32_t end = UINT32_MAX);

// Number of tensors of the shadow that are not what SEAL makes of K and V, on the backends of `like`
int64_t llama_sparse_count_stale(llama_kv_cache & kv, ggml_backend_sched_t like);
