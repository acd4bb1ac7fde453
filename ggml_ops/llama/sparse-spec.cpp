// The text of the settings: reading it, writing it, and what follows from it for a layer.

#include "sparse-spec.h"

#include "sparse-codes.h"

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
const names FLAT    = { "rank=32", "topk=512" }; // what the budget `flat` stands for: it reads about the same at any length

const double LEAST = 1e-6; // of a share
const double MOST  = 1e9;  // of a whole number

std::string join(const names & words, const std::string & sep, const std::string & last) {
    std::string res = words[0];
    for (size_t i = 1; i < words.size(); ++i) {
        res += (i + 1 < words.size() ? sep : last) + words[i];
    }
    return res;
}

// "a, b or c"
std::string one_of(const names & words) { return join(words, ", ", " or "); }

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

// 0.125, 1/8 or 12.5%
double parse_number(const std::string & key, const std::string & s, double low, double high) {
    double x   = 0;
    double den = 1;
    const size_t slash = s.find('/');
    const bool is_percent = !s.empty() && s.back() == '%';
    const bool is_number = to_double(trim(s.substr(0, is_percent ? s.size() - 1 : slash)), x) &&
            (slash == std::string::npos || to_double(trim(s.substr(slash + 1)), den));
    x = is_percent ? x/100 : x/den;
    if (!is_number || !(x >= low && x <= high)) {
        throw llama_sparse_error(key + " is not a number from " + format_double(low) + " to " + format_double(high) + ": " + s, "leave it out for the default");
    }
    return x;
}

int32_t parse_int(const std::string & key, const std::string & s, double low) {
    if (s.find_first_not_of("+-0123456789") != std::string::npos) {
        throw llama_sparse_error(key + " is not a whole number: " + s, "as in " + key + "=" + std::to_string(std::max((int) low, 16)));
    }
    return (int32_t) parse_number(key, s, low, MOST);
}

// the number of a word
int32_t parse_word(const std::string & key, const std::string & s, const names & words) {
    const auto word = std::find(words.begin(), words.end(), s);
    if (word == words.end()) {
        throw llama_sparse_error(key + " is not " + one_of(words) + ": " + s, "write one of these");
    }
    return (int32_t) (word - words.begin());
}

// 64, 12.5% or dense
llama_sparse_spec::layer_k parse_layer_k(const std::string & s) {
    if (s == "dense") {
        return { 100.0, true };
    }
    if (!s.empty() && s.back() == '%') {
        return { parse_number("k_layers", s.substr(0, s.size() - 1), LEAST, 100.0), true };
    }
    return { (double) parse_int("k_layers", s, 1), false };
}

std::string format_layer_k(const llama_sparse_spec::layer_k & k) {
    return !k.percent ? std::to_string((int32_t) k.x) : k.x >= 100.0 ? "dense" : format_double(k.x) + "%";
}

// ---- the keys ----

enum : unsigned {
    SHARED = 1, // one node of a graph has it for all its tokens, so that a sequence cannot have its own
    PROMPT = 2, // says how a prompt is read, so that it goes with `dense` too
    CHOICE = 4, // chooses how much a layer reads, which ratio=1 does as well
    SCORES = 8, // says how a layer scores, which `topk` does with all of K
};

using spec = llama_sparse_spec;

struct key_info {
    std::string name;
    unsigned    flags;
    std::string limits;   // of the exported table, in JSON: the type, and its bounds or words
    std::string excludes; // the other key that says the same of every layer
    std::string needs;    // another key without which it changes nothing
    std::function<void(spec &, const std::string &)> read; // throws llama_sparse_error
    std::function<std::string(const spec &)>         text;
};

std::string bounds(const char * type, double low, double high) {
    return std::string("\"type\": \"") + type + "\", \"low\": " + format_double(low) + ", \"high\": " + format_double(high);
}

std::string quoted(const names & words) { return "[\"" + join(words, "\", \"", "\", \"") + "\"]"; }

key_info whole(const char * name, int32_t spec::*field, int32_t low, unsigned flags = 0, const char * excludes = "") {
    const auto read = [=](spec & x, const std::string & s) { x.*field = parse_int(name, s, low); };
    return { name, flags, bounds("whole", low, MOST), excludes, "", read, [=](const spec & x) { return x.*field < low ? "" : std::to_string(x.*field); } };
}

