// Constructors of the sparse attention operations: shape asserts, in the order of the contracts in ggml-sparse.h.

#include "ggml-sparse.h"
#include "ggml-sparse-nodes.h"

#include "ggml-impl.h"
#include "sparse-codes.h"

#include <stddef.h>
#include <string.h>

// blocks of the Hadamard matrix: a power of two that divides the head
static void assert_rot(int32_t n_rot, int64_t d_k) {
    GGML_ASSERT(n_rot >= 0 && (n_rot & (n_rot - 1)) == 0 && (n_rot == 0 || d_k % n_rot == 0));
}

// op_params[0] is the sub-operation, the rest a plain struct
static void set_op(struct ggml_tensor * t, enum ggml_sparse_attn_op op, const void * params, size_t size, const struct ggml_sparse_src * src) {
    GGML_ASSERT(sizeof(int32_t) + size <= GGML_MAX_OP_PARAMS);

    t->op = GGML_OP_SPARSE_ATTN;
    t->op_params[0] = op;
    if (size > 0) {
        memcpy(t->op_params + 1, params, size);
    }
    ggml_sparse_set_src(t, src);
}

static void assert_stats(const struct ggml_tensor * stats) {
    GGML_ASSERT(!stats || (stats->type == GGML_TYPE_I64 && stats->ne[0] == GGML_SPARSE_STAT_COUNT));
}

static void assert_kv(const struct ggml_tensor * t) {
    GGML_ASSERT(ggml_sparse_kv_block(t->type) > 0);
    GGML_ASSERT(t->nb[0] == ggml_type_size(t->type)); // rows are contiguous
    GGML_ASSERT(t->ne[1] >= 1);
}

// sealed [n_grp, n_stream]
static void assert_sealed(const struct ggml_tensor * sealed, int64_t n_kv, int64_t n_stream) {
    GGML_ASSERT(sealed && sealed->type == GGML_TYPE_I32 && ggml_is_contiguous(sealed));
    GGML_ASSERT(sealed->ne[0] == ggml_sparse_n_groups(n_kv) && sealed->ne[1] == n_stream);
}

// k_t [n_pos_t, d_k*n_head_kv, n_stream] f16, or codes with their ranges [2, d_k*n_head_kv, n_run_t, n_stream]
static void assert_k_t(const struct ggml_tensor * k_t, const struct ggml_tensor * k_range, const struct ggml_tensor * k, int32_t n_bit) {
    GGML_ASSERT(k_t->ne[1] == k->ne[0]*k->ne[1] && k_t->ne[2] == k->ne[3] && k_t->nb[0] == ggml_type_size(k_t->type));
    GGML_ASSERT(ggml_sparse_shadow_name(n_bit));
    if (!ggml_sparse_has_codes(n_bit)) {
        // SEAL writes whole groups, all but the last one
        GGML_ASSERT(k_t->type == GGML_TYPE_F16 && k_t->ne[0] >= (ggml_sparse_n_groups(k->ne[2]) - 1)*GGML_SPARSE_GROUP && !k_range);
        return;
    }
    const int64_t n_run = (k->ne[2] + GGML_SPARSE_RUN - 1)/GGML_SPARSE_RUN;
    GGML_ASSERT(k_t->type == GGML_TYPE_I8 && k_t->ne[0] >= ggml_sparse_shadow_bytes(n_run*GGML_SPARSE_RUN, n_bit));
    GGML_ASSERT(k_range && k_range->type == GGML_TYPE_F32 && k_range->nb[0] == sizeof(float));
    GGML_ASSERT(k_range->ne[0] == 2 && k_range->ne[1] == k_t->ne[1] && k_range->ne[2] >= n_run && k_range->ne[3] == k->ne[3]);
}

// V has the heads, positions and streams of K
static void assert_v(const struct ggml_tensor * v, const struct ggml_tensor * k) {
    assert_kv(v);
    GGML_ASSERT(v->ne[1] == k->ne[1] && v->ne[2] == k->ne[2] && v->ne[3] == k->ne[3]);
}

// learned sinks [n_head], or NULL
static void assert_sinks(const struct ggml_tensor * sinks, int64_t n_head) {
    GGML_ASSERT(!sinks || (sinks->type == GGML_TYPE_F32 && sinks->ne[0] == n_head && sinks->nb[0] == sizeof(float)));
}

// v_sum [d_v*n_head_kv, n_sum_t, n_stream]
static void assert_v_sum(const struct ggml_tensor * v_sum, const struct ggml_tensor * v) {
    GGML_ASSERT(v_sum->type == GGML_TYPE_F32 && v_sum->nb[0] == sizeof(float));
    GGML_ASSERT(v_sum->ne[0] == v->ne[0]*v->ne[1] && v_sum->ne[2] == v->ne[3]);
    GGML_ASSERT(v_sum->ne[1] >= ggml_sparse_n_sum_rows(ggml_sparse_n_groups(v->ne[2])));
}

