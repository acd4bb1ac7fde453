// The shadow of a KV cache, and the graph of one layer's attention.

#include "llama-sparse-impl.h"

#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-graph.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"

#include "ggml-backend.h"
#include "sparse-codes.h"
#include "sparse-compat.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

// Strides of a power of two would map all channels to the same cache sets (PICK by one thread takes 5 to 10 % longer from f16, 10 to 30 % from
// codes, MHA and GQA, 16k; three lines are no better than one). So codes of a channel are a line longer than they need, and f16, which has no
// memory to spare, a group shorter than the cache: its last group, complete only when the cache is full, is always scored from K
static constexpr int64_t CODE_PAD = GGML_SPARSE_LINE;

// groups that a graph can seal, so that it can be used again; when more wait (after a shift), one graph is made that seals them all: a
// position that is not sealed is scored from K, which costs more with every token than sealing it does once
static constexpr int64_t N_SEAL = 16;

//
// shadow
//

struct llama_sparse_shadow {
    struct layer {
        ggml_tensor * k_t     = nullptr; // [n_pos, n_embd_k_gqa, n_stream] f16, or codes
        ggml_tensor * k_range = nullptr; // [2, n_run and more, n_embd_k_gqa, n_stream] f32: scale and zero of the codes; only with codes
        ggml_tensor * v_sum   = nullptr; // [n_embd_v_gqa, n_sum, n_stream] f32; only with mean_v
        std::string   reason;            // why there is no k_t
    };

    std::vector<layer> layers; // by layer of the cache; k_t == nullptr: this layer has no shadow

    // [n_stream][n_grp]: the group's k_t and v_sum equal K and V
    std::vector<std::vector<uint8_t>> sealed;

    std::vector<ggml_context_ptr>        ctxs;
    std::vector<ggml_backend_buffer_ptr> bufs;
    bool                                 has_v_sum = false;
    int32_t                              n_bit     = 16;
    uint32_t                             n_pos     = 0; // that k_t has room for; a group beyond them is never sealed
};

static uint32_t n_groups(uint32_t n_kv) {
    return (n_kv + GGML_SPARSE_GROUP - 1)/GGML_SPARSE_GROUP;
}

// step 3 for a layer? auto: MHA only, as in the paper
static bool wants_mean_v(const llama_sparse_spec & spec, const llama_hparams & hparams, int il) {
    return spec.method == LLAMA_SPARSE_SPARQ && (spec.mean_v < 0 ? hparams.n_head(il) == hparams.n_head_kv(il) : spec.mean_v > 0);
}

static bool is_supported_type(ggml_type type) {
    return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || type == GGML_TYPE_F32 || type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0;
}

// the device whose memory holds t; nullptr: the host, whatever device allocated it
static ggml_backend_dev_t device_of(const ggml_tensor * t) {
    return ggml_backend_buffer_is_host(t->buffer) ? nullptr : ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer));
}

// calls f for each of our nodes that t is made of, t last
template <typename F>
static void for_each_node(ggml_tensor * t, F f) {
    if (t && t->op == GGML_OP_SPARSE_ATTN) {
        for (ggml_tensor * src : t->src) {
            for_each_node(src, f);
        }
        f(t);
    }
}

// "" or why a device can not run all nodes that t is made of
static std::string why_not_run(ggml_backend_dev_t dev, ggml_tensor * t) {
    static const char * names[GGML_SPARSE_ATTN_COUNT] = { "SEAL", "VISIBLE", "SCORE", "SELECT", "PICK", "ATTEND", "PREFILL" };
    std::string res;
    for_each_node(t, [&](ggml_tensor * node) {
        if (dev && res.empty() && !ggml_backend_dev_supports_op(dev, node)) {
            res = std::string(ggml_backend_dev_name(dev)) + " has no kernel for " + names[node->op_params[0]];
        }
    });
    return res;
}

