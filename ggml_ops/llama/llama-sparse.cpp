// Settings, counters and the C API. The shadow and the graph are in llama-sparse-graph.cpp.

#include "llama-sparse-impl.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <stdexcept>

//
// spec
//

namespace {

// what a user did wrong: the message and the hint, as the C API returns them
struct spec_error : std::runtime_error {
    spec_error(const std::string & msg, const std::string & hint) : std::runtime_error(msg + "\n" + hint) {}
};

const std::vector<std::string> METHODS = { "off", "dense", "sparq", "topk" };
const std::vector<std::string> KEYS = {
    "ratio", "rank", "topk", "k", "local", "sinks", "min_k", "min_ctx", "gpu_min_mb", "mean_v", "shadow", "budget", "top_p", "cap",
    "k_layers", "rank_layers",
};

int edit_distance(const std::string & a, const std::string & b) {
    std::vector<int> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) {
        row[j] = j;
    }
    for (size_t i = 1; i <= a.size(); ++i) {
        int diag = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const int up = row[j];
            row[j] = std::min({ up + 1, row[j - 1] + 1, diag + (a[i - 1] != b[j - 1]) });
            diag = up;
        }
    }
    return row.back();
}

std::string nearest(const std::string & word, const std::vector<std::string> & names) {
    return *std::min_element(names.begin(), names.end(), [&](const auto & a, const auto & b) {
        return edit_distance(word, a) < edit_distance(word, b);
    });
}

std::string trim(const std::string & s) {
    const size_t b = s.find_first_not_of(" \t\n");
    return b == std::string::npos ? "" : s.substr(b, s.find_last_not_of(" \t\n") - b + 1);
}

std::vector<std::string> split(const std::string & s, char sep) {
    std::vector<std::string> res;
    size_t b = 0;
    for (size_t e; (e = s.find(sep, b)) != std::string::npos; b = e + 1) {
        res.push_back(trim(s.substr(b, e - b)));
    }
    res.push_back(trim(s.substr(b)));
    return res;
}

// false unless all of s is a number
bool to_double(const std::string & s, double & x) {
    char * end = nullptr;
    x = strtod(s.c_str(), &end);
    return !s.empty() && *end == 0 && std::isfinite(x);
}

double parse_ratio(const std::string & s) {
    double x = 0;
    double den = 1;
    bool ok = false;
    const size_t slash = s.find('/');
    if (slash != std::string::npos) {
        ok = to_double(trim(s.substr(0, slash)), x) && to_double(trim(s.substr(slash + 1)), den) && den > 0;
        x /= den;
    } else if (!s.empty() && s.back() == '%') {
        ok = to_double(trim(s.substr(0, s.size() - 1)), x);
        x /= 100;
    } else {
        ok = to_double(s, x);
    }
    if (!ok) {
        throw spec_error("ratio is not a number: " + s, "write it as 1/8, 0.125 or 12.5%");
    }
    if (!(x > 0 && x <= 1)) {
        throw spec_error("ratio must be above 0 and at most 1: " + s, "ratio is the share of dense attention's bytes to read, as in 1/8");
    }
    return x;
}

int32_t parse_int(const std::string & key, const std::string & s, int32_t min) {
    double x;
    if (!to_double(s, x) || x != std::floor(x) || x > 1e9) {
        throw spec_error(key + " is not a whole number: " + s, "as in " + key + "=" + std::to_string(std::max(min, 16)));
    }
    if (x < min) {
        throw spec_error(key + " must be at least " + std::to_string(min) + ": " + s, "leave it out for the default");
    }
    return (int32_t) x;
}

std::string format_double(double x) {
    char buf[32];
    snprintf(buf, sizeof(buf), "%.9g", x);
    return buf;
}

double parse_double(const std::string & key, const std::string & s, double min, double max, const std::string & hint) {
    double x;
    if (!to_double(s, x) || !(x > min && x <= max)) {
        throw spec_error(key + " is not a number above " + format_double(min) + " and at most " + format_double(max) + ": " + s, hint);
    }
    return x;
}