// mask [n_kv, n_tok, 1, n_stream]
static void assert_mask(const struct ggml_tensor * mask, int64_t n_kv, int64_t n_tok, int64_t n_stream) {
    GGML_ASSERT(mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(ggml_fp16_t));
    GGML_ASSERT(mask->ne[0] == n_kv && mask->ne[1] == n_tok && mask->ne[2] == 1 && mask->ne[3] == n_stream);
}

// visible [n_grp, n_tok or one more, 1, n_stream]
static void assert_visible(const struct ggml_tensor * visible, int64_t n_kv, int64_t n_tok, int64_t n_stream) {
    GGML_ASSERT(visible->type == GGML_TYPE_I32 && ggml_is_contiguous(visible));
    GGML_ASSERT(visible->ne[0] == ggml_sparse_n_groups(n_kv) && visible->ne[3] == n_stream);
    GGML_ASSERT(visible->ne[1] == n_tok || visible->ne[1] == n_tok + 1);
}

// q [d_k, n_head, n_tok, n_stream], k [d_k, n_head_kv, n_kv, n_stream]
static void assert_qk(const struct ggml_tensor * q, const struct ggml_tensor * k) {
    GGML_ASSERT(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float));
    assert_kv(k);
    GGML_ASSERT(q->ne[0] == k->ne[0] && q->ne[1] % k->ne[1] == 0 && q->ne[3] == k->ne[3]);
}

// what exact attention reads
static void assert_qkv(const struct ggml_tensor * q, const struct ggml_tensor * k, const struct ggml_tensor * v, const struct ggml_tensor * mask,
        const struct ggml_tensor * sinks) {
    assert_qk(q, k);
    assert_v(v, k);
    assert_mask(mask, k->ne[2], q->ne[2], q->ne[3]);
    assert_sinks(sinks, q->ne[1]);
}

// the result of attention
static struct ggml_tensor * new_result(struct ggml_context * ctx, const struct ggml_tensor * q, const struct ggml_tensor * v) {
    return ggml_new_tensor_2d(ctx, GGML_TYPE_F32, v->ne[0]*q->ne[1], q->ne[2]*q->ne[3]);
}

// what step 1 reads beside q and K
static void assert_shadow(const struct ggml_tensor * k_t, const struct ggml_tensor * sealed, const struct ggml_tensor * k_range,
        const struct ggml_tensor * k, const struct ggml_sparse_score_params * p) {
    assert_k_t(k_t, k_range, k, p->n_bit);
    assert_sealed(sealed, k->ne[2], k->ne[3]);
    assert_rot(p->n_rot, k->ne[0]);
    GGML_ASSERT(p->rank >= 1 && p->rank <= k->ne[0]);
}

// wanted [i_forced + n_forced, n_tok, 1, n_stream]
static void assert_select(const struct ggml_tensor * wanted, int64_t n_head, int64_t n_tok, int64_t n_stream, const struct ggml_sparse_select_params * p) {
    GGML_ASSERT(p->n_head_kv >= 1 && n_head % p->n_head_kv == 0);
    GGML_ASSERT(p->topk_max >= 1);
    GGML_ASSERT(wanted->type == GGML_TYPE_I32 && wanted->nb[0] == sizeof(int32_t));
    GGML_ASSERT(wanted->ne[1] == n_tok && wanted->ne[2] == 1 && wanted->ne[3] == n_stream);
    GGML_ASSERT(p->i_k >= 0 && p->i_k + 2 <= p->i_forced && p->i_forced < wanted->ne[0]);
    GGML_ASSERT(p->n_local_max >= 0 && p->n_local_max <= wanted->ne[0] - p->i_forced);
}

// the result of step 2
static struct ggml_tensor * new_selection(
        struct ggml_context * ctx, int64_t n_head, int64_t n_tok, int64_t n_stream, const struct ggml_sparse_select_params * p) {
    return ggml_new_tensor_4d(ctx, GGML_TYPE_I32, 1 + n_head/p->n_head_kv + p->topk_max, p->n_head_kv, n_tok, n_stream);
}

