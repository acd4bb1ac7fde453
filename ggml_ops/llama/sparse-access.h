#pragma once

// The private parts of llama.cpp's classes that we use, which name this struct as their friend. It has no logic: each function names a member. Most
// are only read. Written are our own `sparse` of a cache, our two of the context's parameters and its evaluation callback, `sched_need_reserve`,
// `sched`, `ctxs_bufs`, to which the shadow of a context that only measures is added, and the cells that a document fills. patches/README.md says
// what each is for.

#include "llama-context.h"
#include "llama-kv-cache.h"

struct llama_sparse_access {
    static auto &       shadow       (llama_kv_cache & kv)       { return kv.sparse; }
    static auto &       ctxs_bufs    (llama_kv_cache & kv)       { return kv.ctxs_bufs; }
    static const auto & hparams      (const llama_kv_cache & kv) { return kv.hparams; }
    static const auto & layers       (const llama_kv_cache & kv) { return kv.layers; }
    static const auto & layer_ids    (const llama_kv_cache & kv) { return kv.map_layer_ids; }
    static const auto & cells        (const llama_kv_cache & kv, uint32_t stream) { return kv.v_cells[stream]; }
    static auto &       cells        (llama_kv_cache & kv, uint32_t stream)       { return kv.v_cells[stream]; }
    static uint32_t     stream_of    (const llama_kv_cache & kv, llama_seq_id seq) { return kv.seq_to_stream[seq]; }
    static ggml_type    type_k       (const llama_kv_cache & kv, int il) { return kv.layers[kv.map_layer_ids.at(il)].k->type; }
    static bool         has_other    (const llama_kv_cache & kv) { return kv.other != nullptr; }
    static bool         v_trans      (const llama_kv_cache & kv) { return kv.v_trans; }
    static bool         attn_rot_k   (const llama_kv_cache & kv) { return kv.attn_rot_k; }
    static bool         attn_rot_v   (const llama_kv_cache & kv) { return kv.attn_rot_v; }
    static int32_t      n_embd_head_k(const llama_kv_cache & kv) { return kv.n_embd_head_k_all; }

    static llama_kv_cache & kv   (const llama_kv_cache_context & mctx) { return *mctx.kv; }
    static const auto &     sinfo(const llama_kv_cache_context & mctx) { return mctx.sinfos[mctx.i_cur]; }

    // no batch: a graph that only measures the memory it takes
    static bool is_reserve(const llama_kv_cache_context & mctx) { return mctx.ubatches.empty(); }

    static llama_cparams & cparams           (llama_context & ctx) { return ctx.cparams; }
    static bool &          sched_need_reserve(llama_context & ctx) { return ctx.sched_need_reserve; }
    static const auto &    backends          (llama_context & ctx) { return ctx.backends; }
    static auto &          sched             (llama_context & ctx) { return ctx.sched; }
    static auto &          backend_ptrs      (llama_context & ctx) { return ctx.backend_ptrs; }
    static auto &          backend_buft      (llama_context & ctx) { return ctx.backend_buft; }
    static const auto &    set_n_threads_fns (llama_context & ctx) { return ctx.set_n_threads_fns; }
};
