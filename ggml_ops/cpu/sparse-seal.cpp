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

    // k_t in f16 may lack the last group
    bool is_group(int32_t g) const { return g >= 0 && g*(int64_t) GROUP < n_kv && (p.n_bit != 16 || g*(int64_t) GROUP < k_t->ne[0]); }
};

// K in blocks, or rotated, is brought to f32 first: a group of it, or the run that it is coded with
struct seal_work {
    float * rows = nullptr; // [GROUP or RUN][d_k]  this thread's
    size_t  size = 0;       // of all threads

    seal_work(const seal_src & a, const void * wdata, int ith, int nth) {
        if (ggml_is_quantized(a.k->type) || a.p.n_rot != 0) {
            size = take_per_thread(bump(wdata), ith, nth, [&](bump & own) { rows = own.take<float>(ggml_sparse_seal_span(a.p.n_bit)*a.d_k); });
        }
    }
};

// Does entry i of the list follow one of the same span of n_group groups? What is done once per span is then done already. If a list is not
// ascending, some of it is done twice, by the same thread
bool same_span(const int32_t * list, int64_t i, int64_t n_group) {
    return i > 0 && list[i - 1] >= 0 && list[i - 1] <= list[i] && list[i - 1]/n_group == list[i]/n_group;
}

// group g of K of one KV head to f16
void seal_group(const seal_src & a, const seal_work & w, int64_t h, int64_t g, int64_t s) {
    const int    n    = group_size(g, a.n_kv);
    const char * rows = at(a.k, h, g*GROUP, s);
    char       * x    = at(a.k_t, h*a.d_k, s) + g*GROUP*sizeof(f16);
    with_kv_type(a.k->type, [&](auto * t) {
        using T = std::decay_t<decltype(*t)>;
        if (w.rows) {
            load_rows<T>(w.rows, rows, a.k->nb[2], n, a.d_k, a.p.n_rot);
            seal_group_f16<float>(x, a.k_t->nb[1], (const char *) w.rows, a.d_k*sizeof(float), n, a.d_k);
        } else if constexpr (span<T>::SIZE == W) {
            seal_group_f16<T>(x, a.k_t->nb[1], rows, a.k->nb[2], n, a.d_k);
        }
    });
}

// a run of K of one KV head to codes, with all its sealed groups
void seal_run(const seal_src & a, const seal_work & w, int64_t h, int64_t run, int64_t s) {
    constexpr int N = RUN/GROUP;
    uint8_t valid[N];
    for (int64_t j = 0; j < N; ++j) {
        valid[j] = (run*N + j + 1)*GROUP <= a.n_kv && at<const int32_t>(a.sealed, s)[run*N + j] != 0;
    }
    char    * codes    = at(a.k_t, h*a.d_k, s) + ggml_sparse_shadow_bytes(run*RUN, a.p.n_bit);
    float   * range    = at<float>(a.k_range, h*a.d_k, run, s);
    const int64_t ld_range = a.k_range->nb[1]/sizeof(float);
    with_kv_type(a.k->type, [&](auto * t) {
        using T = std::decay_t<decltype(*t)>;
        if (w.rows) {
            for (int64_t j = 0; j < N; ++j) {
                if (valid[j]) {
                    load_rows<T>(w.rows + j*GROUP*a.d_k, at(a.k, h, (run*N + j)*GROUP, s), a.k->nb[2], GROUP, a.d_k, a.p.n_rot);
                }
            }
            seal_run_codes<float>(codes, a.k_t->nb[1], range, (const char *) w.rows, a.d_k*sizeof(float), valid, a.d_k, a.p.n_bit, ld_range);
        } else if constexpr (span<T>::SIZE == W) {
            seal_run_codes<T>(codes, a.k_t->nb[1], range, at(a.k, h, run*RUN, s), a.k->nb[2], valid, a.d_k, a.p.n_bit, ld_range);
        }
    });
}

// v_sum[g, c] = sum_t v[t, c], over the positions of group g of one KV head
void sum_group(const seal_src & a, int64_t h, int64_t g, int64_t s) {
    with_kv_type(a.v->type, [&](auto * t) {
        float * sum = at<float>(a.v_sum, ggml_sparse_sum_row(g), s) + h*a.d_v;
        memset(sum, 0, a.d_v*sizeof(float));
        sum_positions<std::decay_t<decltype(*t)>>(sum, at(a.v, h, g*GROUP, s), a.v->nb[2], group_size(g, a.n_kv), a.d_v);
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
    const int64_t i = g*GROUP/ggml_sparse_seal_span(a.p.n_bit); // a run is coded at once
    return a.n_all % nth == 0 ? head*nth/a.n_all : nth % a.n_all == 0 ? head + i % (nth/a.n_all)*a.n_all : (i*a.n_all + head) % nth;
}

// this thread's entries of the list
void seal_list(const seal_src & a, const seal_work & w, int64_t ith, int64_t nth) {
    for (int64_t u = 0; u < a.n_list*a.n_all; ++u) {
        digits d { u };
        const int64_t h = d.next(a.n_head_kv), s = d.next(a.n_stream), i = d.rest;
        const int32_t * list = a.groups(s);
        const int64_t g = list[i];
        if (!a.is_group((int32_t) g) || owner(a, s*a.n_head_kv + h, g, nth) != ith) {
            continue;
        }
        if (!ggml_sparse_has_codes(a.p.n_bit)) {
            seal_group(a, w, h, g, s);
        } else if (!same_span(list, i, RUN/GROUP)) {
            seal_run(a, w, h, g/(RUN/GROUP), s);
        }
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
        if (a.is_group(list[i]) && (list[i]/SUM*a.n_all + s*a.n_head_kv + h) % nth == ith && !same_span(list, i, SUM)) {
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
