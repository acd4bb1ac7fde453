#pragma once

// Facts about a KV cache and its layers that follow from what llama.cpp keeps.

#include "sparse-access.h"
#include "sparse-spec.h"

#include "ggml-sparse.h"

#include <string>
#include <vector>

// the KV cache of a context whose layers we can serve; nullptr: it has none
llama_kv_cache *               llama_sparse_find_cache(llama_memory_i * memory);
const llama_kv_cache_context * llama_sparse_find_cache(const llama_memory_context_i * mctx);

// Why no layer of this cache is sparse, or not this one, whatever the settings: "" if they are, else what info() and the log say. ikv: the layer's
// number in the cache
const char * llama_sparse_why_not      (const llama_kv_cache & kv);
const char * llama_sparse_why_not_layer(const llama_kv_cache & kv, int32_t ikv);

// sets src.k and src.v: all cells of all streams, of model layer il
void llama_sparse_view_cache(ggml_context * ctx, const llama_kv_cache & kv, int il, ggml_sparse_src & src);

// components of K (and q) that llama.cpp rotates together by a Hadamard matrix, 0: none; as in build_input_k_rot()
int32_t llama_sparse_n_rot(const llama_kv_cache & kv);

// bytes of one position of a KV head: K and V
double llama_sparse_row_bytes(const llama_kv_cache & kv, int il);
double llama_sparse_f16_bytes(const llama_kv_cache & kv, int il); // the same of a cache in f16

// the share of the bytes of a cache in f16 that step 1 reads in each layer [n_layer]; 0 for layers of other caches
std::vector<double> llama_sparse_score_shares(const llama_kv_cache & kv, const llama_sparse_spec & spec, int32_t n_layer);

// the device whose memory it is; nullptr: the host, whatever device allocated it
ggml_backend_dev_t llama_sparse_device_of(ggml_backend_buffer_t buf);
inline ggml_backend_dev_t llama_sparse_device_of(const ggml_tensor * t) { return llama_sparse_device_of(t->buffer); }

// another machine, which llama.cpp takes for a GPU (ggml-rpc)?
bool llama_sparse_is_worker(ggml_backend_dev_t dev);

// whether CPUs compute what runs on a device; nullptr: the host
bool llama_sparse_is_cpu(ggml_backend_dev_t dev);

// calls f for each of our nodes that t is made of, t last
template <typename F>
void llama_sparse_for_each_node(ggml_tensor * t, F f) {
    if (t && t->op == GGML_OP_SPARSE_ATTN) {
        for (ggml_tensor * src : t->src) {
            llama_sparse_for_each_node(src, f);
        }
        f(t);
    }
}

// "" or why not on this device: it can not run all nodes of ours that t is made of, or no GPU of its kind is known to be faster so and gpu_min_mb does
// not ask for it
std::string llama_sparse_why_not_run(ggml_backend_dev_t dev, ggml_tensor * t, const llama_sparse_spec & spec);
