// The C API, and the settings of a context.

#include "sparse-guarded.h"
#include "sparse-input.h"
#include "sparse-seal.h"
#include "sparse-system.h"

#include "llama-sparse-tools.h"

#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-model.h"

#include "sparse-codes.h"

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <tuple>

using access = llama_sparse_access;

//
// settings
//

// throws llama_sparse_error: why the context can not have these settings
static void check(const llama_context & ctx, const llama_sparse_spec & spec) {
    const auto &  hparams = ctx.get_model().hparams;
    const int32_t n_layer = (int32_t) hparams.n_layer();

    if (spec.method != LLAMA_SPARSE_OFF && ctx.get_model().arch == LLM_ARCH_GROK) {
        throw llama_sparse_error("sparse attention lacks the scale of Grok's logits", "run this model with sparse attention off");
    }
    if (spec.method != LLAMA_SPARSE_OFF && !ctx.get_cparams().flash_attn) {
        throw llama_sparse_error("sparse attention needs flash attention, which is off in this context",
                "create the context with flash attention on (-fa on; flash_attn=True in llama-cpp-python): V is stored transposed without it");
    }
    const auto check_size = [&](const std::string & key, size_t n) {
        if (n > 0 && (int32_t) n != n_layer) {
            throw llama_sparse_error(key + " has " + std::to_string(n) + " entries for " + std::to_string(n_layer) + " layers",
                    "give one for each layer, separated by ':'");
        }
    };
    check_size("k_layers",    spec.k_layers.size());
    check_size("rank_layers", spec.rank_layers.size());
    const auto * kv = llama_sparse_find_cache(ctx.get_memory());
    if (spec.method != LLAMA_SPARSE_SPARQ || !kv) {
        return;
    }
    for (const auto & [il, _] : access::layer_ids(*kv)) { // those that may run it, also over K and V of another layer
        if (il >= n_layer || hparams.n_head_kv(il) == 0) {
            continue;
        }
        const int32_t rank = spec.rank_layers.empty() ? spec.rank : spec.rank_layers[il];
        const int32_t d_k  = (int32_t) hparams.n_embd_head_k(il);
        if (rank > d_k) {
            throw llama_sparse_error("rank is above the head size of the model: " + std::to_string(rank) + " > " + std::to_string(d_k),
                    "use a rank of at most " + std::to_string(d_k));
        }
    }
}

// bytes of K and V that one call to llama_decode seals before its graph: some milliseconds of a restored state
static constexpr size_t EARLY_BYTES = 8u << 20;

// seals what the next token would have to seal first, where something reads it; what could not be is left to that token
static void seal_early(llama_context & ctx, size_t n_bytes = SIZE_MAX) {
    const auto & state = ctx.get_cparams().sparse;
    try {
        if (state && state->spec.has_shadow()) {
            llama_sparse_seal(ctx, n_bytes);
        }
    } catch (const std::exception &) { // no memory, say
        LLAMA_LOG_WARN("%s: the next token will seal what could not be sealed now\n", __func__);
    }
}

// Nodes of a layer: up to 15 for the replies, and up to 44 for the prompts beside them, if llama.cpp builds them in three parts, and for the product
// that ends latent attention. The inputs, which the layers share, are fewer than those of a layer
static constexpr uint32_t LAYER_NODES = 64;

uint32_t llama_sparse_max_nodes(const llama_context & ctx) {
    return ctx.get_cparams().sparse ? LAYER_NODES*(1 + llama_model_n_layer(&ctx.get_model())) : 0;
}

// ggml takes buffers that it could not allocate for those of the next graph, and reads address 0: a new scheduler has none
static void renew_scheduler(llama_context & ctx) {
    auto & cparams  = access::cparams(ctx);
    auto & backends = access::backend_ptrs(ctx);
    cparams.sparse_gen++; // no graph of the old one is used again
    access::sched(ctx).reset(ggml_backend_sched_new(backends.data(), access::backend_buft(ctx).data(), backends.size(),
            ctx.get_gf_res_reserve()->get_max_nodes(), cparams.pipeline_parallel, cparams.op_offload));
}

