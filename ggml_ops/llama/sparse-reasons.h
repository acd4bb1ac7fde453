#pragma once

// Why a layer, or all of them, are not sparse: "" if they are, else what info() and the log say. Such layers are left to llama.cpp's own attention,
// all but latent ones, which build_replies() in sparse-graph.cpp reads exactly. What a cache rules out no graph asks again; of the others
// build_replies() decides for each batch.

#include "sparse-state.h"

#include "sparse-cache.h"

#include <string>

struct llm_graph_context;

// no layer of this cache, or not this one, whatever the settings; ikv: its number in the cache
const char * llama_sparse_why_not      (const llama_kv_cache & kv);
const char * llama_sparse_why_not_layer(const llama_kv_cache & kv, int32_t ikv);

// not SparQ with these settings: the device of the layer's K lacks one of the kernels. Asks with the nodes of a token that sees all of the cache
std::string llama_sparse_why_not_sparq(const llama_kv_cache & kv, const llama_sparse_spec & spec, size_t ikv);

// not the decoded tokens of layer il in this graph; mctx: of the layer's cache, nullptr: it has a sliding window
std::string llama_sparse_why_not_ours(const llm_graph_context & g, const llama_sparse_state & state, const llama_kv_cache_context * mctx,
        const ggml_tensor * mask, const ggml_tensor * kq_b, int il);

// not on this device: it can not run all nodes of ours that t is made of
std::string llama_sparse_why_not_run(ggml_backend_dev_t dev, ggml_tensor * t);

// can our ops read the tensors of a layer, if its cache allows? kq_b: a learned bias
bool llama_sparse_is_ordinary(const llama_cparams & cparams, const ggml_tensor * mask, const ggml_tensor * kq_b);
