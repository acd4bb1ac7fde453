// GGML_OP_SPARSE_ATTN on CUDA: tensors to arguments, and which kernels run for a node (docs/cuda.md has a table).

#include "sparse-attn.cuh"

#include "ggml-backend.h"
#include "ggml-impl.h"
#include "ggml-sparse-nodes.h"
#include "sparse-attend.cuh"
#include "sparse-layer.cuh"
#include "sparse-score.cuh"
#include "sparse-seal.cuh"
#include "sparse-select.cuh"

#include <algorithm>
#include <cstring>

using namespace sparse_cuda;

namespace {

view make_view(const ggml_tensor * t) {
    return t ? view { (char *) t->data, (int64_t) t->nb[1], (int64_t) t->nb[2], (int64_t) t->nb[3], (int) t->type } : view {};
}

template <typename T>
T * data_of(const ggml_tensor * t) { return t ? (T *) t->data : nullptr; }

// of I32 from element i of each row on
view make_view(const ggml_tensor * t, int32_t i) {
    view res = make_view(t);
    res.data += i*sizeof(int32_t);
    return res;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1)/b; }

int n_log2(int n) {
    int res = 1;
    while (2*res <= n) {
        res *= 2;
    }
    return res;
}

int n_sm(const ggml_backend_cuda_context & ctx) { return ggml_cuda_info().devices[ctx.device].nsm; }

// query heads of a KV head that a block works on at a time: 1, 4 or 8
int heads_per_pass(int n_group_q) { return n_group_q == 1 ? 1 : n_group_q <= 4 ? 4 : 8; }

// do all rows begin at multiples of 16 bytes?
bool is_aligned(const ggml_tensor * t) {
    return (uintptr_t) t->data % 16 == 0 && t->nb[1] % 16 == 0 && t->nb[2] % 16 == 0 && t->nb[3] % 16 == 0;
}

// ---- SEAL, VISIBLE ----

void op_seal(ggml_backend_cuda_context & ctx, const ggml_tensor * dst) {
    const auto src = ggml_sparse_src_of(dst);
    const auto p   = ggml_sparse_params_of<ggml_sparse_seal_params>(dst);
    GGML_ASSERT(p.n_bit == 16 || p.n_bit == 8 || p.n_bit == 4); // as seal_codes() packs them

    seal_args a = {};
    a.k_t     = make_view(src.k_t);
    a.k_range = make_view(src.k_range);
    a.v_sum   = make_view(src.v_sum);
    a.k       = make_view(src.k);
    a.v       = make_view(src.v);
    a.list    = data_of<const int32_t>(src.list);
    a.stats   = data_of<unsigned long long>(src.stats);
    a.n_kv    = src.k->ne[2];
    a.n_list  = (int) src.list->ne[0];
    a.d_k     = (int) src.k->ne[0];
    a.d_v     = src.v_sum ? (int) src.v->ne[0] : 0;
    a.n_bit   = p.n_bit;
    a.n_rot   = p.n_rot;
    SPARQ_LAUNCH(seal, dim3(src.list->ne[0], src.k->ne[1], src.list->ne[1]), dim3(N_THREAD), ctx.stream(), a);
}

void op_visible(ggml_backend_cuda_context & ctx, const ggml_tensor * dst) {
    const auto src = ggml_sparse_src_of(dst);
    const view m = make_view(src.mask);
    int32_t * res = data_of<int32_t>(dst);
    const int64_t n_kv = src.mask->ne[0], n_grp = dst->ne[0];
    SPARQ_LAUNCH(visible, dim3(ceil_div(n_grp, N_WARP), dst->ne[1], dst->ne[3]), dim3(N_THREAD), ctx.stream(), res, m, n_kv, n_grp);
}

// ---- SCORE, SELECT, SCORE_SELECT ----

