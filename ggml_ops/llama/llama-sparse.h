#pragma once

// llama_sparse: sparse attention for decoding inside libllama.
//
// Exported functions only; no public struct of llama.cpp changes.
//
// Which tokens are sparse: the decoded ones. Tokens of a prompt are always exact, in whatever batch. llama.cpp does not say which is which, so
// this is the rule: a token is a decoded one if
//   it is the only one of its sequence in this call to llama_decode, or llama_sparse_attn_seq_draft() said that they verify a draft,
//   it asks for its logits, as do the others of its sequence in this call,
//   and the token before it, or before them, in the sequence asked for them too, or was restored, or was read before the context had sparse attention for the
//   first time (with METHOD dense, sparq or topk; what is read while it is off again is known).
// So a program reads a prompt in as many calls as it likes and asks for the logits of its last token only: whatever is left for the last call,
// all of it is exact. llama_batch_get_one() asks for those of the last token of each piece: a last piece of one token counts as decoded then.
// Exact means: over all positions, with the products that `prompt` names below.
//
// A token that verifies a draft gets what it gets alone, bit for bit, if what enters its attention has the bits that it has alone; the products of the
// weights may round otherwise for several tokens.

#include "llama.h"

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
//   ratio    1/8 | 0.125 | 12.5%   sparq: bytes moved / bytes of all K and V, of a cache in f16 (others select the same):
//                                  half for the scores, but at most half of the components; the rest for the gathered rows
//                                  topk:  share of the positions that is kept
//   rank, topk (or k)              explicit values, instead of those from ratio
//   local    size of the local window, newest positions of the sequence (default topk/4)
//   sinks    first positions of the sequence, always kept (default 4)
//   min_k    lower bound of topk when it comes from ratio (default 128); whatever its source, no layer's k is below sinks + local + 1
//   min_ctx  up to this many positions of a sequence, or cells in use (rounded up to 256): exact dense (default 1024)
//   gpu_min_mb  where K lies on a GPU: a layer whose K and V that all tokens of the step would read are below so many MB keeps llama.cpp's
//            attention (default 320, or on GPUs before Hopper all of them; 0: always sparse)
//   mean_v   auto | on | off       step 3, interpolation with the mean value (auto: on)
//   shadow   q4 | q8 | f16         the transposed copy of K: +13 %, +26 %, +50 % of f16 KV; at the same ratio fewer bits find more (default q4)
//   budget   uniform | ramp | ramp-down    ramp: topk grows linearly from the first to the last layer, same total (arXiv 2502.06766, 4.4)
//            flat                          rank=32,topk=512: a token of a long context takes next to as long as one of a short context
//   top_p    0.95                  of the topk positions only as many as carry this share of the scores, for each KV head and token (default 1)
//   cap      4                     with top_p: up to so many times topk (default 1); sinks and local follow from topk itself
//   k_layers 64:12.5%:dense:...    topk of each layer, explicit: positions, a share of those in view (min_k holds), or all
//   rank_layers 8:16:...           rank of each layer, explicit
//   prompt   f32 | fast            attention of a prompt, also with dense. fast: products of q and K in 8 bits where the CPU has VNNI or NEON's dot
//                                  product, those with V in bf16 where it multiplies these, f32 elsewhere (default fast)
//   verify   sparse | exact        the tokens that verify a draft: each as a decoded one, or all exactly, as those of a prompt (default sparse)
//
// Errors are text in `err`/`buf`: a message, a line feed, a hint.

// Sets the method of a context; takes effect with the next llama_decode. 0: done. < 0: refused, nothing changed, `err` says why.
LLAMA_API int32_t llama_set_sparse_attn(struct llama_context * ctx, const char * spec, char * err, size_t n_err);

// Sets the method of one sequence's decoded tokens in place of the context's; takes effect with the next llama_decode, and lasts until it is set
// again, or the context's is. NULL: the context's. A batch may mix sequences. Refused is what one node of a graph has for all its tokens: another
// sparse METHOD than the context's, or other mean_v, shadow, top_p, cap, gpu_min_mb or prompt; these, and min_ctx, are the context's where
// the spec does not have them. `off` is llama.cpp's own attention in a batch whose sequences are all off, prompts included; elsewhere it is `dense`, and
// prompts are read as the context's `prompt` says.
LLAMA_API int32_t llama_set_sparse_attn_seq(struct llama_context * ctx, llama_seq_id seq_id, const char * spec, char * err, size_t n_err);

// Says that a prompt comes next in a sequence: none of its tokens is a decoded one, up to the first that asks for its logits. A server that knows
// it says so, for one case: of a prompt that was restored only the last token is evaluated, which looks like a decoded one.
LLAMA_API void llama_sparse_attn_seq_prompt(struct llama_context * ctx, llama_seq_id seq_id);

// Says that the `n` tokens of a sequence from position `from` on verify a draft: the last accepted token, and those that it guesses. They are decoded
// ones, though one call to llama_decode has them all; so the answer does not depend on drafts. It holds until it is said again, or that a prompt comes
// next, or the settings change. Prompts that follow a draft have to be told by llama_sparse_attn_seq_prompt() if all of their tokens ask for logits.
LLAMA_API void llama_sparse_attn_seq_draft(struct llama_context * ctx, llama_seq_id seq_id, llama_pos from, int32_t n);

