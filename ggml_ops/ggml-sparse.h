#pragma once

// ggml_sparse: sparse attention for decoding, as ggml operations.
//
// One new op enum, GGML_OP_SPARSE_ATTN, with seven sub-operations. Read them in this order; they are the paper's steps.
//
//   SEAL          copies complete groups of positions of K into the transposed copy k_t ("store K twice"), and sums V per group
//   VISIBLE       counts the visible positions of each group once per token (from the mask; shared by all layers)
//   SCORE         step 1: approximate scores from the `rank` components of q that count most (k_t given), or exact scores (k_t == NULL)
//   SELECT        step 2: the top-k positions per KV head; sinks and the local window are forced in; the mass of all others
//   SCORE_SELECT  SCORE from k_t and SELECT in one node: the logits stay in the cache of the thread that makes them
//   ATTEND        steps 2 and 3: exact attention over the selected positions (or over all: exact dense), mean-value interpolation
//   PREFILL       attention of many tokens at once, which is a prompt: exact, or over positions that they choose together. CPU only
//
// paper: SparQ Attention, arXiv 2312.04985; algorithm in its Appendix B. Top-k: arXiv 2502.06766 (per-layer k).
//
// Sizes used in every shape below
//   d_k, d_v    head sizes of K and V            n_head, n_head_kv   query and KV heads; n_group_q = n_head / n_head_kv
//   n_kv        positions (cache cells) in view  n_tok, n_stream     tokens per stream; streams (a token reads its own stream only)
//   n_grp       ceil(n_kv / GGML_SPARSE_GROUP)
// A "position" here is a cell of the KV cache; cells need not be in the order of token positions.
//
// Types of K and V: f16, bf16, f32, q8_0, q4_0 ("any" below), rows contiguous. llama.cpp rotates K (and q) by a Hadamard matrix before it
// quantises them (n_rot > 0: blocks of n_rot components; the matrix is its own inverse and keeps lengths). Products of a rotated q and a
// rotated K are what they were, but a rotated q has no large components, and step 1 needs the original basis. So SEAL rotates K back for k_t,
// and SCORE rotates q back (and rows of K that are not sealed). V may be rotated too: the result is rotated then, and llama.cpp rotates it back.
//
// Call sites: patches/README.md lists each hook.

#include "ggml.h"
#include "sparse-codes.h"