// x [n] = H*x, the orthonormal Walsh-Hadamard matrix, its own inverse
static void turn(float * x, int32_t n) {
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

// the graph's streams of a tensor of the shadow; nullptr of nullptr
static ggml_tensor * view_streams(ggml_context * ctx, ggml_tensor * t, int64_t n_stream, uint32_t s0) {
    return t ? ggml_view_3d(ctx, t, t->ne[0], t->ne[1], n_stream, t->nb[1], t->nb[2], s0*t->nb[2]) : nullptr;
}

// scales and zeros lie in memory channel by channel, since SCORE reads those of few channels; the ops see [2, channels, n_run, n_stream]
static ggml_tensor * view_range(ggml_context * ctx, ggml_tensor * t, int64_t n_stream, uint32_t s0) {
    return t ? ggml_view_4d(ctx, t, t->ne[0], t->ne[2], t->ne[1], n_stream, t->nb[2], t->nb[1], t->nb[3], s0*t->nb[3]) : nullptr;
}

// the private parts of upstream's classes that we read; they name this struct as a friend
struct llama_sparse_access {
    using slot_info = llama_kv_cache::slot_info;

    static llama_kv_cache  * kv   (const llama_kv_cache_context * mctx) { return mctx->kv; }
    static const slot_info & sinfo(const llama_kv_cache_context * mctx) { return mctx->sinfos[mctx->i_cur]; }

    static const llama_kv_cells & cells(const llama_kv_cache * kv, uint32_t stream) { return kv->v_cells[stream]; }
    static uint32_t stream_of(const llama_kv_cache * kv, llama_seq_id seq) { return kv->seq_to_stream[seq]; }
    static int32_t  layer_of (const llama_kv_cache * kv, int il)           { return kv->map_layer_ids.at(il); }

    static ggml_backend_dev_t device(const llama_kv_cache * kv, int32_t ikv) { return device_of(kv->layers[ikv].k); }

    static std::shared_ptr<llama_sparse_shadow> & shadow(llama_kv_cache * kv) { return kv->sparse; }

    // components of K (and q) that llama.cpp turns together by a Hadamard matrix, 0: none; as in build_input_k_rot()
    static int32_t n_rot(const llama_kv_cache * kv) {
        return kv->attn_rot_k ? kv->n_embd_head_k_all & -kv->n_embd_head_k_all : 0;
    }

    // bytes of one position of a KV head: K and V
    static double row_bytes(const llama_kv_cache * kv, int il) {
        const auto & layer = kv->layers[layer_of(kv, il)];
        return (double) (ggml_row_size(layer.k->type, layer.k->ne[0]) + ggml_row_size(layer.v->type, layer.v->ne[0]))/kv->hparams.n_head_kv(il);
    }

    // the share of dense attention's bytes that step 1 reads in each layer [n_layer]; 0 for layers of other caches
    static std::vector<double> score_shares(const llama_kv_cache * kv, const llama_sparse_spec & spec, int32_t n_layer) {
        std::vector<double> res(n_layer, 0.0);
        for (const auto & [il, ikv] : kv->map_layer_ids) {
            if (!*why_not_layer(kv, ikv) && il < n_layer) {
                const double bytes = row_bytes(kv, il);
                const double scale = spec.n_bit == 16 ? 0.0 : 2.0*sizeof(float)/GGML_SPARSE_RUN; // and zero
                res[il] = spec.rank_for(il, kv->hparams.n_embd_head_k(il), bytes)*(spec.n_bit/8.0 + scale)/bytes;
            }
        }
        return res;
    }

    // "" or why no layer of this cache can be sparse
    static const char * why_not(const llama_kv_cache * kv) {
        return kv->other           ? "the cells are shared with another cache" :
               kv->v_trans         ? "flash attention is off" :
               kv->layers.empty()  ? "the cache has no layers" :
               kv->hparams.is_mla() ? "multi-head latent attention" : "";
    }

    // "" or why this layer of the cache can not be sparse
    static const char * why_not_layer(const llama_kv_cache * kv, int32_t ikv) {
        const auto & layer = kv->layers[ikv];
        if (!layer.k || !layer.v) {
            return "no separate K and V";
        }
        if (!is_supported_type(layer.k->type) || !is_supported_type(layer.v->type)) {
            return "K or V of a type without a kernel";
        }
        const ggml_backend_dev_t dev = device_of(layer.k);
        if (dev != device_of(layer.v)) {
            return "K and V are on different devices";
        }
        if (dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_META) {
            return "K and V are split among devices (tensor split)";
        }
        // says that it runs every op, whatever the other machine can do
        return dev && !strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC") ? "K and V are on another machine" : "";
    }

    static void create(llama_kv_cache * kv, const llama_sparse_spec & spec, const llama_hparams & hparams) {
        bool v_sum = false;
        for (const auto & [il, ikv] : kv->map_layer_ids) {
            v_sum = v_sum || wants_mean_v(spec, hparams, il);
        }
        auto & old = kv->sparse;
        if (*why_not(kv) || (old && old->n_bit == spec.n_bit && (old->has_v_sum || !v_sum))) {
            return;
        }

        auto shadow = std::make_shared<llama_sparse_shadow>();
        shadow->has_v_sum = v_sum;
        shadow->n_bit     = spec.n_bit;
        shadow->n_pos     = shadow_positions(kv, spec.n_bit);
        shadow->layers.resize(kv->layers.size());

        // in the memory of K, layer by layer; what the device can not run gets none
        std::map<ggml_backend_dev_t, ggml_context_ptr> ctxs;
        for (size_t ikv = 0; ikv < kv->layers.size(); ++ikv) {
            if (*why_not_layer(kv, ikv) || kv->layers[ikv].il >= hparams.n_layer()) {
                continue;
            }
            auto & ctx = ctxs[device_of(kv->layers[ikv].k)];
            if (!ctx) {
                ctx.reset(ggml_init({ 3*kv->layers.size()*ggml_tensor_overhead(), nullptr, true }));
            }
            auto & dst = shadow->layers[ikv];
            dst.reason = why_not_sparq(kv, hparams, spec, ikv, v_sum);
            if (dst.reason.empty()) {
                new_layer(ctx.get(), kv, spec, ikv, v_sum, dst);
            }
        }
        for (auto & [dev, ctx] : ctxs) {
            ggml_tensor * first = ggml_get_first_tensor(ctx.get());
            if (!first) {
                continue;
            }
            const ggml_backend_buffer_type_t buft = dev ? ggml_backend_dev_buffer_type(dev) : ggml_backend_cpu_buffer_type();
            // not cleared: a group is read only after it was sealed, and the pages are first touched by the threads that seal
            const bool no_alloc = kv->hparams.no_alloc;
            ggml_backend_buffer_ptr buf(no_alloc ? ggml_backend_buft_alloc_buffer(buft, 0) : ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
            if (!buf) {
                throw std::runtime_error("no memory for the transposed copy of K\nuse a shorter context, or topk, which needs no copy");
            }
            if (no_alloc) { // a context that only measures: without memory, as upstream makes K and V, and counted with them
                for (ggml_tensor * t = first; t; t = ggml_get_next_tensor(ctx.get(), t)) {
                    t->buffer = buf.get();
                }
                kv->ctxs_bufs.emplace_back(std::move(ctx), std::move(buf));
                continue;
            }
            llama_sparse_huge_pages(buf.get());
            shadow->ctxs.push_back(std::move(ctx));
            shadow->bufs.push_back(std::move(buf));
        }
        shadow->sealed.assign(kv->n_stream, std::vector<uint8_t>(n_groups(kv->get_size()), 0));

        old = std::move(shadow);
    }

    // positions of a row of k_t
    static uint32_t shadow_positions(const llama_kv_cache * kv, int32_t n_bit) {
        const uint32_t n = kv->get_size();
        return n_bit == 16 ? (n - 1)/GGML_SPARSE_GROUP*GGML_SPARSE_GROUP : (n + GGML_SPARSE_RUN - 1)/GGML_SPARSE_RUN*GGML_SPARSE_RUN;
    }

    // the tensors of one layer's shadow, without memory
    static void new_layer(ggml_context * ctx, const llama_kv_cache * kv, const llama_sparse_spec & spec, size_t ikv, bool v_sum, llama_sparse_shadow::layer & dst) {
        const auto & src = kv->layers[ikv];
        const int64_t n_pos = shadow_positions(kv, spec.n_bit);
        if (spec.n_bit == 16) {
            dst.k_t = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, n_pos, src.k->ne[0], kv->n_stream);
        } else {
            const int64_t n_run = n_pos/GGML_SPARSE_RUN;
            dst.k_t = ggml_new_tensor_3d(ctx, GGML_TYPE_I8, n_pos*spec.n_bit/8 + CODE_PAD, src.k->ne[0], kv->n_stream);
            // whole cache lines per channel: a tile of SCORE reads one of each. An odd number, or many channels would share a set of the cache
            const int64_t n_line = (n_run + 7)/8 | 1;
            dst.k_range = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 2, 8*n_line, src.k->ne[0], kv->n_stream);
            ggml_format_name(dst.k_range, "sparse_k_range_%d", (int) src.il);
        }
        ggml_format_name(dst.k_t, "sparse_k_t_%d", (int) src.il);
        if (v_sum) {
            dst.v_sum = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, src.v->ne[0], ggml_sparse_n_sum_rows(n_groups(kv->get_size())), kv->n_stream);
            ggml_format_name(dst.v_sum, "sparse_v_sum_%d", (int) src.il);
        }
    }

    // "" or why the device of a layer's K can not run SparQ on it: asks with the nodes of a token that sees all of the cache
    static std::string why_not_sparq(const llama_kv_cache * kv, const llama_hparams & hparams, const llama_sparse_spec & spec, size_t ikv, bool v_sum) {
        const int il = kv->layers[ikv].il;
        const ggml_backend_dev_t dev = device_of(kv->layers[ikv].k);
        if (!dev) {
            return "";
        }
        ggml_context_ptr scratch(ggml_init({ 64*ggml_tensor_overhead(), nullptr, true }));
        ggml_context * ctx = scratch.get();
        llama_sparse_shadow::layer layer;
        new_layer(ctx, kv, spec, ikv, v_sum, layer);

        const int64_t n_kv = kv->get_size(), ns = kv->n_stream;
        llama_kv_cache::slot_info all;
        all.s0 = 0;
        all.s1 = ns - 1;
        ggml_sparse_attn_inputs in = {};
        in.k       = kv->get_k(ctx, il, n_kv, all);
        in.v       = kv->get_v(ctx, il, n_kv, all);
        in.q       = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, in.k->ne[0], hparams.n_head(il), 1, ns);
        in.mask    = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, n_kv, 1, 1, ns);
        in.visible = ggml_sparse_attn_visible(ctx, in.mask);
        in.sealed  = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_groups(n_kv), ns);
        in.forced  = ggml_new_tensor_4d(ctx, GGML_TYPE_I32, std::max(spec.sinks, 1), 1, 1, ns);
        in.kl      = ggml_new_tensor_4d(ctx, GGML_TYPE_I32, 2, 1, 1, ns);
        in.k_range = view_range(ctx, layer.k_range, ns, 0);
        in.v_sum   = layer.v_sum;
        in.k_t     = ggml_sparse_attn_seal(ctx, view_streams(ctx, layer.k_t, ns, 0), layer.v_sum, in.k, layer.v_sum ? in.v : nullptr, in.sealed,
                nullptr, in.k_range, spec.n_bit == 16 ? nullptr : in.sealed, { spec.n_bit, n_rot(kv) });

        ggml_sparse_attn_params params = {};
        params.rank     = spec.rank_for(il, in.k->ne[0], row_bytes(kv, il));
        params.topk_max = spec.cap_for(spec.topk_for(il, n_kv, score_shares(kv, spec, hparams.n_layer())), n_kv);
        params.scale    = 1.0f;
        params.mean_v   = layer.v_sum && wants_mean_v(spec, hparams, il);
        params.n_bit    = spec.n_bit;
        params.n_rot    = n_rot(kv);
        params.top_p    = (float) spec.top_p;
        return why_not_run(dev, ggml_sparq_attn(ctx, &in, &params));
    }

    // a tensor where the CPU can read it: its own data, or a copy from the device
    struct host_view {
        const ggml_tensor * t;
        std::vector<char>   copy;
        const char        * data;

        explicit host_view(const ggml_tensor * t) : t(t), data(t ? (const char *) t->data : nullptr) {
            if (t && device_of(t)) {
                copy.resize(ggml_nbytes(t));
                ggml_backend_tensor_get(t, copy.data(), 0, copy.size());
                data = copy.data();
            }
        }
    };

    // one row of K or V as f32; row [n] of a type that why_not_layer() accepts
    static void load_row(const host_view & view, uint32_t stream, uint32_t cell, std::vector<float> & row) {
        const ggml_tensor * t = view.t;
        const void * src = view.data + stream*t->nb[2] + cell*t->nb[1];
        row.resize(t->ne[0]);
        if (t->type == GGML_TYPE_F32) {
            memcpy(row.data(), src, row.size()*sizeof(float));
        } else {
            ggml_get_type_traits(t->type)->to_float(src, row.data(), row.size());
        }
    }

    // does k_t hold x for cell i and channel c? As exactly as its type can; err: of x itself
    static bool matches(int32_t n_bit, const host_view & k_t, const host_view & k_range, uint32_t s, uint32_t i, size_t c, float x, float err) {
        const auto * row = (const uint8_t *) k_t.data + s*k_t.t->nb[2] + c*k_t.t->nb[1];
        if (n_bit == 16) {
            const ggml_fp16_t y = ((const ggml_fp16_t *) row)[i];
            return y == ggml_fp32_to_fp16(x) || (err > 0.0f && std::abs(ggml_fp16_to_fp32(y) - x) <= err + 5e-4f*std::abs(x));
        }
        const auto * nb = k_range.t->nb;
        const auto * range = (const float *) (k_range.data + s*nb[3] + c*nb[2] + i/GGML_SPARSE_RUN*nb[1]);
        const int code = row[ggml_sparse_code_byte(i, n_bit)] >> ggml_sparse_code_shift(i, n_bit) & ((1 << n_bit) - 1);
        return std::abs(range[1] + range[0]*code - x) <= 0.501f*range[0] + 1e-6f*std::abs(x) + err;
    }

    // calls f(group) for the complete groups below n_kv that are not sealed and not busy [n_grp] (or NULL), until it returns false
    template <typename F>
    static void for_sealable(const llama_kv_cache * kv, uint32_t stream, uint32_t n_kv, const uint8_t * busy, F f) {
        const auto & cells  = kv->v_cells[stream];
        const auto & sealed = kv->sparse->sealed[stream];
        const uint32_t n_full = std::min({ n_kv, cells.used_max_p1(), kv->sparse->n_pos })/GGML_SPARSE_GROUP;
        for (uint32_t g = 0; g < n_full; ++g) {
            bool full = !sealed[g] && !(busy && busy[g]);
            for (uint32_t i = 0; i < GGML_SPARSE_GROUP && full; ++i) {
                full = !cells.is_empty(g*GGML_SPARSE_GROUP + i);
            }
            if (full && !f((int32_t) g)) {
                return;
            }
        }
    }

    // SEAL for one layer. k, v: views of the cache with n_stream streams from s0 on
    static ggml_tensor * build_seal(ggml_context * ctx, const llama_kv_cache * kv, int32_t ikv, ggml_tensor * k, ggml_tensor * v, uint32_t s0,
            ggml_tensor * list, ggml_tensor * sealed, ggml_tensor * stats) {
        const auto & shadow = *kv->sparse;
        const auto & layer  = shadow.layers[ikv];
        return ggml_sparse_attn_seal(ctx, view_streams(ctx, layer.k_t, k->ne[3], s0), view_streams(ctx, layer.v_sum, k->ne[3], s0),
                k, layer.v_sum ? v : nullptr, list, stats, view_range(ctx, layer.k_range, k->ne[3], s0), sealed, { shadow.n_bit, n_rot(kv) });
    }

    // seals every complete group of every layer and stream; number of (layer, group), < 0: not computed
    static int64_t seal(llama_kv_cache * kv, ggml_backend_sched_t like, llama_sparse_state & state) {
        auto & shadow = *kv->sparse;
        std::vector<std::vector<int32_t>> todo;
        size_t n_list = 0, n_group = 0;
        for (uint32_t s = 0; s < kv->n_stream; ++s) {
            todo.emplace_back();
            for_sealable(kv, s, kv->get_size(), nullptr, [&](int32_t g) { todo.back().push_back(g); return true; });
            n_list   = std::max(n_list, todo.back().size());
            n_group += todo.back().size();
        }
        if (n_group == 0) {
            return 0;
        }
        const size_t n_flag = shadow.sealed[0].size();
        ggml_context_ptr scratch(ggml_init({ (16*kv->layers.size() + 16)*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
        ggml_context * ctx = scratch.get();

        ggml_tensor * list   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_list, kv->n_stream);
        ggml_tensor * sealed = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_flag, kv->n_stream);
        ggml_set_input(list);
        ggml_set_input(sealed);

        llama_kv_cache::slot_info all;
        all.s0 = 0;
        all.s1 = kv->n_stream - 1;
        ggml_cgraph * gf = ggml_new_graph(ctx);
        int64_t n_layer = 0;
        for (const auto & [il, ikv] : kv->map_layer_ids) {
            if (shadow.layers[ikv].k_t && kv->layers[ikv].il == (uint32_t) il) { // a layer that reuses another's cells has none of its own
                ggml_tensor * k = kv->get_k(ctx, il, kv->get_size(), all);
                ggml_tensor * v = kv->get_v(ctx, il, kv->get_size(), all);
                ggml_tensor * stats = state.stats(device_of(kv->layers[ikv].k));
                ggml_build_forward_expand(gf, build_seal(ctx, kv, ikv, k, v, 0, list, shadow.n_bit == 16 ? nullptr : sealed, stats));
                ++n_layer;
            }
        }
        if (n_layer == 0) {
            return 0;
        }

        // a scheduler of its own, so that the allocations of the context's stay as they are; each node runs where its k_t lies
        std::vector<ggml_backend_t> backends;
        for (int i = 0; i < ggml_backend_sched_get_n_backends(like); ++i) {
            backends.push_back(ggml_backend_sched_get_backend(like, i));
        }
        ggml_backend_sched_ptr sched(ggml_backend_sched_new(backends.data(), nullptr, backends.size(), GGML_DEFAULT_GRAPH_SIZE, false, false));
        if (!ggml_backend_sched_alloc_graph(sched.get(), gf)) {
            return -1;
        }
        for (uint32_t s = 0; s < kv->n_stream; ++s) {
            std::vector<int32_t> row(todo[s]);
            row.resize(n_list, -1);
            ggml_backend_tensor_set(list, row.data(), s*list->nb[1], list->nb[1]);

            row.assign(shadow.sealed[s].begin(), shadow.sealed[s].end());
            for (int32_t g : todo[s]) {
                row[g] = 1;
            }
            if (shadow.n_bit != 16) {
                ggml_backend_tensor_set(sealed, row.data(), s*sealed->nb[1], sealed->nb[1]);
            }
        }
        if (ggml_backend_sched_graph_compute(sched.get(), gf) != GGML_STATUS_SUCCESS) {
            return -1;
        }
        for (uint32_t s = 0; s < kv->n_stream; ++s) {
            for (int32_t g : todo[s]) {
                shadow.sealed[s][g] = 1;
            }
        }
        return n_layer*n_group;
    }

    // number of (layer, group) in which the sealed data differs from K and V
    static int64_t check(const llama_kv_cache * kv) {
        const auto & shadow = *kv->sparse;
        int64_t n_bad = 0;
        std::vector<float> row;
        for (size_t ikv = 0; ikv < shadow.layers.size(); ++ikv) {
            const auto & dst = shadow.layers[ikv];
            if (!dst.k_t) {
                continue;
            }
            const host_view k(kv->layers[ikv].k), v(kv->layers[ikv].v), k_t(dst.k_t), k_range(dst.k_range), v_sum(dst.v_sum);
            for (uint32_t s = 0; s < kv->n_stream; ++s) {
                for (size_t g = 0; g < shadow.sealed[s].size(); ++g) {
                    if (!shadow.sealed[s][g]) {
                        continue;
                    }
                    bool bad = false;
                    std::vector<double> sum(kv->layers[ikv].v->ne[0], 0.0);
                    std::vector<double> mag(sum.size(), 0.0);
                    for (uint32_t i = g*GGML_SPARSE_GROUP; i < (g + 1)*GGML_SPARSE_GROUP; ++i) {
                        load_row(k, s, i, row);
                        float err = 0.0f;
                        for (size_t c = 0; n_rot(kv) > 0 && c < row.size(); c += n_rot(kv)) {
                            turn(&row[c], n_rot(kv));
                        }
                        for (size_t c = 0; n_rot(kv) > 0 && c < row.size(); ++c) {
                            err = std::max(err, 1e-5f*std::abs(row[c])); // turning rounds
                        }
                        for (size_t c = 0; c < row.size(); ++c) {
                            bad = bad || !matches(shadow.n_bit, k_t, k_range, s, i, c, std::clamp(row[c], -65504.0f, 65504.0f), err);
                        }
                        load_row(v, s, i, row);
                        for (size_t c = 0; c < row.size(); ++c) {
                            sum[c] += row[c];
                            mag[c] += std::abs(row[c]);
                        }
                    }
                    const auto * sums = v_sum.t ? (const float *) (v_sum.data + s*v_sum.t->nb[2] + ggml_sparse_sum_row(g)*v_sum.t->nb[1]) : nullptr;
                    for (size_t c = 0; sums && c < sum.size(); ++c) {
                        bad = bad || !(std::abs(sums[c] - sum[c]) <= 1e-5*mag[c] + 1e-30);
                    }
                    n_bad += bad;
                }
            }
        }
        return n_bad;
    }
};