// throws llama_sparse_error, or std::runtime_error: no memory; nothing has changed then
static void set(llama_context & ctx, const llama_sparse_spec & spec) {
    check(ctx, spec);

    auto & state = access::cparams(ctx).sparse;
    if (state ? state->spec.str() == spec.str() : spec.method == LLAMA_SPARSE_OFF) {
        if (state) {
            state->sequences = {};
        }
        seal_early(ctx);
        return;
    }
    auto * kv = llama_sparse_find_cache(ctx.get_memory());
    const auto next = state ? state : std::make_shared<llama_sparse_state>();
    next->make_stats(nullptr);
    for (size_t ikv = 0; kv && !*llama_sparse_why_not(*kv) && ikv < access::layers(*kv).size(); ++ikv) {
        if (!*llama_sparse_why_not_layer(*kv, ikv)) {
            next->make_stats(llama_sparse_device_of(access::layers(*kv)[ikv].k));
        }
    }
    for (const auto & backend : access::backends(ctx)) { // also those that hold nothing but layers with a sliding window
        ggml_backend_dev_t dev = ggml_backend_get_device(backend.get());
        if (llama_sparse_is_worker(dev) && llama_sparse_is_cpu(dev)) {
            next->make_stats(dev);
        }
    }
    if (kv && spec.method != LLAMA_SPARSE_OFF) {
        auto & shadow = access::shadow(*kv);
        if (!shadow) {
            shadow = std::make_shared<llama_sparse_shadow>(kv->get_n_stream(), kv->get_size());
        }
        if (spec.has_shadow()) {
            shadow->make_tensors(*kv, spec);
        }
    }
    const auto before = state ? std::make_pair(state->spec, state->reason) : std::pair<llama_sparse_spec, std::string>();
    state            = next;
    state->spec      = spec;
    state->sequences = {};
    state->layers.clear(); // those of the last graph are of other settings
    state->n_layer   = (int32_t) ctx.get_model().hparams.n_layer();
    const char * on_cpu = getenv("SPARQ_PROMPT_ON_CPU");
    state->prompt_on_cpu = on_cpu && std::string(on_cpu) == "1";
    state->reason    = spec.method == LLAMA_SPARSE_OFF ? "" : kv ? llama_sparse_why_not(*kv) : "this architecture has no plain KV cache";
    if (!state->reason.empty()) {
        LLAMA_LOG_WARN("sparse attention %s: all layers stay dense: %s\n", spec.str().c_str(), state->reason.c_str());
    }

    access::cparams(ctx).sparse_gen++; // allow_reuse() compares it
    access::sched_need_reserve(ctx) = true;
    try {
        ctx.sched_reserve(); // llama_decode would do it, and let out what it throws
    } catch (const std::exception &) {
        std::tie(state->spec, state->reason) = before;
        renew_scheduler(ctx);
        throw;
    }
    seal_early(ctx);
}

int32_t llama_set_sparse_attn(llama_context * ctx, const char * text, char * err, size_t n_err) {
    return llama_sparse_guarded(err, n_err, [&] {
        ctx->synchronize();
        set(*ctx, llama_sparse_spec::parse(text ? text : "off"));
        return 0;
    });
}

void llama_sparse_check_seq(const llama_context & ctx, llama_seq_id seq) {
    if (seq < 0 || (uint32_t) seq >= ctx.get_cparams().n_seq_max) {
        throw llama_sparse_error("there is no sequence " + std::to_string(seq), "the context has " + std::to_string(ctx.get_cparams().n_seq_max));
    }
}

// throws llama_sparse_error
static void set_sequence(llama_context & ctx, llama_seq_id seq, const char * text) {
    llama_sparse_check_seq(ctx, seq);
    auto & state = access::cparams(ctx).sparse;
    std::shared_ptr<const llama_sparse_spec> own;
    if (text) {
        const auto spec = llama_sparse_spec::parse_own(text, state ? state->spec : llama_sparse_spec());
        check(ctx, spec);
        if (spec.str() != (state ? state->spec : llama_sparse_spec()).str()) {
            own = std::make_shared<const llama_sparse_spec>(spec);
        }
    }
    if (!state) {
        return; // off, as all is
    }
    ctx.synchronize();
    for (const auto & other : state->sequences) { // equal settings are one, so that a graph has them once
        if (own && other.own && other.own->str() == own->str()) {
            own = other.own;
        }
    }
    state->sequences[seq] = {};
    state->sequences[seq].own = own;
}

int32_t llama_set_sparse_attn_seq(llama_context * ctx, llama_seq_id seq, const char * text, char * err, size_t n_err) {
    return llama_sparse_guarded(err, n_err, [&] {
        set_sequence(*ctx, seq, text);
        return 0;
    });
}