// Writes, as JSON, the spec of a sequence, and what its decoded tokens have read since it was set: `steps`, those of them that `verified` a draft, and
// over all layers that are ours `calls_sparse`, `calls_dense`, `positions_visible`, `positions_read`, `bytes_dense` and `bytes_read`, as the settings
// order them (the most, with top_p). Returns the length the text has (without the 0), < 0: no such sequence.
LLAMA_API int32_t llama_get_sparse_attn_seq_info(const struct llama_context * ctx, llama_seq_id seq_id, char * buf, size_t n_buf);

// The spec of the contexts that this thread makes from now on, in place of the environment variable SPARQ_ATTN. NULL: SPARQ_ATTN again. A context
// can not be made with a spec that is wrong, or that its model refuses; the log says why, in one line. Contexts made with ctx_other, as for
// the model of a draft, do not take SPARQ_ATTN. 0: done. < 0: no memory, nothing changed.
LLAMA_API int32_t llama_sparse_attn_default(const char * spec);

// Checks a spec without a context. >= 0: the length of the canonical spec written to buf. < 0: buf says why.
LLAMA_API int32_t llama_sparse_attn_parse(const char * spec, char * buf, size_t n_buf);

// Writes the keys of a spec with their types, bounds, words and defaults, and what they exclude, as JSON. Returns the length the text has (without the
// 0), < 0: no memory.
LLAMA_API int32_t llama_sparse_attn_keys(char * buf, size_t n_buf);

// Writes what is active, why layers stay dense, and the counters, as JSON. Returns the length the text has (without the 0), < 0: no memory.
LLAMA_API int32_t llama_get_sparse_attn_info(const struct llama_context * ctx, char * buf, size_t n_buf);

LLAMA_API void llama_sparse_attn_reset_counters(struct llama_context * ctx);

// Seals now what the next token would have to seal first. A restored state is sealed by itself (where sequences have streams of their own, in the
// course of the next calls to llama_decode), and the cache when SparQ is turned on; this is for what a prompt or a shift leaves. Returns how many
// (layer, group) that were, < 0: failed.
LLAMA_API int64_t llama_sparse_attn_seal(struct llama_context * ctx);

// Documents: what a sequence has read, in a file that the program lays out; here it is a descriptor, and the offset of the image in the file, a
// multiple of 65536. The image holds K and V of n_pos positions, the state of recurrent layers, and the transposed K. The cells of the sequence must lie
// one after another, as in an empty cache. A file that is open may not be made shorter. < 0: failed, err says why.

// the bytes of an image
LLAMA_API int64_t llama_sparse_document_bytes(struct llama_context * ctx, uint32_t n_pos, char * err, size_t n_err);

// Writes what K and V of this context are, a line feed, and what its transposed K is, "" if there is none. Returns the length
LLAMA_API int64_t llama_sparse_document_kind(struct llama_context * ctx, char * buf, size_t n_buf);

// Writes K and V of positions [from, to), from <= to <= n_pos, and the state after `to` of layers that are recurrent or have a window. It fails where
// that is gone already
LLAMA_API int64_t llama_sparse_document_write(struct llama_context * ctx, llama_seq_id seq_id, int fd, uint64_t offset, uint32_t n_pos,
        uint32_t from, uint32_t to, char * err, size_t n_err);

// Writes the transposed K, once all positions are read, and seals it first; what of its parts belongs to other cells is zeros. Without one it does
// nothing
LLAMA_API int64_t llama_sparse_document_write_shadow(struct llama_context * ctx, llama_seq_id seq_id, int fd, uint64_t offset, uint32_t n_pos,
        char * err, size_t n_err);

// Gives an empty sequence the first n_read positions of the image; as many as it had when the state was written, if there is one. Where the
// system can, K and V become pages of the file, and are read from it when a token reads them; what is written to them later stays in memory. The
// transposed K is copied if all n_pos positions are read and `kind`, that of the context that wrote the image, is this context's; otherwise it is made
// anew. The tokens count as those of a prompt. Returns the bytes that are mapped
LLAMA_API int64_t llama_sparse_document_open(struct llama_context * ctx, llama_seq_id seq_id, int fd, uint64_t offset, uint32_t n_pos, uint32_t n_read,
        const char * kind, char * err, size_t n_err);

// For tests: seals each sealed group once more. Returns how many tensors get other bytes, of three in a layer; < 0: no shadow.
LLAMA_API int64_t llama_sparse_attn_check(struct llama_context * ctx);

// For measurements: the share of the true attention in the positions that an ATTEND node reads, which is softmax over all that its tokens see, as a
// mean over query heads and tokens; that of a learned sink counts as read. 1 where it has no selection. NaN: a source or the selection is not in
// host memory any more, the CPU failed, or there is no memory. From any thread.
LLAMA_API double llama_sparse_attn_mass(const struct ggml_tensor * attend);

// Measures it for every ATTEND node of a context until the end, which writes the mean of each layer, [n_layer]; 1 where none ran over a
// selection. Decoding takes longer meanwhile. The context's own evaluation callback is called as ever. NULL: no memory.
struct llama_sparse_measure;
LLAMA_API struct llama_sparse_measure * llama_sparse_measure_begin(struct llama_context * ctx);
LLAMA_API void llama_sparse_measure_end(struct llama_sparse_measure * m, double * mass);

#ifdef __cplusplus
}
#endif
