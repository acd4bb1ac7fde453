// The graph of one layer's attention: exact for tokens of prompts, sparse for decoded ones.

#include "sparse-compat.h"
#include "sparse-input.h"

#include "llama-hparams.h"
#include "llama-kv-cache-iswa.h"

#include "ggml-sparse-nodes.h"
#include "sparse-codes.h"

#include <algorithm>
#include <cmath>

using access = llama_sparse_access;

namespace {

// logits and lists of all decoded tokens of a step in a layer, on a GPU
constexpr double GPU_SCRATCH_BYTES = 1 << 30;

// gpu_min_mb where nothing else is asked for: below it tokens of models with shared KV heads were no faster on Hopper
constexpr int32_t GPU_MIN_MB = 320;

// what build_attn() is called with
struct attention {
    const llm_graph_context & g;
    llm_graph_input_sparse  & inp;
    ggml_tensor * q;
    ggml_tensor * k;
    ggml_tensor * v;
    ggml_tensor * kq_b;
    ggml_tensor * mask;
    ggml_tensor * sinks;
    ggml_tensor * v_mla;
    float         scale;
    int           il;

    const llama_sparse_spec & spec()    const { return inp.state->spec; }
    float                     max_bias() const { return g.hparams.f_max_alibi_bias; }
    float                     softcap() const { return g.hparams.attn_soft_cap ? g.hparams.f_attn_logit_softcapping : 0.0f; }
    int32_t                   ikv()     const { return access::layer_ids(inp.kv()).at(il); }
    // where K lies: a view of the cache
    ggml_backend_dev_t        device()  const { return llama_sparse_device_of(k->view_src ? k->view_src : k); }

    // what a node of the tokens [lo, hi) may read, but for the mask
    ggml_sparse_src sources(uint32_t lo, uint32_t hi) const {
        ggml_sparse_src res = {};
        res.q     = view_q(lo, hi);
        res.k     = k;
        res.v     = v;
        res.sinks = sinks;
        res.stats = inp.state->stats(device());
        return res;
    }

    // the tokens [lo, hi) of q, [d_k, n_head, n, n_stream], and of the mask; with several streams they must be all
    ggml_tensor * view_q(uint32_t lo, uint32_t hi) const {
        const int64_t n = (hi - lo)/k->ne[3];
        return ggml_view_4d(g.ctx0, q, q->ne[0], q->ne[1], n, k->ne[3], q->nb[1], q->nb[2], q->nb[2]*n, q->nb[2]*lo);
    }
    ggml_tensor * view_mask(uint32_t lo, uint32_t hi) const {
        if (hi - lo == inp.tok.n) {
            return mask;
        }
        return ggml_view_4d(g.ctx0, mask, mask->ne[0], hi - lo, 1, 1, mask->nb[1], mask->nb[2], mask->nb[3], mask->nb[1]*lo);
    }
};

// "" or why our ops can not read the tensors of a layer, whatever its cache
const char * why_not_ordinary(const attention & a) {
    const auto & c = a.g.cparams;
    return !c.flash_attn || !a.mask || a.mask->type != GGML_TYPE_F16 ? "flash attention is off" :
            a.kq_b                                                   ? "attention with a learned bias" :
            !c.causal_attn || sparse_is_training(c, 0)               ? "not causal decoding" : "";
}

bool is_ordinary(const attention & a) { return !*why_not_ordinary(a); }

// "" or why the decoded tokens of a layer are not ours in this graph, as info() and the log say; mctx: of its cache, nullptr: it has a sliding window.
// What a cache rules out no graph asks again; of the rest build_replies() decides for each batch
std::string why_not_ours(const attention & a, const llama_kv_cache_context * mctx) {
    if (!mctx) {
        return "sliding-window layer";
    }
    if (a.il >= a.inp.state->n_layer) {
        return "not a layer of the trunk"; // of a draft head, or one that routes
    }
    auto & kv = access::kv(*mctx);
    const int32_t ikv = access::layer_ids(kv).at(a.il);
    for (const char * reason : { why_not_ordinary(a), llama_sparse_why_not(kv), llama_sparse_why_not_layer(kv, ikv) }) {
        if (*reason) {
            return reason;
        }
    }
    const auto & shadow = access::shadow(kv);
    if (!shadow) {
        return "not a plain KV cache";
    }
    return a.spec().has_shadow() ? shadow->at(ikv).reason : "";
}

// Multi-head latent attention, of which a row of K serves all heads and V is the front of it? On a CPU its decoded tokens are read exactly by ATTEND,
// which reads a row once for all heads, where llama.cpp reads it for each
bool is_latent(const attention & a) {
    return a.v_mla && a.v->view_src == a.k->view_src && is_ordinary(a) &&
            ggml_sparse_kv_block(a.k->type) > 0 && llama_sparse_is_cpu(a.device());
}

// Does a CPU compute the prompts of a layer? With a GPU, llama.cpp may run a prompt there even where K lies in host memory. It does so unless it is
// told otherwise, since nobody has measured which of the two is faster
bool is_prompt_on_cpu(const attention & a) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(a.g.sched) && !a.inp.state->prompt_on_cpu; ++i) {
        const auto dev = ggml_backend_get_device(ggml_backend_sched_get_backend(a.g.sched, i));
        if (!llama_sparse_is_cpu(dev) && !llama_sparse_is_worker(dev)) {
            return false;
        }
    }
    return llama_sparse_is_cpu(a.device());
}

