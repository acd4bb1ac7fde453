#include "sparse-seal.h"

#include "sparse-codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

using access = llama_sparse_access;

//
// seal
//

namespace {

// complete groups below `end` that are not sealed, by stream: about n_most, and then those whose codes have a range in common with the last one
std::vector<std::vector<int32_t>> groups_to_seal(llama_kv_cache & kv, size_t n_most, uint32_t end) {
    const auto &  shadow = *access::shadow(kv);
    const int32_t n_span = ggml_sparse_seal_span(shadow.n_bit())/GGML_SPARSE_GROUP;
    std::vector<std::vector<int32_t>> res(kv.get_n_stream());
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

    seal_graph(llama_kv_cache & kv, llama_sparse_state & state, size_t n_list) {
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
                src.stats  = state.stats(llama_sparse_device_of(layers[ikv].k));
                ggml_build_forward_expand(gf, shadow.build_seal(ctx.get(), kv, ikv, 0, src));
                ++n_layer;
            }
        }
    }
};

} // namespace

int64_t llama_sparse_seal(llama_kv_cache & kv, llama_sparse_state & state, ggml_backend_sched_t like, size_t n_most, uint32_t end) {
    auto & shadow = *access::shadow(kv);
    auto   todo   = groups_to_seal(kv, n_most, end);
    size_t n_list = 0, n_group = 0;
    for (const auto & groups : todo) {
        n_list   = std::max(n_list, groups.size());
        n_group += groups.size();
    }
    if (n_group == 0) {
        return 0;
    }
    const seal_graph graph(kv, state, n_list);
    if (graph.n_layer == 0) {
        return 0;
    }

    // a scheduler of its own, so that the allocations of the context's stay as they are; each node runs where its k_t lies
    std::vector<ggml_backend_t> backends;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(like); ++i) {
        backends.push_back(ggml_backend_sched_get_backend(like, i));
    }
    ggml_backend_sched_ptr sched(ggml_backend_sched_new(backends.data(), nullptr, backends.size(), GGML_DEFAULT_GRAPH_SIZE, false, false));
    if (!ggml_backend_sched_alloc_graph(sched.get(), graph.gf)) {
        return -1;
    }
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
    for (uint32_t s = 0; s < todo.size(); ++s) {
        for (int32_t g : todo[s]) {
            shadow.seal(s, g);
        }
        todo[s].resize(n_list, -1);
        ggml_backend_tensor_set(graph.list, todo[s].data(), s*graph.list->nb[1], graph.list->nb[1]);
        if (ggml_sparse_has_codes(shadow.n_bit())) {
            const std::vector<int32_t> row(shadow.sealed(s).begin(), shadow.sealed(s).end());
            ggml_backend_tensor_set(graph.sealed, row.data(), s*graph.sealed->nb[1], graph.sealed->nb[1]);
        }
    }
    if (ggml_backend_sched_graph_compute(sched.get(), graph.gf) != GGML_STATUS_SUCCESS) {
        return -1;
    }
    guard.is_done = true;
    shadow.commit();
    return graph.n_layer*n_group;
}

//
// check
//

namespace {

// a tensor where the CPU can read it: its own data, or a copy from the device
struct host_view {
    const ggml_tensor * t;
    std::vector<char>   copy;
    const char        * data;

    explicit host_view(const ggml_tensor * t) : t(t), data(t ? (const char *) t->data : nullptr) {
        if (t && llama_sparse_device_of(t)) {
            copy.resize(ggml_nbytes(t));
            ggml_backend_tensor_get(t, copy.data(), 0, copy.size());
            data = copy.data();
        }
    }
};

// one row of K or V as f32; row [n] of a type that has a kernel
void load_row(const host_view & view, uint32_t stream, uint32_t cell, std::vector<float> & row) {
    const ggml_tensor * t = view.t;
    const void * src = view.data + stream*t->nb[2] + cell*t->nb[1];
    row.resize(t->ne[0]);
    if (t->type == GGML_TYPE_F32) {
        memcpy(row.data(), src, row.size()*sizeof(float));
    } else {
        ggml_get_type_traits(t->type)->to_float(src, row.data(), row.size());
    }
}

// x [n] = H*x, the orthonormal Walsh-Hadamard matrix, its own inverse
void hadamard(float * x, int32_t n) {
    for (int32_t s = 1; s < n; s *= 2) {
        for (int32_t i = 0; i < n; ++i) {
            if (!(i & s)) {
                const float a = x[i], b = x[i + s];
                x[i]     = a + b;
                x[i + s] = a - b;
            }
        }
    }
    for (int32_t i = 0; i < n; ++i) {
        x[i] /= std::sqrt((float) n);
    }
}

// what is compared in one layer
struct layer_check {
    const host_view k, v, k_t, k_range, v_sum;
    const int32_t   n_bit, n_rot;
    std::vector<float> row = {};

