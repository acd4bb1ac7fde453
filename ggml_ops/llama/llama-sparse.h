#pragma once

// llama_sparse: sparse attention for decoding inside libllama.
//
// C API (below): new exported functions only; no public struct of llama.cpp changes.
// Hooks (bottom): what the patches call. Each is one line at its call site and does nothing while sparse attention is off;
// patches/README.md has the table of call sites.

#include "llama.h"

#include "ggml-backend.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A spec is one line of text: METHOD[,key=value]...
//   METHOD   off | dense | sparq | topk
//              off    llama.cpp's own attention, bit-identical to an unpatched build
//              dense  exact attention through our op (reads every visible position once per KV head)
//              sparq  SparQ: approximate scores from `rank` components, then exact attention over `topk` positions
//              topk   exact scores from all of K, then attention over `topk` positions
//   ratio    1/8 | 0.125 | 12.5%   sparq: bytes moved / bytes of all K and V: half for the scores, but at most a quarter
//                                  of the components; the rest for the gathered rows
//                                  topk:  share of the positions that is kept
//   rank, topk (or k)              explicit values, instead of those from ratio
//   local    size of the local window, newest positions of the sequence (default topk/4)
//   sinks    first positions of the sequence, always kept (default 4)
//   min_k    lower bound of topk when it comes from ratio (default 128); whatever its source, no layer's k is below sinks + local + 1
//   min_ctx  up to this many cells in use (rounded up to 256): exact dense (default 1024)
//   gpu_min_mb  where K lies on a GPU: a layer whose K and V that all tokens of the step would read are below so many MB keeps llama.cpp's
//            attention (default 256, not measured; 0: always sparse)
//   mean_v   auto | on | off       step 3, interpolation with the mean value (auto: on for MHA, off for GQA)
//   shadow   q4 | q8 | f16         the transposed copy of K: +13 %, +26 %, +50 % of f16 KV; at the same ratio fewer bits find more (default q4)
//   budget   uniform | ramp | ramp-down    ramp: topk grows linearly from the first to the last layer, same total (arXiv 2502.06766, 4.4)
//   top_p    0.95                  of the topk positions only as many as carry this share of the scores, for each KV head and token (default 1)
//   cap      4                     with top_p: up to so many times topk (default 1); sinks and local follow from topk itself
//   k_layers 64:12.5%:dense:...    topk of each layer, explicit: positions, a share of those in view (min_k holds), or all
//   rank_layers 8:16:...           rank of each layer, explicit
//
// Errors are text in `err`/`buf`: a message, a line feed, a hint.

// Sets the method of a context; takes effect with the next llama_decode. 0: done. < 0: refused, nothing changed, `err` says why.
LLAMA_API int32_t llama_set_sparse_attn(struct llama_context * ctx, const char * spec, char * err, size_t n_err);

// Checks a spec without a context. >= 0: the length of the canonical spec written to buf. < 0: buf says why.
LLAMA_API int32_t llama_sparse_attn_parse(const char * spec, char * buf, size_t n_buf);

// Writes what is active, why layers stay dense, and the counters, as JSON. Returns the length the text has (without the 0).
LLAMA_API int32_t llama_get_sparse_attn_info(const struct llama_context * ctx, char * buf, size_t n_buf);

LLAMA_API void llama_sparse_attn_reset_counters(struct llama_context * ctx);

// Seals now what the next token would have to seal first. A restored state is sealed by itself, and the cache when SparQ is turned on; this is
// for what a prompt or a shift leaves. Returns how many (layer, group) that were, < 0: failed.
LLAMA_API int64_t llama_sparse_attn_seal(struct llama_context * ctx);

// For tests: makes k_t and the sums of V of every sealed group anew from K and V. Returns how many (layer, group) differ; < 0: no shadow.
LLAMA_API int64_t llama_sparse_attn_check(struct llama_context * ctx);

#ifdef __cplusplus
}

#include <memory>
#include <vector>

struct ggml_tensor;
struct llama_cparams;
struct llama_memory_i;
struct llm_graph_context;
class  llama_kv_cache_context;

struct llama_sparse_state;  // per context: the spec and the counters
struct llama_sparse_shadow; // per KV cache: transposed K, sums of V, and which groups of them are valid
struct llama_sparse_access; // the one friend of the upstream classes we read

// ---- hooks ----

// llama_context(): environment variable SPARQ_ATTN; the first before the cache is made (turns flash attention on), the second at the end
void llama_sparse_env_prepare(llama_cparams & cparams);
void llama_sparse_env_apply(llama_context * ctx);

// llm_graph_context::build_attn_mha(): the attention of one layer, or nullptr: build it as upstream does.
//   q [d_k, n_head, n_tokens], k [d_k, n_head_kv, n_kv, n_stream], v likewise, kq_mask [n_kv, n_tokens/n_stream, 1, n_stream]
//   res [d_v*n_head, n_tokens] f32
ggml_tensor * llama_sparse_build_attn(
        const llm_graph_context & g, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * kq_mask, ggml_tensor * sinks, float kq_scale, int il);

// llama_kv_cache: bytes of K or V were written, or are about to be
void llama_sparse_unseal    (llama_sparse_shadow * shadow, uint32_t stream, const std::vector<uint32_t> & cells);
void llama_sparse_unseal_all(llama_sparse_shadow * shadow);

// llama_kv_cache(): a buffer was allocated and not touched yet. Linux, host memory, 4 MiB and more; elsewhere nothing
void llama_sparse_huge_pages(ggml_backend_buffer_t buf);

// llama_context::decode(): an ubatch failed, so what it was to seal is unknown
void llama_sparse_decode_failed(llama_memory_i * memory);

// llama_context, whatever restores a state: seals at its end what was restored, so that no token has to. Made first, so that it ends last: bytes
// are still copied then
struct llama_sparse_restored {
    llama_context * ctx;

    explicit llama_sparse_restored(llama_context * ctx) : ctx(ctx) {}
    ~llama_sparse_restored();
};

#endif