// 64, 12.5% or dense
llama_sparse_spec::layer_k parse_layer_k(const std::string & s) {
    if (s == "dense") {
        return { 100.0, true };
    }
    if (!s.empty() && s.back() == '%') {
        return { parse_double("k_layers", trim(s.substr(0, s.size() - 1)), 0.0, 100.0, "as in k_layers=64:12.5%:dense"), true };
    }
    return { (double) parse_int("k_layers", s, 1), false };
}

llama_sparse_spec parse_spec(const std::string & text) {
    llama_sparse_spec spec;

    const auto parts = split(text, ',');

    const auto method = std::find(METHODS.begin(), METHODS.end(), parts[0]);
    if (method == METHODS.end()) {
        throw spec_error("unknown method: " + parts[0], "did you mean " + nearest(parts[0], METHODS) + "? methods: off, dense, sparq, topk");
    }
    spec.method = (llama_sparse_method) (method - METHODS.begin());

    for (size_t i = 1; i < parts.size(); ++i) {
        const size_t eq = parts[i].find('=');
        // "budget" values may stand alone: topk,k=512,ramp
        const std::string key = eq == std::string::npos ? "budget" : trim(parts[i].substr(0, eq));
        const std::string val = eq == std::string::npos ? parts[i] : trim(parts[i].substr(eq + 1));

        if (std::find(KEYS.begin(), KEYS.end(), key) == KEYS.end()) {
            throw spec_error("unknown key: " + key, "did you mean " + nearest(key, KEYS) + "?");
        }
        if (key == "ratio") {
            spec.ratio = parse_ratio(val);
        } else if (key == "rank") {
            spec.rank = parse_int(key, val, 1);
        } else if (key == "topk" || key == "k") {
            spec.topk = parse_int(key, val, 1);
        } else if (key == "local") {
            spec.local = parse_int(key, val, 0);
        } else if (key == "sinks") {
            spec.sinks = parse_int(key, val, 0);
        } else if (key == "min_k") {
            spec.min_k = parse_int(key, val, 1);
        } else if (key == "min_ctx") {
            spec.min_ctx = parse_int(key, val, 0);
        } else if (key == "gpu_min_mb") {
            spec.gpu_min_mb = parse_int(key, val, 0);
        } else if (key == "mean_v") {
            if (val != "auto" && val != "on" && val != "off") {
                throw spec_error("mean_v is not auto, on or off: " + val, "leave it out for auto: on for MHA, off for GQA");
            }
            spec.mean_v = val == "auto" ? -1 : val == "on";
        } else if (key == "shadow") {
            if (val != "f16" && val != "q8" && val != "q4") {
                throw spec_error("shadow is not f16, q8 or q4: " + val, "leave it out for the default");
            }
            spec.n_bit = val == "f16" ? 16 : val == "q8" ? 8 : 4;
        } else if (key == "budget") {
            if (val == "calibrated" || val == "top-p") {
                throw spec_error("budget " + val + " is measured for each model, by sparq-cpp calibrate",
                        "write what it found here: sparq-cpp explain --budget " + val + " names it");
            }
            if (val != "uniform" && val != "ramp" && val != "ramp-down") {
                throw spec_error((eq == std::string::npos ? "not a key=value pair: " : "unknown budget: ") + val, "budgets: uniform, ramp, ramp-down");
            }
            spec.ramp = val == "ramp" ? 1 : val == "ramp-down" ? -1 : 0;
        } else if (key == "top_p") {
            spec.top_p = parse_double(key, val, 0.0, 1.0, "the share of the mass to select, as in top_p=0.95");
        } else if (key == "cap") {
            spec.cap = parse_double(key, val, 0.0, 1e6, "up to how many times k, as in cap=4");
        } else if (key == "k_layers") {
            for (const auto & k : split(val, ':')) {
                spec.k_layers.push_back(parse_layer_k(k));
            }
        } else if (key == "rank_layers") {
            for (const auto & r : split(val, ':')) {
                spec.rank_layers.push_back(parse_int(key, r, 1));
            }
        }
    }

    const bool sparse = spec.method == LLAMA_SPARSE_SPARQ || spec.method == LLAMA_SPARSE_TOPK;
    if (!sparse && parts.size() > 1 && !parts[1].empty()) {
        throw spec_error(parts[0] + " takes no keys: " + text, "write just " + parts[0]);
    }
    if (spec.cap != 1.0 && (spec.cap < 1.0 || spec.top_p >= 1.0)) {
        throw spec_error("cap is 1 or more, and belongs to top_p: " + text, "as in top_p=0.95,cap=4");
    }
    if (spec.method == LLAMA_SPARSE_TOPK && (spec.rank > 0 || !spec.rank_layers.empty() || spec.mean_v > 0)) {
        throw spec_error("rank and mean_v belong to sparq, not topk: " + text, "topk scores with all of K, so its scores are exact");
    }
    if (spec.topk > 0 && spec.sinks + std::max(spec.local, 0) + 1 > spec.topk) {
        throw spec_error("topk leaves no room beside sinks and local: " + text, "topk counts them; raise topk, or lower sinks or local");
    }
    return spec;
}

} // namespace