int64_t llama_sparse_shadow_seal(llama_kv_cache * kv, ggml_backend_sched_t like, llama_sparse_state & state) {
    return llama_sparse_shadow_get(kv) ? llama_sparse_access::seal(kv, like, state) : 0;
}

int64_t llama_sparse_shadow_check(const llama_kv_cache * kv) {
    return llama_sparse_shadow_get(kv) ? llama_sparse_access::check(kv) : -1;
}

void llama_sparse_shadow_create(llama_kv_cache * kv, const llama_sparse_spec & spec, const llama_hparams & hparams) {
    llama_sparse_access::create(kv, spec, hparams);
}

const char * llama_sparse_shadow_why_not(const llama_kv_cache * kv) {
    return llama_sparse_access::why_not(kv);
}

llama_sparse_shadow * llama_sparse_shadow_get(const llama_kv_cache * kv) {
    return llama_sparse_access::shadow(const_cast<llama_kv_cache *>(kv)).get();
}

void llama_sparse_huge_pages(ggml_backend_buffer_t buf) {
#if defined(__linux__)
    // rows of K and V, gathered, lie in a page each: without huge pages address translation takes longer than the bytes
    constexpr uintptr_t PAGE = GGML_SPARSE_HUGE_PAGE;
    const uintptr_t b = (uintptr_t) ggml_backend_buffer_get_base(buf);
    const uintptr_t first = (b + PAGE - 1)/PAGE*PAGE, last = (b + ggml_backend_buffer_get_size(buf))/PAGE*PAGE;
    if (ggml_backend_buffer_is_host(buf) && last >= first + 2*PAGE) {
        madvise((void *) first, last - first, MADV_HUGEPAGE); // a wish: where the kernel refuses, nothing is lost
    }
#else
    GGML_UNUSED(buf);
#endif
}

