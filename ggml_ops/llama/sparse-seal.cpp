#include "sparse-seal.h"

#include "sparse-codes.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

using access = llama_sparse_access;

//
// seal
//

namespace {

using groups = std::vector<std::vector<int32_t>>; // by stream

// complete groups below `end` that are not sealed, by stream: about n_most, and then those whose codes have a range in common with the last one
groups groups_to_seal(llama_kv_cache & kv, size_t n_most, uint32_t end) {
    const auto &  shadow = *access::shadow(kv);
    const int32_t n_span = ggml_sparse_seal_span(shadow.n_bit())/GGML_SPARSE_GROUP;
    groups res(kv.get_n_stream());
    size_t n_group = 0;
    for (uint32_t s = 0; s < res.size(); ++s) {
        shadow.for_sealable(access::cells(kv, s), s, std::min(end, kv.get_size()), nullptr, [&](int32_t g) {
            const bool is_next = res[s].empty() || g/n_span != res[s].back()/n_span;
            if (is_next && n_group >= n_most) {
                return false;
            }
            res[s].push_back(g);
            ++n_group;
            return true;
        });
    }
    return res;
}

// a graph that seals up to n_list groups of each stream, in all layers
struct seal_graph {
    ggml_context_ptr ctx;
    ggml_tensor    * list;   // [n_list, n_stream]; -1: nothing
    ggml_tensor    * sealed; // [n_grp, n_stream]
    ggml_cgraph    * gf;
    int64_t          n_layer = 0;

    // state: what counts the groups, or nullptr
    seal_graph(llama_kv_cache & kv, const llama_sparse_state * state, size_t n_list) {
        const auto & layers = access::layers(kv);
        const auto & shadow = *access::shadow(kv);
        ctx.reset(ggml_init({ (16*layers.size() + 16)*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
        list   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, n_list, kv.get_n_stream());
        sealed = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, shadow.sealed(0).size(), kv.get_n_stream());
        gf     = ggml_new_graph(ctx.get());
        ggml_set_input(list);
        ggml_set_input(sealed);

        llama_kv_cache::slot_info all;
        all.s0 = 0;
        all.s1 = kv.get_n_stream() - 1;
        for (const auto & [il, ikv] : access::layer_ids(kv)) {
            if (shadow.at(ikv).k_t && layers[ikv].il == (uint32_t) il) { // a layer that reuses another's cells has none of its own
                ggml_sparse_src src = {};
                src.k      = kv.get_k(ctx.get(), il, kv.get_size(), all);
                src.v      = kv.get_v(ctx.get(), il, kv.get_size(), all);
                src.list   = list;
                src.sealed = sealed;
                src.stats  = state ? state->stats(llama_sparse_device_of(layers[ikv].k)) : nullptr;
                ggml_build_forward_expand(gf, shadow.build_seal(ctx.get(), kv, ikv, 0, src));
                ++n_layer;
            }
        }
    }
};

// Seals these groups, which count as sealed already. Returns in how many layers; < 0: not computed
int64_t run_seal(llama_kv_cache & kv, const llama_sparse_state * state, ggml_backend_sched_t like, groups todo) {
    auto & shadow = *access::shadow(kv);
    size_t n_list = 1;
    for (const auto & own : todo) {
        n_list = std::max(n_list, own.size());
    }
    const seal_graph graph(kv, state, n_list);
    // a scheduler of its own, so that the allocations of the context's stay as they are; each node runs where its k_t lies
    std::vector<ggml_backend_t> backends;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(like); ++i) {
        backends.push_back(ggml_backend_sched_get_backend(like, i));
    }
    ggml_backend_sched_ptr sched(ggml_backend_sched_new(backends.data(), nullptr, backends.size(), GGML_DEFAULT_GRAPH_SIZE, false, false));
    if (graph.n_layer == 0 || !ggml_backend_sched_alloc_graph(sched.get(), graph.gf)) {
        return graph.n_layer == 0 ? 0 : -1;
    }
    for (uint32_t s = 0; s < todo.size(); ++s) {
        todo[s].resize(n_list, -1);
        ggml_backend_tensor_set(graph.list, todo[s].data(), s*graph.list->nb[1], graph.list->nb[1]);
        if (ggml_sparse_has_codes(shadow.n_bit())) {
            const std::vector<int32_t> row(shadow.sealed(s).begin(), shadow.sealed(s).end());
            ggml_backend_tensor_set(graph.sealed, row.data(), s*graph.sealed->nb[1], graph.sealed->nb[1]);
        }
    }
    return ggml_backend_sched_graph_compute(sched.get(), graph.gf) == GGML_STATUS_SUCCESS ? graph.n_layer : -1;
}

} // namespace

int64_t llama_sparse_seal(llama_kv_cache & kv, llama_sparse_state & state, ggml_backend_sched_t like, size_t n_most, uint32_t end) {
    auto & shadow = *access::shadow(kv);
    const groups todo = groups_to_seal(kv, n_most, end);
    // whatever throws or fails in between, no group may count as sealed whose part of the shadow was not written
    struct unless_done {
        llama_sparse_shadow & shadow;
        bool                  is_done;

        ~unless_done() {
            if (!is_done) {
                shadow.rollback();
            }
        }
    };
    shadow.commit();
    unless_done guard = { shadow, false };
    int64_t n_group = 0;
    for (uint32_t s = 0; s < todo.size(); ++s) {
        for (int32_t g : todo[s]) {
            shadow.seal(s, g);
            ++n_group;
        }
    }
    if (n_group == 0) {
        return 0;
    }
    const int64_t n_layer = run_seal(kv, &state, like, todo);
    if (n_layer <= 0) {
        return n_layer;
    }
    guard.is_done = true;
    shadow.commit();
    return n_layer*n_group;
}