std::string llama_sparse_spec::str() const {
    if (method == LLAMA_SPARSE_OFF || method == LLAMA_SPARSE_DENSE) {
        return METHODS[method];
    }
    const llama_sparse_spec def;
    std::string s = METHODS[method];
    const auto add = [&](const char * key, const std::string & val) { s += std::string(",") + key + "=" + val; };
    const bool needs_ratio = (topk <= 0 && k_layers.empty()) || (method == LLAMA_SPARSE_SPARQ && rank <= 0 && rank_layers.empty());
    if (needs_ratio)            { add("ratio",   format_double(ratio)); }
    if (rank > 0)               { add("rank",    std::to_string(rank)); }
    if (topk > 0)               { add("topk",    std::to_string(topk)); }
    if (local >= 0)             { add("local",   std::to_string(local)); }
    if (sinks   != def.sinks)   { add("sinks",   std::to_string(sinks)); }
    if (min_k   != def.min_k)   { add("min_k",   std::to_string(min_k)); }
    if (min_ctx != def.min_ctx) { add("min_ctx", std::to_string(min_ctx)); }
    if (gpu_min_mb != def.gpu_min_mb) { add("gpu_min_mb", std::to_string(gpu_min_mb)); }
    if (mean_v >= 0)            { add("mean_v",  mean_v ? "on" : "off"); }
    if (n_bit != def.n_bit)     { add("shadow",  shadow_name()); }
    if (ramp)                   { add("budget",  ramp > 0 ? "ramp" : "ramp-down"); }
    if (top_p < 1.0)            { add("top_p",   format_double(top_p)); }
    if (cap != def.cap)         { add("cap",     format_double(cap)); }
    const auto add_list = [&](const char * key, const auto & list, auto text) {
        std::string res;
        for (const auto & x : list) {
            res += (res.empty() ? "" : ":") + text(x);
        }
        if (!res.empty()) {
            add(key, res);
        }
    };
    add_list("k_layers", k_layers, [](const layer_k & k) {
        return !k.percent ? std::to_string((int32_t) k.x) : k.x >= 100.0 ? "dense" : format_double(k.x) + "%";
    });
    add_list("rank_layers", rank_layers, [](int32_t r) { return std::to_string(r); });
    return s;
}

bool llama_sparse_spec::is_dense() const {
    return method == LLAMA_SPARSE_DENSE || (ratio >= 1 && rank <= 0 && rank_layers.empty() && topk <= 0 && k_layers.empty());
}

const char * llama_sparse_spec::shadow_name() const {
    return n_bit == 16 ? "f16" : n_bit == 8 ? "q8" : "q4";
}