size_t llama_sparse_shadow_bytes(const llama_kv_cache * kv) {
    size_t n = 0;
    if (const auto * shadow = llama_sparse_shadow_get(kv)) {
        for (const auto & buf : shadow->bufs) {
            n += ggml_backend_buffer_get_size(buf.get());
        }
    }
    return n;
}

void llama_sparse_unseal(llama_sparse_shadow * shadow, uint32_t stream, const std::vector<uint32_t> & cells) {
    if (shadow) {
        for (uint32_t i : cells) {
            shadow->sealed[stream][i/GGML_SPARSE_GROUP] = 0;
        }
    }
}

void llama_sparse_unseal_all(llama_sparse_shadow * shadow) {
    if (shadow) {
        for (auto & sealed : shadow->sealed) {
            std::fill(sealed.begin(), sealed.end(), 0);
        }
    }
}

//
// graph input
//

static const llama_kv_cache_context * find_kv_context(const llama_memory_context_i * mctx) {
    if (auto * kv = dynamic_cast<const llama_kv_cache_context *>(mctx)) {
        return kv;
    }
    if (auto * iswa = dynamic_cast<const llama_kv_cache_iswa_context *>(mctx)) {
        return iswa->get_base();
    }
    if (auto * hybrid = dynamic_cast<const llama_memory_hybrid_context *>(mctx)) {
        return hybrid->get_attn();
    }
    if (auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa_context *>(mctx)) {
        return hybrid->get_attn()->get_base();
    }
    return nullptr;
}