// dst: SCORE or SCORE_SELECT
score_args make_score(const ggml_tensor * dst) {
    const auto src = ggml_sparse_src_of(dst);
    const auto p   = ggml_sparse_score_params_of(dst);

    score_args a = {};
    a.q         = make_view(src.q);
    a.k         = make_view(src.k);
    a.k_t       = make_view(src.k_t);
    a.k_range   = make_view(src.k_range);
    a.mask      = make_view(src.mask);
    a.kl        = src.wanted ? make_view(src.wanted, ggml_sparse_select_params_of(dst).i_k) : view {};
    a.ranks     = p.i_rank > 0 ? make_view(src.wanted, p.i_rank) : view {};
    a.sealed    = data_of<const int32_t>(src.sealed);
    a.stats     = data_of<unsigned long long>(src.stats);
    a.n_kv      = src.k->ne[2];
    a.n_grp     = ggml_sparse_n_groups(a.n_kv);
    a.n_run     = ceil_div(a.n_kv, RUN);
    a.n_pos_t   = src.k_t ? std::min(a.n_kv, src.k_t->ne[0]) : 0; // in f16 it may lack an incomplete group
    a.n_head    = (int) src.q->ne[1];
    a.n_head_kv = (int) src.k->ne[1];
    a.n_group_q = a.n_head/a.n_head_kv;
    a.n_tok     = (int) src.q->ne[2];
    a.d         = (int) src.k->ne[0];
    a.rank      = p.rank;
    a.n_rot     = src.k_t ? p.n_rot : 0;
    a.n_log2    = n_log2(a.n_head);
    a.row_bytes = (int) ggml_row_size(src.k->type, src.k->ne[0]);
    a.scale     = p.scale;
    a.softcap   = p.softcap;
    a.max_bias  = p.max_bias;
    return a;
}

template <int N_BIT, int GB, int TYPE, int NT>
void launch_score(ggml_backend_cuda_context & ctx, score_args a, int64_t n_row) {
    a.n_pass = (int) ceil_div(a.n_group_q, GB);
    const int64_t n_y = (int64_t) a.n_head_kv*a.n_pass;
    // as many blocks as there is room for at once: each chooses its components first
    const int64_t n_x = std::min(ceil_div(a.n_run, NT/32), std::max<int64_t>(1, score_blocks(N_BIT, GB, NT)*n_sm(ctx)/(n_y*n_row)));
    SPARQ_LAUNCH((score<N_BIT, GB, TYPE, NT>), dim3(n_x, n_y, n_row), dim3(NT), ctx.stream(), a);
}

template <int N_BIT, int TYPE>
void launch_score(ggml_backend_cuda_context & ctx, const score_args & a, int64_t n_row) {
    // little work is done sooner by more blocks, although each reads what its neighbours read
    const bool is_little = a.n_group_q == 1 || n_row*a.n_head*a.n_run <= 32*n_sm(ctx);
    constexpr int WIDE = ggml_sparse_has_codes(N_BIT) ? 1 : 4; // whole coefficients of several heads would not fit into shared memory
    const auto launch = a.d > N_THREAD/2 ? is_little ? launch_score<N_BIT, 1, TYPE, N_THREAD>   : launch_score<N_BIT, WIDE, TYPE, N_THREAD> :
                                           is_little ? launch_score<N_BIT, 1, TYPE, N_THREAD/2> : launch_score<N_BIT, 4,    TYPE, N_THREAD/2>;
    launch(ctx, a, n_row);
}

// n_bit 0: exact
void run_score(ggml_backend_cuda_context & ctx, const score_args & a, const ggml_tensor * q, int n_bit) {
    const int64_t n_row = q->ne[2]*q->ne[3];
    if (n_bit > 0) {
        ggml_sparse_with_bits(n_bit, [&](auto bits) { launch_score<bits(), ANY>(ctx, a, n_row); });
    } else {
        a.k.type == GGML_TYPE_F16 ? launch_score<0, GGML_TYPE_F16>(ctx, a, n_row) : launch_score<0, ANY>(ctx, a, n_row);
    }
}

void op_score(ggml_backend_cuda_context & ctx, const ggml_tensor * dst) {
    score_args a = make_score(dst);
    a.logits = data_of<float>(dst);
    const auto src = ggml_sparse_src_of(dst);
    run_score(ctx, a, src.q, src.k_t ? ggml_sparse_score_params_of(dst).n_bit : 0);
}

bool is_top_p(const ggml_sparse_select_params & p) { return p.top_p > 0.0f && p.top_p < 1.0f; }

// does SELECT need the softmax of the logits?
bool wants_sums(const ggml_sparse_select_params & p, int n_group_q) { return p.rest || is_top_p(p) || n_group_q > 1; }