// Half of the bytes pay for the scores, but a quarter of the components is enough: beyond that, rows bring more (bench/recall.py)
int32_t llama_sparse_spec::rank_for(int32_t il, int32_t d_k, double row_bytes) const {
    if (!rank_layers.empty()) {
        return rank_layers[il];
    }
    if (rank > 0) {
        return rank;
    }
    return std::clamp((int32_t) std::lround(ratio/2*row_bytes*8/n_bit), 1, std::max(d_k/4, 1));
}

int32_t llama_sparse_spec::topk_for(int32_t il, int32_t n_pos, const std::vector<double> & score_shares) const {
    double k;
    int32_t k_min = 1;
    if (!k_layers.empty()) {
        const auto & layer = k_layers[il];
        k     = layer.percent ? layer.x/100*n_pos : layer.x;
        k_min = layer.percent ? min_k : 1;
    } else if (topk > 0) {
        k = topk;
    } else {
        // sparq: what the scores leave of the bytes. topk: ratio is the share of positions
        k = (method == LLAMA_SPARSE_SPARQ ? ratio - score_shares[il] : ratio)*n_pos;
        k_min = min_k;
    }
    if (ramp && k_layers.empty()) {
        // among the layers that are ours, so that the total stays what it is
        const auto ours = [](double share) { return share > 0; };
        const auto at   = score_shares.begin() + il;
        const auto i    = std::count_if(score_shares.begin(), at, ours) + 1;
        const auto n    = std::count_if(at, score_shares.end(), ours) + i - 1;
        k *= 2.0*(ramp > 0 ? i : n + 1 - i)/(n + 1);
    }
    k_min = std::max(k_min, sinks + std::max(local, 0) + 1);
    return (int32_t) std::min<int64_t>(std::max<int64_t>(std::lround(k), k_min), std::max(n_pos, 1));
}

int32_t llama_sparse_spec::cap_for(int32_t k, int32_t n_pos) const {
    return (int32_t) std::min<double>(std::ceil(k*cap), std::max(n_pos, 1));
}

int32_t llama_sparse_spec::local_for(int32_t k) const {
    return local >= 0 ? local : std::max(k/4, 1);
}

//
// per context
//

// the KV caches of a context whose layers we can serve
static std::vector<llama_kv_cache *> find_caches(llama_memory_i * memory) {
    if (auto * kv = dynamic_cast<llama_kv_cache *>(memory)) {
        return { kv };
    }
    if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        return { iswa->get_base() };
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return { hybrid->get_mem_attn() };
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return { hybrid->get_mem_attn()->get_base() };
    }
    return {};
}

static void write_text(const std::string & s, char * buf, size_t n) {
    if (buf && n > 0) {
        snprintf(buf, n, "%s", s.c_str());
    }
}

ggml_tensor * llama_sparse_state::stats(ggml_backend_dev_t dev) {
    auto & s = all_stats[dev];
    if (!s.t) {
        s.ctx.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
        ggml_tensor * t = ggml_new_tensor_1d(s.ctx.get(), GGML_TYPE_I64, GGML_SPARSE_STAT_COUNT);
        ggml_set_name(t, "sparse_stats");
        s.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(s.ctx.get(), dev ? ggml_backend_dev_buffer_type(dev) : ggml_backend_cpu_buffer_type()));
        if (!s.buf) {
            throw std::runtime_error("failed to allocate the counters of sparse attention");
        }
        ggml_backend_buffer_clear(s.buf.get(), 0);
        s.t = t;
    }
    return s.t;
}

std::array<int64_t, GGML_SPARSE_STAT_COUNT> llama_sparse_state::read_stats() const {
    std::array<int64_t, GGML_SPARSE_STAT_COUNT> sum = {}, one;
    for (const auto & [_, s] : all_stats) {
        ggml_backend_tensor_get(s.t, one.data(), 0, sizeof(one));
        std::transform(one.begin(), one.end(), sum.begin(), sum.begin(), std::plus<>());
    }
    return sum;
}