// Everything the sparse layers of one graph need from the host. Tensors are made by the first layer that wants them.
class llm_graph_input_sparse : public llm_graph_input_i {
public:
    llm_graph_input_sparse(std::shared_ptr<llama_sparse_state> state, const llm_graph_context & g, const llama_kv_cache_context * mctx) :
        state(std::move(state)), mctx(mctx),
        is_decode(g.ubatch.n_tokens == g.ubatch.n_seqs_unq), // NOT n_seq_tokens == 1, which is true in the prefill of a single stream
        n_kv(mctx ? mctx->get_n_kv() : 0), n_tok_all(g.n_tokens) {
    }

    void set_input(const llama_ubatch * ubatch) override;
    bool can_reuse(const llm_graph_params & params) override;

    int64_t n_waiting() const; // complete groups that are not sealed, in the stream with most of them

    std::shared_ptr<llama_sparse_state> state;
    const llama_kv_cache_context * mctx; // nullptr: an architecture without a plain KV cache

    const bool     is_decode;
    const uint32_t n_kv;
    const uint32_t n_tok_all;

    ggml_tensor * list   = nullptr; // I32 [n_list, n_stream]
    ggml_tensor * sealed = nullptr; // I32 [n_grp, n_stream]
    ggml_tensor * forced = nullptr; // I32 [n_local_max + n_sinks, n_tok, 1, n_stream]
    ggml_tensor * kl     = nullptr; // I32 [2, n_tok, n_stream, n_layer]: k and l

    // the graph's nodes that layers share, by the device that runs them (nullptr: the CPU)
    std::map<ggml_backend_dev_t, ggml_tensor *> visible;
    std::map<ggml_backend_dev_t, ggml_tensor *> kl_of; // copied there once, not once per layer
    std::map<int32_t, ggml_tensor *> k_t; // SEAL's result, by layer of the cache

    int32_t n_local_max = 0;
    std::vector<double> score_shares; // [n_layer], see there

    std::vector<std::pair<int, std::string>> layers; // (il, reason): reason "" = our op runs

private:
    std::vector<uint8_t> busy; // [n_grp] groups that the ubatch writes; kept, so that a token allocates nothing

    void set_seal  (uint32_t s, uint32_t stream, const std::vector<uint32_t> & written);
    void set_select(const llama_ubatch * ubatch);
};

// an input without memory was made for nodes that are in no graph, since their device refused one of them
static bool is_used(const ggml_tensor * t) {
    return t && t->data;
}