// can PREFILL read this layer, which may have a sliding window?
bool can_prefill(const attention & a) {
    return is_ordinary(a) && !a.g.hparams.is_mla() && ggml_sparse_kv_block(a.k->type) > 0 &&
            ggml_sparse_kv_block(a.v->type) > 0 && is_prompt_on_cpu(a);
}

// our nodes run where K lies: left to the scheduler, they could follow q, and all of K be copied to them
void set_device(const llm_graph_context & g, ggml_backend_dev_t dev, ggml_tensor * node) {
    ggml_backend_t backend = g.backend_cpu;
    for (int i = 0; dev && i < ggml_backend_sched_get_n_backends(g.sched); ++i) {
        ggml_backend_t b = ggml_backend_sched_get_backend(g.sched, i);
        backend = ggml_backend_get_device(b) == dev ? b : backend;
    }
    ggml_backend_sched_set_tensor_backend(g.sched, node, backend);
}

// puts our nodes that t is made of into the graph
ggml_tensor * emit(const attention & a, ggml_tensor * t, const char * name) {
    llama_sparse_for_each_node(t, [&](ggml_tensor * node) { set_device(a.g, a.device(), node); });
    a.g.cb(t, name, a.il);
    ggml_build_forward_expand(a.g.gf, t);
    return t;
}

// k_t of the graph's streams; where the graph seals, the result of SEAL, behind the nodes that write K and V. Once for layers that share cells
ggml_tensor * build_seal(const attention & a) {
    auto & inp = a.inp;
    auto & res = inp.k_t[a.ikv()];
    if (!res) {
        inp.need_seal(a.g);
        ggml_sparse_src src = {};
        src.k     = a.k;
        src.v     = a.v;
        src.list  = inp.list;
        src.stats = inp.state->stats(a.device());
        const auto & shadow = inp.shadow().at(a.ikv());
        if (inp.list) {
            emit(a, shadow.seal(a.g.ctx0, inp.stream0(), src, { inp.shadow().n_bit(), llama_sparse_n_rot(inp.kv()) }), "sparse_seal");
        } else {
            shadow.view(a.g.ctx0, inp.stream0(), src);
        }
        res = src.k_t;
    }
    return res;
}

// attention of the tokens [lo, hi) of a prompt
ggml_tensor * build_prefill(const attention & a, uint32_t lo, uint32_t hi, ggml_tensor * mask) {
    const ggml_sparse_prefill_params params = { a.scale, a.max_bias(), a.softcap(), a.spec().prompt };
    ggml_sparse_src src = a.sources(lo, hi);
    src.mask = mask;
    return emit(a, ggml_sparse_attn_prefill(a.g.ctx0, &src, params), "sparse_prefill");
}