// SELECT, and the second half of SCORE_SELECT; run_max and run_sum: from score(), or NULL
void run_select(ggml_backend_cuda_context & ctx, const ggml_tensor * dst, float * logits, int64_t n_kv, int n_head, float * run_max, float * run_sum) {
    const auto src = ggml_sparse_src_of(dst);
    const auto p   = ggml_sparse_select_params_of(dst);

    const int64_t n_row = dst->ne[2]*dst->ne[3], n_run = ceil_div(n_kv, RUN);
    select_args a = {};
    a.forced      = make_view(src.wanted, p.i_forced);
    a.kl          = make_view(src.wanted, p.i_k);
    a.logits      = logits;
    a.run_max     = run_max;
    a.run_sum     = run_sum;
    a.res         = data_of<int32_t>(dst);
    a.n_kv        = n_kv;
    a.n_run       = n_run;
    a.n_bits      = ceil_div(n_kv, 32);
    a.n_list      = ceil_div(n_kv, LIST_KEYS);
    a.n_head      = n_head;
    a.n_head_kv   = p.n_head_kv;
    a.n_group_q   = n_head/p.n_head_kv;
    a.n_tok       = (int) dst->ne[2];
    a.n_forced    = (int) src.wanted->ne[0] - p.i_forced;
    a.n_local_max = p.n_local_max;
    a.topk_max    = p.topk_max;
    a.rest        = p.rest;
    a.top_p       = is_top_p(p) ? p.top_p : 0.0f;

    const int64_t n_heads = n_row*a.n_head_kv;
    ggml_cuda_pool_alloc<unsigned> bits(ctx.pool(), n_heads*a.n_bits);
    ggml_cuda_pool_alloc<int2>     list(ctx.pool(), n_heads*a.n_list*LIST_KEYS), count(ctx.pool(), n_heads*a.n_list);
    ggml_cuda_pool_alloc<float>    runs(ctx.pool()), key(ctx.pool()); // in this order: the pool is a stack
    a.bits  = bits.get();
    a.list  = list.get();
    a.count = count.get();
    if (!run_max && wants_sums(p, a.n_group_q)) {
        a.run_max = runs.alloc(2*n_row*n_head*n_run);
        a.run_sum = a.run_max + n_row*n_head*n_run;
        SPARQ_LAUNCH(sum_runs, dim3(ceil_div(n_run, N_WARP), n_head, n_row), dim3(N_THREAD), ctx.stream(), a);
    }
    if (a.n_group_q > 1) {
        a.key = key.alloc(n_heads*n_kv);
    }
    const dim3 heads(a.n_head_kv, n_row);
    // as many blocks as threads have room for at once: each guesses the cut first
    const int64_t n_x = std::min(a.n_list, std::max<int64_t>(1, 8*n_sm(ctx)/n_heads));
    SPARQ_LAUNCH(list_keys, dim3(n_x, a.n_head_kv, n_row), dim3(N_THREAD), ctx.stream(), a);
    // what is listed at most, but for one head in a million: what its threads do not hold, a block reads again and again
    const float rank = sample_rank((float) a.topk_max*N_SAMPLE/n_kv), n_listed = (1.25f*rank + 6.0f*sqrtf(rank) + 12.0f)*n_kv/N_SAMPLE + a.n_forced;
    if (a.top_p == 0.0f && n_listed < 256*8) {
        SPARQ_LAUNCH((select<256, 8>), heads, dim3(256), ctx.stream(), a);
    } else {
        SPARQ_LAUNCH((select<TOP_P_THREADS, 8>), heads, dim3(TOP_P_THREADS), ctx.stream(), a);
    }
}

void op_select(ggml_backend_cuda_context & ctx, const ggml_tensor * dst) {
    const ggml_tensor * logits = ggml_sparse_src_of(dst).logits;
    run_select(ctx, dst, data_of<float>(logits), logits->ne[0], (int) logits->ne[1], nullptr, nullptr);
}

void op_score_select(ggml_backend_cuda_context & ctx, const ggml_tensor * dst) {
    const auto p = ggml_sparse_params_of<ggml_sparse_score_select_params>(dst);
    score_args a = make_score(dst);

    const int64_t n_heads = (int64_t) a.n_head*dst->ne[2]*dst->ne[3]; // of all rows
    ggml_cuda_pool_alloc<float> logits(ctx.pool(), n_heads*a.n_kv), runs(ctx.pool());
    a.logits = logits.get();
    if (wants_sums(p.select, a.n_group_q)) {
        a.run_max = runs.alloc(2*n_heads*a.n_run);
        a.run_sum = a.run_max + n_heads*a.n_run;
    }
    run_score(ctx, a, ggml_sparse_src_of(dst).q, p.score.n_bit);
    run_select(ctx, dst, a.logits, a.n_kv, a.n_head, a.run_max, a.run_sum);
}

