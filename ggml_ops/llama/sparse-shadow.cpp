#include "sparse-shadow.h"

#include "llama-hparams.h"

#include "sparse-codes.h"
#include "sparse-system.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>

// A stride that is a power of two would map all components to the same sets of a CPU's cache: SCORE_SELECT by one thread would take 5 to 10 %
// longer from f16 and 10 to 30 % longer from codes. So the row of a component is a line longer than it needs to be; three lines are no better
// than one
static constexpr int64_t PAD = GGML_SPARSE_LINE;

llama_sparse_shadow::llama_sparse_shadow(uint32_t n_stream, uint32_t n_cell) :
    flags(n_stream, std::vector<uint8_t>(ggml_sparse_n_groups(n_cell), 0)), prompt(n_stream, std::vector<uint8_t>(n_cell, 0)) {
}

llama_kv_cache * llama_sparse_find_shadowed(llama_memory_i * memory) {
    auto * kv = llama_sparse_find_cache(memory);
    return kv && llama_sparse_access::shadow(*kv) && llama_sparse_access::shadow(*kv)->has_tensors() ? kv : nullptr;
}

//
// tensors
//

static ggml_tensor * view_streams(ggml_context * ctx, ggml_tensor * t, int64_t n_stream, uint32_t s0) {
    return t ? ggml_view_3d(ctx, t, t->ne[0], t->ne[1], n_stream, t->nb[1], t->nb[2], s0*t->nb[2]) : nullptr;
}

void llama_sparse_shadow::layer::view(ggml_context * ctx, uint32_t s0, ggml_sparse_src & src) const {
    const int64_t n_stream = src.k->ne[3];
    src.k_t   = view_streams(ctx, k_t, n_stream, s0);
    src.v_sum = view_streams(ctx, v_sum, n_stream, s0);
    // scales and zeros lie in memory component by component, since SCORE reads those of few components; the ops see [2, components, n_grp, n_stream]
    const ggml_tensor * r = k_range;
    src.k_range = r ? ggml_view_4d(ctx, k_range, r->ne[0], r->ne[2], r->ne[1], n_stream, r->nb[2], r->nb[1], r->nb[3], s0*r->nb[3]) : nullptr;
}

ggml_tensor * llama_sparse_shadow::layer::seal(ggml_context * ctx, uint32_t s0, ggml_sparse_src & src, ggml_sparse_seal_params params) const {
    view(ctx, s0, src);
    return src.k_t = ggml_sparse_attn_seal(ctx, &src, params);
}

llama_sparse_shadow::layer llama_sparse_shadow::layer::make(ggml_context * ctx, const llama_kv_cache & kv, const llama_sparse_spec & spec, size_t ikv) {
    layer res;
    const auto &  src      = llama_sparse_access::layers(kv)[ikv];
    const int64_t n_group  = kv.get_size()/GGML_SPARSE_GROUP;
    const int64_t n_stream = kv.get_n_stream();
    const bool    codes    = ggml_sparse_has_codes(spec.n_bit);
    const int64_t n_byte   = ggml_sparse_shadow_bytes(n_group*GGML_SPARSE_GROUP, spec.n_bit) + PAD;
    const ggml_type type   = codes ? GGML_TYPE_I8 : GGML_TYPE_F16;
    res.k_t = ggml_new_tensor_3d(ctx, type, n_byte/ggml_type_size(type), src.k->ne[0], n_stream);
    if (codes) {
        // whole cache lines per component, each of 16 groups. An odd number, or many components would share a set of the cache
        res.k_range = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 2, 16*((n_group + 15)/16 | 1), src.k->ne[0], n_stream);
        ggml_format_name(res.k_range, "sparse_k_range_%d", (int) src.il);
    }
    ggml_format_name(res.k_t, "sparse_k_t_%d", (int) src.il);
    if (spec.wants_mean_v()) {
        res.v_sum = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, src.v->ne[0], ggml_sparse_n_sum_rows(ggml_sparse_n_groups(kv.get_size())), n_stream);
        ggml_format_name(res.v_sum, "sparse_v_sum_%d", (int) src.il);
    }
    return res;
}