// The tokens [lo, hi) by llama.cpp's own attention. Its function calls our hook again, which knows a mask by its address, and passes on this view
ggml_tensor * build_stock(const attention & a, uint32_t lo, uint32_t hi) {
    ggml_tensor * q = ggml_view_3d(a.g.ctx0, a.q, a.q->ne[0], a.q->ne[1], hi - lo, a.q->nb[1], a.q->nb[2], a.q->nb[2]*lo);
    auto & mask = a.inp.mask_stock[{ a.mask, lo }]; // of all layers, so that a device gets it once
    if (!mask) {
        ggml_tensor * all = a.view_mask(lo, hi);
        mask = ggml_view_4d(a.g.ctx0, all, all->ne[0], all->ne[1], all->ne[2], all->ne[3], all->nb[1], all->nb[2], all->nb[3], 0);
    }
    ggml_tensor * res = sparse_build_attn_mha(a.g, q, a.k, a.v, mask, a.sinks, a.v_mla, a.scale, a.il, 0);
    a.g.cb(res, "kqv_out", a.il); // by this name llama.cpp keeps it on the CPU with K and V that are not offloaded
    return res;
}

// the tokens [lo, hi) of a prompt. ours: by PREFILL
ggml_tensor * build_prompt(const attention & a, bool ours, uint32_t lo, uint32_t hi) {
    return ours ? build_prefill(a, lo, hi, a.view_mask(lo, hi)) : build_stock(a, lo, hi);
}

// Those of the range that has the replies, zeros for the replies. PREFILL gives zeros to a token that sees nothing; a kernel of llama.cpp may give
// NaN, so there the replies see what they would, and are multiplied by 0
ggml_tensor * build_prompts_between(const attention & a, bool ours) {
    auto & inp = a.inp;
    if (!ours) {
        inp.need_keep(a.g);
        return ggml_mul(a.g.ctx0, build_stock(a, inp.tok.lo, inp.tok.hi), inp.keep_prompts);
    }
    auto & mask = inp.mask_prompt[a.mask];
    if (!mask) {
        inp.need_hide(a.g);
        mask = ggml_add(a.g.ctx0, a.view_mask(inp.tok.lo, inp.tok.hi), inp.hide_replies);
        a.g.cb(mask, "sparse_mask_prompt", -1);
    }
    return build_prefill(a, inp.tok.lo, inp.tok.hi, mask);
}

// The replies by llama.cpp's own attention, as when no prompt is read beside them; zeros for prompts between them
ggml_tensor * build_stock_replies(const attention & a) {
    auto & inp = a.inp;
    ggml_tensor * res = build_stock(a, inp.tok.lo, inp.tok.hi);
    if (!inp.tok.is_mixed()) {
        return res;
    }
    inp.need_keep(a.g);
    return ggml_mul(a.g.ctx0, res, ggml_scale_bias(a.g.ctx0, inp.keep_prompts, -1.0f, 1.0f));
}

// the mask of the range that has the replies, shared by the layers
void build_mask(const attention & a) {
    auto & inp = a.inp;
    if (inp.mask_reply) {
        return;
    }
    inp.mask_reply = a.view_mask(inp.tok.lo, inp.tok.hi);
    if (inp.tok.is_mixed()) {
        inp.need_hide(a.g);
        inp.mask_reply = ggml_add(a.g.ctx0, inp.mask_reply, inp.hide_prompts);
        a.g.cb(inp.mask_reply, "sparse_mask_reply", -1);
    }
}

// x [d_v*n_head, n_tok] by v_mla [d_v, d_res, n_head]: [d_res*n_head, n_tok], as upstream's build_attn_mha() ends
ggml_tensor * times_v_mla(const attention & a, ggml_tensor * x) {
    ggml_context * ctx = a.g.ctx0;
    x = ggml_reshape_3d(ctx, x, a.v->ne[0], a.q->ne[1], x->ne[1]);
    x = ggml_mul_mat(ctx, a.v_mla, ggml_permute(ctx, x, 0, 2, 1, 3));
    a.g.cb(x, "fattn_mla", a.il);
    x = ggml_cont(ctx, ggml_permute(ctx, x, 0, 2, 1, 3));
    return ggml_reshape_2d(ctx, x, x->ne[0]*x->ne[1], x->ne[2]);
}