// ---- ATTEND ----

template <int GB, int TYPE, int D>
void launch_attend(ggml_backend_cuda_context & ctx, attend_args a) {
    a.n_pass = (int) ceil_div(a.n_group_q, GB);
    const int64_t n_y    = (int64_t) a.n_head_kv*a.n_pass;
    const int64_t fill   = std::max<int64_t>(1, 4*n_sm(ctx)/(n_y*a.n_row));
    const auto split = [&](int64_t n) { return (int) std::min<int64_t>({ ceil_div(n, ATTEND_TILE), fill, N_THREAD }); }; // merge() has a thread per split
    a.n_split_all = split(a.n_kv);
    a.n_split_sel = a.sel ? split(a.ld_sel - 1 - a.n_group_q) : a.n_split_all;
    a.n_grid      = std::max(a.n_split_all, a.n_split_sel);

    const bool merged = a.n_grid > 1 || a.mean_v;
    ggml_cuda_pool_alloc<float> state(ctx.pool()), mean(ctx.pool());
    if (merged) {
        a.state = state.alloc((int64_t) a.n_row*a.n_head*a.n_grid*(a.d_v + ATTEND_STATE));
    }
    if (a.mean_v) {
        a.mean = mean.alloc((int64_t) a.n_row*a.n_head_kv*a.d_v);
    }
    const int n_count = a.stats || a.mean_v ? 1 : 0;
    SPARQ_LAUNCH((attend<GB, TYPE, TYPE, D>), dim3(a.n_grid + n_count, n_y, a.n_row), dim3(N_THREAD), ctx.stream(), a);
    if (merged) {
        SPARQ_LAUNCH(merge, dim3(a.n_head, a.n_row), dim3(N_THREAD), ctx.stream(), a);
    }
}

template <int D>
void launch_attend_f16(ggml_backend_cuda_context & ctx, const attend_args & a) {
    switch (heads_per_pass(a.n_group_q)) {
        case 1:  launch_attend<1, GGML_TYPE_F16, D>(ctx, a); break;
        case 4:  launch_attend<4, GGML_TYPE_F16, D>(ctx, a); break;
        default: launch_attend<8, GGML_TYPE_F16, D>(ctx, a); break;
    }
}

attend_args make_attend(const ggml_tensor * dst) {
    const auto src = ggml_sparse_src_of(dst);
    const auto p   = ggml_sparse_params_of<ggml_sparse_attend_params>(dst);
    const ggml_tensor * q = src.q, * k = src.k, * v = src.v;

    attend_args a = {};
    a.q         = make_view(q);
    a.k         = make_view(k);
    a.v         = make_view(v);
    a.mask      = make_view(src.mask);
    a.visible   = make_view(src.visible);
    a.sel       = data_of<const int32_t>(src.sel);
    a.v_sum     = make_view(src.v_sum);
    a.sealed    = data_of<const int32_t>(src.sealed);
    a.sink_logits = data_of<const float>(src.sinks);
    a.stats     = data_of<unsigned long long>(src.stats);
    a.res       = data_of<float>(dst);
    a.n_kv      = k->ne[2];
    a.n_grp     = ggml_sparse_n_groups(a.n_kv);
    a.ld_res    = dst->nb[1]/sizeof(float);
    a.n_head    = (int) q->ne[1];
    a.n_head_kv = (int) k->ne[1];
    a.n_group_q = a.n_head/a.n_head_kv;
    a.n_tok     = (int) q->ne[2];
    a.n_row     = (int) (q->ne[2]*q->ne[3]);
    a.d_k       = (int) k->ne[0];
    a.d_v       = (int) v->ne[0];
    a.ld_sel    = src.sel ? (int) src.sel->ne[0] : 0;
    a.n_log2    = n_log2(a.n_head);
    a.row_k     = (int) ggml_row_size(k->type, k->ne[0]);
    a.row_v     = (int) ggml_row_size(v->type, v->ne[0]);
    a.mean_v    = p.mean_v;
    a.scale     = p.scale;
    a.softcap   = p.softcap;
    a.max_bias  = p.max_bias;

    return a;
}