//
// check
//

namespace {

// the bytes of a tensor, wherever it is; none of nullptr
std::vector<char> bytes_of(const ggml_tensor * t) {
    std::vector<char> res(t ? ggml_nbytes(t) : 0);
    if (t) {
        ggml_backend_tensor_get(t, res.data(), 0, res.size());
    }
    return res;
}

// the shadow of a layer
struct layer_bytes {
    const llama_sparse_shadow::layer * own;
    std::vector<char> k_t, k_range, v_sum;

    explicit layer_bytes(const llama_sparse_shadow::layer & own) :
        own(&own), k_t(bytes_of(own.k_t)), k_range(bytes_of(own.k_range)), v_sum(bytes_of(own.v_sum)) {
    }
};

// are the codes of group g the same, and the scales and zeros of its run?
bool same_codes(const layer_bytes & a, const layer_bytes & b, int32_t n_bit, uint32_t s, uint32_t g) {
    const ggml_tensor * t = a.own->k_t, * r = a.own->k_range;
    const auto same = [](const std::vector<char> & x, const std::vector<char> & y, size_t at, size_t n) { return memcmp(&x[at], &y[at], n) == 0; };
    for (int64_t c = 0; c < t->ne[1]; ++c) {
        const size_t at = s*t->nb[2] + c*t->nb[1];
        if (!r) {
            if (!same(a.k_t, b.k_t, at + ggml_sparse_shadow_bytes(g*GGML_SPARSE_GROUP, n_bit), ggml_sparse_shadow_bytes(GGML_SPARSE_GROUP, n_bit))) {
                return false;
            }
            continue;
        }
        if (!same(a.k_range, b.k_range, s*r->nb[3] + c*r->nb[2] + g*GGML_SPARSE_GROUP/GGML_SPARSE_RUN*r->nb[1], r->nb[1])) {
            return false;
        }
        for (int64_t i = g*GGML_SPARSE_GROUP; i < (g + 1)*GGML_SPARSE_GROUP; ++i) { // beside codes of other groups, which may not be sealed
            const size_t byte = at + ggml_sparse_code_byte(i, n_bit);
            if ((a.k_t[byte] ^ b.k_t[byte]) & ggml_sparse_code_max(n_bit) << ggml_sparse_code_shift(i, n_bit)) {
                return false;
            }
        }
    }
    return true;
}

bool same_sums(const layer_bytes & a, const layer_bytes & b, uint32_t s, int64_t row) {
    const ggml_tensor * t = a.own->v_sum;
    const size_t at = t ? s*t->nb[2] + row*t->nb[1] : 0;
    return !t || memcmp(&a.v_sum[at], &b.v_sum[at], t->nb[1]) == 0;
}

} // namespace

int64_t llama_sparse_count_stale(llama_kv_cache & kv, ggml_backend_sched_t like) {
    const auto & shadow = *access::shadow(kv);
    groups all(kv.get_n_stream());
    for (uint32_t s = 0; s < all.size(); ++s) {
        for (size_t g = 0; g < shadow.sealed(s).size(); ++g) {
            if (shadow.sealed(s)[g]) {
                all[s].push_back(g);
            }
        }
    }
    std::vector<layer_bytes> before;
    for (size_t ikv = 0; ikv < access::layers(kv).size(); ++ikv) {
        if (shadow.at(ikv).k_t) {
            before.emplace_back(shadow.at(ikv));
        }
    }
    if (run_seal(kv, nullptr, like, all) < 0) {
        throw std::runtime_error("K could not be transposed");
    }
    int64_t res = 0;
    for (const layer_bytes & was : before) {
        const layer_bytes is(*was.own);
        for (uint32_t s = 0; s < all.size(); ++s) {
            uint32_t n_sealed = 0; // of the groups of a sum block
            for (size_t i = 0; i < all[s].size(); ++i) {
                const int32_t g = all[s][i];
                n_sealed = (i > 0 && g/GGML_SPARSE_SUM == all[s][i - 1]/GGML_SPARSE_SUM ? n_sealed : 0) + 1;
                const bool is_whole = n_sealed == GGML_SPARSE_SUM;
                res += !(same_codes(was, is, shadow.n_bit(), s, g) && same_sums(was, is, s, ggml_sparse_sum_row(g)) &&
                        (!is_whole || same_sums(was, is, s, ggml_sparse_total_row(g))));
            }
        }
        for (const auto & [t, bytes] : { std::make_pair(was.own->k_t, &was.k_t), { was.own->k_range, &was.k_range }, { was.own->v_sum, &was.v_sum } }) {
            if (t) { // as it was: a check mends nothing
                ggml_backend_tensor_set(t, bytes->data(), 0, bytes->size());
            }
        }
    }
    return res;
}