// "" or why a device should leave a step to its own flash attention
std::string why_not_there(const attention & a, bool reads_all) {
    const auto & inp = a.inp;
    const auto & tok = inp.tok;
    if (llama_sparse_is_cpu(a.device())) {
        return "";
    }
    // it reads few bytes faster than it selects
    const double dense_bytes = llama_sparse_row_bytes(inp.kv(), a.il)*a.k->ne[1]*inp.n_kv*tok.n_reply;
    if (!a.spec().is_dense() && (reads_all || dense_bytes < (a.spec().gpu_min_mb < 0 ? GPU_MIN_MB : a.spec().gpu_min_mb)*1e6)) {
        return reads_all ? "every position is read" : "short for a GPU";
    }
    // its kernels keep the logits of the whole range, also of the prompts in it, so it may be as wide as replies alone can be
    if (tok.is_mixed() && tok.hi - tok.lo > LLAMA_MAX_SEQ) {
        return "a long prompt between replies";
    }
    // that memory is not reserved, and a device that has none ends the program
    const int64_t n_head = a.q->ne[1], n_head_kv = a.k->ne[1];
    const double bytes = (4.0*n_head + (n_head > n_head_kv ? 12.0 : 8.0)*n_head_kv)*(tok.hi - tok.lo)*inp.n_kv;
    return !reads_all && bytes > GPU_SCRATCH_BYTES ? "too many logits for a GPU" : "";
}

// of tokens of which the largest k and rank are these
ggml_sparse_score_select_params params_of(const attention & a, int32_t topk_max, int32_t rank) {
    const auto & spec = a.spec();
    // a share below 1 does not become 1, which means none
    const float top_p = spec.top_p < 1.0 ? std::min((float) spec.top_p, std::nextafter(1.0f, 0.0f)) : 1.0f;
    return {
        { rank, a.scale, a.max_bias(), a.softcap(), spec.n_bit, llama_sparse_n_rot(a.inp.kv()), a.inp.i_rank(a.il) },
        { topk_max, (int32_t) a.k->ne[1], a.inp.n_local_max, spec.wants_mean_v(), top_p, 2*a.il, a.inp.i_forced() },
    };
}

// Attention of the range of tokens that has the decoded ones; nullptr: left to llama.cpp, and why. k_t: see build_seal(), nullptr without SparQ
ggml_tensor * build_replies(const attention & a, ggml_tensor * k_t, std::string & why) {
    auto & inp = a.inp;
    int32_t topk_max = 0, rank = 0; // the largest of those that read a selection; 0: all read every position
    for (const auto & setting : inp.settings) {
        if (!is_latent(a) && !inp.reads_all(setting, a.il)) {
            topk_max = std::max(topk_max, setting.spec.cap_for(inp.topk_for(setting, a.il), inp.n_kv));
            rank     = std::max(rank, inp.rank_for(setting, a.il));
        }
    }
    why = why_not_there(a, topk_max == 0);
    if (!why.empty()) {
        return nullptr;
    }

    ggml_sparse_src src = a.sources(inp.tok.lo, inp.tok.hi);
    src.mask = inp.mask_reply;
    auto & visible = inp.visible[a.device()];
    if (!visible) {
        visible = ggml_sparse_attn_visible(a.g.ctx0, src.mask);
        a.g.cb(visible, "sparse_visible", -1);
    }
    src.visible = visible;

    ggml_tensor * res;
    if (topk_max == 0) {
        res = ggml_sparse_attn_attend(a.g.ctx0, &src, { a.scale, a.max_bias(), a.softcap(), 0 });
    } else {
        inp.need_wanted(a.g);
        src.wanted = inp.wanted;
        if (k_t) {
            inp.shadow().at(a.ikv()).view(a.g.ctx0, inp.stream0(), src);
            src.k_t    = k_t;
            src.sealed = inp.sealed;
        }
        res = (k_t ? ggml_sparq_attn : ggml_topk_attn)(a.g.ctx0, &src, params_of(a, topk_max, rank));
    }
    why = llama_sparse_why_not_run(a.device(), res, a.spec());
    if (!why.empty()) {
        return nullptr; // the nodes made above are in no graph
    }
    // before the layer's own nodes: on a GPU two neighbours among them may be one launch
    set_device(a.g, a.device(), visible);
    ggml_build_forward_expand(a.g.gf, visible);
    res = emit(a, res, "sparse_attend");
    return a.v_mla ? times_v_mla(a, res) : res;
}

