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

// op_params[0] is the sub-operation, the rest a plain struct. Returns t
static struct ggml_tensor * set_op(
        struct ggml_tensor * t, enum ggml_sparse_attn_op op, const void * params, size_t size, const struct ggml_sparse_src * src) {
    GGML_ASSERT(sizeof(int32_t) + size <= GGML_MAX_OP_PARAMS);

    t->op = GGML_OP_SPARSE_ATTN;
    t->op_params[0] = op;
    if (size > 0) {
        memcpy(t->op_params + 1, params, size);
    }
    ggml_sparse_set_src(t, src);
    return t;
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

// k_t [n_pos_t, d_k*n_head_kv, n_stream] f16, or codes with their ranges [2, d_k*n_head_kv, n_grp_t, n_stream]
static void assert_k_t(const struct ggml_tensor * k_t, const struct ggml_tensor * k_range, const struct ggml_tensor * k, int32_t n_bit) {
    GGML_ASSERT(k_t->ne[1] == k->ne[0]*k->ne[1] && k_t->ne[2] == k->ne[3] && k_t->nb[0] == ggml_type_size(k_t->type));
    GGML_ASSERT(ggml_sparse_shadow_name(n_bit));
    const int64_t n_group = k->ne[2]/GGML_SPARSE_GROUP; // whole ones
    const bool    codes   = ggml_sparse_has_codes(n_bit);
    GGML_ASSERT(k_t->type == (codes ? GGML_TYPE_I8 : GGML_TYPE_F16) && !k_range == !codes);
    GGML_ASSERT(k_t->ne[0]*(int64_t) k_t->nb[0] >= ggml_sparse_shadow_bytes(n_group*GGML_SPARSE_GROUP, n_bit));
    if (!codes) {
        return;
    }
    GGML_ASSERT(k_range->type == GGML_TYPE_F16 && k_range->nb[0] == sizeof(ggml_fp16_t) && k_range->ne[0] == 2);
    GGML_ASSERT(k_range->ne[1] == k_t->ne[1] && k_range->ne[2] >= n_group && k_range->ne[3] == k->ne[3]);
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

// visible [n_grp, n_tok, 1, n_stream]
static void assert_visible(const struct ggml_tensor * visible, int64_t n_kv, int64_t n_tok, int64_t n_stream) {
    GGML_ASSERT(visible->type == GGML_TYPE_I32 && ggml_is_contiguous(visible));
    GGML_ASSERT(visible->ne[0] == ggml_sparse_n_groups(n_kv) && visible->ne[1] == n_tok && visible->ne[3] == n_stream);
}

// q [d_k, n_head, n_tok, n_stream], k [d_k, n_head_kv, n_kv, n_stream]
static void assert_qk(const struct ggml_tensor * q, const struct ggml_tensor * k) {
    GGML_ASSERT(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float));
    assert_kv(k);
    GGML_ASSERT(q->ne[0] == k->ne[0] && q->ne[1] % k->ne[1] == 0 && q->ne[3] == k->ne[3]);
}

// what exact attention reads
static void assert_attention(const struct ggml_sparse_src * s) {
    assert_qk(s->q, s->k);
    assert_v(s->v, s->k);
    assert_mask(s->mask, s->k->ne[2], s->q->ne[2], s->q->ne[3]);
    assert_sinks(s->sinks, s->q->ne[1]);
    assert_stats(s->stats);
}

// the result of attention
static struct ggml_tensor * new_result(struct ggml_context * ctx, const struct ggml_tensor * q, const struct ggml_tensor * v) {
    return ggml_new_tensor_2d(ctx, GGML_TYPE_F32, v->ne[0]*q->ne[1], q->ne[2]*q->ne[3]);
}

// what step 1 reads; with k_t, approximately
static void assert_score(const struct ggml_sparse_src * s, const struct ggml_sparse_score_params * p) {
    assert_qk(s->q, s->k);
    assert_mask(s->mask, s->k->ne[2], s->q->ne[2], s->q->ne[3]);
    assert_stats(s->stats);
    if (s->k_t) {
        assert_k_t(s->k_t, s->k_range, s->k, p->n_bit);
        assert_sealed(s->sealed, s->k->ne[2], s->k->ne[3]);
        assert_rot(p->n_rot, s->k->ne[0]);
        GGML_ASSERT(p->rank >= 1 && p->rank <= s->k->ne[0]);
    }
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

struct ggml_tensor * ggml_sparse_attn_seal(struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_seal_params params) {
    struct ggml_sparse_src s = *src;
    assert_kv(s.k);
    assert_k_t(s.k_t, s.k_range, s.k, params.n_bit);
    assert_rot(params.n_rot, s.k->ne[0]);
    if (s.v_sum) {
        assert_v(s.v, s.k);
        assert_v_sum(s.v_sum, s.v);
    } else {
        s.v = NULL;
    }
    GGML_ASSERT(s.list->type == GGML_TYPE_I32 && ggml_is_contiguous(s.list) && s.list->ne[1] == s.k->ne[3]);
    assert_stats(s.stats);
    return set_op(ggml_view_tensor(ctx, s.k_t), GGML_SPARSE_ATTN_SEAL, &params, sizeof(params), &s);
}

struct ggml_tensor * ggml_sparse_attn_visible(struct ggml_context * ctx, struct ggml_tensor * mask) {
    GGML_ASSERT(mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(ggml_fp16_t) && mask->ne[2] == 1);

    struct ggml_tensor * res = ggml_new_tensor_4d(ctx, GGML_TYPE_I32, ggml_sparse_n_groups(mask->ne[0]), mask->ne[1], 1, mask->ne[3]);
    const struct ggml_sparse_src src = { .mask = mask };
    return set_op(res, GGML_SPARSE_ATTN_VISIBLE, NULL, 0, &src);
}

struct ggml_tensor * ggml_sparse_attn_score(struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_score_params params) {
    struct ggml_sparse_src s = *src;
    assert_score(&s, &params);
    assert_visible(s.visible, s.k->ne[2], s.q->ne[2], s.q->ne[3]);
    GGML_ASSERT(params.i_rank == 0); // there is no `wanted`
    if (!s.k_t) {
        s.sealed = s.k_range = NULL;
    }
    struct ggml_tensor * res = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, s.k->ne[2], s.q->ne[1], s.q->ne[2], s.q->ne[3]);
    return set_op(res, GGML_SPARSE_ATTN_SCORE, &params, sizeof(params), &s);
}

struct ggml_tensor * ggml_sparse_attn_select(struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_select_params params) {
    const struct ggml_tensor * x = src->logits;
    GGML_ASSERT(x->type == GGML_TYPE_F32 && ggml_is_contiguous(x));
    assert_select(src->wanted, x->ne[1], x->ne[2], x->ne[3], &params);
    return set_op(new_selection(ctx, x->ne[1], x->ne[2], x->ne[3], &params), GGML_SPARSE_ATTN_SELECT, &params, sizeof(params), src);
}

struct ggml_tensor * ggml_sparse_attn_score_select(
        struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_score_select_params params) {
    const struct ggml_tensor * q = src->q;
    GGML_ASSERT(src->k_t);
    assert_score(src, &params.score);
    assert_select(src->wanted, q->ne[1], q->ne[2], q->ne[3], &params.select);
    GGML_ASSERT(params.select.n_head_kv == src->k->ne[1]);
    GGML_ASSERT(params.score.i_rank >= 0 && params.score.i_rank < src->wanted->ne[0]);
    return set_op(new_selection(ctx, q->ne[1], q->ne[2], q->ne[3], &params.select), GGML_SPARSE_ATTN_SCORE_SELECT, &params, sizeof(params), src);
}

struct ggml_tensor * ggml_sparse_attn_attend(struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_attend_params params) {
    struct ggml_sparse_src s = *src;
    const struct ggml_tensor * q = s.q, * k = s.k, * sel = s.sel;
    assert_attention(&s);
    assert_visible(s.visible, k->ne[2], q->ne[2], q->ne[3]);
    if (sel) {
        GGML_ASSERT(sel->type == GGML_TYPE_I32 && ggml_is_contiguous(sel));
        GGML_ASSERT(sel->ne[0] > 1 + q->ne[1]/k->ne[1] && sel->ne[1] == k->ne[1] && sel->ne[2] == q->ne[2] && sel->ne[3] == q->ne[3]);
    }
    if (params.mean_v) {
        GGML_ASSERT(sel && s.v_sum);
        assert_v_sum(s.v_sum, s.v);
        assert_sealed(s.sealed, k->ne[2], k->ne[3]);
    } else {
        s.v_sum = s.sealed = NULL;
    }
    return set_op(new_result(ctx, q, s.v), GGML_SPARSE_ATTN_ATTEND, &params, sizeof(params), &s);
}

struct ggml_tensor * ggml_sparse_attn_prefill(struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_prefill_params params) {
    assert_attention(src);
    return set_op(new_result(ctx, src->q, src->v), GGML_SPARSE_ATTN_PREFILL, &params, sizeof(params), src);
}

// over the selection that s->sel is
static struct ggml_tensor * attend_selected(struct ggml_context * ctx, const struct ggml_sparse_src * s, const struct ggml_sparse_score_select_params * p) {
    const struct ggml_sparse_attend_params attend = { p->score.scale, p->score.max_bias, p->score.softcap, p->select.rest };
    return ggml_sparse_attn_attend(ctx, s, attend);
}

struct ggml_tensor * ggml_sparq_attn(struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_score_select_params params) {
    struct ggml_sparse_src s = *src;
    s.sel = ggml_sparse_attn_score_select(ctx, &s, params);
    return attend_selected(ctx, &s, &params);
}

struct ggml_tensor * ggml_topk_attn(struct ggml_context * ctx, const struct ggml_sparse_src * src, struct ggml_sparse_score_select_params params) {
    struct ggml_sparse_src s = *src;
    s.k_t    = NULL;
    s.logits = ggml_sparse_attn_score(ctx, &s, params.score);
    s.sel    = ggml_sparse_attn_select(ctx, &s, params.select);
    return attend_selected(ctx, &s, &params);
}