// the head size of K and V that are f16 with rows that begin at multiples of 16 bytes; 0: they are not
int f16_size(const ggml_tensor * k, const ggml_tensor * v) {
    const bool is_f16 = k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 && k->ne[0] == v->ne[0] && is_aligned(k) && is_aligned(v);
    return is_f16 ? (int) k->ne[0] : 0;
}

void op_attend(ggml_backend_cuda_context & ctx, const ggml_tensor * dst) {
    const auto src = ggml_sparse_src_of(dst);
    const attend_args a = make_attend(dst);
    switch (f16_size(src.k, src.v)) {
        case 64:  launch_attend_f16< 64>(ctx, a); break;
        case 128: launch_attend_f16<128>(ctx, a); break;
        case 256: launch_attend_f16<256>(ctx, a); break;
        default:  a.n_group_q == 1 ? launch_attend<1, ANY, 0>(ctx, a) : launch_attend<4, ANY, 0>(ctx, a);
    }
}

// ---- SCORE_SELECT and ATTEND in one launch ----

template <int N_BIT, int GB, int TYPE>
bool launch_layer(ggml_backend_cuda_context & ctx, layer_args a) {
    using shared = layer_shared<N_BIT, GB>;
    constexpr size_t N_SHARED = sizeof(shared), N_KB = 1024; // a block has as much besides
    constexpr size_t N_MOST = SPARQ_SMEM_KEYS || SPARQ_DSMEM_FINISH ? 227*N_KB : N_SHARED;
    static_assert(N_SHARED <= 227*N_KB && (N_BIT != 4 || layer_blocks(N_BIT, GB)*(N_SHARED + N_KB) <= 228*N_KB), "more than a multiprocessor of Hopper has");
    static_assert(offsetof(shared, q) % 16 == 0 && offsetof(shared, marks) % 16 == 0 && offsetof(shared, coarse) % 8 == 0, "they are read as vectors");
    const int64_t n_row = a.attend.n_row, n_heads = n_row*a.score.n_head_kv, n_head = a.score.n_head;
    // as large as leaves room for all clusters at once; else as small as can be
    a.n_block = 0;
    const auto n_key = [&](int n) { // floats behind `shared`: of own runs, of rows that all blocks share, and candidates
        return SPARQ_SMEM_KEYS ? (int) ceil_div(a.score.n_run, n)*RUN + (n > 1 ? LAYER_ROWS*GROUP/n : 0) + 2*LAYER_CAND : 0;
    };
    const int n_state = SPARQ_DSMEM_FINISH ? a.score.n_group_q*(a.attend.d_v + LAYER_STATE) + a.attend.d_v : 0;
    const auto n_shared = [&](int n) { return N_SHARED + 4*(n_key(n) + n_state); };
    for (int n = LAYER_BLOCKS; n >= 1 && ceil_div(a.score.n_run, n)*RUN <= LAYER_OWN; n /= 2) {
        const int n_cluster = n == 1 || n <= a.score.n_run ? max_clusters(layer<N_BIT, GB, TYPE>, n, n_shared(n), N_MOST) : 0;
        a.n_block = n_cluster > 0 ? n : a.n_block;
        if (n_cluster >= n_heads) {
            break;
        }
    }
    if (a.n_block == 0) {
        return false;
    }
    a.ld = a.score.n_run*RUN;
    a.n_key = n_key(a.n_block);
    ggml_cuda_pool_alloc<float>   logits(ctx.pool(), n_row*n_head*a.ld);
    ggml_cuda_pool_alloc<int32_t> sel(ctx.pool(), n_heads*a.topk_max);
    ggml_cuda_pool_alloc<int2>    cand(ctx.pool(), n_heads*LAYER_CAND);
    ggml_cuda_pool_alloc<float>   state(ctx.pool(), n_row*n_head*a.n_block*(a.attend.d_v + LAYER_STATE)), mean(ctx.pool(), n_heads*a.n_block*a.attend.d_v);
    ggml_cuda_pool_alloc<float>   key(ctx.pool()); // in this order: the pool is a stack
    a.score.logits = logits.get();
    a.key   = a.score.n_group_q > 1 ? key.alloc(n_heads*a.ld) : nullptr;
    a.sel   = sel.get();
    a.cand  = cand.get();
    a.state = state.get();
    a.mean  = mean.get();
    launch_cluster(layer<N_BIT, GB, TYPE>, dim3(a.n_block*a.score.n_head_kv, n_row), dim3(N_THREAD), a.n_block, n_shared(a.n_block), ctx.stream(), a);
    return true;
}