    // does k_t hold x for cell i and component c? As exactly as its type can; err: of x itself
    bool matches(uint32_t s, uint32_t i, size_t c, float x, float err) const {
        const auto * codes = (const uint8_t *) k_t.data + s*k_t.t->nb[2] + c*k_t.t->nb[1];
        if (!ggml_sparse_has_codes(n_bit)) {
            const float y = ggml_fp16_to_fp32(((const ggml_fp16_t *) codes)[i]);
            return y == ggml_fp16_to_fp32(ggml_fp32_to_fp16(x)) || (err > 0.0f && std::abs(y - x) <= err + 5e-4f*std::abs(x));
        }
        const auto * nb = k_range.t->nb;
        const auto * range = (const float *) (k_range.data + s*nb[3] + c*nb[2] + i/GGML_SPARSE_RUN*nb[1]);
        const int code = codes[ggml_sparse_code_byte(i, n_bit)] >> ggml_sparse_code_shift(i, n_bit) & ggml_sparse_code_max(n_bit);
        return std::abs(range[1] + range[0]*code - x) <= 0.501f*range[0] + 1e-6f*std::abs(x) + err;
    }

    bool cell_matches(uint32_t s, uint32_t i) {
        load_row(k, s, i, row);
        float err = 0.0f;
        for (size_t c = 0; n_rot > 0 && c < row.size(); c += n_rot) {
            hadamard(&row[c], n_rot);
        }
        for (size_t c = 0; n_rot > 0 && c < row.size(); ++c) {
            err = std::max(err, 1e-5f*std::abs(row[c])); // the matrix rounds
        }
        for (size_t c = 0; c < row.size(); ++c) {
            if (!matches(s, i, c, std::clamp(row[c], -GGML_SPARSE_SHADOW_MAX, GGML_SPARSE_SHADOW_MAX), err)) {
                return false;
            }
        }
        return true;
    }

    bool sum_matches(uint32_t s, uint32_t g) {
        if (!v_sum.t) {
            return true;
        }
        std::vector<double> sum(v.t->ne[0], 0.0), mag(v.t->ne[0], 0.0);
        for (uint32_t i = g*GGML_SPARSE_GROUP; i < (g + 1)*GGML_SPARSE_GROUP; ++i) {
            load_row(v, s, i, row);
            for (size_t c = 0; c < row.size(); ++c) {
                sum[c] += row[c];
                mag[c] += std::abs(row[c]);
            }
        }
        return is_near(sum_row(s, ggml_sparse_sum_row(g)), sum, mag);
    }

    // is the total of the sum block that begins with group g the sum of its rows?
    bool total_matches(uint32_t s, uint32_t g) const {
        if (!v_sum.t) {
            return true;
        }
        std::vector<double> sum(v.t->ne[0], 0.0), mag(v.t->ne[0], 0.0);
        for (uint32_t i = g; i < g + GGML_SPARSE_SUM; ++i) {
            const float * part = sum_row(s, ggml_sparse_sum_row(i));
            for (size_t c = 0; c < sum.size(); ++c) {
                sum[c] += part[c];
                mag[c] += std::abs(part[c]);
            }
        }
        return is_near(sum_row(s, ggml_sparse_total_row(g)), sum, mag);
    }

    const float * sum_row(uint32_t s, int64_t row) const { return (const float *) (v_sum.data + s*v_sum.t->nb[2] + row*v_sum.t->nb[1]); }

    // mag: the sums of the magnitudes
    static bool is_near(const float * have, const std::vector<double> & sum, const std::vector<double> & mag) {
        for (size_t c = 0; c < sum.size(); ++c) {
            if (!(std::abs(have[c] - sum[c]) <= 1e-5*mag[c] + 1e-30)) {
                return false;
            }
        }
        return true;
    }

    bool group_matches(uint32_t s, uint32_t g) {
        for (uint32_t i = g*GGML_SPARSE_GROUP; i < (g + 1)*GGML_SPARSE_GROUP; ++i) {
            if (!cell_matches(s, i)) {
                return false;
            }
        }
        return sum_matches(s, g);
    }
};

} // namespace

int64_t llama_sparse_count_stale(llama_kv_cache & kv) {
    const auto & shadow = *access::shadow(kv);
    const auto & layers = access::layers(kv);
    int64_t res = 0;
    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & own = shadow.at(ikv);
        if (!own.k_t) {
            continue;
        }
        layer_check check = {
            host_view(layers[ikv].k), host_view(layers[ikv].v), host_view(own.k_t), host_view(own.k_range), host_view(own.v_sum),
            shadow.n_bit(), llama_sparse_n_rot(kv),
        };
        for (uint32_t s = 0; s < kv.get_n_stream(); ++s) {
            const auto & sealed = shadow.sealed(s);
            uint32_t n_sealed = 0; // of the groups of a sum block
            for (uint32_t g = 0; g < sealed.size(); ++g) {
                n_sealed = (g % GGML_SPARSE_SUM == 0 ? 0 : n_sealed) + (sealed[g] != 0);
                const bool is_whole = n_sealed == GGML_SPARSE_SUM;
                res += sealed[g] && !(check.group_matches(s, g) && (!is_whole || check.total_matches(s, g + 1 - GGML_SPARSE_SUM)));
            }
        }
    }
    return res;
}