#ifdef __cplusplus
extern "C" {
#endif

// Types of K and V: X(name in ggml, in cpu/, elements of a block)
#define GGML_SPARSE_KV_TYPES(X) \
    X(F16,  f16,    1) \
    X(BF16, bf16,   1) \
    X(F32,  float,  1) \
    X(Q8_0, q8_0,  32) \
    X(Q4_0, q4_0,  32)

// elements of a block; 0: K and V can not be of the type
static inline int ggml_sparse_kv_block(enum ggml_type type) {
    switch (type) {
#define X(name, in_cpu, n) case GGML_TYPE_##name: return n;
        GGML_SPARSE_KV_TYPES(X)
#undef X
        default: return 0;
    }
}

// Buffers of two huge pages or more start on a huge page, smaller ones on 64 bytes, as all do in upstream's ggml (not on macOS, where ggml allocates
// whole pages). Rows of K and V that begin in the second line of a pair of cache lines take 10 to 14 % longer to gather
#define GGML_SPARSE_HUGE_PAGE (2*1024*1024)
static inline int ggml_sparse_alignment(size_t size) { return size >= 2*GGML_SPARSE_HUGE_PAGE ? GGML_SPARSE_HUGE_PAGE : 64; }

// ---- the seven sub-operations ----

// Where a step gets its tensors from, by name. A constructor reads those that its step has (the table in ggml-sparse-nodes.h); what is optional may be
// NULL
struct ggml_sparse_src {
    struct ggml_tensor * q, * k, * v, * mask, * sinks, * stats, * sealed, * k_t, * k_range, * v_sum, * visible, * wanted, * logits, * sel, * list;
};

// SEAL
//   k_t    [n_pos_t, d_k*n_head_kv, n_stream]       f16      transposed K: row = one component (strides may be padded), with room for the
//                                                            groups that lie wholly below n_kv
//          [n_pos_t*n_bit/8, d_k*n_head_kv, n_stream] i8     or its codes, n_bit = 8 or 4. The layout is sparse-codes.h's business
//   k_range [2, d_k*n_head_kv, n_grp_t, n_stream]   f16      scale and zero of each group of codes, or NULL with f16
//   v_sum  [d_v*n_head_kv, n_sum_t, n_stream]       f32      sums of V over each group, and over GGML_SPARSE_SUM groups (true where all
//                                                            of them are sealed); n_sum_t >= ggml_sparse_n_sum_rows(n_grp). Or NULL
//   k      [d_k, n_head_kv, n_kv, n_stream]         any
//   v      [d_v, n_head_kv, n_kv, n_stream]         any      (may be NULL when v_sum is NULL)
//   list   [n_list, n_stream]                       i32      groups to seal, ascending (else some work is done twice), < 0: none. Only
//                                                            those count that lie wholly below n_kv
//   stats  [GGML_SPARSE_STAT_COUNT]                 i64      or NULL
//   res    a view of k_t
//   values beyond the range of f16 are clamped to +-GGML_SPARSE_SHADOW_MAX (k_t only ranks)
//
//   Only k_t is SEAL's result; v_sum, k_range and stats it writes through src[]. SCORE reads that result, and ATTEND the selection that follows from it, so
//   both come after SEAL in whatever order the sources allow. Of two SEALs in a graph only their places tell which is first
GGML_API struct ggml_tensor * ggml_sparse_attn_seal(
        struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_seal_params params);

// VISIBLE
//   mask   [n_kv, n_tok, 1, n_stream]               f16      -inf hides a position; otherwise a bias (ALiBi) or 0
//   res    [n_grp, n_tok, 1, n_stream]              i32      number of positions of the group whose mask is not -inf
GGML_API struct ggml_tensor * ggml_sparse_attn_visible(struct ggml_context * ctx, struct ggml_tensor * mask);

// SCORE (step 1)
//   q        [d_k, n_head, n_tok, n_stream]         f32
//   k        [d_k, n_head_kv, n_kv, n_stream]       any
//   k_t      as for SEAL, the tensor it returned; NULL: exact scores from k
//   sealed   [n_grp, n_stream]                      i32      1 + the first token of the stream that may read the group from k_t, 0: none may;
//                                                            the others read k. So a group that a token of this batch completes is one
//                                                            for those after it. Only groups that SEAL has written. NULL with k_t NULL
//   mask     [n_kv, n_tok, 1, n_stream]             f16
//   visible  from VISIBLE
//   stats    i64 or NULL
//   k_range  as for SEAL
//   res      [n_kv, n_head, n_tok, n_stream]        f32      logits per query head; -inf where hidden
//
//   approximate: let p[h,c] = |q[h,c]|*spread[c]. Of the `rank` components c with the largest sum of p over the query heads of the KV head
//     (ties: lowest c),
//     logit[h,t] = sum_c q[h,c]*k[t,c] * scale / sqrt(|p_r|_1 / |p|_1)         (eq. 7 and 9: equals 1/tau for scale = 1/sqrt(d_k))
//     where |p_r|_1 and |p|_1 are per query head; a head whose kept p are all 0, or whose |p|_1 is beyond f32 (q holds inf), has logits 0.
//   spread[c] estimates the standard deviation of component c of K, since one that hardly varies ranks nothing: from the ranges of the groups
//     j*n/8, j = 0..7, that are sealed, it is sqrt(mean of (w/5.2)^2 + variance of z), w being the width of a group's range and z its middle (128
//     normal values span 5.2 standard deviations). 1 with f16, as in the paper, and where there is no such group. n are the groups of the
//     stream that the token finds sealed, by ggml_sparse_sealed_groups(): not n_kv, which another stream may have raised
//   then softcap, then + slope(h)*mask. Hidden positions are -inf whatever K holds there (NaN included).
//   acc f32; the order of additions depends on the shapes only, not on the number of threads. From codes: coefficients rounded to whole
//   numbers, sums of integers (docs/numerics.md, 11a)
GGML_API struct ggml_tensor * ggml_sparse_attn_score(
        struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_score_params params);

#define GGML_SPARSE_SELECT_ALL (-1) // as n_sel: every visible position

// SELECT (step 2)
//   logits   [n_kv, n_head, n_tok, n_stream]        f32      from SCORE
//   wanted   [i_forced + n_forced, n_tok, 1, n_stream] i32   k; l: how many cells of the local window count; then the n_forced >= 1 forced
//                                                            cells: the local window, then the sinks; < 0: none.
//                                                            k < 0: the token reads every visible position, see below
//   res      [1 + n_group_q + topk_max, n_head_kv, n_tok, n_stream]   i32
//            n_sel, then rest of each query head of the KV head (bits of an f32; -inf where not asked for), then the n_sel cells in
//            ascending order, then -1
//
//   A batch may mix tokens of prompts, which read everything, with tokens of replies, which read a selection. Of a token with k < 0 nothing is
//   scored or ranked: its n_sel is GGML_SPARSE_SELECT_ALL for each KV head, its rest -inf, its cells -1. ATTEND then reads all that it sees.
//   llama/ writes k < 0 for replies whose own settings read everything, beside others; from the tokens of prompts it hides everything here, and
//   PREFILL reads for them. The tests hold every device to k < 0 (tests/ops/test_mixed_kinds.py)
//   ranks by the sum over the query heads of the KV head of softmax(logits) (with one query head: by the logit itself, the same order)
//   k counts the local window and the sinks. Hidden cells are never selected, so n_sel = min(k, visible). But visible cells of the local window
//   and sinks are in even when they are more than k, as far as topk_max allows: sinks last.
//   What is not finite: +inf counts as FLT_MAX. A cell is hidden where the logit of the KV head's first query head is -inf (SCORE writes it for all
//   of them), or any head's is NaN; -inf of another head only is a score of 0. A head that has a NaN, or nothing but -inf, has no softmax: its
//   rest is -inf, and it counts neither in the ranking nor for top_p. Where no head has one, all visible cells rank alike, and top_p drops none
//   top_p: of the k positions only the local window and the sinks, and then the highest ranked, until they carry top_p of the softmaxed
//   scores (mean over the query heads of the KV head, without learned sinks): k caps, n_sel varies with head and token
//   ties: the lower cell wins
//   rest[h] = ln(sum of exp(x - m) over the visible cells that are not selected) - 4 ln(sum of exp((x - m)/4) over those that are); x: logits of
//   head h, m: the largest of them. -inf where no more than 2^-18 of the mass is left, or the selected cells' is 0 in f32. ATTEND makes
//   alpha from it
GGML_API struct ggml_tensor * ggml_sparse_attn_select(
        struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_select_params params);

// SCORE_SELECT
//   sources as for SCORE and SELECT; visible is counted on the way. res and its bits as SELECT(SCORE(..))
GGML_API struct ggml_tensor * ggml_sparse_attn_score_select(
        struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_score_select_params params);

// ATTEND (steps 2 and 3)
//   q        [d_k, n_head, n_tok, n_stream]         f32
//   k        [d_k, n_head_kv, n_kv, n_stream]       any
//   v        [d_v, n_head_kv, n_kv, n_stream]       any
//   mask     [n_kv, n_tok, 1, n_stream]             f16
//   visible  from VISIBLE
//   sel      the result of SELECT or SCORE_SELECT, or NULL: all visible positions (exact dense). A token whose n_sel is GGML_SPARSE_SELECT_ALL gets what
//            it gets without sel, bit for bit on the CPU, without the mean of V, and counts as dense
//   v_sum    [d_v*n_head_kv, n_sum_t, n_stream]     f32      with mean_v
//   sealed   [n_grp, n_stream]                      i32      with mean_v, as for SCORE: the groups whose sums are in v_sum
//   sinks    [n_head]                               f32      or NULL
//   stats    i64 or NULL
//   res      [d_v*n_head, n_tok*n_stream]           f32      zeros where a token sees nothing
//
//   alpha = sqrt(L/(L + R)), for a query head. L = sum of exp(y - n) over the selected cells and the learned sink, y: exact logits, n: the largest
//   of them. R = exp(rest)*(sum of exp((y - n)/4) over the selected cells)^4 is what the others are thought to have: their approximate mass,
//   times what the selected cells' exact mass is to their approximate one. Sums of fourth roots tell that better than the mass itself, which a
//   single cell may decide. The outer root: since R is an estimate, the mean of V comes in half way. A learned sink takes mass but carries no
//   value: its share stays with the selection, so that selecting everything is dense attention
GGML_API struct ggml_tensor * ggml_sparse_attn_attend(
        struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_attend_params params);

// PREFILL
//   sources as for ATTEND; what ATTEND gives for each token without a selection, but for rounding. Made for tokens that see the same positions: K and V
//   are read once for many of them
//   acc f32, by tiles of positions: the bits of a token's result do not depend on the number of threads, nor on the other tokens
GGML_API struct ggml_tensor * ggml_sparse_attn_prefill(
        struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_prefill_params params);

// ---- the methods, composed of them ----

// with select.rest, the mean of V comes in

// SparQ attention: SCORE_SELECT, ATTEND
GGML_API struct ggml_tensor * ggml_sparq_attn(
        struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_score_select_params params);

// exact top-k attention: SCORE from K, SELECT, ATTEND
GGML_API struct ggml_tensor * ggml_topk_attn(
        struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_score_select_params params);

#ifdef __cplusplus
}
#endif
