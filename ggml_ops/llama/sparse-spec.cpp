// The text of the settings: reading it, writing it, and what follows from it for a layer.

#include "sparse-spec.h"

#include "sparse-codes.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iomanip>
#include <locale>
#include <set>
#include <sstream>

namespace {

using names = std::vector<std::string>;

const names METHODS = { "off", "dense", "sparq", "topk" };
const names BUDGETS = { "ramp-down", "uniform", "ramp", "flat" };

// "a, b or c"
std::string one_of(const names & words) {
    std::string res = words[0];
    for (size_t i = 1; i < words.size(); ++i) {
        res += (i + 1 < words.size() ? ", " : " or ") + words[i];
    }
    return res;
}

std::string trim(const std::string & s) {
    const size_t b = s.find_first_not_of(" \t\n");
    return b == std::string::npos ? "" : s.substr(b, s.find_last_not_of(" \t\n") - b + 1);
}

names split(const std::string & s, char sep) {
    names res;
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

// the shortest text of 9 digits or more that reads back as x: a sequence takes the settings of all as text
std::string format_double(double x) {
    for (int digits = 9;; ++digits) {
        std::ostringstream out;
        out.imbue(std::locale::classic());
        out << std::setprecision(digits) << x;
        double back;
        if (digits >= 17 || (to_double(out.str(), back) && back == x)) {
            return out.str();
        }
    }
}

int32_t parse_int(const std::string & key, const std::string & s, int32_t min) {
    double x;
    if (s.find_first_not_of("+-0123456789") != std::string::npos || !to_double(s, x) || x > 1e9) {
        throw llama_sparse_error(key + " is not a whole number: " + s, "as in " + key + "=" + std::to_string(std::max(min, 16)));
    }
    if (x < min) {
        throw llama_sparse_error(key + " must be at least " + std::to_string(min) + ": " + s, "leave it out for the default");
    }
    return (int32_t) x;
}

double parse_above_0(const std::string & key, const std::string & s, double max, const std::string & hint) {
    double x;
    if (!to_double(s, x) || !(x > 0 && x <= max)) {
        throw llama_sparse_error(key + " is not a number above 0 and at most " + format_double(max) + ": " + s, hint);
    }
    return x;
}

// the number of a word
int32_t parse_word(const std::string & key, const std::string & s, const names & words) {
    const auto word = std::find(words.begin(), words.end(), s);
    if (word == words.end()) {
        throw llama_sparse_error(key + " is not " + one_of(words) + ": " + s, "leave it out for the default");
    }
    return (int32_t) (word - words.begin());
}

// 64, 12.5% or dense
llama_sparse_spec::layer_k parse_layer_k(const std::string & s) {
    if (s == "dense") {
        return { 100.0, true };
    }
    if (!s.empty() && s.back() == '%') {
        return { parse_above_0("k_layers", trim(s.substr(0, s.size() - 1)), 100.0, "as in k_layers=64:12.5%:dense"), true };
    }
    return { (double) parse_int("k_layers", s, 1), false };
}

int32_t parse_layer_rank(const std::string & s) { return parse_int("rank_layers", s, 1); }

std::string format_layer_k(const llama_sparse_spec::layer_k & k) {
    return !k.percent ? std::to_string((int32_t) k.x) : k.x >= 100.0 ? "dense" : format_double(k.x) + "%";
}

// ---- the keys ----

enum : unsigned {
    SHARED = 1, // one node of a graph has it for all its tokens, so that a sequence cannot have its own
    PROMPT = 2, // says how a prompt is read, so that it goes with `dense` too
    CHOICE = 4, // chooses how much a layer reads, which ratio=1 and the budget flat do as well
};

using spec = llama_sparse_spec;

struct key_info {
    std::string name;
    unsigned    flags;
    std::function<void(spec &, const std::string &)> read; // throws llama_sparse_error
    std::function<std::string(const spec &)>         text;
};

key_info whole(const char * name, int32_t spec::*field, int32_t min, unsigned flags = 0) {
    const auto read = [=](spec & x, const std::string & s) { x.*field = parse_int(name, s, min); };
    return { name, flags, read, [=](const spec & x) { return std::to_string(x.*field); } };
}

key_info above_0(const char * name, double spec::*field, double max, unsigned flags, const char * hint) {
    const auto read = [=](spec & x, const std::string & s) { x.*field = parse_above_0(name, s, max, hint); };
    return { name, flags, read, [=](const spec & x) { return format_double(x.*field); } };
}

// words for the numbers from `first` on
key_info choice(const char * name, int32_t spec::*field, int32_t first, const names & words, unsigned flags = 0) {
    const auto read = [=](spec & x, const std::string & s) { x.*field = first + parse_word(name, s, words); };
    return { name, flags, read, [=](const spec & x) { return words[x.*field - first]; } };
}

// one value for each layer, separated by ':'
template <typename T, typename Parse, typename Text> key_info list(const char * name, std::vector<T> spec::*field, Parse parse, Text text) {
    const auto read = [=](spec & x, const std::string & s) {
        for (const auto & one : split(s, ':')) {
            (x.*field).push_back(parse(one));
        }
    };
    return { name, CHOICE, read, [=](const spec & x) {
                std::string res;
                for (const T & one : x.*field) {
                    res += (res.empty() ? "" : ":") + text(one);
                }
                return res;
            } };
}

void read_shadow(spec & x, const std::string & s) {
#define X(bits, name) name,
    parse_word("shadow", s, { GGML_SPARSE_SHADOWS(X) });
#undef X
    x.n_bit = ggml_sparse_shadow_bits(s.c_str());
}

// All keys, in the order of the canonical text. Which there are, how they are read and written, and what sequences share follow from this table;
// llama-sparse.h says what they mean
const std::vector<key_info> & keys() {
    // clang-format off
    static const std::vector<key_info> res = {
        { "ratio", 0, [](spec & x, const std::string & s) { x.ratio = parse_ratio(s); }, [](const spec & x) { return format_double(x.ratio); } },
        whole  ("rank",       &spec::rank,       1, CHOICE),
        whole  ("topk",       &spec::topk,       1, CHOICE),
        whole  ("local",      &spec::local,      0),
        whole  ("sinks",      &spec::sinks,      0),
        whole  ("min_k",      &spec::min_k,      1),
        whole  ("min_ctx",    &spec::min_ctx,    0),
        whole  ("gpu_min_mb", &spec::gpu_min_mb, 0, SHARED),
        choice ("mean_v",     &spec::mean_v,     -1, { "auto", "off", "on" }, SHARED),
        { "shadow", SHARED, read_shadow, [](const spec & x) { return std::string(ggml_sparse_shadow_name(x.n_bit)); } },
        choice ("budget",     &spec::ramp,       -1, BUDGETS),
        above_0("top_p",      &spec::top_p,      1.0, SHARED | CHOICE, "the share of the mass to select, as in top_p=0.95"),
        above_0("cap",        &spec::cap,        1e6, SHARED, "up to how many times k, as in cap=4"),
        list   ("k_layers",    &spec::k_layers,    parse_layer_k, format_layer_k),
        list   ("rank_layers", &spec::rank_layers, parse_layer_rank, [](int32_t x) { return std::to_string(x); }),
        choice ("prompt",     &spec::prompt,     0, { "f32", "fast", "sparse" }, SHARED | PROMPT),
        above_0("prompt_p",   &spec::prompt_p,   1.0, SHARED | PROMPT, "the share of a prompt's attention to read, as in prompt_p=0.99"),
    };
    // clang-format on
    return res;
}

// throws: there is none of that name
const key_info & key_of(const std::string & name) {
    names known;
    for (const auto & k : keys()) {
        if (k.name == (name == "k" ? "topk" : name)) {
            return k;
        }
        known.push_back(k.name);
    }
    throw llama_sparse_error("unknown key: " + name, "write " + one_of(known));
}

// ---- what keys exclude ----

using key_set = std::set<std::string>;

// the first key of those that choose how much a layer reads; "": none is given
std::string choice_of(const key_set & given) {
    const auto key = std::find_if(keys().begin(), keys().end(), [&](const key_info & k) { return k.flags & CHOICE && given.count(k.name); });
    return key == keys().end() ? "" : key->name;
}

// rank and topk of a budget that reads next to the same at any length
void make_flat(llama_sparse_spec & spec, const key_set & given) {
    if (spec.method != LLAMA_SPARSE_SPARQ || given.count("ratio") || !choice_of(given).empty()) {
        throw llama_sparse_error("budget flat is sparq,rank=32,topk=512, beside no ratio, rank, topk, k_layers, rank_layers or top_p", "write just sparq,flat");
    }
    spec.ramp = 0;
    spec.rank = 32;
    spec.topk = 512;
}

// Throws: a key would change nothing, because another says the same of every layer, or because the method does not use it. Its default changes nothing
// either, but is what everybody has who writes all keys down
void check_idle(const llama_sparse_spec & spec, const key_set & given) {
    const llama_sparse_spec usual;
    const bool is_topk = spec.method == LLAMA_SPARSE_TOPK;
    const bool is_rank_given = is_topk || given.count("rank");
    const bool reads_all = given.count("ratio") && spec.ratio >= 1;
    const std::string choice = reads_all ? choice_of(given) : "";
    const struct { bool is_idle; const char * key, * why; } rules[] = {
        { given.count("k_layers")    && given.count("topk"), "topk",   "k_layers has the topk of every layer" },
        { given.count("rank_layers") && given.count("rank"), "rank",   "rank_layers has the rank of every layer" },
        { given.count("k_layers")    && spec.ramp,           "budget", "k_layers has the topk of every layer" },
        { reads_all                  && spec.ramp,           "budget", "ratio 1 is dense attention" },
        { spec.n_bit != usual.n_bit  && is_topk,             "shadow", "topk scores with all of K, not with a transposed copy" },
        { !choice.empty(), choice.c_str(), "ratio 1 is dense attention" },
        { given.count("ratio") && given.count("topk") && is_rank_given, "ratio", is_topk ? "topk is given" : "topk and rank are given" },
    };
    for (const auto & rule : rules) {
        if (rule.is_idle) {
            throw llama_sparse_error(std::string(rule.why) + ", so " + rule.key + " would change nothing", std::string("leave out ") + rule.key);
        }
    }
}

void check_together(const llama_sparse_spec & spec, const key_set & given, const std::string & text) {
    const std::string method = spec.method_name();
    const bool dense = spec.method == LLAMA_SPARSE_DENSE;
    for (const auto & name : given) {
        if (!spec.is_sparse() && !(dense && key_of(name).flags & PROMPT)) {
            throw llama_sparse_error(method + " takes no keys" + (dense ? " but prompt and prompt_p: " : ": ") + text, "write just " + method);
        }
    }
    if (spec.prompt_p != llama_sparse_spec().prompt_p && spec.prompt != 2) {
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
}

// Sets the method and what keys say, and leaves the rest as it is; given: receives the keys that are there
void read_keys(const std::string & text, llama_sparse_spec & spec, key_set & given) {
    const names parts  = split(text, ',');
    const auto  method = std::find(METHODS.begin(), METHODS.end(), parts[0]);
    if (method == METHODS.end()) {
        throw llama_sparse_error("unknown method: " + parts[0], "write " + one_of(METHODS));
    }
    spec.method = (llama_sparse_method) (method - METHODS.begin());

    for (size_t i = 1; i < parts.size(); ++i) {
        const size_t eq = parts[i].find('=');
        // a budget may stand alone: topk,k=512,ramp
        const std::string val = eq == std::string::npos ? parts[i] : trim(parts[i].substr(eq + 1));
        const bool is_budget = std::find(BUDGETS.begin(), BUDGETS.end(), val) != BUDGETS.end() || val == "calibrated" || val == "top-p";
        if (eq == std::string::npos && !is_budget) {
            throw llama_sparse_error("not a key=value pair: " + val, "without a key there may be " + one_of(BUDGETS));
        }
        const auto & k = key_of(eq == std::string::npos ? "budget" : trim(parts[i].substr(0, eq)));
        if (!given.insert(k.name).second) {
            throw llama_sparse_error(k.name + " is given twice: " + text, "leave out one of the two");
        }
        if (k.name == "budget" && (val == "calibrated" || val == "top-p")) {
            throw llama_sparse_error("budget " + val + " is measured for each model, by sparq-cpp calibrate",
                    "write what it found here: sparq-cpp explain --budget " + val + " names it");
        }
        k.read(spec, val);
    }
    if (spec.ramp == 2) { // flat
        make_flat(spec, given);
    }
}

} // namespace

std::string llama_sparse_in_one_line(std::string what) {
    const size_t at = what.find('\n');
    return at == std::string::npos ? what : what.replace(at, 1, "; hint: ");
}

llama_sparse_spec llama_sparse_spec::parse(const std::string & text) {
    llama_sparse_spec spec;
    key_set given;
    read_keys(text, spec, given);
    check_together(spec, given, text);
    return spec;
}

llama_sparse_spec llama_sparse_spec::parse_own(const std::string & text, const llama_sparse_spec & all) {
    llama_sparse_spec spec;
    spec.min_ctx = all.min_ctx;
    for (const auto & k : keys()) {
        if (k.flags & SHARED) {
            k.read(spec, k.text(all));
        }
    }
    key_set given;
    read_keys(text, spec, given);
    if (spec.is_off()) {
        check_together(spec, given, text);
        return spec;
    }
    const std::string here = ": " + all.str();
    if (all.is_off() || (spec.is_sparse() && spec.method != all.method) || (spec.has_shadow() && !all.has_shadow())) {
        throw llama_sparse_error(std::string(spec.method_name()) + " is not available beside the settings of all" + here,
                "start the program with it, as in --sparse-attn sparq,ratio=1/8");
    }
    for (const auto & k : keys()) {
        const bool is_same = k.text(spec) == k.text(all) || (k.name == "mean_v" && (spec.mean_v != 0) == (all.mean_v != 0)); // auto is on
        if (k.flags & SHARED && !is_same) {
            throw llama_sparse_error(k.name + " is the same for all" + here, "leave out " + k.name);
        }
        if (k.flags & SHARED) { // of what reads everything, settings of a selection say nothing
            k.read(spec, k.text(spec.is_dense() && !(k.flags & PROMPT) ? llama_sparse_spec() : all));
        }
    }
    check_together(spec, given, text);
    return spec;
}

const char * llama_sparse_spec::method_name() const {
    return METHODS[method].c_str();
}

std::string llama_sparse_spec::str() const {
    const llama_sparse_spec usual;
    const bool needs_ratio = (topk <= 0 && k_layers.empty()) || (method == LLAMA_SPARSE_SPARQ && rank <= 0 && rank_layers.empty());
    std::string res = method_name();
    for (const auto & k : keys()) {
        const std::string text = k.text(*this);
        if ((is_sparse() || k.flags & PROMPT) && (k.name == "ratio" ? needs_ratio : text != k.text(usual))) {
            res += "," + k.name + "=" + text;
        }
    }
    return res;
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
