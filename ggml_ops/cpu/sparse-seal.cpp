// SEAL: which thread seals which group of which head.

#include "sparse-seal.h"
#include "sparse-work.h"

namespace {

struct seal_src : ggml_sparse_src {
    ggml_sparse_seal_params p;
    int64_t n_kv, n_list, n_stream, n_head_kv;
    int64_t n_all; // KV heads of all streams
    int     d_k, d_v;

    explicit seal_src(const ggml_tensor * dst) : ggml_sparse_src(ggml_sparse_src_of(dst)), p(ggml_sparse_params_of<ggml_sparse_seal_params>(dst)) {
        n_kv      = k->ne[2];
        n_list    = list->ne[0];
        n_stream  = list->ne[1];
        n_head_kv = k->ne[1];
        n_all     = n_head_kv*n_stream;
        d_k       = (int) k->ne[0];
        d_v       = v_sum ? (int) v->ne[0] : 0;
    }

    const int32_t * groups(int64_t s) const { return at<const int32_t>(list, s); }

    bool is_group(int32_t g) const { return g >= 0 && (g + 1)*(int64_t) GROUP <= n_kv; }
};

// a group of K in blocks, or rotated, is brought to f32 first
struct seal_work {
    float * rows = nullptr; // [GROUP][d_k]  this thread's
    size_t  size = 0;       // of all threads

    seal_work(const seal_src & a, const void * wdata, int ith, int nth) {
        if (ggml_is_quantized(a.k->type) || a.p.n_rot != 0) {
            size = take_per_thread(bump(wdata), ith, nth, [&](bump & own) { rows = own.take<float>(GROUP*a.d_k); });
        }
    }
};

// group g of K of one KV head, to f16 or to codes
void seal_group(const seal_src & a, const seal_work & w, int64_t h, int64_t g, int64_t s) {
    const char * k = at(a.k, h, g*GROUP, s);
    char * k_t   = at(a.k_t, h*a.d_k, s) + ggml_sparse_shadow_bytes(g*GROUP, a.p.n_bit);
    char * range = a.k_range ? at(a.k_range, h*a.d_k, g, s) : nullptr;
    const auto seal = [&](auto * t, const char * rows, size_t nb_pos) {
        using T = std::decay_t<decltype(*t)>;
        if (range) {
            seal_group_codes<T>(k_t, a.k_t->nb[1], range, a.k_range->nb[1], rows, nb_pos, a.d_k, a.p.n_bit);
        } else {
            seal_group_f16<T>(k_t, a.k_t->nb[1], rows, nb_pos, a.d_k);
        }
    };
    with_kv_type(a.k->type, [&](auto * t) {
        using T = std::decay_t<decltype(*t)>;
        if (w.rows) {
            load_rows<T>(w.rows, k, a.k->nb[2], GROUP, a.d_k, a.p.n_rot);
            seal((const float *) nullptr, (const char *) w.rows, a.d_k*sizeof(float));
        } else if constexpr (span<T>::SIZE == W) {
            seal(t, k, a.k->nb[2]);
        }
    });
}

// v_sum[g, c] = sum_t v[t, c], over the positions of group g of one KV head
void sum_group(const seal_src & a, int64_t h, int64_t g, int64_t s) {
    with_kv_type(a.v->type, [&](auto * t) {
        float * sum = at<float>(a.v_sum, ggml_sparse_sum_row(g), s) + h*a.d_v;
        memset(sum, 0, a.d_v*sizeof(float));
        sum_positions<std::decay_t<decltype(*t)>>(sum, at(a.v, h, g*GROUP, s), a.v->nb[2], GROUP, a.d_v);
    });
}

// the total of the sum block that g lies in
void sum_groups(const seal_src & a, int64_t h, int64_t g, int64_t s) {
    const int64_t row = ggml_sparse_sum_row(g/SUM*SUM);
    float * sum = at<float>(a.v_sum, ggml_sparse_total_row(g), s) + h*a.d_v;
    memset(sum, 0, a.d_v*sizeof(float));
    sum_positions<float>(sum, (const char *) (at<float>(a.v_sum, row, s) + h*a.d_v), a.v_sum->nb[1], SUM, a.d_v);
}

// The thread that seals group g of a head. It is one of those that will read the head, see unit_queue: each thread has neighbouring heads, or
// a head belongs to the threads i, i + n_all, .. in turns
int64_t owner(const seal_src & a, int64_t head, int64_t g, int64_t nth) {
    return a.n_all % nth == 0 ? head*nth/a.n_all : nth % a.n_all == 0 ? head + g % (nth/a.n_all)*a.n_all : (g*a.n_all + head) % nth;
}

// this thread's entries of the list
void seal_list(const seal_src & a, const seal_work & w, int64_t ith, int64_t nth) {
    for (int64_t u = 0; u < a.n_list*a.n_all; ++u) {
        digits d { u };
        const int64_t h = d.next(a.n_head_kv), s = d.next(a.n_stream), i = d.rest;
        const int32_t g = a.groups(s)[i];
        if (!a.is_group(g) || owner(a, s*a.n_head_kv + h, g, nth) != ith) {
            continue;
        }
        seal_group(a, w, h, g, s);
        if (a.v_sum) {
            sum_group(a, h, g, s);
        }
    }
}

// this thread's totals of those that hold a group of the list
void sum_list(const seal_src & a, int64_t ith, int64_t nth) {
    for (int64_t u = 0; u < a.n_list*a.n_all; ++u) {
        digits d { u };
        const int64_t h = d.next(a.n_head_kv), s = d.next(a.n_stream), i = d.rest;
        const int32_t * list = a.groups(s);
        const bool same = i > 0 && list[i - 1] >= 0 && list[i - 1] <= list[i] && list[i - 1]/SUM == list[i]/SUM; // as the entry before it
        if (a.is_group(list[i]) && (list[i]/SUM*a.n_all + s*a.n_head_kv + h) % nth == ith && !same) {
            sum_groups(a, h, list[i], s);
        }
    }
}

} // namespace

void sparse::forward_seal(const ggml_compute_params * params, ggml_tensor * dst) {
    const seal_src  a(dst);
    const seal_work w(a, params->wdata, params->ith, params->nth);

    int64_t n_seal = 0;
    for (int64_t i = 0; i < a.n_list*a.n_stream; ++i) {
        n_seal += a.is_group(((const int32_t *) a.list->data)[i]);
    }
    seal_list(a, w, params->ith, params->nth);
    if (a.v_sum && n_seal > 0) {
        ggml_barrier(params->threadpool);
        sum_list(a, params->ith, params->nth);
    }
    if (a.stats && params->ith == 0) {
        add_stat(a.stats, GGML_SPARSE_STAT_GROUPS_SEALED, n_seal);
    }
}

size_t sparse::seal_work_size(const ggml_tensor * dst, int n_threads) { return seal_work(seal_src(dst), nullptr, 0, n_threads).size; }
