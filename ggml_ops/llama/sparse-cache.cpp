#include "sparse-cache.h"

#include "llama-hparams.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"

#include "ggml-sparse-nodes.h"
#include "sparse-codes.h"

#include <cstring>
#include <typeinfo>

using access = llama_sparse_access;

// x, if it is of this very class: one that derives from it keeps more than K and V, say the keys of an indexer, and attends by itself
template <typename T, typename U> static T * exactly(U * x) {
    return x && typeid(*x) == typeid(T) ? static_cast<T *>(x) : nullptr;
}

// attn: what a hybrid memory has for its layers with attention
template <typename Kv, typename Iswa, typename Hybrid, typename HybridIswa, typename M, typename F> static Kv * find_cache(M * m, F attn) {
    auto * hybrid      = exactly<Hybrid>(m);
    auto * hybrid_iswa = exactly<HybridIswa>(m);
    auto * iswa        = hybrid_iswa ? attn(hybrid_iswa) : exactly<Iswa>(m);
    return iswa ? iswa->get_base() : hybrid ? attn(hybrid) : exactly<Kv>(m);
}

llama_kv_cache * llama_sparse_find_cache(llama_memory_i * memory) {
    return find_cache<llama_kv_cache, llama_kv_cache_iswa, llama_memory_hybrid, llama_memory_hybrid_iswa>(
            memory, [](auto * m) { return m->get_mem_attn(); });
}

const llama_kv_cache_context * llama_sparse_find_cache(const llama_memory_context_i * mctx) {
    return find_cache<const llama_kv_cache_context, const llama_kv_cache_iswa_context, const llama_memory_hybrid_context,
            const llama_memory_hybrid_iswa_context>(mctx, [](auto * m) { return m->get_attn(); });
}

bool llama_sparse_is_worker(ggml_backend_dev_t dev) {
    return dev && !strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC");
}

bool llama_sparse_is_cpu(ggml_backend_dev_t dev) {
    if (llama_sparse_is_worker(dev)) { // ours says so only if it has no other devices; llama.cpp takes it for a GPU
        ggml_tensor any = {};
        any.op = GGML_OP_SPARSE_ATTN;
        return ggml_backend_dev_supports_op(dev, &any);
    }
    const auto type = dev ? ggml_backend_dev_type(dev) : GGML_BACKEND_DEVICE_TYPE_CPU;
    return type == GGML_BACKEND_DEVICE_TYPE_CPU || type == GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

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
    if (ggml_sparse_kv_block(layer.k->type) == 0 || ggml_sparse_kv_block(layer.v->type) == 0) {
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

void llama_sparse_view_cache(ggml_context * ctx, const llama_kv_cache & kv, int il, ggml_sparse_src & src) {
    llama_kv_cache::slot_info all;
    all.s0 = 0;
    all.s1 = kv.get_n_stream() - 1;
    src.k = kv.get_k(ctx, il, kv.get_size(), all);
    src.v = kv.get_v(ctx, il, kv.get_size(), all);
}

int32_t llama_sparse_n_rot(const llama_kv_cache & kv) {
    const int32_t n = access::n_embd_head_k(kv);
    return access::attn_rot_k(kv) ? n & -n : 0;
}

double llama_sparse_row_bytes(const llama_kv_cache & kv, int il) {
    const auto & layer = access::layers(kv)[access::layer_ids(kv).at(il)];
    const size_t size_v = layer.v ? ggml_row_size(layer.v->type, layer.v->ne[0]) : 0; // latent attention has V in K
    return (double) (ggml_row_size(layer.k->type, layer.k->ne[0]) + size_v)/access::hparams(kv).n_head_kv(il);
}

double llama_sparse_f16_bytes(const llama_kv_cache & kv, int il) {
    const auto & layer = access::layers(kv)[access::layer_ids(kv).at(il)];
    return 2.0*(layer.k->ne[0] + (layer.v ? layer.v->ne[0] : 0))/access::hparams(kv).n_head_kv(il);
}

std::vector<double> llama_sparse_score_shares(const llama_kv_cache & kv, const llama_sparse_spec & spec, int32_t n_layer) {
    std::vector<double> res(n_layer, 0.0);
    for (const auto & [il, ikv] : access::layer_ids(kv)) {
        if (!*llama_sparse_why_not_layer(kv, ikv) && il < n_layer) {
            const double bytes = llama_sparse_f16_bytes(kv, il);
            const double code  = ggml_sparse_scan_bytes(spec.n_bit)/(double) GGML_SPARSE_GROUP; // bytes of a component
            res[il] = spec.rank_for(il, access::hparams(kv).n_embd_head_k(il), bytes)*code/bytes;
        }
    }
    return res;
}

ggml_backend_dev_t llama_sparse_device_of(ggml_backend_buffer_t buf) {
    return ggml_backend_buffer_is_host(buf) ? nullptr : ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buf));
}

std::string llama_sparse_why_not_run(ggml_backend_dev_t dev, ggml_tensor * t, const llama_sparse_spec & spec) {
#define X(step) #step,
    static const char * names[GGML_SPARSE_ATTN_COUNT] = { GGML_SPARSE_STEPS(X) };
#undef X
    std::string res;
    llama_sparse_for_each_node(t, [&](ggml_tensor * node) {
        if (dev && res.empty() && !ggml_backend_dev_supports_op(dev, node)) {
            res = std::string(ggml_backend_dev_name(dev)) + " has no kernel for " + names[node->op_params[0]];
        }
    });
    ggml_tensor any = {};
    any.op           = GGML_OP_SPARSE_ATTN;
    any.op_params[0] = GGML_SPARSE_ATTN_IS_TIMED;
    const bool is_slow = res.empty() && spec.gpu_min_mb < 0 && !spec.is_dense() && !llama_sparse_is_cpu(dev) && !ggml_backend_dev_supports_op(dev, &any);
    return is_slow ? "not known to be faster on such a GPU" : res;
}
