// The text of the settings: reading it, writing it, and what follows from it for a layer.

#include "sparse-spec.h"

#include "sparse-codes.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iomanip>
#include <locale>
#include <set>
#include <sstream>

namespace {

const std::vector<std::string> METHODS = { "off", "dense", "sparq", "topk" };
const std::vector<std::string> KEYS = {
    "ratio", "rank", "topk", "k", "local", "sinks", "min_k", "min_ctx", "gpu_min_mb", "mean_v", "shadow", "budget", "top_p", "cap",
    "k_layers", "rank_layers", "prompt", "prompt_p",
};

const std::vector<std::string> PROMPTS = { "f32", "fast", "sparse" };

const std::vector<std::string> SHADOWS = {
#define X(bits, name) name,
    GGML_SPARSE_SHADOWS(X)
#undef X
};

// "a, b or c"
std::string one_of(const std::vector<std::string> & names) {
    std::string res = names[0];
    for (size_t i = 1; i < names.size(); ++i) {
        res += (i + 1 < names.size() ? ", " : " or ") + names[i];
    }
    return res;
}

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

// false unless all of s is a number, with a point whatever the locale of the program
bool to_double(const std::string & s, double & x) {
    std::istringstream in(s);
    in.imbue(std::locale::classic());
    return in >> x && in.peek() == EOF && std::isfinite(x);
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
        throw llama_sparse_error("ratio is not a number: " + s, "write it as 1/8, 0.125 or 12.5%");
    }
    if (!(x > 0 && x <= 1)) {
        throw llama_sparse_error("ratio must be above 0 and at most 1: " + s, "ratio is the share of dense attention's bytes to read, as in 1/8");
    }
    return x;
}

int32_t parse_int(const std::string & key, const std::string & s, int32_t min) {
    double x;
    if (!to_double(s, x) || x != std::floor(x) || x > 1e9) {
        throw llama_sparse_error(key + " is not a whole number: " + s, "as in " + key + "=" + std::to_string(std::max(min, 16)));
    }
    if (x < min) {
        throw llama_sparse_error(key + " must be at least " + std::to_string(min) + ": " + s, "leave it out for the default");
    }
    return (int32_t) x;
}

std::string format_double(double x) {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out << std::setprecision(9) << x;
    return out.str();
}