// at the end of a context: what was asked for and what ran. Not one sparse call is worth a warning: nobody else says it in the programs
// of llama.cpp
llama_sparse_state::~llama_sparse_state() {
    const auto stat = read_stats();
    const int64_t n_sparse = stat[GGML_SPARSE_STAT_ATTEND_SPARSE], n_dense = stat[GGML_SPARSE_STAT_ATTEND_DENSE];
    const int64_t n_prefill = stat[GGML_SPARSE_STAT_PREFILL];
    if (n_sparse + n_dense + n_prefill == 0 && n_stock.empty()) {
        return;
    }
    std::string text = std::to_string(n_sparse) + " attention calls sparse, " + std::to_string(n_dense) + " exact, " + std::to_string(n_prefill) + " in prompts";
    for (const auto & [reason, n] : n_stock) {
        text += ", " + std::to_string(n) + " left to llama.cpp (" + reason + ")";
    }
    const bool none = n_sparse == 0 && (spec.method == LLAMA_SPARSE_SPARQ || spec.method == LLAMA_SPARSE_TOPK);
    if (none) {
        LLAMA_LOG_WARN("sparse attention %s: %s\n", spec.str().c_str(), text.c_str());
    } else {
        LLAMA_LOG_INFO("sparse attention %s: %s\n", spec.str().c_str(), text.c_str());
    }
}

void llama_sparse_state::reset_counters() {
    for (const auto & [_, s] : all_stats) {
        ggml_backend_buffer_clear(s.buf.get(), 0);
    }
    n_steps = 0;
    n_stock.clear();
}

struct llama_sparse_access_ctx { // friend of llama_context
    // throws spec_error; nothing has changed then
    static void set(llama_context * ctx, const llama_sparse_spec & spec) {
        const auto & hparams = ctx->model.hparams;
        const int32_t n_layer = (int32_t) hparams.n_layer();

        if (spec.method != LLAMA_SPARSE_OFF && !ctx->cparams.flash_attn) {
            throw spec_error("sparse attention needs flash attention, which is off in this context",
                    "create the context with flash attention on (-fa on; flash_attn=True in llama-cpp-python): V is stored transposed without it");
        }
        const auto check_size = [&](const std::string & key, size_t n) {
            if (n > 0 && (int32_t) n != n_layer) {
                throw spec_error(key + " has " + std::to_string(n) + " entries for " + std::to_string(n_layer) + " layers",
                        "give one for each layer, separated by ':'");
            }
        };
        check_size("k_layers",    spec.k_layers.size());
        check_size("rank_layers", spec.rank_layers.size());
        for (int32_t il = 0; il < n_layer && spec.method == LLAMA_SPARSE_SPARQ; ++il) {
            const bool    attends = hparams.has_kv(il) && hparams.n_head_kv(il) > 0; // not so in recurrent layers
            const int32_t rank    = spec.rank_layers.empty() ? spec.rank : spec.rank_layers[il];
            if (attends && rank > (int32_t) hparams.n_embd_head_k(il)) {
                throw spec_error("rank is above the head size of the model: " + std::to_string(rank) + " > " +
                        std::to_string(hparams.n_embd_head_k(il)), "use a rank of at most " + std::to_string(hparams.n_embd_head_k(il)));
            }
        }

        const auto caches = find_caches(ctx->memory.get());
        if (spec.method == LLAMA_SPARSE_SPARQ && !spec.is_dense()) {
            for (auto * kv : caches) {
                llama_sparse_shadow_create(kv, spec, hparams);
            }
        }

        auto & state = ctx->cparams.sparse;
        if (!state) {
            if (spec.method == LLAMA_SPARSE_OFF) {
                return;
            }
            state = std::make_shared<llama_sparse_state>();
        }
        state->spec    = spec;
        state->n_layer = n_layer;
        state->reason  = spec.method == LLAMA_SPARSE_OFF ? "" :
                         caches.empty() ? "this architecture has no plain KV cache" : llama_sparse_shadow_why_not(caches[0]);

        // a graph built with the old settings must not be reused: allow_reuse() compares this number
        ctx->cparams.sparse_gen++;
        ctx->sched_need_reserve = true;
    }

