#pragma once

// What the patches call: one line at each call site, which patches/README.md lists. While sparse attention was never asked for, they change no
// result.

#include "llama-sparse.h"

#include "ggml-backend.h"

#include <string>
#include <vector>

struct ggml_tensor;
struct llama_cparams;
struct llm_graph_context;
class  llama_kv_cache;

struct llama_sparse_state;  // of a context: the settings and the counters
struct llama_sparse_shadow; // of a KV cache: the transposed K, the sums of V, and what is known of each cell
struct llama_sparse_access; // the one friend of the classes of llama.cpp that we read

// ---- llama_context ----

// The constructor: before the cache is made, then at the end. The settings that a new context has by default, see llama_sparse_attn_default().
// Both throw std::runtime_error, in one line.
void llama_sparse_context_begin(llama_cparams & cparams, const llama_context_params & params); // turns flash attention on
void llama_sparse_context_end  (llama_context * ctx);

// sched_reserve(): how many nodes a graph may have for sparse attention, beside those that llama.cpp makes room for; 0 while it was never asked for
uint32_t llama_sparse_max_nodes(const llama_context & ctx);

// decode(): the batch is checked, and shifts and copies that were due are done. Decides which tokens are decoded ones, see llama-sparse.h. Seals
// what the last token completed, so that its own graph need not, and a part of what was restored
void llama_sparse_decode_begin(llama_context * ctx, const llama_batch & batch);

// decode(): an ubatch failed, so what it was to seal is unknown, and a scheduler without memory for its buffers is made again
void llama_sparse_decode_failed(llama_context * ctx);

// Whatever restores a state: seals at its end what was restored, so that no token has to. Where sequences have streams of their own the next calls to
// decode() do it, a part by each, so that no token of another sequence waits for all of it; if a token of the restored one comes before they are
// through, its graph seals the rest. Declared first, so destroyed last: the io object's destructor still copies bytes
struct llama_sparse_restored {
    llama_context * ctx;

    explicit llama_sparse_restored(llama_context * ctx) : ctx(ctx) {}
    ~llama_sparse_restored();
};

// ---- llm_graph_context ----

// build_attn_mha(): the attention of one layer, or nullptr: build it as upstream does.
//   q [d_k, n_head, n_tokens], k [d_k, n_head_kv, n_kv, n_stream], v likewise, kq_mask [n_kv, n_tokens/n_stream, 1, n_stream]
//   v_mla [d_v, d_res, n_head] or nullptr: what the result of each head is multiplied by, with latent attention
//   res [d_v*n_head, n_tokens] f32, or d_res in the place of d_v
ggml_tensor * llama_sparse_build_attn(
        const llm_graph_context & g, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il);

// ---- llama_kv_cache ----

// Bytes of K or V in these cells were written, or are about to be. output [cells]: which tokens were asked for their logits; nullptr: not known
void llama_sparse_cells_written(llama_sparse_shadow * shadow, uint32_t stream, const std::vector<uint32_t> & cells, const int8_t * output);

// Whole streams are about to be copied, and K to be rotated (by RoPE) to shifted positions
void llama_sparse_cells_moved(
        llama_kv_cache & kv, const llama_cparams & cparams, bool do_shift, const std::vector<uint32_t> & from, const std::vector<uint32_t> & to);

// All of K and V is about to be set to zero. Before it is, since the pages of a document's file must be unmapped first
void llama_sparse_cells_cleared(llama_sparse_shadow * shadow);

// The memory that K and V of layer il get, where llama.cpp would take buft: the CPU's for the layers that SPARQ_KV_IN_MEMORY lists, "0,3,7", but for
// those of a draft. So K and V of some layers can lie on a GPU and those of others in memory. Throws std::runtime_error, in one line: that is no such list
ggml_backend_buffer_type_t llama_sparse_kv_buft(ggml_backend_buffer_type_t buft, uint32_t il);

// Sets a buffer of K and V to zero, in place of ggml_backend_buffer_clear(). Where the system can, its pages are given back and come again when they
// are written, as zeros and large: a context of a million positions is made at once, and takes the memory that it uses
void llama_sparse_clear(ggml_backend_buffer_t buf);
