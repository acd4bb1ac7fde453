#include "sparse-reasons.h"

#include "llama-hparams.h"

#include "ggml-sparse-nodes.h"
#include "sparse-codes.h"
#include "sparse-compat.h"
#include "sparse-shadow.h"

using access = llama_sparse_access;

const char * llama_sparse_why_not(const llama_kv_cache & kv) {
    return access::has_other(kv)                   ? "the cells are shared with another cache" :
            access::v_trans(kv)                     ? "flash attention is off" :
            access::layers(kv).empty()              ? "the cache has no layers" :
            access::hparams(kv).n_rel_attn_bkts > 0 ? "attention with a learned bias" :
           access::hparams(kv).is_mla()            ? "multi-head latent attention" : "";
}

const char * llama_sparse_why_not_layer(const llama_kv_cache & kv, int32_t ikv) {
    const auto & layer = access::layers(kv)[ikv];
    if (!layer.k || !layer.v) {
        return "no separate K and V";
    }
    if (!llama_sparse_is_supported_type(layer.k->type) || !llama_sparse_is_supported_type(layer.v->type)) {
        return "K or V of a type without a kernel";
    }
    const ggml_backend_dev_t dev = llama_sparse_device_of(layer.k);
    if (dev != llama_sparse_device_of(layer.v)) {
        return "K and V are on different devices";
    }
    if (dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_META) {
        return "K and V are split among devices (tensor split)";
    }
    return llama_sparse_is_worker(dev) && !llama_sparse_is_cpu(dev) ? "on a worker without our sparse attention" : "";
}

std::string llama_sparse_why_not_sparq(const llama_kv_cache & kv, const llama_sparse_spec & spec, size_t ikv) {
    const auto & hparams = access::hparams(kv);
    const int    il      = access::layers(kv)[ikv].il;
    const ggml_backend_dev_t dev = llama_sparse_device_of(access::layers(kv)[ikv].k);
    if (!dev) {
        return "";
    }
    ggml_context_ptr scratch(ggml_init({ 64*ggml_tensor_overhead(), nullptr, true }));
    ggml_context * ctx = scratch.get();
    const auto layer = llama_sparse_shadow::layer::make(ctx, kv, spec, ikv);

    const int64_t n_kv = kv.get_size(), ns = kv.get_n_stream();
    llama_kv_cache::slot_info all;
    all.s0 = 0;
    all.s1 = ns - 1;
    ggml_sparse_src in = {};
    in.k       = kv.get_k(ctx, il, n_kv, all);
    in.v       = kv.get_v(ctx, il, n_kv, all);
    in.q       = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, in.k->ne[0], hparams.n_head(il), 1, ns);
    in.mask    = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, n_kv, 1, 1, ns);
    in.sealed  = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, llama_sparse_n_groups(n_kv), ns);
    in.visible = ggml_sparse_attn_visible(ctx, in.mask);
    in.wanted  = ggml_new_tensor_4d(ctx, GGML_TYPE_I32, 2 + std::max(spec.sinks, 1), 1, 1, ns);
    in.list    = in.sealed;
    layer.give(ctx, ns, 0, in);
    in.k_t     = ggml_sparse_attn_seal(ctx, &in, { spec.n_bit, llama_sparse_n_rot(kv) });

    const auto shares = llama_sparse_score_shares(kv, spec, hparams.n_layer());
    ggml_sparse_score_select_params params = {};
    params.score.rank       = spec.rank_for(il, in.k->ne[0], llama_sparse_row_bytes(kv, il));
    params.score.scale      = 1.0f;
    params.score.n_bit      = spec.n_bit;
    params.score.n_rot      = llama_sparse_n_rot(kv);
    params.select.topk_max  = spec.cap_for(spec.topk_for(il, n_kv, shares), n_kv);
    params.select.n_head_kv = in.k->ne[1];
    params.select.rest      = layer.v_sum && spec.wants_mean_v();
    params.select.top_p     = (float) spec.top_p;
    params.select.i_forced  = 2;
    return llama_sparse_why_not_run(dev, ggml_sparq_attn(ctx, &in, params));
}

std::string llama_sparse_why_not_ours(const llm_graph_context & g, const llama_sparse_state & state, const llama_kv_cache_context * mctx,
        const ggml_tensor * mask, const ggml_tensor * kq_b, int il) {
    if (!mctx) {
        return "sliding-window layer";
    }
    if (il >= state.n_layer) {
        return "not a layer of the trunk"; // of a draft head, or one that routes
    }
    if (!g.cparams.flash_attn || !mask || mask->type != GGML_TYPE_F16) {
        return "flash attention is off";
    }
    if (kq_b) {
        return "attention with a learned bias";
    }
    if (!llama_sparse_is_ordinary(g.cparams, mask, kq_b)) {
        return "not causal decoding";
    }
    auto & kv = access::kv(*mctx);
    const int32_t ikv = access::layer_ids(kv).at(il);
    for (const char * reason : { llama_sparse_why_not(kv), llama_sparse_why_not_layer(kv, ikv) }) {
        if (*reason) {
            return reason;
        }
    }
    const auto & shadow = access::shadow(kv);
    if (!shadow) {
        return "not a plain KV cache";
    }
    return state.spec.has_shadow() ? shadow->at(ikv).reason : "";
}

std::string llama_sparse_why_not_run(ggml_backend_dev_t dev, ggml_tensor * t) {
#define X(step) #step,
    static const char * names[GGML_SPARSE_ATTN_COUNT] = { GGML_SPARSE_STEPS(X) };
#undef X
    std::string res;
    llama_sparse_for_each_node(t, [&](ggml_tensor * node) {
        if (dev && res.empty() && !ggml_backend_dev_supports_op(dev, node)) {
            res = std::string(ggml_backend_dev_name(dev)) + " has no kernel for " + names[node->op_params[0]];
        }
    });
    return res;
}

bool llama_sparse_is_ordinary(const llama_cparams & cparams, const ggml_tensor * mask, const ggml_tensor * kq_b) {
    return cparams.flash_attn && mask && mask->type == GGML_TYPE_F16 && !kq_b && !sparse_is_training(cparams, 0) && cparams.causal_attn;
}