    static int64_t seal(llama_context * ctx) {
        const auto & state = ctx->cparams.sparse;
        for (const auto & [backend, set_n_threads] : ctx->set_n_threads_fns) {
            set_n_threads(backend, ctx->cparams.n_threads_batch);
        }
        int64_t res = 0;
        for (auto * kv : state ? find_caches(ctx->memory.get()) : std::vector<llama_kv_cache *>()) {
            const int64_t n = llama_sparse_shadow_seal(kv, ctx->sched.get(), *state);
            res = n < 0 || res < 0 ? -1 : res + n;
        }
        return res;
    }
};

int32_t llama_set_sparse_attn(llama_context * ctx, const char * text, char * err, size_t n_err) {
    try {
        ctx->synchronize();
        llama_sparse_access_ctx::set(ctx, parse_spec(text ? text : "off"));
        llama_sparse_restored{ctx};
    } catch (const std::exception & e) {
        write_text(e.what(), err, n_err);
        return -1;
    }
    write_text("", err, n_err);
    return 0;
}

int32_t llama_sparse_attn_parse(const char * text, char * buf, size_t n_buf) {
    try {
        const std::string s = parse_spec(text ? text : "off").str();
        write_text(s, buf, n_buf);
        return (int32_t) s.size();
    } catch (const std::exception & e) {
        write_text(e.what(), buf, n_buf);
        return -1;
    }
}

void llama_sparse_attn_reset_counters(llama_context * ctx) {
    ctx->synchronize();
    if (auto & state = ctx->get_cparams().sparse) {
        state->reset_counters();
    }
}

int64_t llama_sparse_attn_seal(llama_context * ctx) {
    ctx->synchronize();
    return llama_sparse_access_ctx::seal(ctx);
}

int64_t llama_sparse_attn_check(llama_context * ctx) {
    ctx->synchronize();
    int64_t n = -1;
    for (auto * kv : find_caches(ctx->get_memory())) {
        n = llama_sparse_shadow_check(kv);
    }
    return n;
}

