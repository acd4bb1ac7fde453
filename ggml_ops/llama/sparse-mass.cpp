// How much of the true attention ATTEND reads, for whoever measures a method.

#include "llama-sparse.h"
#include "sparse-access.h"
#include "sparse-guarded.h"

#include "llama-hparams.h"
#include "llama-model.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-sparse-nodes.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

using access = llama_sparse_access;

// A backend computes one graph at a time, so each thread that asks has its own, which computes with that thread alone. What is measured is asked
// for between the nodes of another graph, whose threads wait meanwhile
static ggml_backend_t cpu() {
    static thread_local const ggml_backend_ptr res([] {
        ggml_backend_t b = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
        auto * reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(b));
        ((ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"))(b, 1);
        return b;
    }());
    return res.get();
}

static bool is_host(const ggml_tensor * t) {
    const ggml_backend_buffer_t buf = !t ? nullptr : t->view_src ? t->view_src->buffer : t->buffer;
    return !buf || ggml_backend_buffer_is_host(buf);
}

// SCORE from all of K and ggml's softmax, so that no type of K and no kind of bias is written a second time here. Only these two nodes are
// computed: what they are made of is there already
static double mass_of(const ggml_tensor * attend) {
    const ggml_sparse_src a = ggml_sparse_src_of(attend);
    if (!a.sel) {
        return 1.0;
    }
    if (!is_host(a.q) || !is_host(a.k) || !is_host(a.mask) || !is_host(a.sinks) || !is_host(a.sel)) {
        return NAN;
    }
    const auto p = ggml_sparse_params_of<ggml_sparse_attend_params>(attend);
    const int64_t n_kv = a.k->ne[2], n_head = a.q->ne[1], n_head_kv = a.k->ne[1], n_row = a.q->ne[2]*a.q->ne[3], n_group_q = n_head/n_head_kv;

    const size_t size = n_kv*n_head*n_row*sizeof(float) + 3*ggml_tensor_overhead() + ggml_graph_overhead_custom(2, false) + 4*GGML_MEM_ALIGN;
    const ggml_context_ptr ctx(ggml_init({ size, nullptr, false }));
    ggml_sparse_src exact = {};
    exact.q       = a.q;
    exact.k       = a.k;
    exact.mask    = a.mask;
    exact.visible = a.visible;
    ggml_tensor * logits = ggml_sparse_attn_score(ctx.get(), &exact, { 0, p.scale, p.max_bias, p.softcap, 16, 0, 0 });
    ggml_tensor * share  = ggml_soft_max_inplace(ctx.get(), ggml_reshape_4d(ctx.get(), logits, n_kv, 1, n_head, n_row));
    ggml_soft_max_add_sinks(share, a.sinks);
    ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 2, false);
    for (ggml_tensor * t : { logits, share }) {
        t->flags |= GGML_TENSOR_FLAG_COMPUTE;
        ggml_graph_add_node(graph, t);
    }
    if (ggml_backend_graph_compute(cpu(), graph) != GGML_STATUS_SUCCESS) {
        return NAN;
    }

    double sum = 0;
    for (int64_t i = 0; i < n_row*n_head; ++i) {
        const int64_t   h    = i % n_head/n_group_q, row = i/n_head;
        const int32_t * sel  = (const int32_t *) a.sel->data + (row*n_head_kv + h)*a.sel->ne[0];
        const int32_t * cell = sel + 1 + n_group_q;
        const float   * s    = (const float *) share->data + i*n_kv;
        if (sel[0] <= 0) { // GGML_SPARSE_SELECT_ALL, or a token that sees nothing: there is nothing that it misses
            sum += 1.0;
            continue;
        }
        sum += a.sinks ? 1.0 - std::accumulate(s, s + n_kv, 0.0) : 0.0; // a sink's share has no value that could be missed
        for (int32_t j = 0; j < sel[0]; ++j) {
            sum += s[cell[j]];
        }
    }
    return sum/(double) (n_row*n_head);
}

double llama_sparse_attn_mass(const ggml_tensor * attend) {
    return llama_sparse_logged<double>(__func__, NAN, [&] { return mass_of(attend); });
}

//
// all nodes of a context
//

// By layer the sum over the ATTEND nodes, and how many they were. It stands in for the evaluation callback of the context, which it goes on to call
struct llama_sparse_measure {
    llama_context * ctx;
    ggml_backend_sched_eval_callback inner;
    void * inner_data;
    bool   inner_wants = false;
    std::vector<double>  sum;
    std::vector<int64_t> n;

    void note(const ggml_tensor * t) {
        const char * dash = strrchr(t->name, '-');
        const size_t il   = dash ? strtoul(dash + 1, nullptr, 10) : sum.size();
        if (il < sum.size()) {
            sum[il] += llama_sparse_attn_mass(t);
            ++n[il];
        }
    }

    bool on_node(ggml_tensor * t, bool ask) {
        const bool ours = t->op == GGML_OP_SPARSE_ATTN && t->op_params[0] == GGML_SPARSE_ATTN_ATTEND && ggml_sparse_src_of(t).sel;
        if (ask) {
            inner_wants = inner && inner(t, true, inner_data);
            return inner_wants || ours;
        }
        const bool go_on = !inner_wants || inner(t, false, inner_data);
        if (ours) {
            note(t);
        }
        return go_on;
    }
};

static void set_callback(llama_context & ctx, ggml_backend_sched_eval_callback call, void * data) {
    access::cparams(ctx).cb_eval           = call;
    access::cparams(ctx).cb_eval_user_data = data;
    ggml_backend_sched_set_eval_callback(ctx.get_sched(), call, data); // a graph that is used again does not look at the parameters
}

llama_sparse_measure * llama_sparse_measure_begin(llama_context * ctx) {
    return llama_sparse_logged<llama_sparse_measure *>(__func__, nullptr, [&] {
        ctx->synchronize();
        const auto & cparams = ctx->get_cparams();
        const size_t n_layer = ctx->get_model().hparams.n_layer();
        auto * m = new llama_sparse_measure {
            ctx, cparams.cb_eval, cparams.cb_eval_user_data, false, std::vector<double>(n_layer), std::vector<int64_t>(n_layer),
        };
        set_callback(*ctx, [](ggml_tensor * t, bool ask, void * data) { return ((llama_sparse_measure *) data)->on_node(t, ask); }, m);
        return m;
    });
}

void llama_sparse_measure_end(llama_sparse_measure * m, double * mass) {
    m->ctx->synchronize();
    set_callback(*m->ctx, m->inner, m->inner_data);
    for (size_t il = 0; il < m->sum.size(); ++il) {
        mass[il] = m->n[il] > 0 ? m->sum[il]/(double) m->n[il] : 1.0;
    }
    delete m;
}
