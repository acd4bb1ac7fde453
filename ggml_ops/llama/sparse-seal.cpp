#include "sparse-seal.h"

#include "sparse-codes.h"

#include <algorithm>
#include <stdexcept>

using access = llama_sparse_access;

//
// seal
//

namespace {

// Complete groups below `end` that are not sealed, by stream: as many as hold n_bytes of K and V in all layers, one for each stream at least
std::vector<std::vector<int32_t>> groups_to_seal(llama_kv_cache & kv, size_t n_bytes, uint32_t end) {
    const auto &  shadow = *access::shadow(kv);
    size_t one = 0; // bytes of a group
    for (const auto & layer : access::layers(kv)) {
        one += GGML_SPARSE_GROUP*(layer.k->nb[1] + (layer.v ? layer.v->nb[1] : 0));
    }
    const size_t  n_most = std::max<size_t>(n_bytes/std::max<size_t>(one, 1), kv.get_n_stream());
    std::vector<std::vector<int32_t>> res; // empty, and nothing is allocated, if there are none: as a rule, before a token
    size_t n_group = 0;
    for (uint32_t s = 0; s < kv.get_n_stream(); ++s) {
        shadow.for_sealable(access::cells(kv, s), s, std::min(end, kv.get_size()), [&](int32_t g) {
            if (n_group < n_most) {
                res.resize(kv.get_n_stream());
                res[s].push_back(g);
            }
            return ++n_group < n_most;
        });
    }
    return res;
}

// a graph that seals some groups of each stream in some layers
struct seal_graph {
    llama_kv_cache                           & kv;
    const std::vector<std::vector<int32_t>>  & groups; // [n_stream]
    size_t             n_list = 0; // of the longest stream
    ggml_context_ptr   ctx;
    ggml_tensor      * list;   // [n_list, n_stream]; -1: nothing
    ggml_cgraph      * gf;

