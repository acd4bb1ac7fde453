#pragma once

// The geometry of the shadow, the steps, their parameters and their counters. Nothing is included, so that kernels in any dialect of C can have it; who
// includes it has the integers of stdint.h.

// What the positions are cut into, from small to large. How many a kernel works on at a time is its own business (docs/glossary.md).
//
//   name       size                   what it is                                                who goes by it
//   cell       1 position             a place in the KV cache                                   everyone
//   line       64 bytes               codes of a component: 64 cells of 8 bits, 128 of 4        the scans and SEAL
//   group      128 cells              what is sealed, once, when it is complete: its codes      every op, and llama/
//                                     share a scale and a zero. `visible` counts in groups,
//                                     v_sum has a row for each
//   sum block  8 groups, 1024 cells   groups whose sums of V are summed once more               SEAL, and ATTEND with mean_v
#define GGML_SPARSE_GROUP 128 // cells
#define GGML_SPARSE_SUM   8   // groups

#if defined(__CUDACC__)
#define GGML_SPARSE_INLINE static constexpr __host__ __device__
#elif defined(__cplusplus)
#define GGML_SPARSE_INLINE static constexpr
#else
#define GGML_SPARSE_INLINE static inline
#endif

// groups of n_kv cells, the last of which may be incomplete
GGML_SPARSE_INLINE int64_t ggml_sparse_n_groups(int64_t n_kv) { return (n_kv + GGML_SPARSE_GROUP - 1)/GGML_SPARSE_GROUP; }

// Rows of v_sum: the sums of the groups of a sum block, then their total, and so on. The row of a group, the row of the total of the sum block that
// it lies in, and the number of rows
GGML_SPARSE_INLINE int64_t ggml_sparse_sum_row(int64_t group) { return group/GGML_SPARSE_SUM*(GGML_SPARSE_SUM + 1) + group % GGML_SPARSE_SUM; }
GGML_SPARSE_INLINE int64_t ggml_sparse_total_row(int64_t group) { return group/GGML_SPARSE_SUM*(GGML_SPARSE_SUM + 1) + GGML_SPARSE_SUM; }
GGML_SPARSE_INLINE int64_t ggml_sparse_n_sum_rows(int64_t n_group) { return (n_group + GGML_SPARSE_SUM - 1)/GGML_SPARSE_SUM*(GGML_SPARSE_SUM + 1); }

// X(step), by number
#define GGML_SPARSE_STEPS(X) X(SEAL) X(VISIBLE) X(SCORE) X(SELECT) X(SCORE_SELECT) X(ATTEND) X(PREFILL)

enum ggml_sparse_attn_op {
#define X(step) GGML_SPARSE_ATTN_##step,
    GGML_SPARSE_STEPS(X)
#undef X
            GGML_SPARSE_ATTN_COUNT,
    GGML_SPARSE_ATTN_IS_TIMED = GGML_SPARSE_ATTN_COUNT, // no step: a device that supports it is known to be faster with our ops, in long contexts
};

// counters that the ops themselves add to when they run: an I64 tensor of GGML_SPARSE_STAT_COUNT in the memory of the device that runs them
#define GGML_SPARSE_STATS(X) \
    X(ATTEND_SPARSE)   /* ATTEND over a selection, per (token, node); here and below not of tokens that see nothing */ \
    X(ATTEND_DENSE)    /* ATTEND over all positions, per (token, node) */ \
    X(POS_VISIBLE)     /* visible positions, summed over (token, KV head, node) */ \
    X(POS_READ)        /* positions whose K and V rows ATTEND read, likewise */ \
    X(BYTES_SCORE)     /* bytes of k_t and K that SCORE or SCORE_SELECT had to read */ \
    X(BYTES_ATTEND)    /* bytes of K, V and v_sum that ATTEND had to read */ \
    X(BYTES_DENSE)     /* bytes of all visible K and V rows: what dense attention reads */ \
    X(GROUPS_SEALED)   /* groups sealed, per node */ \
    X(PREFILL)         /* PREFILL, per (token, node) */ \
    X(PREFILL_FAST)    /* products of few bits in PREFILL, per (token, query head, block of positions, node) */ \
    X(CUT_PASSES)      /* passes over what is ranked that a guess of the cut cost, per (token, KV head, node); counted where a layer is one launch */

