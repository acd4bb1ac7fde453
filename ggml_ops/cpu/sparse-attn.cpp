// GGML_OP_SPARSE_ATTN on the CPU: the sub-operations SEAL and VISIBLE, and the way to the others.

#include "sparse-glue.h"
#include "sparse-quant.h"

namespace {

// ---- SEAL ----

// K in blocks, or turned, is brought to f32 first: a group, or the run it is coded with
struct seal_work {
    float * rows = nullptr; // [GROUP or RUN][d_k]  this thread's
    size_t  size = 0;       // of all threads

    seal_work(const ggml_tensor * dst, const void * wdata, int ith, int nth) {
        const ggml_tensor * k = ggml_sparse_src_of(dst).k;
        const auto p = ggml_sparse_params_of<ggml_sparse_seal_params>(dst);
        if (!ggml_is_quantized(k->type) && p.n_rot == 0) {
            return;
        }
        bump own(wdata);
        for (int i = 0; i <= ith; ++i) {
            rows = own.take<float>(ggml_sparse_unit(p.n_bit)*k->ne[0]);
        }
        size = own.used/(ith + 1)*nth + bump::ALIGN;
    }
};

// does entry i of the list follow one of the same run (or other span of groups)? What is done once per span is then done already. Of a list
// that is not ascending, some is done twice, by the same thread
bool same_span(const int32_t * list, int64_t i, int64_t n_group) {
    return i > 0 && list[i - 1] >= 0 && list[i - 1] <= list[i] && list[i - 1]/n_group == list[i]/n_group;
}

// codes the run of group g anew, for one KV head; once per run, at the first of its groups in the list
void seal_codes(const ggml_tensor * dst, const seal_work & w, int64_t h, int64_t g, int64_t s, const int32_t * list, int64_t i) {
    constexpr int N = RUN/GROUP;
    const auto src = ggml_sparse_src_of(dst);
    const ggml_tensor * k_t     = src.k_t;
    const ggml_tensor * k       = src.k;
    const ggml_tensor * k_range = src.k_range;
    const ggml_tensor * sealed  = src.sealed;
    const auto p = ggml_sparse_params_of<ggml_sparse_seal_params>(dst);

    if (same_span(list, i, N)) {
        return;
    }
    const int64_t run = g/N;
    uint8_t valid[N];
    for (int64_t j = 0; j < N; ++j) {
        valid[j] = (run*N + j + 1)*GROUP <= k->ne[2] && at<const int32_t>(sealed, s)[run*N + j] != 0;
    }
    const int   d_k   = (int) k->ne[0];
    char      * codes = at(k_t, h*d_k, s) + ggml_sparse_shadow_bytes(run*RUN, p.n_bit);
    float     * range = at<float>(k_range, h*d_k, run, s);
    with_kv_type(k->type, [&](auto * t) {
        using T = std::decay_t<decltype(*t)>;
        if (w.rows) {
            for (int64_t j = 0; j < N; ++j) {
                if (valid[j]) {
                    load_rows<T>(w.rows + j*GROUP*d_k, at(k, h, (run*N + j)*GROUP, s), k->nb[2], GROUP, d_k, p.n_rot);
                }
            }
            seal_run<float>(codes, k_t->nb[1], range, (const char *) w.rows, d_k*sizeof(float), valid, d_k, p.n_bit, k_range->nb[1]/sizeof(float));
        } else if constexpr (span<T>::SIZE == W) {
            seal_run<T>(codes, k_t->nb[1], range, at(k, h, run*RUN, s), k->nb[2], valid, d_k, p.n_bit, k_range->nb[1]/sizeof(float));
        }
    });
}

void forward_seal(const ggml_compute_params * params, ggml_tensor * dst) {
    const auto src = ggml_sparse_src_of(dst);
    const ggml_tensor * k_t   = src.k_t;
    const ggml_tensor * v_sum = src.v_sum;
    const ggml_tensor * k     = src.k;
    const ggml_tensor * v     = src.v;
    const ggml_tensor * list  = src.list;
    const ggml_tensor * stats = src.stats;
    const auto p = ggml_sparse_params_of<ggml_sparse_seal_params>(dst);

    const int64_t n_list    = list->ne[0];
    const int64_t n_stream  = list->ne[1];
    const int64_t n_head_kv = k->ne[1];
    const int     d_k       = (int) k->ne[0];
    const int     d_v       = v_sum ? (int) v->ne[0] : 0;
    const int64_t n_kv      = k->ne[2];

    const seal_work w(dst, params->wdata, params->ith, params->nth);

    const auto valid = [&](int32_t g) { return g >= 0 && g*(int64_t) GROUP < n_kv; };

    // a head by those who will read it, see unit_queue: neighbours by each thread; or one by each of the threads i, i + n_all, ..
    const int64_t n_all = n_head_kv*n_stream, nth = params->nth;
    const auto owner = [&](int64_t head, int64_t g) {
        const int64_t i = g*GROUP/ggml_sparse_unit(p.n_bit); // a run is coded at once
        return n_all % nth == 0 ? head*nth/n_all : nth % n_all == 0 ? head + i % (nth/n_all)*n_all : (i*n_all + head) % nth;
    };

    for (int64_t u = 0; u < n_list*n_all; ++u) {
        const int64_t h = u % n_head_kv, s = u/n_head_kv % n_stream, i = u/n_all;
        const int64_t g = at<const int32_t>(list, s)[i];
        if (!valid((int32_t) g) || owner(s*n_head_kv + h, g) != params->ith) {
            continue;
        }
        const int n = group_size(g, n_kv);
        if (ggml_sparse_has_codes(p.n_bit)) {
            seal_codes(dst, w, h, g, s, at<const int32_t>(list, s), i);
        } else {
            const char * rows = at(k, h, g*GROUP, s);
            char       * x    = at(k_t, h*d_k, s) + g*GROUP*sizeof(f16);
            with_kv_type(k->type, [&](auto * t) {
                using T = std::decay_t<decltype(*t)>;
                if (w.rows) {
                    load_rows<T>(w.rows, rows, k->nb[2], n, d_k, p.n_rot);
                    seal_k<float>(x, k_t->nb[1], (const char *) w.rows, d_k*sizeof(float), n, d_k);
                } else if constexpr (span<T>::SIZE == W) {
                    seal_k<T>(x, k_t->nb[1], rows, k->nb[2], n, d_k);
                }
            });
        }
        if (v_sum) {
            with_kv_type(v->type, [&](auto * t) {
                float * sum = at<float>(v_sum, ggml_sparse_sum_row(g), s) + h*d_v;
                memset(sum, 0, d_v*sizeof(float));
                sum_v<std::decay_t<decltype(*t)>>(sum, at(v, h, g*GROUP, s), v->nb[2], n, d_v);
            });
        }
    }

    int64_t n_seal = 0;
    for (int64_t i = 0; i < n_list*n_stream; ++i) {
        n_seal += valid(((const int32_t *) list->data)[i]);
    }
    if (v_sum && n_seal > 0) {
        ggml_barrier(params->threadpool);
    }

    // the sums of sums that hold a group of the list, at the first of their groups in it
    for (int64_t u = 0; v_sum && u < n_list*n_all; ++u) {
        const int64_t h = u % n_head_kv, s = u/n_head_kv % n_stream, i = u/n_all;
        const int32_t * x = at<const int32_t>(list, s);
        if (valid(x[i]) && (x[i]/SUM*n_all + s*n_head_kv + h) % nth == params->ith && !same_span(x, i, SUM)) {
            const int64_t row = ggml_sparse_sum_row(x[i]/SUM*SUM);
            float * sum = at<float>(v_sum, row + SUM, s) + h*d_v;
            memset(sum, 0, d_v*sizeof(float));
            sum_v<float>(sum, (const char *) (at<float>(v_sum, row, s) + h*d_v), v_sum->nb[1], SUM, d_v);
        }
    }

    if (stats && params->ith == 0) {
        add_stat(stats, GGML_SPARSE_STAT_GROUPS_SEALED, n_seal);
    }
}

// ---- VISIBLE ----

void forward_visible(const ggml_compute_params * params, ggml_tensor * dst) {
    const auto src = ggml_sparse_src_of(dst);
    const ggml_tensor * mask = src.mask;

    const int64_t n_kv  = mask->ne[0];
    const int64_t n_grp = dst->ne[0];
    const int64_t n_tok = mask->ne[1];
    const int64_t n_row = dst->ne[1]; // one more than tokens with sealed, which is copied

    for (int64_t u = params->ith; u < n_grp*n_row*dst->ne[3]; u += params->nth) {
        const int64_t g = u % n_grp;
        const int64_t i = u/n_grp % n_row;
        const int64_t s = u/n_grp/n_row;
        at<int32_t>(dst, i, 0, s)[g] = i == n_tok ? at<const int32_t>(src.sealed, s)[g] :
            count_visible(at<const f16>(mask, i, 0, s) + g*GROUP, group_size(g, n_kv));
    }
}

} // namespace