// The attention of a layer, or nullptr and why it is left to llama.cpp. ours: PREFILL reads the prompts, else llama.cpp does. Either way a reply gets
// what it gets without them
ggml_tensor * build_layer(const attention & a, bool has_cache, bool ours, std::string & why) {
    const auto & tok = a.inp.tok;

    ggml_tensor * k_t = why.empty() && a.spec().has_shadow() ? build_seal(a) : nullptr;

    const std::string why_exact = is_latent(a) ? why : ""; // why it is read exactly, though by us
    const bool is_stock = !why.empty() && why_exact.empty();
    if (is_stock && (has_cache || !ours)) { // of a layer with a sliding window the prompts may be ours
        return nullptr;
    }
    if (tok.n_reply == 0) {
        why = is_stock ? why : ours ? "" : "prefill";
        return ours ? build_prefill(a, 0, tok.n, a.mask) : nullptr;
    }
    ggml_tensor * res = nullptr;
    if (is_stock) {
        res = build_stock_replies(a);
    } else {
        build_mask(a);
        res = build_replies(a, k_t, why);
        why = why.empty() ? why_exact : why;
    }
    if (res && tok.is_mixed()) { // a token that sees nothing gives zeros
        res = ggml_add(a.g.ctx0, res, build_prompts_between(a, ours));
    }
    if (res && tok.lo > 0) {
        res = ggml_concat(a.g.ctx0, build_prompt(a, ours, 0, tok.lo), res, 1);
    }
    if (res && tok.hi < tok.n) {
        res = ggml_concat(a.g.ctx0, res, build_prompt(a, ours, tok.hi, tok.n), 1);
    }
    return res;
}

// Which cache a layer reads is told by its mask, which belongs to an input of the graph. False: another kind of
// attention, which is upstream's. mctx == nullptr: a layer with a sliding window, of which we read prompts only.
bool find_cache(const llm_graph_context & g, const ggml_tensor * kq_mask, const llama_kv_cache_context ** mctx) {
    for (const auto & input : g.res->inputs) {
        auto * hybrid        = dynamic_cast<llm_graph_input_mem_hybrid      *>(input.get());
        auto * hybrid_iswa   = dynamic_cast<llm_graph_input_mem_hybrid_iswa *>(input.get());
        auto * hybrid_latent = dynamic_cast<llm_graph_input_mem_hybrid_k    *>(input.get());
        auto * plain  = hybrid        ? hybrid->get_attn()        : dynamic_cast<llm_graph_input_attn_kv      *>(input.get());
        auto * iswa   = hybrid_iswa   ? hybrid_iswa->get_attn()   : dynamic_cast<llm_graph_input_attn_kv_iswa *>(input.get());
        auto * latent = hybrid_latent ? hybrid_latent->get_attn() : dynamic_cast<llm_graph_input_attn_k       *>(input.get());
        if (latent && latent->get_kq_mask() == kq_mask) {
            *mctx = latent->mctx;
            return true;
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

} // namespace

ggml_tensor * llama_sparse_build_attn(
        const llm_graph_context & g, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il) {
    const llama_kv_cache_context * mctx = nullptr;
    if (!g.cparams.sparse || g.cparams.sparse->is_off() || !llama_sparse_find_cache(g.mctx) || !kq_mask || !find_cache(g, kq_mask, &mctx)) {
        return nullptr;
    }
    if (kq_mask->ne[3] != k->ne[3]) { // a graph that only measures, for MiniMax-01 with one sequence, while k is of all
        return nullptr;
    }
    auto & inp = *llm_graph_input_sparse::input_of(g);
    if (inp.tok.is_stock) {
        inp.layers.push_back({ il, "off", true });
        return nullptr;
    }
    const attention a = { g, inp, q, k, v, kq_b, kq_mask, sinks, v_mla, kq_scale, il };

    std::string why = why_not_ours(a, mctx);
    const bool ours = inp.tok.has_prompt() && can_prefill(a);
    ggml_tensor * res = build_layer(a, mctx != nullptr, ours, why);
    inp.layers.push_back({ il, why, res == nullptr, res && !ours, res && is_latent(a) });
    return res;
}