enum ggml_sparse_stat {
#define X(name) GGML_SPARSE_STAT_##name,
    GGML_SPARSE_STATS(X)
#undef X
            GGML_SPARSE_STAT_COUNT,
};

// The parameters of each step: F(type, field), the fields of struct ggml_sparse_STEP_params. Machines send them to each other as bytes, so
// sparse-layout.h has a number that follows from these lists
#define GGML_SPARSE_PARAMS_SEAL(F) \
    F(int32_t, n_bit)       /* of k_t, see sparse-codes.h */ \
    F(int32_t, n_rot)       /* > 0: K is rotated, k_t is not */
#define GGML_SPARSE_PARAMS_VISIBLE(F) /* none */
#define GGML_SPARSE_PARAMS_SCORE(F) \
    F(int32_t, rank)        /* r: components of q kept, 1..d_k; ignored when k_t == NULL */ \
    F(float,   scale)       /* kq_scale, 1/sqrt(d_k) in most models */ \
    F(float,   max_bias)    /* ALiBi: > 0 multiplies the mask by the head's slope */ \
    F(float,   softcap)     /* > 0: logit = softcap*tanh(logit/softcap), before the mask is added */ \
    F(int32_t, n_bit)       /* of k_t, see sparse-codes.h */ \
    F(int32_t, n_rot)       /* > 0: q and K are rotated, k_t is not; without k_t it does not matter */ \
    F(int32_t, i_rank)      /* > 0, of SCORE_SELECT: wanted[i_rank] is the token's own rank, at most `rank`; 0: all tokens have `rank` */
#define GGML_SPARSE_PARAMS_SELECT(F) \
    F(int32_t, topk_max)    /* capacity of the result; the k of a token is min(wanted[i_k], topk_max) */ \
    F(int32_t, n_head_kv) \
    F(int32_t, n_local_max) /* of the forced cells, that many are the local window, newest first; the rest are sinks */ \
    F(int32_t, rest)        /* != 0: compute rest (needs a pass of exp over all scores) */ \
    F(float,   top_p)       /* in (0, 1): fewer than k positions, where these carry that share of the mass; else exactly k */ \
    F(int32_t, i_k)         /* wanted[i_k] is k, wanted[i_k + 1] is l: what belongs to the layer */ \
    F(int32_t, i_forced)    /* wanted[i_forced ..] are the forced cells: what all layers share */
#define GGML_SPARSE_PARAMS_SCORE_SELECT(F) \
    F(struct ggml_sparse_score_params,  score) \
    F(struct ggml_sparse_select_params, select)
#define GGML_SPARSE_PARAMS_ATTEND(F) \
    F(float,   scale) \
    F(float,   max_bias) \
    F(float,   softcap) \
    F(int32_t, mean_v)      /* != 0: res = alpha*res + (1 - alpha)*mean of V over all visible positions (eq. 10); needs sel with rest */
#define GGML_SPARSE_PARAMS_PREFILL(F) \
    F(float,   scale) \
    F(float,   max_bias) \
    F(float,   softcap) \
    F(int32_t, fast)        /* != 0: products of 8 bits and bf16, where the CPU has them */

#define FIELD(type, field) type field;
struct ggml_sparse_seal_params         { GGML_SPARSE_PARAMS_SEAL(FIELD) };
struct ggml_sparse_score_params        { GGML_SPARSE_PARAMS_SCORE(FIELD) };
struct ggml_sparse_select_params       { GGML_SPARSE_PARAMS_SELECT(FIELD) };
struct ggml_sparse_score_select_params { GGML_SPARSE_PARAMS_SCORE_SELECT(FIELD) };
struct ggml_sparse_attend_params       { GGML_SPARSE_PARAMS_ATTEND(FIELD) };
struct ggml_sparse_prefill_params      { GGML_SPARSE_PARAMS_PREFILL(FIELD) };
#undef FIELD