void llama_sparse_attn_seq_prompt(llama_context * ctx, llama_seq_id seq) {
    const auto & state = ctx->get_cparams().sparse;
    if (state && seq >= 0 && (uint32_t) seq < ctx->get_cparams().n_seq_max) {
        auto & own = state->sequences[seq];
        own.is_prompt  = true;
        own.prompt_end = own.draft_from = own.draft_to = -1;
    }
}

void llama_sparse_attn_seq_draft(llama_context * ctx, llama_seq_id seq, llama_pos from, int32_t n) {
    const auto & state = ctx->get_cparams().sparse;
    if (state && seq >= 0 && (uint32_t) seq < ctx->get_cparams().n_seq_max) {
        state->sequences[seq].draft_from = from;
        state->sequences[seq].draft_to   = from + n;
    }
}

int32_t llama_sparse_attn_parse(const char * text, char * buf, size_t n_buf) {
    return llama_sparse_guarded_text(buf, n_buf, [&] { return llama_sparse_spec::parse(text ? text : "off").str(); });
}

int32_t llama_sparse_attn_keys(char * buf, size_t n_buf) {
    return llama_sparse_guarded_text(buf, n_buf, llama_sparse_spec::table);
}

//
// settings of a new context
//

static thread_local std::optional<std::string> thread_default;

int32_t llama_sparse_attn_default(const char * spec) {
    return llama_sparse_logged(__func__, -1, [&] {
        thread_default = spec ? std::optional<std::string>(spec) : std::nullopt;
        return 0;
    });
}

static thread_local bool makes_draft = false;

bool llama_sparse_makes_draft() { return makes_draft; }

// "" or the spec that a new context begins with, and in `from` who says so
static std::string default_spec(std::string & from) {
    if (thread_default) {
        return *thread_default;
    }
    const char * text = getenv("SPARQ_ATTN");
    from = "SPARQ_ATTN: ";
    return text && !makes_draft ? text : "";
}

void llama_sparse_context_begin(llama_cparams & cparams, const llama_context_params & params) {
    makes_draft = params.ctx_other || (thread_default && thread_default->empty()); // see llama_sparse_measured
    std::string from;
    const std::string text = default_spec(from);
    try {
        if (!text.empty() && llama_sparse_spec::parse(text).method != LLAMA_SPARSE_OFF && !cparams.flash_attn) {
            LLAMA_LOG_WARN("%s: %sturning flash attention on, which the program had turned off\n", __func__, from.c_str());
            cparams.flash_attn = true;
        }
    } catch (const llama_sparse_error & e) {
        throw std::runtime_error(from + llama_sparse_in_one_line(e.what())); // a program that was asked for sparse attention must not run dense without a word
    }
}

void llama_sparse_context_end(llama_context * ctx) {
    const uint32_t n_layer = ctx->get_model().hparams.n_layer_all;
    for (uint32_t il : llama_sparse_kv_in_memory()) {
        if (il >= n_layer && !makes_draft) {
            LLAMA_LOG_WARN("%s: SPARQ_KV_IN_MEMORY: there is no layer %u; the last one is %u\n", __func__, il, n_layer - 1);
        }
    }
    std::string from;
    const std::string text = default_spec(from);
    if (text.empty()) {
        return;
    }
    try {
        set(*ctx, llama_sparse_spec::parse(text));
    } catch (const std::exception & e) {
        throw std::runtime_error(from + llama_sparse_in_one_line(e.what()));
    }
    LLAMA_LOG_INFO("%s: %s%s\n", __func__, from.c_str(), text.c_str());
}

//
// while it runs
//

void llama_sparse_decode_begin(llama_context * ctx, const llama_batch & batch) {
    llama_sparse_grammar_begin();
    auto & state = access::cparams(*ctx).sparse;
    if (state && !state->is_off()) {
        seal_early(*ctx, EARLY_BYTES);
        llama_sparse_find_replies(*state, llama_sparse_find_cache(ctx->get_memory()), batch);
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            auto & seq = state->sequences[batch.seq_id[i][0]];
            if (seq.is_prompt || seq.prompt_end == batch.pos[i]) {
                state->replying [batch.seq_id[i][0]] = false;
                state->verifying[batch.seq_id[i][0]] = false;
                seq.prompt_end = batch.logits[i] ? batch.pos[i] : -1;
                seq.is_prompt  = !batch.logits[i] || ctx->get_cparams().embeddings; // all tokens of what is embedded have an output
            } else {
                seq.prompt_end = -1; // it went on; a shift may bring the position back
            }
        }
    }
}