    seal_graph(llama_kv_cache & kv, const std::vector<std::vector<int32_t>> & groups) : kv(kv), groups(groups) {
        for (const auto & of_stream : groups) {
            n_list = std::max(n_list, of_stream.size());
        }
        ctx.reset(ggml_init({ (16*access::layers(kv).size() + 16)*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
        list = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, n_list, groups.size());
        gf   = ggml_new_graph(ctx.get());
        ggml_set_input(list);
    }

    // the cells of model layer il to `layer`
    void add(int32_t il, const llama_sparse_shadow::layer & layer, ggml_tensor * stats) {
        ggml_sparse_src src = {};
        llama_sparse_view_cache(ctx.get(), kv, il, src);
        src.list  = list;
        src.stats = stats;
        ggml_build_forward_expand(gf, layer.seal(ctx.get(), 0, src, { access::shadow(kv)->n_bit(), llama_sparse_n_rot(kv) }));
    }

    // On the backends of `like`, by a scheduler of its own, so that the allocations of the context's stay as they are; each node runs where its k_t lies.
    // Throws std::runtime_error: no memory
    void compute(ggml_backend_sched_t like) {
        std::vector<ggml_backend_t> backends;
        for (int i = 0; i < ggml_backend_sched_get_n_backends(like); ++i) {
            backends.push_back(ggml_backend_sched_get_backend(like, i));
        }
        ggml_backend_sched_ptr sched(ggml_backend_sched_new(backends.data(), nullptr, backends.size(), GGML_DEFAULT_GRAPH_SIZE, false, false));
        if (!ggml_backend_sched_alloc_graph(sched.get(), gf)) {
            throw std::runtime_error("no memory to transpose K");
        }
        for (uint32_t s = 0; s < groups.size(); ++s) {
            std::vector<int32_t> row = groups[s];
            row.resize(n_list, -1);
            ggml_backend_tensor_set(list, row.data(), s*list->nb[1], list->nb[1]);
        }
        if (ggml_backend_sched_graph_compute(sched.get(), gf) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("K could not be transposed");
        }
    }
};

} // namespace

int64_t llama_sparse_seal(llama_context & ctx, size_t n_bytes, uint32_t end) {
    const auto & state  = ctx.get_cparams().sparse;
    auto *       cached = llama_sparse_find_shadowed(ctx.get_memory());
    if (!state || !cached) {
        return 0;
    }
    auto &     kv     = *cached;
    auto &     shadow = *access::shadow(kv);
    const auto layers = [&](const auto & f) { // a layer that reuses another's cells has none of its own
        for (const auto & [il, ikv] : access::layer_ids(kv)) {
            if (shadow.at(ikv).k_t && access::layers(kv)[ikv].il == (uint32_t) il) {
                f(il, ikv);
            }
        }
    };
    int64_t n_layer = 0, n_group = 0;
    layers([&](auto, auto) { ++n_layer; });
    const auto todo = groups_to_seal(kv, n_bytes, end);
    for (const auto & of_stream : todo) {
        n_group += of_stream.size();
    }
    if (n_layer == 0 || n_group == 0) {
        return 0;
    }
    ctx.synchronize();
    seal_graph graph(kv, todo);
    layers([&](int32_t il, int32_t ikv) { graph.add(il, shadow.at(ikv), state->stats(llama_sparse_device_of(access::layers(kv)[ikv].k))); });
    // the backends have the threads of a step or of a prompt, whichever came last
    const auto & cparams = ctx.get_cparams();
    for (const auto & [backend, set_n_threads] : access::set_n_threads_fns(ctx)) {
        set_n_threads(backend, std::min(cparams.n_threads, cparams.n_threads_batch));
    }
    shadow.commit();
    try {
        for (uint32_t s = 0; s < todo.size(); ++s) {
            for (int32_t g : todo[s]) {
                shadow.seal(s, g);
            }
        }
        graph.compute(ctx.get_sched());
    } catch (...) {
        shadow.rollback(); // no group may count as sealed whose part of the shadow was not written
        throw;
    }
    shadow.commit();
    return n_layer*n_group;
}

//
// check
//

static std::vector<char> bytes_of(const ggml_tensor * t) {
    std::vector<char> res(ggml_nbytes(t));
    ggml_backend_tensor_get(t, res.data(), 0, res.size());
    return res;
}

// the totals of sum blocks that are not sealed as a whole, which nobody reads
static void copy_other_totals(const llama_sparse_shadow & shadow, const ggml_tensor * v_sum, ggml_tensor * to) {
    std::vector<char> row(v_sum->nb[1]);
    for (uint32_t s = 0; s < v_sum->ne[2]; ++s) {
        const auto & sealed = shadow.sealed(s);
        for (size_t g = 0; g < sealed.size(); g += GGML_SPARSE_SUM) {
            const size_t end = std::min(g + GGML_SPARSE_SUM, sealed.size()), at = s*v_sum->nb[2] + ggml_sparse_total_row(g)*v_sum->nb[1];
            if (std::count(sealed.begin() + g, sealed.begin() + end, 1) < GGML_SPARSE_SUM) {
                ggml_backend_tensor_get(v_sum, row.data(), at, row.size());
                ggml_backend_tensor_set(to, row.data(), at, row.size());
            }
        }
    }
}

int64_t llama_sparse_count_stale(llama_kv_cache & kv, ggml_backend_sched_t like) {
    const auto & shadow = *access::shadow(kv);
    std::vector<std::vector<int32_t>> groups(kv.get_n_stream());
    for (uint32_t s = 0; s < groups.size(); ++s) {
        for (size_t g = 0; g < shadow.sealed(s).size(); ++g) {
            if (shadow.sealed(s)[g]) {
                groups[s].push_back(g);
            }
        }
    }
    int64_t res = 0;
    for (size_t ikv = 0; ikv < access::layers(kv).size(); ++ikv) {
        const auto & own = shadow.at(ikv);
        seal_graph graph(kv, groups);
        if (!own.k_t || graph.n_list == 0) {
            continue;
        }
        ggml_context_ptr ctx(ggml_init({ 3*ggml_tensor_overhead(), nullptr, true }));
        const auto like_own = [&](ggml_tensor * t) { return t ? ggml_dup_tensor(ctx.get(), t) : nullptr; };
        const llama_sparse_shadow::layer copy = { like_own(own.k_t), like_own(own.k_range), like_own(own.v_sum), "" };
        ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_buffer_get_type(own.k_t->buffer)));
        if (!buf) {
            throw std::runtime_error("no memory to check the transposed copy of K");
        }
        std::map<ggml_tensor *, ggml_tensor *> copies = { { own.k_t, copy.k_t }, { own.k_range, copy.k_range }, { own.v_sum, copy.v_sum } };
        copies.erase(nullptr);
        for (const auto & [t, again] : copies) {
            ggml_backend_tensor_copy(t, again);
        }
        graph.add(access::layers(kv)[ikv].il, copy, nullptr);
        graph.compute(like);
        if (own.v_sum) {
            copy_other_totals(shadow, own.v_sum, copy.v_sum);
        }
        for (const auto & [t, again] : copies) {
            res += bytes_of(t) != bytes_of(again);
        }
    }
    return res;
}