double parse_double(const std::string & key, const std::string & s, double min, double max, const std::string & hint) {
    double x;
    if (!to_double(s, x) || !(x > min && x <= max)) {
        throw llama_sparse_error(key + " is not a number above " + format_double(min) + " and at most " + format_double(max) + ": " + s, hint);
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

// throws: a key would change nothing, because another says the same of every layer, or because the method does not use it
void check_idle(const llama_sparse_spec & spec, const std::set<std::string> & given) {
    const auto refuse = [](bool is_idle, const std::string & key, const std::string & why) {
        if (is_idle) {
            throw llama_sparse_error(why + ", so " + key + " would change nothing", "leave out " + key);
        }
    };
    const bool is_topk = spec.method == LLAMA_SPARSE_TOPK;
    refuse(given.count("k_layers")    && given.count("topk"), "topk", "k_layers has the topk of every layer");
    refuse(given.count("rank_layers") && given.count("rank"), "rank", "rank_layers has the rank of every layer");
    refuse(given.count("k_layers")    && spec.ramp,         "budget", "k_layers has the topk of every layer");
    refuse(is_topk && given.count("shadow"),                "shadow", "topk scores with all of K, not with a transposed copy");
    refuse(given.count("ratio") && given.count("topk") && (is_topk || given.count("rank")), "ratio", is_topk ? "topk is given" : "topk and rank are given");
}

const char * BUDGETS = "budgets: uniform, ramp, ramp-down, flat";

// rank and topk of a budget that reads next to the same at any length
void make_flat(llama_sparse_spec & spec, const std::set<std::string> & given) {
    const char * keys[] = { "ratio", "rank", "topk", "k_layers", "rank_layers", "top_p" };
    if (spec.method != LLAMA_SPARSE_SPARQ || std::any_of(std::begin(keys), std::end(keys), [&](const char * key) { return given.count(key); })) {
        throw llama_sparse_error("budget flat is sparq,rank=32,topk=512, beside no ratio, rank, topk, k_layers, rank_layers or top_p", "write just sparq,flat");
    }
    spec.rank = 32;
    spec.topk = 512;
}

// given: receives the keys that are there
llama_sparse_spec parse_keys(const std::string & text, std::set<std::string> & given) {
    llama_sparse_spec spec;

    const auto parts = split(text, ',');

    const auto method = std::find(METHODS.begin(), METHODS.end(), parts[0]);
    if (method == METHODS.end()) {
        throw llama_sparse_error("unknown method: " + parts[0], "did you mean " + nearest(parts[0], METHODS) + "? methods: off, dense, sparq, topk");
    }
    spec.method = (llama_sparse_method) (method - METHODS.begin());

    bool is_flat = false;
    for (size_t i = 1; i < parts.size(); ++i) {
        const size_t eq = parts[i].find('=');
        // "budget" values may stand alone: topk,k=512,ramp
        const std::string key = eq == std::string::npos ? "budget" : trim(parts[i].substr(0, eq));
        const std::string val = eq == std::string::npos ? parts[i] : trim(parts[i].substr(eq + 1));

        if (std::find(KEYS.begin(), KEYS.end(), key) == KEYS.end()) {
            throw llama_sparse_error("unknown key: " + key, "did you mean " + nearest(key, KEYS) + "?");
        }
        if (!given.insert(key == "k" ? "topk" : key).second) {
            throw llama_sparse_error(key + " is given twice: " + text, "leave out one of the two");
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
                throw llama_sparse_error("mean_v is not auto, on or off: " + val, "leave it out for auto, which is on");
            }
            spec.mean_v = val == "auto" ? -1 : val == "on";
        } else if (key == "shadow") {
            spec.n_bit = ggml_sparse_shadow_bits(val.c_str());
            if (spec.n_bit == 0) {
                throw llama_sparse_error("shadow is not " + one_of(SHADOWS) + ": " + val, "leave it out for the default");
            }
        } else if (key == "budget") {
            if (val == "calibrated" || val == "top-p") {
                throw llama_sparse_error("budget " + val + " is measured for each model, by sparq-cpp calibrate",
                        "write what it found here: sparq-cpp explain --budget " + val + " names it");
            }
            is_flat = val == "flat";
            if (val != "uniform" && val != "ramp" && val != "ramp-down" && !is_flat) {
                throw llama_sparse_error((eq == std::string::npos ? "not a key=value pair: " : "unknown budget: ") + val, BUDGETS);
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
        } else if (key == "prompt") {
            const auto prompt = std::find(PROMPTS.begin(), PROMPTS.end(), val);
            if (prompt == PROMPTS.end()) {
                throw llama_sparse_error("prompt is not " + one_of(PROMPTS) + ": " + val, "leave it out for the default");
            }
            spec.prompt = (int32_t) (prompt - PROMPTS.begin());
        } else if (key == "prompt_p") {
            spec.prompt_p = parse_double(key, val, 0.0, 1.0, "the share of a prompt's attention to read, as in prompt_p=0.99");
        } else if (key == "rank_layers") {
            for (const auto & r : split(val, ':')) {
                spec.rank_layers.push_back(parse_int(key, r, 1));
            }
        }
    }

    if (is_flat) {
        make_flat(spec, given);
    }
    const bool sparse = spec.method == LLAMA_SPARSE_SPARQ || spec.method == LLAMA_SPARSE_TOPK;
    const bool dense = spec.method == LLAMA_SPARSE_DENSE;
    if (!sparse && given.size() > (dense ? given.count("prompt") + given.count("prompt_p") : 0)) {
        throw llama_sparse_error(parts[0] + " takes no keys" + (dense ? " but prompt and prompt_p: " : ": ") + text, "write just " + parts[0]);
    }
    if (given.count("prompt_p") && spec.prompt != 2) {
        throw llama_sparse_error("prompt_p belongs to prompt=sparse: " + text, "as in prompt=sparse,prompt_p=0.99");
    }
    if (spec.cap != 1.0 && (spec.cap < 1.0 || spec.top_p >= 1.0)) {
        throw llama_sparse_error("cap is 1 or more, and belongs to top_p: " + text, "as in top_p=0.95,cap=4");
    }
    if (spec.method == LLAMA_SPARSE_TOPK && (spec.rank > 0 || !spec.rank_layers.empty() || spec.mean_v > 0)) {
        throw llama_sparse_error("rank and mean_v belong to sparq, not topk: " + text, "topk scores with all of K, so its scores are exact");
    }
    check_idle(spec, given);
    if (spec.topk > 0 && spec.sinks + std::max(spec.local, 0) + 1 > spec.topk) {
        throw llama_sparse_error("topk leaves no room beside sinks and local: " + text, "topk counts them; raise topk, or lower sinks or local");
    }
    return spec;
}

} // namespace

std::string llama_sparse_in_one_line(std::string what) {
    const size_t at = what.find('\n');
    return at == std::string::npos ? what : what.replace(at, 1, "; hint: ");
}

llama_sparse_spec llama_sparse_spec::parse(const std::string & text) {
    std::set<std::string> given;
    return parse_keys(text, given);
}

llama_sparse_spec llama_sparse_spec::parse_own(const std::string & text, const llama_sparse_spec & all) {
    std::set<std::string> given;
    llama_sparse_spec spec = parse_keys(text, given);
    if (spec.is_off()) {
        return spec;
    }
    const std::string here = ": " + all.str();
    if (all.is_off() || (spec.is_sparse() && spec.method != all.method) || (spec.has_shadow() && !all.has_shadow())) {
        throw llama_sparse_error(std::string(spec.method_name()) + " is not available beside the settings of all: " + all.str(),
                "start the program with it, as in --sparse-attn sparq,ratio=1/8");
    }
    const auto share = [&](const char * key, auto & mine, const auto & theirs, bool is_same) {
        if (given.count(key) && !is_same) {
            throw llama_sparse_error(std::string(key) + " is the same for all" + here, std::string("leave out ") + key);
        }
        mine = theirs;
    };
    share("mean_v",     spec.mean_v,     all.mean_v,     (spec.mean_v != 0) == (all.mean_v != 0));
    share("shadow",     spec.n_bit,      all.n_bit,      spec.n_bit == all.n_bit);
    share("top_p",      spec.top_p,      all.top_p,      spec.top_p == all.top_p);
    share("cap",        spec.cap,        all.cap,        spec.cap == all.cap);
    share("gpu_min_mb", spec.gpu_min_mb, all.gpu_min_mb, spec.gpu_min_mb == all.gpu_min_mb);
    share("prompt",     spec.prompt,     all.prompt,     spec.prompt == all.prompt);
    share("prompt_p",   spec.prompt_p,   all.prompt_p,   spec.prompt_p == all.prompt_p);
    if (!given.count("min_ctx")) {
        spec.min_ctx = all.min_ctx;
    }
    return spec;
}

const char * llama_sparse_spec::method_name() const {
    return METHODS[method].c_str();
}

std::string llama_sparse_spec::str() const {
    const llama_sparse_spec def;
    std::string s = METHODS[method];
    const auto add = [&](const char * key, const std::string & val) { s += std::string(",") + key + "=" + val; };
    const auto add_prompt = [&] {
        if (prompt   != def.prompt)   { add("prompt",   PROMPTS[prompt]); }
        if (prompt_p != def.prompt_p) { add("prompt_p", format_double(prompt_p)); }
    };
    if (method == LLAMA_SPARSE_OFF || method == LLAMA_SPARSE_DENSE) {
        add_prompt();
        return s;
    }
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
    if (n_bit != def.n_bit)     { add("shadow",  ggml_sparse_shadow_name(n_bit)); }
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
    add_prompt();
    return s;
}

bool llama_sparse_spec::is_dense() const {
    return method == LLAMA_SPARSE_DENSE || (ratio >= 1 && rank <= 0 && rank_layers.empty() && topk <= 0 && k_layers.empty());
}

// Half of the bytes pay for the scores, but half of the components is enough: beyond that, rows bring more (docs/numerics.md, 11b)
int32_t llama_sparse_spec::rank_for(int32_t il, int32_t d_k, double row_bytes) const {
    if (!rank_layers.empty()) {
        return rank_layers[il];
    }
    if (rank > 0) {
        return rank;
    }
    return std::clamp((int32_t) std::lround(ratio/2*row_bytes*8/n_bit), 1, std::max(d_k/2, 1));
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

// n_kv is the number of cells in use, rounded up; min_ctx is rounded in the same way, so that no shorter context is ever sparse
bool llama_sparse_spec::is_short(uint32_t n_kv) const {
    return n_kv <= ((uint32_t) min_ctx + 255)/256*256;
}