void llama_sparse_decode_failed(llama_context * ctx) {
    auto * kv = llama_sparse_find_cache(ctx->get_memory());
    if (kv && access::shadow(*kv)) {
        access::shadow(*kv)->rollback();
    }
    for (auto * backend : access::backend_ptrs(*ctx)) {
        if (!ggml_backend_sched_get_buffer_size(ctx->get_sched(), backend)) {
            renew_scheduler(*ctx);
            break;
        }
    }
    if (llama_sparse_is_ending()) {
        throw std::runtime_error("the program ends"); // llama-server would read the same in smaller batches
    }
}

llama_sparse_restored::~llama_sparse_restored() {
    const auto * kv = llama_sparse_find_cache(ctx->get_memory());
    if (!kv || kv->get_n_stream() == 1) {
        seal_early(*ctx); // the next token would have to seal all of it
    }
}

int64_t llama_sparse_attn_seal(llama_context * ctx) {
    return llama_sparse_logged<int64_t>(__func__, -1, [&] { return llama_sparse_seal(*ctx); });
}

int64_t llama_sparse_attn_check(llama_context * ctx) {
    return llama_sparse_logged<int64_t>(__func__, -1, [&] {
        ctx->synchronize();
        auto * kv = llama_sparse_find_shadowed(ctx->get_memory());
        return kv ? llama_sparse_count_stale(*kv, ctx->get_sched()) : -1;
    });
}

//
// counters
//

void llama_sparse_attn_reset_counters(llama_context * ctx) {
    ctx->synchronize();
    if (auto & state = ctx->get_cparams().sparse) {
        state->reset_counters();
    }
}

static std::map<ggml_backend_dev_t, size_t> shadow_bytes(llama_context & ctx) {
    auto * kv = llama_sparse_find_shadowed(ctx.get_memory());
    return kv ? access::shadow(*kv)->bytes() : std::map<ggml_backend_dev_t, size_t>();
}

size_t llama_sparse_shadow_bytes(llama_context & ctx) {
    size_t n = 0;
    for (const auto & [_, bytes] : shadow_bytes(ctx)) {
        n += bytes;
    }
    return n;
}

using json_fields = std::vector<std::pair<std::string, std::string>>;

// one JSON object; texts have no character that JSON would escape
static std::string json_object(const json_fields & fields) {
    std::string res;
    for (const auto & [key, value] : fields) {
        res += (res.empty() ? "{\"" : ", \"") + key + "\": " + value;
    }
    return res.empty() ? "{}" : res + "}";
}

static std::string json_text(const std::string & s) { return "\"" + s + "\""; }
static std::string json_number(int64_t x)           { return std::to_string(x); }

static std::string layers_info(const llama_sparse_state & state) {
    std::string res;
    for (const auto & [il, reason] : state.layers) {
        const char * text = reason.empty() ? "sparse" : "dense";
        res += (res.empty() ? "" : ", ") + json_object({ { "il", json_number(il) }, { "state", json_text(text) }, { "reason", json_text(reason) } });
    }
    return "[" + res + "]";
}

static std::string devices_info(const llama_sparse_state & state, std::map<ggml_backend_dev_t, size_t> shadow) {
    std::string res;
    state.for_each_device([&](ggml_backend_dev_t dev) {
        const auto stat = state.read_stats(dev);
        const json_fields fields = {
            { "name",         json_text(dev ? ggml_backend_dev_name(dev) : "CPU") },
            { "shadow_bytes", json_number(shadow[dev]) },
            { "calls_sparse", json_number(stat[GGML_SPARSE_STAT_ATTEND_SPARSE]) },
            { "bytes_read",   json_number(stat[GGML_SPARSE_STAT_BYTES_SCORE] + stat[GGML_SPARSE_STAT_BYTES_ATTEND]) },
        };
        res += (res.empty() ? "" : ", ") + json_object(fields);
    });
    return "[" + res + "]";
}