template <int N_BIT, int TYPE>
bool launch_layer(ggml_backend_cuda_context & ctx, const layer_args & a) {
    constexpr int MANY = SPARQ_HEADS_8 && N_BIT == 4 ? 8 : 4;
    const int n = a.score.n_group_q;
    return n == 1 ? launch_layer<N_BIT, 1, TYPE>(ctx, a) : n <= 4 ? launch_layer<N_BIT, 4, TYPE>(ctx, a) : launch_layer<N_BIT, MANY, TYPE>(ctx, a);
}

// SCORE_SELECT and the ATTEND that reads it; false: nothing was done
bool run_layer(ggml_backend_cuda_context & ctx, const ggml_tensor * score_select, const ggml_tensor * attend, bool is_early) {
    const auto src = ggml_sparse_src_of(score_select), other = ggml_sparse_src_of(attend);
    const auto p   = ggml_sparse_params_of<ggml_sparse_score_select_params>(score_select);
    const int  cc  = ggml_cuda_info().devices[ctx.device].cc;
    layer_args a = {};
    a.score       = make_score(score_select);
    a.attend      = make_attend(attend);
    a.forced      = make_view(src.wanted, p.select.i_forced);
    a.n_forced    = (int) src.wanted->ne[0] - p.select.i_forced;
    a.n_local_max = p.select.n_local_max;
    a.topk_max    = p.select.topk_max;
    const int d = std::max(a.attend.d_k, a.attend.d_v);
    a.is_early    = is_early;
    a.n_lane      = d <= 64 ? 8 : d <= 128 ? 16 : 32;
    const bool fits = cc >= 900 && cc < 0x10000 && src.k_t && src.q == other.q && src.k == other.k && src.mask == other.mask &&
            (!a.attend.mean_v || (src.sealed == other.sealed && p.select.rest)) && !is_top_p(p.select) && a.n_forced <= a.topk_max &&
            a.score.n_group_q <= LAYER_HEADS && a.score.n_grp <= N_STATE;
    if (!fits) {
        return false;
    }
    bool done = false;
    ggml_sparse_with_bits(p.score.n_bit, [&](auto bits) {
        done = f16_size(src.k, other.v) ? launch_layer<bits(), GGML_TYPE_F16>(ctx, a) : launch_layer<bits(), ANY>(ctx, a);
    });
    return done;
}

// ---- what can run ----

bool is_kv(const ggml_tensor * t) {
    const int n = ggml_sparse_kv_block(t->type);
    return n > 0 && t->ne[0] <= D_MAX && t->ne[0] % n == 0;
}

// the scan reads 16 bytes of f16 at a time, 4 or 8 of codes
bool is_shadow(const ggml_tensor * k_t, const ggml_tensor * k_range) {
    return is_aligned(k_t) && k_t->ne[0] % 8 == 0 && (!k_range || k_range->nb[0] == sizeof(ggml_fp16_t));
}

bool is_on_host(const ggml_tensor * t) { return t && t->buffer && ggml_backend_buffer_is_host(t->buffer); }

constexpr int64_t GRID_MAX = 65535;   // blocks along y and z
constexpr int64_t N_KV_MAX = 1 << 30; // cells are numbered in 32 bits, with room for a stride
constexpr int64_t N_SELECT_MAX = LIST_MAX*LIST_KEYS; // positions that lists have room for

} // namespace

void ggml_cuda_op_sparse_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    switch ((ggml_sparse_attn_op) dst->op_params[0]) {
        case GGML_SPARSE_ATTN_SEAL:    op_seal   (ctx, dst); break;
        case GGML_SPARSE_ATTN_VISIBLE: op_visible(ctx, dst); break;
        case GGML_SPARSE_ATTN_SCORE:   op_score  (ctx, dst); break;
        case GGML_SPARSE_ATTN_SELECT:  op_select (ctx, dst); break;
        case GGML_SPARSE_ATTN_SCORE_SELECT: op_score_select(ctx, dst); break;
        case GGML_SPARSE_ATTN_ATTEND:  op_attend (ctx, dst); break;
        default: GGML_ABORT("sparse_attn: unknown sub-operation %d", dst->op_params[0]);
    }
}