struct ggml_tensor * ggml_sparse_attn_seal(
        struct ggml_context * ctx,
        struct ggml_tensor  * k_t,
        struct ggml_tensor  * v_sum,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * list,
        struct ggml_tensor  * stats,
        struct ggml_tensor  * k_range,
        struct ggml_tensor  * sealed,
        struct ggml_sparse_seal_params params) {
    assert_kv(k);
    assert_k_t(k_t, k_range, k, params.n_bit);
    assert_rot(params.n_rot, k->ne[0]);
    if (ggml_sparse_has_codes(params.n_bit)) {
        assert_sealed(sealed, k->ne[2], k->ne[3]);
    }
    if (v_sum) {
        assert_v(v, k);
        assert_v_sum(v_sum, v);
    }
    GGML_ASSERT(list->type == GGML_TYPE_I32 && ggml_is_contiguous(list) && list->ne[1] == k->ne[3]);
    assert_stats(stats);

    struct ggml_tensor * res = ggml_view_tensor(ctx, k_t);

    const struct ggml_sparse_src src = {
        .list = list, .k = k, .stats = stats, .sealed = ggml_sparse_has_codes(params.n_bit) ? sealed : NULL,
        .k_t = k_t, .k_range = k_range, .v = v, .v_sum = v_sum,
    };
    set_op(res, GGML_SPARSE_ATTN_SEAL, &params, sizeof(params), &src);

    return res;
}

struct ggml_tensor * ggml_sparse_attn_visible(struct ggml_context * ctx, struct ggml_tensor * mask, struct ggml_tensor * sealed) {
    GGML_ASSERT(mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(ggml_fp16_t) && mask->ne[2] == 1);
    if (sealed) {
        assert_sealed(sealed, mask->ne[0], mask->ne[3]);
    }

    struct ggml_tensor * res = ggml_new_tensor_4d(ctx, GGML_TYPE_I32, ggml_sparse_n_groups(mask->ne[0]), mask->ne[1] + (sealed ? 1 : 0), 1, mask->ne[3]);

    const struct ggml_sparse_src src = { .mask = mask, .sealed = sealed };
    set_op(res, GGML_SPARSE_ATTN_VISIBLE, NULL, 0, &src);

    return res;
}

struct ggml_tensor * ggml_sparse_attn_score(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * k_t,
        struct ggml_tensor  * sealed,
        struct ggml_tensor  * mask,
        struct ggml_tensor  * visible,
        struct ggml_tensor  * stats,
        struct ggml_tensor  * k_range,
        struct ggml_sparse_score_params params) {
    assert_qk(q, k);
    if (k_t) {
        assert_shadow(k_t, sealed, k_range, k, &params);
    }
    assert_mask(mask, k->ne[2], q->ne[2], q->ne[3]);
    assert_visible(visible, k->ne[2], q->ne[2], q->ne[3]);
    assert_stats(stats);
    GGML_ASSERT(params.i_rank == 0); // there is no `wanted`

    struct ggml_tensor * res = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, k->ne[2], q->ne[1], q->ne[2], q->ne[3]);

    const struct ggml_sparse_src src = { .q = q, .k = k, .k_t = k_t, .sealed = sealed, .mask = mask, .visible = visible, .stats = stats, .k_range = k_range };
    set_op(res, GGML_SPARSE_ATTN_SCORE, &params, sizeof(params), &src);

    return res;
}

struct ggml_tensor * ggml_sparse_attn_select(
        struct ggml_context * ctx,
        struct ggml_tensor  * logits,
        struct ggml_tensor  * wanted,
        struct ggml_sparse_select_params params) {
    GGML_ASSERT(logits->type == GGML_TYPE_F32 && ggml_is_contiguous(logits));
    assert_select(wanted, logits->ne[1], logits->ne[2], logits->ne[3], &params);

    struct ggml_tensor * res = new_selection(ctx, logits->ne[1], logits->ne[2], logits->ne[3], &params);

    const struct ggml_sparse_src src = { .logits = logits, .wanted = wanted };
    set_op(res, GGML_SPARSE_ATTN_SELECT, &params, sizeof(params), &src);

    return res;
}

struct ggml_tensor * ggml_sparse_attn_score_select(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * k_t,
        struct ggml_tensor  * sealed,
        struct ggml_tensor  * mask,
        struct ggml_tensor  * wanted,
        struct ggml_tensor  * stats,
        struct ggml_tensor  * k_range,
        struct ggml_sparse_score_select_params params) {
    assert_qk(q, k);
    assert_shadow(k_t, sealed, k_range, k, &params.score);
    assert_mask(mask, k->ne[2], q->ne[2], q->ne[3]);
    assert_select(wanted, q->ne[1], q->ne[2], q->ne[3], &params.select);
    GGML_ASSERT(params.select.n_head_kv == k->ne[1]);
    GGML_ASSERT(params.score.i_rank >= 0 && params.score.i_rank < wanted->ne[0]);
    assert_stats(stats);

    struct ggml_tensor * res = new_selection(ctx, q->ne[1], q->ne[2], q->ne[3], &params.select);

    const struct ggml_sparse_src src = {
        .q = q, .k = k, .mask = mask, .stats = stats, .sealed = sealed, .k_t = k_t, .k_range = k_range, .wanted = wanted,
    };
    set_op(res, GGML_SPARSE_ATTN_SCORE_SELECT, &params, sizeof(params), &src);

    return res;
}