// "" or why there is none with these settings: the device of the layer's K lacks one of SparQ's kernels. Asks with the nodes of a token that sees all of
// the cache; of their parameters any will do, since devices look at shapes
static std::string why_no_layer(const llama_kv_cache & kv, const llama_sparse_spec & spec, size_t ikv) {
    const ggml_backend_dev_t dev = llama_sparse_device_of(llama_sparse_access::layers(kv)[ikv].k);
    if (!dev) {
        return "";
    }
    ggml_context_ptr scratch(ggml_init({ 64*ggml_tensor_overhead(), nullptr, true }));
    ggml_context * ctx = scratch.get();
    const int     il   = llama_sparse_access::layers(kv)[ikv].il;
    const int64_t n_kv = kv.get_size(), ns = kv.get_n_stream();
    ggml_sparse_src in = {};
    llama_sparse_view_cache(ctx, kv, il, in);
    in.q       = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, in.k->ne[0], llama_sparse_access::hparams(kv).n_head(il), 1, ns);
    in.mask    = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, n_kv, 1, 1, ns);
    in.sealed  = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, ggml_sparse_n_groups(n_kv), ns);
    in.visible = ggml_sparse_attn_visible(ctx, in.mask);
    in.wanted  = ggml_new_tensor_4d(ctx, GGML_TYPE_I32, 3, 1, 1, ns);
    in.list    = in.sealed;
    const ggml_sparse_seal_params seal = { spec.n_bit, llama_sparse_n_rot(kv) };
    llama_sparse_shadow::layer::make(ctx, kv, spec, ikv).seal(ctx, 0, in, seal);
    const ggml_sparse_score_params  score  = { 1, 1.0f, 0.0f, 0.0f, seal.n_bit, seal.n_rot, 0 };
    const ggml_sparse_select_params select = { 1, (int32_t) in.k->ne[1], 0, in.v_sum != nullptr, 1.0f, 0, 2 };
    return llama_sparse_why_not_run(dev, ggml_sparq_attn(ctx, &in, { score, select }), spec);
}

// Memory of a device (nullptr: the host) for the tensors of ctx; none with no_alloc, in a context that only measures. It is not cleared: a group is read only
// after it was sealed, and the pages are first touched by the threads that seal. Throws std::runtime_error
static ggml_backend_buffer_ptr allocate(ggml_context * ctx, ggml_backend_dev_t dev, bool no_alloc) {
    const ggml_backend_buffer_type_t buft = dev ? ggml_backend_dev_buffer_type(dev) : ggml_backend_cpu_buffer_type();
    ggml_backend_buffer_ptr buf(no_alloc ? ggml_backend_buft_alloc_buffer(buft, 0) : ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
    if (!buf) {
        throw std::runtime_error("no memory for the transposed copy of K\nuse a shorter context, or topk, which needs no copy");
    }
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t && no_alloc; t = ggml_get_next_tensor(ctx, t)) {
        t->buffer = buf.get(); // as upstream makes K and V then
    }
    if (ggml_backend_buffer_is_host(buf.get())) {
        llama_sparse_huge_pages((char *) ggml_backend_buffer_get_base(buf.get()), ggml_backend_buffer_get_size(buf.get()));
    }
    return buf;
}

void llama_sparse_shadow::make_tensors(llama_kv_cache & kv, const llama_sparse_spec & spec) {
    const bool v_sum = spec.wants_mean_v(), asks = spec.gpu_min_mb >= 0;
    if (*llama_sparse_why_not(kv) || (has_tensors() && bits == spec.n_bit && (has_v_sum || !v_sum) && (was_asked || !asks))) {
        return;
    }
    const auto & cached = llama_sparse_access::layers(kv);
    std::vector<layer>                   new_layers(cached.size());
    std::vector<ggml_context_ptr>        new_ctxs;
    std::vector<ggml_backend_buffer_ptr> new_bufs;

    // in the memory of K, layer by layer; what the device can not run gets none
    std::map<ggml_backend_dev_t, ggml_context_ptr> by_device;
    for (size_t ikv = 0; ikv < cached.size(); ++ikv) {
        if (*llama_sparse_why_not_layer(kv, ikv) || cached[ikv].il >= llama_sparse_access::hparams(kv).n_layer()) {
            continue;
        }
        auto & ctx = by_device[llama_sparse_device_of(cached[ikv].k)];
        if (!ctx) {
            ctx.reset(ggml_init({ 3*cached.size()*ggml_tensor_overhead(), nullptr, true }));
        }
        const std::string reason = why_no_layer(kv, spec, ikv);
        if (reason.empty()) {
            new_layers[ikv] = layer::make(ctx.get(), kv, spec, ikv);
        }
        new_layers[ikv].reason = reason;
    }
    for (auto & [dev, ctx] : by_device) {
        if (!ggml_get_first_tensor(ctx.get())) {
            continue;
        }
        const bool no_alloc = llama_sparse_access::hparams(kv).no_alloc;
        ggml_backend_buffer_ptr buf = allocate(ctx.get(), dev, no_alloc);
        if (no_alloc) { // counted with K and V
            llama_sparse_access::ctxs_bufs(kv).emplace_back(std::move(ctx), std::move(buf));
            continue;
        }
        new_ctxs.push_back(std::move(ctx));
        new_bufs.push_back(std::move(buf));
    }
    layers    = std::move(new_layers);
    bufs      = std::move(new_bufs);
    ctxs      = std::move(new_ctxs);
    bits      = spec.n_bit;
    has_v_sum = v_sum;
    was_asked = asks;
    invalidate();
}

std::map<ggml_backend_dev_t, size_t> llama_sparse_shadow::bytes() const {
    std::map<ggml_backend_dev_t, size_t> res;
    for (const auto & buf : bufs) {
        res[llama_sparse_device_of(buf.get())] += ggml_backend_buffer_get_size(buf.get());
    }
    return res;
}

//
// sealed groups
//