size_t ggml_sparse_attn_work_size(const ggml_tensor * node, int n_threads) {
    switch ((ggml_sparse_attn_op) node->op_params[0]) {
        case GGML_SPARSE_ATTN_SEAL:   return seal_work(node, nullptr, 0, n_threads).size;
        case GGML_SPARSE_ATTN_SCORE:  return score_work_size(node, n_threads);
        case GGML_SPARSE_ATTN_SELECT: return select_work_size(node, n_threads);
        case GGML_SPARSE_ATTN_SCORE_SELECT: return score_select_work_size(node, n_threads);
        case GGML_SPARSE_ATTN_ATTEND: return attend_work_size(node, n_threads);
        case GGML_SPARSE_ATTN_PREFILL: return prefill_work_size(node, n_threads);
        default:                      return 0;
    }
}

void ggml_compute_forward_sparse_attn(const ggml_compute_params * params, ggml_tensor * dst) {
    switch ((ggml_sparse_attn_op) dst->op_params[0]) {
        case GGML_SPARSE_ATTN_SEAL:    forward_seal   (params, dst); break;
        case GGML_SPARSE_ATTN_VISIBLE: forward_visible(params, dst); break;
        case GGML_SPARSE_ATTN_SCORE:   forward_score  (params, dst); break;
        case GGML_SPARSE_ATTN_SELECT:  forward_select (params, dst); break;
        case GGML_SPARSE_ATTN_SCORE_SELECT: forward_score_select(params, dst); break;
        case GGML_SPARSE_ATTN_ATTEND:  forward_attend (params, dst); break;
        case GGML_SPARSE_ATTN_PREFILL: forward_prefill(params, dst); break;
        default: GGML_ABORT("sparse_attn: unknown sub-operation %d", dst->op_params[0]);
    }
}