int32_t llama_get_sparse_attn_info(const llama_context * ctx, char * buf, size_t n_buf) {
    const auto & state = ctx->get_cparams().sparse;
    if (!state) {
        const std::string s = "{\"spec\": \"off\", \"active\": false, \"reason\": \"off\", \"method\": \"off\"}";
        write_text(s, buf, n_buf);
        return (int32_t) s.size();
    }
    const auto & spec = state->spec;

    size_t shadow_bytes = 0;
    for (auto * kv : find_caches(ctx->get_memory())) {
        shadow_bytes += llama_sparse_shadow_bytes(kv);
    }

    int32_t n_sparse = 0;
    std::string layers;
    for (const auto & [il, reason] : state->layers) {
        n_sparse += reason.empty();
        layers += (layers.empty() ? "" : ", ") + std::string("{\"il\": ") + std::to_string(il) +
            ", \"state\": \"" + (reason.empty() ? "sparse" : "dense") + "\", \"reason\": \"" + reason + "\"}";
    }
    std::string stock;
    uint64_t n_stock = 0;
    for (const auto & [reason, n] : state->n_stock) {
        stock += (stock.empty() ? "\"" : ", \"") + reason + "\": " + std::to_string(n);
        n_stock += n;
    }
    const_cast<llama_context *>(ctx)->synchronize(); // devices may still be counting
    const auto stat = state->read_stats();
    const auto num = [](int64_t x) { return std::to_string(x); };

    const std::string s =
        "{\"spec\": \"" + spec.str() + "\", \"active\": " + (spec.method != LLAMA_SPARSE_OFF && state->reason.empty() ? "true" : "false") +
        ", \"reason\": \"" + (spec.method == LLAMA_SPARSE_OFF ? "off" : state->reason) + "\", \"method\": \"" + METHODS[spec.method] + "\"" +
        ", \"n_layer\": " + num(state->n_layer) + ", \"layers_sparse\": " + num(n_sparse) +
        ", \"shadow_type\": \"" + spec.shadow_name() + "\", \"shadow_bytes\": " + num(shadow_bytes) + ", \"layers\": [" + layers + "]" +
        ", \"counters\": {\"steps\": " + num(state->n_steps) +
        ", \"calls_sparse\": "      + num(stat[GGML_SPARSE_STAT_ATTEND_SPARSE]) +
        ", \"calls_dense_op\": "    + num(stat[GGML_SPARSE_STAT_ATTEND_DENSE]) +
        ", \"calls_prefill\": "     + num(stat[GGML_SPARSE_STAT_PREFILL]) +
        ", \"calls_stock\": "       + num(n_stock) + ", \"stock_reasons\": {" + stock + "}" +
        ", \"positions_visible\": " + num(stat[GGML_SPARSE_STAT_POS_VISIBLE]) +
        ", \"positions_read\": "    + num(stat[GGML_SPARSE_STAT_POS_READ]) +
        ", \"bytes_read\": "        + num(stat[GGML_SPARSE_STAT_BYTES_SCORE] + stat[GGML_SPARSE_STAT_BYTES_ATTEND]) +
        ", \"bytes_score\": "       + num(stat[GGML_SPARSE_STAT_BYTES_SCORE]) +
        ", \"bytes_attend\": "      + num(stat[GGML_SPARSE_STAT_BYTES_ATTEND]) +
        ", \"bytes_dense\": "       + num(stat[GGML_SPARSE_STAT_BYTES_DENSE]) +
        ", \"groups_sealed\": "     + num(stat[GGML_SPARSE_STAT_GROUPS_SEALED]) + "}}";
    write_text(s, buf, n_buf);
    return (int32_t) s.size();
}

//
// environment variable
//

static const char * env_spec() {
    const char * text = getenv("SPARQ_ATTN");
    return text && *text ? text : nullptr;
}

void llama_sparse_env_prepare(llama_cparams & cparams) {
    if (!env_spec() || cparams.flash_attn) {
        return;
    }
    try {
        if (parse_spec(env_spec()).method != LLAMA_SPARSE_OFF) {
            LLAMA_LOG_WARN("%s: SPARQ_ATTN is set: turning flash attention on, which the program had turned off\n", __func__);
            cparams.flash_attn = true;
        }
    } catch (const spec_error &) {
        // llama_sparse_env_apply() reports it
    }
}

void llama_sparse_env_apply(llama_context * ctx) {
    if (!env_spec()) {
        return;
    }
    char err[512];
    if (llama_set_sparse_attn(ctx, env_spec(), err, sizeof(err)) != 0) {
        // a program that was asked for sparse attention must not run dense without a word
        throw std::runtime_error(std::string("SPARQ_ATTN: ") + err);
    }
    LLAMA_LOG_INFO("%s: SPARQ_ATTN=%s\n", __func__, env_spec());
}

void llama_sparse_decode_failed(llama_memory_i * memory) {
    for (auto * kv : find_caches(memory)) {
        llama_sparse_unseal_all(llama_sparse_shadow_get(kv));
    }
}

llama_sparse_restored::~llama_sparse_restored() {
    const auto & state = ctx->get_cparams().sparse;
    if (!state || state->spec.method != LLAMA_SPARSE_SPARQ || state->spec.is_dense()) {
        return; // a shadow of before may be there, but nothing reads it
    }
    int64_t n = -1;
    try {
        n = llama_sparse_attn_seal(ctx);
    } catch (const std::exception &) {
        // no memory, say
    }
    if (n < 0) {
        LLAMA_LOG_WARN("%s: the next token will seal what could not be sealed now\n", __func__);
    }
}