void llama_sparse_shadow::invalidate() {
    for (uint32_t s = 0; s < flags.size(); ++s) {
        invalidate(s);
    }
}

void llama_sparse_shadow::invalidate(uint32_t stream, uint32_t from_group) {
    std::fill(flags[stream].begin() + std::min<size_t>(from_group, flags[stream].size()), flags[stream].end(), 0);
}

void llama_sparse_shadow::invalidate(uint32_t stream, const std::vector<uint32_t> & cells) {
    for (uint32_t i : cells) {
        flags[stream][i/GGML_SPARSE_GROUP] = 0;
    }
}

void llama_sparse_shadow::seal(uint32_t stream, uint32_t group) {
    pending.emplace_back(stream, group); // first, since it may throw
    flags[stream][group] = 1;
}

void llama_sparse_shadow::rollback() {
    for (const auto & [stream, group] : pending) {
        flags[stream][group] = 0;
    }
    pending.clear();
}

//
// cells
//

void llama_sparse_shadow::set_prompt(uint32_t stream, const std::vector<uint32_t> & cells, const int8_t * output) {
    for (size_t i = 0; i < cells.size(); ++i) {
        prompt[stream][cells[i]] = output && !output[i];
    }
}

//
// hooks
//

void llama_sparse_cells_written(llama_sparse_shadow * shadow, uint32_t stream, const std::vector<uint32_t> & cells, const int8_t * output) {
    if (shadow) {
        shadow->invalidate(stream, cells);
        shadow->set_prompt(stream, cells, output);
    }
}

void llama_sparse_cells_cleared(llama_sparse_shadow * shadow) {
    if (shadow) {
        shadow->invalidate();
        shadow->pages.unmap();
    }
}

void llama_sparse_cells_moved(
        llama_kv_cache & kv, const llama_cparams & cparams, bool do_shift, const std::vector<uint32_t> & from, const std::vector<uint32_t> & to) {
    auto & shadow = llama_sparse_access::shadow(kv);
    if (!shadow) {
        return;
    }
    for (size_t i = 0; i < to.size(); ++i) {
        shadow->invalidate(to[i]);
        shadow->copy_prompt(from[i], to[i]);
    }
    if (!do_shift || !shadow->has_tensors()) {
        return;
    }
    // all of K goes through RoPE, which leaves a cell that is not shifted as it is; not so if K is rounded anew, or scaled
    const bool is_exact = !ggml_is_quantized(kv.type_k()) && cparams.yarn_ext_factor == 0.0f && cparams.yarn_attn_factor == 1.0f;
    for (uint32_t s = 0; s < kv.get_n_stream(); ++s) {
        const auto & cells = llama_sparse_access::cells(kv, s);
        std::vector<uint32_t> shifted;
        for (uint32_t i = 0; i < cells.size(); ++i) {
            if (!is_exact || (!cells.is_empty(i) && cells.get_shift(i) != 0)) {
                shifted.push_back(i);
            }
        }
        shadow->invalidate(s, shifted);
    }
}

std::vector<uint32_t> llama_sparse_kv_in_memory() {
    const char * list = getenv("SPARQ_KV_IN_MEMORY");
    std::istringstream text(list ? list : "");
    std::vector<uint32_t> res;
    for (std::string one; std::getline(text, one, ',');) {
        const char * end = one.data() + one.size();
        uint32_t il = 0;
        const auto [at, error] = std::from_chars(one.data(), end, il);
        if (error != std::errc() || at != end) {
            throw std::runtime_error("SPARQ_KV_IN_MEMORY: not the number of a layer: '" + one + "'; hint: write it as in 0,3,7");
        }
        res.push_back(il);
    }
    return res;
}

ggml_backend_buffer_type_t llama_sparse_kv_buft(ggml_backend_buffer_type_t buft, uint32_t il) {
    const auto layers = llama_sparse_kv_in_memory();
    const bool is_listed = std::find(layers.begin(), layers.end(), il) != layers.end();
    return is_listed && !llama_sparse_makes_draft() ? ggml_backend_cpu_buffer_type() : buft;
}

void llama_sparse_clear(ggml_backend_buffer_t buf) {
    // The system fills such pages with zeros. Those of a file, which it would fill with the file, are no longer there, or we write zeros. Partial
    // pages at either end may be shared, so they are zeroed by hand
    if (ggml_backend_buffer_get_type(buf) == ggml_backend_cpu_buffer_type() && !llama_sparse_pages::has_unmap_failed()) {
        const uintptr_t page = llama_sparse_page_size(), begin = (uintptr_t) ggml_backend_buffer_get_base(buf), n = ggml_backend_buffer_get_size(buf);
        char * base = (char *) begin, * first = (char *) ((begin + page - 1)/page*page), * last = (char *) ((begin + n)/page*page);
        if (last > first && llama_sparse_drop_pages(first, last - first)) {
            memset(base, 0, first - base);
            memset(last, 0, base + n - last);
            llama_sparse_huge_pages(base, n);
            return;
        }
    }
    ggml_backend_buffer_clear(buf, 0);
}