// Seals up to n_list complete groups of one stream: every cell in use, none written by this ubatch. K and V of such a group are in the
// cache already, so it does not matter where in the graph SEAL runs.
void llm_graph_input_sparse::set_seal(uint32_t s, uint32_t stream, const std::vector<uint32_t> & written) {
    const auto * kv = llama_sparse_access::kv(mctx);
    auto & flags = llama_sparse_shadow_get(kv)->sealed[stream];

    // the cells this ubatch writes are in use already, and their groups were unsealed by apply_ubatch()
    busy.assign(flags.size(), 0);
    for (uint32_t i : written) {
        busy[i/GGML_SPARSE_GROUP] = 1;
    }

    // no cell past the view is in use, and coding a run anew leaves out its groups there
    std::fill(flags.begin() + std::min<size_t>(n_kv/GGML_SPARSE_GROUP, flags.size()), flags.end(), 0);

    const int64_t n_list = list->ne[0];
    int32_t * dst = (int32_t *) list->data + s*n_list;
    int64_t n = 0;
    llama_sparse_access::for_sealable(kv, stream, n_kv, busy.data(), [&](int32_t g) {
        if (n == n_list) {
            return false;
        }
        dst[n++] = g;
        flags[g] = 1;
        return true;
    });
    std::fill(dst + n, dst + n_list, -1);

    if (is_used(sealed)) {
        int32_t * out = (int32_t *) sealed->data + s*sealed->ne[0];
        for (int64_t g = 0; g < sealed->ne[0]; ++g) {
            out[g] = flags[g];
        }
    }
}

// The local window and the sinks are the newest and the oldest positions of the token's own sequence: found by position, since cells are
// in no particular order.
void llm_graph_input_sparse::set_select(const llama_ubatch * ubatch) {
    const auto * kv = llama_sparse_access::kv(mctx);
    const auto & spec = state->spec;

    const int64_t n_forced = forced->ne[0];
    const int64_t n_layer  = kl->ne[3];

    for (uint32_t t = 0; t < n_tok_all; ++t) {
        const llama_seq_id seq = ubatch->seq_id[t][0];
        const auto & pos = sparse_positions_of(llama_sparse_access::cells(kv, llama_sparse_access::stream_of(kv, seq)), seq, 0);

        const auto end = pos.upper_bound({ ubatch->pos[t], UINT32_MAX }); // the first after the token itself
        const int32_t n_pos = pos.size() - std::distance(end, pos.end()); // most often nothing comes after

        int32_t * dst = (int32_t *) forced->data + t*n_forced;
        std::fill(dst, dst + n_forced, -1);
        auto it = end;
        for (int32_t i = 0; i < n_local_max && it != pos.begin(); ++i) {
            dst[i] = (--it)->second;
        }
        auto first = pos.begin();
        for (int64_t i = n_local_max; i < n_local_max + spec.sinks && first != end; ++i, ++first) { // n_forced is at least 1
            dst[i] = first->second;
        }

        for (int64_t il = 0; il < n_layer; ++il) {
            int32_t * out = (int32_t *) kl->data + (il*n_tok_all + t)*2;
            const int32_t k = spec.topk_for(il, n_pos, score_shares);
            out[0] = spec.cap_for(k, n_pos);
            out[1] = std::min(spec.local_for(k), n_local_max);
        }
    }
}

void llm_graph_input_sparse::set_input(const llama_ubatch * ubatch) {
    if (list) {
        const auto & sinfo = llama_sparse_access::sinfo(mctx);
        // the graph's streams are s0..s1; those without tokens in this ubatch seal nothing new
        static const std::vector<uint32_t> none;
        for (uint32_t s = 0; s < list->ne[1]; ++s) {
            const uint32_t stream = sinfo.s0 + s;
            const auto it = std::find(sinfo.strm.begin(), sinfo.strm.end(), (llama_seq_id) stream);
            set_seal(s, stream, it == sinfo.strm.end() ? none : sinfo.idxs[it - sinfo.strm.begin()]);
        }
    }
    if (is_used(kl)) {
        set_select(ubatch);
    }

    if (is_decode) {
        if (state->layers.size() != layers.size()) {
            state->layers.clear(); // else the same ones, whose entries are written again: nothing is allocated
        }
        state->n_steps += n_tok_all;
    }
    for (const auto & [il, reason] : layers) {
        if (is_decode) {
            state->layers[il] = reason;
        }
        if (!reason.empty()) {
            state->n_stock[reason] += n_tok_all;
        }
    }
}

bool llm_graph_input_sparse::can_reuse(const llm_graph_params & params) {
    const auto * next = find_kv_context(params.mctx);
    if (!mctx || !next) {
        return !mctx && !next;
    }
    mctx = next;
    if (n_kv != mctx->get_n_kv() || n_tok_all != params.ubatch.n_tokens) {
        return false;
    }
    const int64_t n = list ? n_waiting() : 0;
    // a long list is walked by every layer, so a decode graph that has one serves once
    return !list || (n <= list->ne[0] && (!is_decode || list->ne[0] <= N_SEAL || n > N_SEAL));
}

int64_t llm_graph_input_sparse::n_waiting() const {
    const auto & sinfo = llama_sparse_access::sinfo(mctx);
    int64_t n = 0;
    for (uint32_t s = sinfo.s0; s <= sinfo.s1; ++s) {
        int64_t n_stream = 0;
        llama_sparse_access::for_sealable(llama_sparse_access::kv(mctx), s, n_kv, nullptr, [&](int32_t) { ++n_stream; return true; });
        n = std::max(n, n_stream);
    }
    return n;
}

//
// graph
//

static llm_graph_input_sparse * get_input(const llm_graph_context & g, const llama_kv_cache_context * mctx) {
    for (auto & input : g.res->inputs) {
        if (auto * inp = dynamic_cast<llm_graph_input_sparse *>(input.get())) {
            return inp;
        }
    }
    auto inp = std::make_unique<llm_graph_input_sparse>(g.cparams.sparse, g, mctx ? mctx : find_kv_context(g.mctx));
    return static_cast<llm_graph_input_sparse *>(g.res->add_input(std::move(inp)));
}

static ggml_tensor * new_input(const llm_graph_context & g, const char * name, int64_t ne0, int64_t ne1, int64_t ne2 = 1, int64_t ne3 = 1) {
    ggml_tensor * t = ggml_new_tensor_4d(g.ctx0, GGML_TYPE_I32, ne0, ne1, ne2, ne3);
    ggml_set_input(t);
    g.cb(t, name, -1);
    return t;
}