static std::string counters_info(const llama_sparse_state & state) {
    const auto stat = state.read_stats();
    json_fields stock;
    uint64_t n_stock = 0;
    for (const auto & [reason, n] : state.n_stock) {
        stock.emplace_back(reason, json_number(n));
        n_stock += n;
    }
    // clang-format off: a table
    return json_object({
        { "steps",             json_number(state.n_steps) },
        { "verified",          json_number(state.n_verified) },
        { "calls_sparse",      json_number(stat[GGML_SPARSE_STAT_ATTEND_SPARSE]) },
        { "calls_dense_op",    json_number(stat[GGML_SPARSE_STAT_ATTEND_DENSE]) },
        { "calls_prefill",     json_number(stat[GGML_SPARSE_STAT_PREFILL]) },
        { "blocks_fast",       json_number(stat[GGML_SPARSE_STAT_PREFILL_FAST]) },
        { "calls_stock",       json_number(n_stock) },
        { "stock_reasons",     json_object(stock) },
        { "positions_visible", json_number(stat[GGML_SPARSE_STAT_POS_VISIBLE]) },
        { "positions_read",    json_number(stat[GGML_SPARSE_STAT_POS_READ]) },
        { "bytes_read",        json_number(stat[GGML_SPARSE_STAT_BYTES_SCORE] + stat[GGML_SPARSE_STAT_BYTES_ATTEND]) },
        { "bytes_score",       json_number(stat[GGML_SPARSE_STAT_BYTES_SCORE]) },
        { "bytes_attend",      json_number(stat[GGML_SPARSE_STAT_BYTES_ATTEND]) },
        { "bytes_dense",       json_number(stat[GGML_SPARSE_STAT_BYTES_DENSE]) },
        { "groups_sealed",     json_number(stat[GGML_SPARSE_STAT_GROUPS_SEALED]) },
    });
    // clang-format on
}

static std::string info(llama_context & ctx) {
    const auto & state = ctx.get_cparams().sparse;
    if (!state) {
        return "{\"spec\": \"off\", \"active\": false, \"reason\": \"off\", \"method\": \"off\"}";
    }
    ctx.synchronize(); // devices may still be counting
    const auto & layers = state->layers;
    return json_object({
            { "spec",          json_text(state->spec.str()) },
            { "active",        !state->is_off() && state->reason.empty() ? "true" : "false" },
            { "reason",        json_text(state->is_off() ? "off" : state->reason) },
            { "method",        json_text(state->spec.method_name()) },
            { "n_layer",       json_number(state->n_layer) },
            { "layers_sparse", json_number(std::count_if(layers.begin(), layers.end(), [](const auto & x) { return x.second.empty(); })) },
            { "shadow_type",   json_text(ggml_sparse_shadow_name(state->spec.n_bit)) },
            { "shadow_bytes",  json_number(llama_sparse_shadow_bytes(ctx)) },
            { "layers",        layers_info(*state) },
            { "devices",       devices_info(*state, shadow_bytes(ctx)) },
            { "counters",      counters_info(*state) },
    });
}

static std::string sequence_info(const llama_context & ctx, llama_seq_id seq) {
    const auto & state = ctx.get_cparams().sparse;
    llama_sparse_check_seq(ctx, seq);
    if (!state) {
        return json_object({ { "spec", json_text("off") } });
    }
    const auto & x = state->sequences[seq];
    // clang-format off: a table
    return json_object({
        { "spec",              json_text(state->spec_of(seq).str()) },
        { "steps",             json_number(x.n_steps) },
        { "verified",          json_number(x.n_verified) },
        { "calls_sparse",      json_number(x.n_sparse) },
        { "calls_dense",       json_number(x.n_dense) },
        { "positions_visible", json_number(x.n_visible) },
        { "positions_read",    json_number(x.n_read) },
        { "bytes_dense",       json_number((int64_t) x.bytes_dense) },
        { "bytes_read",        json_number((int64_t) x.bytes_read) },
    });
    // clang-format on
}

int32_t llama_get_sparse_attn_seq_info(const llama_context * ctx, llama_seq_id seq, char * buf, size_t n_buf) {
    return llama_sparse_guarded_text(buf, n_buf, [&] { return sequence_info(*ctx, seq); });
}

int32_t llama_get_sparse_attn_info(const llama_context * ctx, char * buf, size_t n_buf) {
    return llama_sparse_guarded_text(buf, n_buf, [&] { return info(*const_cast<llama_context *>(ctx)); });
}