key_info number(const char * name, double spec::*field, double low, double high, unsigned flags, const char * needs = "") {
    const auto read = [=](spec & x, const std::string & s) { x.*field = parse_number(name, s, low, high); };
    return { name, flags, bounds("number", low, high), "", needs, read, [=](const spec & x) { return format_double(x.*field); } };
}

// words for the numbers from `first` on
key_info choice(const char * name, int32_t spec::*field, int32_t first, const names & words, unsigned flags = 0, const char * excludes = "") {
    const auto read = [=](spec & x, const std::string & s) { x.*field = first + parse_word(name, s, words); };
    return { name, flags, "\"type\": \"word\", \"words\": " + quoted(words), excludes, "", read, [=](const spec & x) { return words[x.*field - first]; } };
}

// one value for each layer, separated by ':'
template <typename T, typename Parse, typename Text> key_info list(const char * name, unsigned flags, std::vector<T> spec::*field, Parse parse, Text text) {
    const auto read = [=](spec & x, const std::string & s) {
        for (const auto & one : split(s, ':')) {
            (x.*field).push_back(parse(one));
        }
    };
    return { name, flags, bounds("list", 1, MOST), "", "", read, [=](const spec & x) {
                std::string res;
                for (const T & one : x.*field) {
                    res += (res.empty() ? "" : ":") + text(one);
                }
                return res;
            } };
}

key_info shadow() {
#define X(bits, name) name,
    const names words = { GGML_SPARSE_SHADOWS(X) };
#undef X
    const auto read = [=](spec & x, const std::string & s) {
        parse_word("shadow", s, words);
        x.n_bit = ggml_sparse_shadow_bits(s.c_str());
    };
    const auto text = [](const spec & x) { return std::string(ggml_sparse_shadow_name(x.n_bit)); };
    return { "shadow", SHARED | SCORES, "\"type\": \"word\", \"words\": " + quoted(words), "", "", read, text };
}

