#pragma once

// Outside of any decoding: seal what is complete, and check what is sealed.

#include "sparse-shadow.h"
#include "sparse-state.h"

// Seals every complete group of every layer and stream, on the backends of `like`. Returns how many (layer, group) that were; < 0: not computed
int64_t llama_sparse_seal_all(llama_kv_cache & kv, llama_sparse_state & state, ggml_backend_sched_t like);

// Number of (layer, group) in which the sealed data differs from K and V
int64_t llama_sparse_count_stale(llama_kv_cache & kv);