// "" or why this layer's attention is left to llama.cpp whatever the batch
static std::string why_dense(const llm_graph_context & g, const llama_kv_cache_context * mctx, const ggml_tensor * kq_b, const ggml_tensor * kq_mask, int il) {
    if (!mctx) {
        return "sliding-window layer";
    }
    if (il >= g.cparams.sparse->n_layer) {
        return "not a layer of the trunk"; // of a draft head, or one that routes
    }
    if (!g.cparams.flash_attn || !kq_mask || kq_mask->type != GGML_TYPE_F16) {
        return "flash attention is off";
    }
    if (kq_b) {
        return "attention with a learned bias";
    }
    if (sparse_is_training(g.cparams, 0) || !g.cparams.causal_attn) {
        return "not causal decoding";
    }
    const auto * kv = llama_sparse_access::kv(mctx);
    const int32_t ikv = llama_sparse_access::layer_of(kv, il);
    for (const char * reason : { llama_sparse_access::why_not(kv), llama_sparse_access::why_not_layer(kv, ikv) }) {
        if (*reason) {
            return reason;
        }
    }
    const auto & spec = g.cparams.sparse->spec;
    return spec.method == LLAMA_SPARSE_SPARQ && !spec.is_dense() ? llama_sparse_shadow_get(kv)->layers[ikv].reason : "";
}

// our nodes run where K lies: left to the scheduler, they could follow q, and all of K be copied to them
static void set_device(const llm_graph_context & g, ggml_backend_dev_t dev, ggml_tensor * node) {
    ggml_backend_t backend = g.backend_cpu;
    for (int i = 0; dev && i < ggml_backend_sched_get_n_backends(g.sched); ++i) {
        ggml_backend_t b = ggml_backend_sched_get_backend(g.sched, i);
        backend = ggml_backend_get_device(b) == dev ? b : backend;
    }
    ggml_backend_sched_set_tensor_backend(g.sched, node, backend);
}

// no device but CPUs? With another, llama.cpp may run a prompt there even where K lies in host memory
static bool is_cpu_only(const llm_graph_context & g) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(g.sched); ++i) {
        const auto type = ggml_backend_dev_type(ggml_backend_get_device(ggml_backend_sched_get_backend(g.sched, i)));
        if (type != GGML_BACKEND_DEVICE_TYPE_CPU && type != GGML_BACKEND_DEVICE_TYPE_ACCEL) {
            return false;
        }
    }
    return true;
}

// can PREFILL read a prompt in this layer, which may have a sliding window?
static bool can_prefill(const llm_graph_context & g, const ggml_tensor * k, const ggml_tensor * v, const ggml_tensor * kq_b, const ggml_tensor * kq_mask) {
    return g.cparams.flash_attn && kq_mask && kq_mask->type == GGML_TYPE_F16 && !kq_b && !sparse_is_training(g.cparams, 0) && g.cparams.causal_attn &&
           !g.hparams.is_mla() && is_supported_type(k->type) && is_supported_type(v->type) && is_cpu_only(g);
}

// puts our nodes that t is made of into the graph
static void emit(const llm_graph_context & g, ggml_backend_dev_t dev, ggml_tensor * t, const char * name, int il) {
    for_each_node(t, [&](ggml_tensor * node) { set_device(g, dev, node); });
    g.cb(t, name, il);
    ggml_build_forward_expand(g.gf, t);
}

// SEAL for the layer, once per graph; returns k_t of the graph's streams
static ggml_tensor * build_seal(const llm_graph_context & g, llm_graph_input_sparse * inp, ggml_tensor * k, ggml_tensor * v, uint32_t s0, int il) {
    const auto * kv = llama_sparse_access::kv(inp->mctx);
    const int32_t ikv = llama_sparse_access::layer_of(kv, il);

    auto & res = inp->k_t[ikv];
    if (res) {
        return res;
    }
    const int64_t ns = k->ne[3];
    if (!inp->list) {
        const int64_t n_written = g.n_tokens/ns/GGML_SPARSE_GROUP + 2;
        inp->list = new_input(g, "sparse_list", std::max({ N_SEAL, n_written, inp->n_waiting() }), ns);
    }
    if (inp->state->spec.n_bit != 16 && !inp->sealed) {
        inp->sealed = new_input(g, "sparse_sealed", n_groups(inp->n_kv), ns);
    }
    const ggml_backend_dev_t dev = llama_sparse_access::device(kv, ikv);
    res = llama_sparse_access::build_seal(g.ctx0, kv, ikv, k, v, s0, inp->list, inp->sealed, inp->state->stats(dev));
    emit(g, dev, res, "sparse_seal", il);
    return res;
}

// the inputs of SELECT, shared by all layers
static void build_select_inputs(const llm_graph_context & g, llm_graph_input_sparse * inp, int64_t n_tok, int64_t ns) {
    if (inp->kl) {
        return;
    }
    const auto & spec = inp->state->spec;
    const int32_t n_layer = inp->state->n_layer;
    for (int32_t il = 0; il < n_layer; ++il) {
        const int32_t k = spec.topk_for(il, inp->n_kv, inp->score_shares);
        inp->n_local_max = std::max(inp->n_local_max, (uint32_t) k < inp->n_kv ? spec.local_for(k) : 0);
    }
    inp->forced = new_input(g, "sparse_forced", std::max(inp->n_local_max + spec.sinks, 1), n_tok, 1, ns);
    inp->kl     = new_input(g, "sparse_kl", 2, n_tok, ns, n_layer);
}