// All keys, in the order of the canonical text. Which there are, how they are read and written, what sequences share, what excludes what, and the table
// that Python has follow from these rows; llama-sparse.h says what they mean
const std::vector<key_info> & keys() {
    // clang-format off
    static const std::vector<key_info> res = {
        number("ratio",      &spec::ratio,      LEAST, 1.0, 0),
        whole ("rank",       &spec::rank,       1, CHOICE | SCORES, "rank_layers"),
        whole ("topk",       &spec::topk,       1, CHOICE, "k_layers"),
        whole ("local",      &spec::local,      0),
        whole ("sinks",      &spec::sinks,      0),
        whole ("min_k",      &spec::min_k,      1),
        whole ("min_ctx",    &spec::min_ctx,    0),
        whole ("gpu_min_mb", &spec::gpu_min_mb, 0, SHARED),
        choice("mean_v",     &spec::mean_v,     -1, { "auto", "off", "on" }, SHARED | SCORES),
        shadow(),
        choice("budget",     &spec::ramp,       -1, BUDGETS, CHOICE, "k_layers"),
        number("top_p",      &spec::top_p,      LEAST, 1.0, SHARED | CHOICE),
        number("cap",        &spec::cap,        1.0, 1e6, SHARED, "top_p"),
        list  ("k_layers",    CHOICE,          &spec::k_layers,    parse_layer_k, format_layer_k),
        list  ("rank_layers", CHOICE | SCORES, &spec::rank_layers, [](const std::string & s) { return parse_int("rank_layers", s, 1); },
                [](int32_t x) { return std::to_string(x); }),
        choice("prompt",     &spec::prompt,     0, { "f32", "fast" }, SHARED | PROMPT),
        choice("verify",     &spec::verify,     0, { "exact", "sparse" }),
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

// with or without what a key changes nothing; "": it does. Its default never does, but is what everybody has who writes all keys down
std::string why_idle(const llama_sparse_spec & spec, const key_set & given, const key_info & key) {
    const llama_sparse_spec usual;
    const bool is_topk = spec.method == LLAMA_SPARSE_TOPK;
    if (key.name != "ratio" && key.text(spec) == key.text(usual)) {
        return "";
    }
    if (is_topk ? key.flags & SCORES : !spec.is_sparse() && !(spec.method == LLAMA_SPARSE_DENSE && key.flags & PROMPT)) {
        return std::string("with ") + spec.method_name();
    }
    if (given.count(key.excludes)) {
        return "with " + key.excludes;
    }
    if (!key.needs.empty() && key_of(key.needs).text(spec) == key_of(key.needs).text(usual)) {
        return "without " + key.needs;
    }
    if (key.name == "ratio" && given.count("topk") && (is_topk || given.count("rank"))) {
        return is_topk ? "with topk" : "with rank and topk";
    }
    if (key.name == "topk" && spec.topk <= spec.sinks + std::max(spec.local, 0)) {
        return "with as many sinks and local";
    }
    return key.flags & CHOICE && given.count("ratio") && spec.ratio >= 1 ? "with ratio=1" : "";
}

// throws: a key would change nothing
void check_together(const llama_sparse_spec & spec, const key_set & given) {
    for (const auto & name : given) {
        const std::string why = why_idle(spec, given, key_of(name));
        if (!why.empty()) {
            throw llama_sparse_error(name + " changes nothing " + why, "leave out " + name);
        }
    }
}

// Sets the method and what keys say, and leaves the rest as it is; given: receives the keys that are there
void read_keys(const std::string & text, llama_sparse_spec & spec, key_set & given) {
    names parts = split(text, ',');
    spec.method = (llama_sparse_method) parse_word("method", parts[0], METHODS);
    for (size_t i = 1; i < parts.size(); ++i) {
        // a budget may stand alone: topk,k=512,ramp
        const size_t eq = parts[i].find('=');
        const auto & k  = key_of(eq == std::string::npos ? "budget" : trim(parts[i].substr(0, eq)));
        const std::string val = eq == std::string::npos ? parts[i] : trim(parts[i].substr(eq + 1));
        if (!given.insert(k.name).second) {
            throw llama_sparse_error(k.name + " is given twice: " + text, "leave out one of the two");
        }
        if (k.name == "budget" && val == "flat") {
            parts.insert(parts.end(), FLAT.begin(), FLAT.end());
        } else {
            k.read(spec, val);
        }
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
    check_together(spec, given);
    return spec;
}

llama_sparse_spec llama_sparse_spec::parse_own(const std::string & text, const llama_sparse_spec & all) {
    llama_sparse_spec spec;
    spec.min_ctx = all.min_ctx;
    const auto take = [&](const key_info & k, const llama_sparse_spec & from) {
        if (const std::string text = k.text(from); !text.empty()) {
            k.read(spec, text);
        } else { // the only shared key without a default
            spec.gpu_min_mb = from.gpu_min_mb;
        }
    };
    for (const auto & k : keys()) {
        if (k.flags & SHARED) {
            take(k, all);
        }
    }
    key_set given;
    read_keys(text, spec, given);
    if (spec.is_off()) {
        check_together(spec, given);
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
            take(k, spec.is_dense() && !(k.flags & PROMPT) ? llama_sparse_spec() : all);
        }
    }
    check_together(spec, given);
    return spec;
}

std::string llama_sparse_spec::table() {
    std::string res = "{\"methods\": " + quoted(METHODS) + ", \"flat\": " + quoted(FLAT) + ", \"keys\": {";
    for (const auto & k : keys()) {
        names methods = { "sparq" };
        if (!(k.flags & SCORES)) {
            methods.push_back("topk");
        }
        if (k.flags & PROMPT) {
            methods.push_back("dense");
        }
        res += std::string(&k == &keys()[0] ? "" : ",") + "\n\"" + k.name + "\": {" + k.limits + ", \"default\": \"" + k.text(llama_sparse_spec()) +
                "\", \"methods\": " + quoted(methods) + ", \"chooses\": " + (k.flags & CHOICE ? "true" : "false") + ", \"excludes\": \"" + k.excludes +
                "\", \"needs\": \"" + k.needs + "\"}";
    }
    return res + "\n}}\n";
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
int32_t llama_sparse_spec::rank_for(int32_t il, int32_t d_k, double f16_bytes) const {
    if (!rank_layers.empty()) {
        return rank_layers[il];
    }
    if (rank > 0) {
        return rank;
    }
    return std::clamp((int32_t) std::lround(ratio/2*f16_bytes*8/n_bit), 1, std::max(d_k/2, 1));
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

// n_kv is the number of cells in use, rounded up; min_ctx is rounded in the same way, so that no shorter context is ever sparse
bool llama_sparse_spec::is_short(uint32_t n_kv) const {
    return n_kv <= ((uint32_t) min_ctx + 255)/256*256;
}