struct ggml_tensor * ggml_sparse_attn_attend(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * mask,
        struct ggml_tensor  * visible,
        struct ggml_tensor  * sel,
        struct ggml_tensor  * v_sum,
        struct ggml_tensor  * sinks,
        struct ggml_tensor  * stats,
        struct ggml_sparse_attend_params params) {
    assert_qkv(q, k, v, mask, sinks);
    assert_visible(visible, k->ne[2], q->ne[2], q->ne[3]);
    if (sel) {
        GGML_ASSERT(sel->type == GGML_TYPE_I32 && ggml_is_contiguous(sel));
        GGML_ASSERT(sel->ne[0] > 1 + q->ne[1]/k->ne[1] && sel->ne[1] == k->ne[1] && sel->ne[2] == q->ne[2] && sel->ne[3] == q->ne[3]);
    }
    GGML_ASSERT(!params.mean_v || (sel && v_sum && visible->ne[1] == q->ne[2] + 1));
    if (v_sum) {
        assert_v_sum(v_sum, v);
    }
    assert_stats(stats);

    struct ggml_tensor * res = new_result(ctx, q, v);

    const struct ggml_sparse_src src = {
        .q = q, .k = k, .mask = mask, .sinks = sinks, .stats = stats, .v = v, .v_sum = v_sum, .sel = sel, .visible = visible,
    };
    set_op(res, GGML_SPARSE_ATTN_ATTEND, &params, sizeof(params), &src);

    return res;
}

struct ggml_tensor * ggml_sparse_attn_prefill(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * mask,
        struct ggml_tensor  * sinks,
        struct ggml_tensor  * stats,
        struct ggml_sparse_prefill_params params) {
    assert_qkv(q, k, v, mask, sinks);
    assert_stats(stats);

    struct ggml_tensor * res = new_result(ctx, q, v);

    const struct ggml_sparse_src src = { .q = q, .k = k, .v = v, .mask = mask, .sinks = sinks, .stats = stats };
    set_op(res, GGML_SPARSE_ATTN_PREFILL, &params, sizeof(params), &src);

    return res;
}

static struct ggml_tensor * sparse_attn(
        struct ggml_context * ctx, const struct ggml_sparse_attn_inputs * in, struct ggml_tensor * k_t, const struct ggml_sparse_attn_params * p) {
    const struct ggml_sparse_score_params score = { p->rank, p->scale, p->max_bias, p->softcap, p->n_bit, p->n_rot, p->i_rank };
    const struct ggml_sparse_select_params select = {
        .topk_max = p->topk_max, .n_head_kv = (int32_t) in->k->ne[1], .n_local_max = p->n_local_max,
        .rest = p->mean_v, // what the mean of V is weighed with, and nothing else reads it
        .top_p = p->top_p, .i_k = p->i_k, .i_forced = p->i_forced,
    };
    struct ggml_tensor * sel;
    if (k_t) {
        const struct ggml_sparse_score_select_params fused = { score, select };
        sel = ggml_sparse_attn_score_select(ctx, in->q, in->k, k_t, in->sealed, in->mask, in->wanted, in->stats, in->k_range, fused);
    } else {
        struct ggml_tensor * logits = ggml_sparse_attn_score(ctx, in->q, in->k, NULL, NULL, in->mask, in->visible, in->stats, NULL, score);
        sel = ggml_sparse_attn_select(ctx, logits, in->wanted, select);
    }

    const struct ggml_sparse_attend_params attend = { p->scale, p->max_bias, p->softcap, p->mean_v };
    return ggml_sparse_attn_attend(ctx, in->q, in->k, in->v, in->mask, in->visible, sel,
            p->mean_v ? in->v_sum : NULL, in->sinks, in->stats, attend);
}

struct ggml_tensor * ggml_sparq_attn(
        struct ggml_context * ctx, const struct ggml_sparse_attn_inputs * in, const struct ggml_sparse_attn_params * params) {
    GGML_ASSERT(in->k_t);
    return sparse_attn(ctx, in, in->k_t, params);
}

struct ggml_tensor * ggml_topk_attn(
        struct ggml_context * ctx, const struct ggml_sparse_attn_inputs * in, const struct ggml_sparse_attn_params * params) {
    return sparse_attn(ctx, in, NULL, params);
}