// mctx == nullptr: a layer with a sliding window, of which we read prompts only
static ggml_tensor * build_layer(
        const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * kq_mask, ggml_tensor * sinks, float kq_scale, int il) {
    const auto & state = g.cparams.sparse;
    if (!state || state->spec.method == LLAMA_SPARSE_OFF) {
        return nullptr;
    }
    const auto & spec = state->spec;

    auto * inp = get_input(g, mctx);

    const auto leave = [&](const std::string & why) { inp->layers.emplace_back(il, why); return nullptr; };
    const std::string reason = why_dense(g, mctx, kq_b, kq_mask, il);

    const auto * kv = reason.empty() ? llama_sparse_access::kv(mctx) : nullptr;
    const int64_t ns    = k->ne[3];
    const int64_t n_tok = g.n_tokens/ns;

    const bool has_shadow = kv && spec.method == LLAMA_SPARSE_SPARQ && !spec.is_dense();
    ggml_tensor * k_t = has_shadow ? build_seal(g, inp, k, v, llama_sparse_access::sinfo(mctx).s0, il) : nullptr;

    const float softcap = g.hparams.attn_soft_cap ? g.hparams.f_attn_logit_softcapping : 0.0f;
    if (!inp->is_decode && (kv || !mctx) && can_prefill(g, k, v, kq_b, kq_mask)) {
        q = ggml_view_4d(g.ctx0, q, q->ne[0], q->ne[1], n_tok, ns, q->nb[1], q->nb[2], q->nb[2]*n_tok, 0);
        const ggml_sparse_prefill_params prefill = { kq_scale, g.hparams.f_max_alibi_bias, softcap };
        ggml_tensor * cur = ggml_sparse_attn_prefill(g.ctx0, q, k, v, kq_mask, sinks, state->stats(nullptr), prefill);
        inp->layers.emplace_back(il, "");
        emit(g, nullptr, cur, "sparse_prefill", il);
        return cur;
    }
    if (!kv) {
        return leave(reason);
    }
    if (!inp->is_decode) {
        return leave("prefill");
    }

    if (inp->score_shares.empty()) {
        inp->score_shares = llama_sparse_access::score_shares(kv, spec, state->n_layer);
    }
    const int32_t topk = spec.topk_for(il, inp->n_kv, inp->score_shares);

    // n_kv is the number of cells in use, rounded up; round min_ctx in the same way, so that no shorter context is ever sparse
    const bool is_short = inp->n_kv <= GGML_PAD((uint32_t) spec.min_ctx, 256u);
    const bool all = spec.is_dense() || is_short || (uint32_t) topk >= inp->n_kv;

    // a device reads few bytes faster than it picks: what is short stays with its own flash attention
    const auto dev = llama_sparse_access::device(kv, llama_sparse_access::layer_of(kv, il));
    const double dense_bytes = llama_sparse_access::row_bytes(kv, il)*k->ne[1]*inp->n_kv*ns*n_tok;
    if (dev && !spec.is_dense() && (all || dense_bytes < spec.gpu_min_mb*1e6)) {
        return leave(all ? "every position is read" : "short for a GPU");
    }

    auto & visible = inp->visible[dev];
    if (!visible) {
        visible = ggml_sparse_attn_visible(g.ctx0, kq_mask);
        g.cb(visible, "sparse_visible", -1);
    }

    ggml_sparse_attn_inputs in = {};
    in.q       = ggml_view_4d(g.ctx0, q, q->ne[0], q->ne[1], n_tok, ns, q->nb[1], q->nb[2], q->nb[2]*n_tok, 0);
    in.k       = k;
    in.v       = v;
    in.mask    = kq_mask;
    in.visible = visible;
    in.sinks   = sinks;
    in.stats   = state->stats(dev);

    ggml_sparse_attn_params params = {};
    params.scale    = kq_scale;
    params.max_bias = g.hparams.f_max_alibi_bias;
    params.softcap  = softcap;
    params.topk_max = spec.cap_for(topk, inp->n_kv);
    params.top_p    = (float) spec.top_p;

    ggml_tensor * cur;
    if (all) {
        const ggml_sparse_attend_params attend = { params.scale, params.max_bias, params.softcap, 0 };
        cur = ggml_sparse_attn_attend(g.ctx0, in.q, in.k, in.v, in.mask, in.visible, nullptr, nullptr, nullptr, in.sinks, in.stats, attend);
    } else {
        build_select_inputs(g, inp, n_tok, ns);
        ggml_tensor * kl = inp->kl;
        if (dev) {
            auto & copy = inp->kl_of[dev];
            if (!copy) {
                copy = ggml_cont(g.ctx0, inp->kl);
                set_device(g, dev, copy);
            }
            kl = copy;
        }
        in.forced = inp->forced;
        in.kl     = ggml_view_4d(g.ctx0, kl, 2, n_tok, 1, ns, kl->nb[1], kl->nb[2], kl->nb[2], il*kl->nb[3]);
        params.n_local_max = inp->n_local_max;
        if (k_t) {
            if (!inp->sealed) {
                inp->sealed = new_input(g, "sparse_sealed", n_groups(inp->n_kv), ns);
            }
            in.k_t    = k_t;
            in.v_sum  = nullptr;
            in.sealed = inp->sealed;
            params.mean_v = wants_mean_v(spec, g.hparams, il);
            params.rank   = spec.rank_for(il, k->ne[0], llama_sparse_access::row_bytes(kv, il));
            params.n_bit  = spec.n_bit;
            params.n_rot  = llama_sparse_access::n_rot(kv);
            const auto   & layer = llama_sparse_shadow_get(kv)->layers[llama_sparse_access::layer_of(kv, il)];
            const uint32_t s0    = llama_sparse_access::sinfo(mctx).s0;
            in.k_range = view_range(g.ctx0, layer.k_range, ns, s0);
            if (params.mean_v) {
                in.v_sum = view_streams(g.ctx0, layer.v_sum, ns, s0);
            }
            cur = ggml_sparq_attn(g.ctx0, &in, &params);
        } else {
            cur = ggml_topk_attn(g.ctx0, &in, &params);
        }
    }
    const std::string why = why_not_run(dev, cur);
    if (!why.empty()) {
        return leave(why); // the nodes made above are in no graph
    }
    inp->layers.emplace_back(il, "");
    emit(g, dev, cur, "sparse_attend", il);

    return cur;
}

// Which cache a layer reads is told by its mask: those of a plain KV cache belong to one of two inputs of the graph. False: another kind of
// attention, which is upstream's.
static bool find_cache(const llm_graph_context & g, const ggml_tensor * kq_mask, const llama_kv_cache_context ** mctx) {
    for (const auto & input : g.res->inputs) {
        auto * plain = dynamic_cast<llm_graph_input_attn_kv      *>(input.get());
        auto * iswa  = dynamic_cast<llm_graph_input_attn_kv_iswa *>(input.get());
        if (auto * hybrid = dynamic_cast<llm_graph_input_mem_hybrid *>(input.get())) {
            plain = hybrid->get_attn();
        }
        if (auto * hybrid = dynamic_cast<llm_graph_input_mem_hybrid_iswa *>(input.get())) {
            iswa = hybrid->get_attn();
        }
        if (plain && plain->get_kq_mask() == kq_mask) {
            *mctx = plain->mctx;
            return true;
        }
        if (iswa && (iswa->get_kq_mask() == kq_mask || iswa->get_kq_mask_swa() == kq_mask)) {
            *mctx = iswa->get_kq_mask() == kq_mask ? iswa->mctx->get_base() : nullptr;
            return true;
        }
    }
    return false;
}

ggml_tensor * llama_sparse_build_attn(
        const llm_graph_context & g, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * kq_mask, ggml_tensor * sinks, float kq_scale, int il) {
    const llama_kv_cache_context * mctx = nullptr;
    const bool is_ours = g.cparams.sparse && kq_mask && find_cache(g, kq_mask, &mctx);
    return is_ours ? build_layer(g, mctx, q, k, v, kq_b, kq_mask, sinks, kq_scale, il) : nullptr;
}