// May node i read what VISIBLE wrote before it waits? Where a kernel of ours lies between them: it has waited for VISIBLE before others began. Kernels
// of llama.cpp let others begin first
static bool is_early(const ggml_cgraph * graph, int i) {
    const ggml_op op = graph->nodes[i]->op;
    for (--i; i >= 0 && graph->nodes[i]->op != op; --i) {
    }
    return SPARQ_EARLY == 2 || (SPARQ_EARLY == 1 && i >= 0 && graph->nodes[i]->op_params[0] != GGML_SPARSE_ATTN_VISIBLE);
}

int ggml_cuda_fuse_sparse_attn(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    const auto is_step = [&](int j, ggml_sparse_attn_op op) {
        return j < graph->n_nodes && graph->nodes[j]->op == graph->nodes[i]->op && graph->nodes[j]->op_params[0] == op;
    };
    static const char * off = getenv("GGML_CUDA_DISABLE_FUSION"); // as upstream's
    if ((off && atoi(off)) || !is_step(i, GGML_SPARSE_ATTN_SCORE_SELECT) || !is_step(i + 1, GGML_SPARSE_ATTN_ATTEND) || !ggml_node_has_n_uses(graph, i, 1) ||
            ggml_sparse_src_of(graph->nodes[i + 1]).sel != graph->nodes[i]) {
        return 0;
    }
    // What only SCORE_SELECT reads is free behind it, so ATTEND's result may lie there; one launch reads it until the end
    const ggml_tensor * res = graph->nodes[i + 1];
    for (const ggml_tensor * t : graph->nodes[i]->src) {
        if (t && (char *) t->data < (char *) res->data + ggml_nbytes(res) && (char *) res->data < (char *) t->data + ggml_nbytes(t)) {
            return 0;
        }
    }
    return run_layer(ctx, graph->nodes[i], res, is_early(graph, i)) ? 1 : 0;
}

bool ggml_cuda_sparse_attn_supported(const ggml_tensor * dst, int cc) {
    if (cc < 750 || cc >= 0x10000) { // larger numbers are GPUs of other makers
        return false;
    }
    if (dst->op_params[0] == GGML_SPARSE_ATTN_IS_TIMED) {
        return cc >= 900; // before Hopper tokens were slower than dense ones (docs/gpu.md)
    }
    const auto src = ggml_sparse_src_of(dst);
    const ggml_tensor * q = src.q, * k = src.k;
    const auto is_qk = [&] {
        return is_kv(k) && q->ne[1] <= GRID_MAX && q->ne[1]/k->ne[1] <= G_MAX && q->ne[2]*q->ne[3] <= GRID_MAX && k->ne[2] <= N_KV_MAX &&
                !is_on_host(src.stats);
    };
    switch ((ggml_sparse_attn_op) dst->op_params[0]) {
        case GGML_SPARSE_ATTN_SEAL:
            return is_kv(k) && (!src.v_sum || is_kv(src.v)) && k->ne[1] <= GRID_MAX && k->ne[3] <= GRID_MAX && !is_on_host(src.stats);
        case GGML_SPARSE_ATTN_VISIBLE:
            return dst->ne[1] <= GRID_MAX && dst->ne[3] <= GRID_MAX;
        case GGML_SPARSE_ATTN_SCORE:
            return is_qk() && (!src.k_t || is_shadow(src.k_t, src.k_range));
        case GGML_SPARSE_ATTN_SCORE_SELECT:
            return is_qk() && k->ne[2] <= N_SELECT_MAX && (!src.k_t || is_shadow(src.k_t, src.k_range));
        case GGML_SPARSE_ATTN_SELECT: {
            const ggml_tensor * logits = src.logits;
            return logits->ne[0] <= N_SELECT_MAX && logits->ne[1] <= GRID_MAX && logits->ne[1]/dst->ne[1] <= G_MAX && dst->ne[2]*dst->ne[3] <= GRID_MAX;
        }
        case GGML_SPARSE_ATTN_ATTEND:
            return is_qk() && is_kv(src.v);
        default:
            return false;
    }
}
