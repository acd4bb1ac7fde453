// --sparse-attn in the programs of llama.cpp.

#include "llama-sparse-tools.h"

#include "llama-sparse.h"
#include "sparse-state.h"
#include "sparse-system.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

std::string llama_sparse_arg(const std::string & spec) {
    char err[512];
    if (llama_sparse_attn_parse(spec.c_str(), err, sizeof(err)) < 0) {
        throw std::invalid_argument(err);
    }
    return spec;
}

// of the scope that is there; no path: none is
static thread_local std::string scope_spec, scope_path;

// of the program: the spec of its first scope. Other threads read it later
static std::string program_spec;

static void take_spec_of_scope() {
    llama_sparse_attn_default(scope_spec.empty() ? nullptr : scope_spec.c_str());
}

llama_sparse_scope::llama_sparse_scope(const std::string & spec, const std::string & path_model) {
    scope_spec = spec;
    scope_path = path_model;
    if (program_spec.empty()) {
        program_spec = spec;
    }
    take_spec_of_scope();
}

llama_sparse_scope::~llama_sparse_scope() {
    scope_spec.clear();
    scope_path.clear();
    take_spec_of_scope();
}

llama_sparse_measured::llama_sparse_measured(const std::string & path_model) : is_other(!scope_path.empty() && path_model != scope_path) {
    if (is_other) {
        llama_sparse_attn_default("");
    }
}

llama_sparse_measured::~llama_sparse_measured() {
    if (is_other) {
        take_spec_of_scope();
    }
}

// ---- llama-server ----

std::string llama_sparse_request_arg(const std::string & spec) {
    if (spec.size() > 1 << 14 || spec.find('\0') != std::string::npos) { // long enough for the settings of each layer
        throw std::invalid_argument("sparse_attn has over 16384 bytes or a character 0; hint: write it as in sparq,ratio=1/8");
    }
    try {
        return llama_sparse_arg(spec);
    } catch (const std::invalid_argument & e) {
        throw std::invalid_argument(llama_sparse_in_one_line(e.what()));
    }
}

std::string llama_sparse_request_of(const std::string & spec) {
    const char * variable = getenv("SPARQ_ATTN");
    return !spec.empty() ? spec : !program_spec.empty() ? program_spec : variable ? variable : "off";
}

bool llama_sparse_request(llama_context * ctx, llama_seq_id slot, const std::string & spec, bool is_child, std::string & why) {
    llama_sparse_grammar_begin();
    char err[512];
    const bool is_set = llama_set_sparse_attn_seq(ctx, slot, spec.empty() ? nullptr : spec.c_str(), err, sizeof(err)) == 0;
    if (!is_child) {
        llama_sparse_attn_seq_prompt(ctx, slot);
    }
    why = is_set ? "" : llama_sparse_in_one_line(std::string("sparse_attn: ") + err);
    return is_set;
}

std::string llama_sparse_reply(const llama_context * ctx, llama_seq_id slot) {
    if (!ctx->get_cparams().sparse) {
        return "";
    }
    const int32_t n = llama_get_sparse_attn_seq_info(ctx, slot, nullptr, 0);
    std::string res(std::max(n, 0) + 1, '\0');
    llama_get_sparse_attn_seq_info(ctx, slot, &res[0], res.size());
    res.pop_back();
    return res;
}

std::string llama_sparse_metrics(llama_context * ctx) {
    const auto & state = ctx->get_cparams().sparse;
    if (!state) {
        return "";
    }
    ctx->synchronize(); // devices may still be counting
    const auto stat = state->read_stats();
    std::ostringstream out;
    const auto head = [&](const char * name, const char * type, const char * help) {
        out << "# HELP sparq:" << name << " " << help << "\n# TYPE sparq:" << name << " " << type << "\n";
    };
    const auto one = [&](const char * name, const char * type, int64_t value, const char * help) {
        head(name, type, help);
        out << "sparq:" << name << " " << value << "\n";
    };
    const auto call = [&](const std::string & by, const std::string & reason, int64_t value) {
        out << "sparq:attention_calls_total{by=\"" << by << "\",reason=\"" << reason << "\"} " << value << "\n";
    };
    head("attention_calls_total", "counter", "Attention calls, one for each token and layer");
    call("sparse", "", stat[GGML_SPARSE_STAT_ATTEND_SPARSE]);
    call("dense",  "", stat[GGML_SPARSE_STAT_ATTEND_DENSE]);
    call("prompt", "", stat[GGML_SPARSE_STAT_PREFILL]);
    for (const auto & [reason, n] : state->n_stock) {
        call("llama.cpp", reason, n);
    }
    one("decoded_tokens_total", "counter", state->n_steps, "Tokens of replies");
    one("verified_tokens_total", "counter", state->n_verified, "Tokens of replies that came several at once, to verify a draft");
    one("bytes_read_total", "counter", stat[GGML_SPARSE_STAT_BYTES_SCORE] + stat[GGML_SPARSE_STAT_BYTES_ATTEND],
            "Bytes of K, V and the shadow that replies read");
    one("bytes_dense_total", "counter", stat[GGML_SPARSE_STAT_BYTES_DENSE], "Bytes that dense attention would have read for them");
    one("shadow_bytes", "gauge", llama_sparse_shadow_bytes(*ctx), "Memory of the transposed K and the sums of V");
    return out.str();
}

// ---- documents ----

namespace {

struct known_document {
    int         fd = -1; // open as long as the program runs, which so keeps the file that it knows when another takes its place
    std::string path, kind; // see llama-sparse.h
    uint32_t    n_tokens = 0;
    uint64_t    image_at = 0;
    std::vector<llama_token> tokens;

    bool has(const char * what) const { return kind.find(what) < kind.find('\n'); }
};

// SPARQ_DOCUMENTS is a file with three lines for each document: its path, "tokens image_at tokens_at", and its kind with | for the line feed
std::vector<known_document> read_list(const char * list) {
    std::vector<known_document> res;
    std::ifstream lines(list);
    known_document d;
    for (std::string numbers; std::getline(lines, d.path) && std::getline(lines, numbers) && std::getline(lines, d.kind);) {
        uint64_t tokens_at = 0;
        std::istringstream fields(numbers);
        d.fd = llama_sparse_file_open(d.path.c_str());
        const uint64_t n_bytes = d.fd < 0 ? 0 : std::max<int64_t>(llama_sparse_file_size(d.fd), 0);
        const bool is_line = !!(fields >> d.n_tokens >> d.image_at >> tokens_at);
        std::replace(d.kind.begin(), d.kind.end(), '|', '\n');
        d.tokens.resize(is_line && tokens_at <= n_bytes && d.n_tokens <= (n_bytes - tokens_at)/sizeof(llama_token) ? d.n_tokens : 0);
        const uint64_t n = d.tokens.size()*sizeof(llama_token);
        if (n > 0 && llama_sparse_file_read_all(d.fd, (char *) d.tokens.data(), n, tokens_at) > 0 &&
                *std::min_element(d.tokens.begin(), d.tokens.end()) >= 0) {
            res.push_back(d);
        } else {
            LLAMA_LOG_WARN("%s: %s cannot be read\n", __func__, d.path.c_str());
        }
    }
    return res;
}

std::vector<known_document> & documents() {
    static const char * list = getenv("SPARQ_DOCUMENTS");
    static std::vector<known_document> all = list ? read_list(list) : std::vector<known_document>();
    return all;
}

size_t n_common(const std::vector<llama_token> & a, const std::vector<llama_token> & b) {
    return std::mismatch(a.begin(), a.begin() + std::min(a.size(), b.size()), b.begin()).first - a.begin();
}

} // namespace

bool llama_sparse_has_documents() { return !documents().empty(); }

void llama_sparse_check_documents(llama_context * ctx) {
    char own[4096] = "";
    llama_sparse_document_kind(ctx, own, sizeof(own)); // or why it has none
    const auto rows_of  = [](const std::string & kind) { return kind.substr(0, kind.find('\n')); };
    const auto is_other = [&](const known_document & d) {
        const bool res = rows_of(d.kind) != rows_of(own);
        if (res) {
            LLAMA_LOG_WARN("sparse document: unused %s: it has K and V in %s, but here: %s; hint: take the cache types, the rotations (--rope-*) and "
                    "about the context that it was read with\n", d.path.c_str(), rows_of(d.kind).c_str(), rows_of(own).c_str());
        }
        return res;
    };
    documents().erase(std::remove_if(documents().begin(), documents().end(), is_other), documents().end());
}

bool llama_sparse_override_matters(const char * key) {
    const std::string_view name = key, lengths = "context_length"; // also the original one, which is a part of the rotations
    const bool is_length = name.size() > lengths.size() && name.substr(name.size() - lengths.size()) == lengths;
    return !name.empty() && name.rfind("tokenizer.", 0) != 0 && !is_length; // the last override has no name: it ends them
}

bool llama_sparse_update_adapters(const void * slot, const std::string & adapters) {
    static std::map<const void *, std::string> last; // what a slot holds before its first request comes from a file, which tells of no adapters
    const auto it = last.try_emplace(slot, adapters).first;
    return std::exchange(it->second, adapters) != adapters;
}

void llama_sparse_train_on(llama_model * model, uint32_t n_ctx) {
    model->hparams.n_ctx_train = std::max(model->hparams.n_ctx_train, n_ctx);
}

static size_t stack_bytes; // of a thread

void llama_sparse_begin() {
    stack_bytes = llama_sparse_deep_stacks();
}

bool llama_sparse_no_config() {
    return getenv("SPARQ_NO_CONFIG") != nullptr;
}

static std::atomic<size_t> most_bytes{ 0 }; // of a text; 0: this is no server
static std::atomic<size_t> most_messages{ SIZE_MAX }; // of a conversation

void llama_sparse_serve(llama_context * ctx) {
    llama_set_abort_callback(ctx, [](void *) { return llama_sparse_is_ending(); }, nullptr);
    const llama_vocab & vocab = ctx->get_model().vocab;
    size_t longest = 0;
    for (llama_token token = 0; token < (llama_token) vocab.n_tokens(); ++token) {
        longest = std::max(longest, vocab.token_to_piece(token).size());
    }
    constexpr size_t SECONDS = 4 << 20; // a text of this length takes as long, and a client may count its tokens
    most_bytes = std::max(SECONDS, llama_n_ctx_seq(ctx)*longest);
    most_messages = std::max<size_t>(4096, llama_n_ctx_seq(ctx)); // each is a token at least, which takes a template 0.3 ms
}

void llama_sparse_check_text(const std::string & text) {
    constexpr size_t FRAMES = 768; // bytes of stack for a character: std::regex of GNU's library took 320, and a match may span two runs
    if (most_bytes == 0 || text.size() < 4096) {
        return;
    }
    if (text.size() > most_bytes) {
        throw std::invalid_argument("a text of " + std::to_string(text.size()) + " bytes does not fit into a slot");
    }
    size_t run = 0, longest = 0; // of characters that are all white space, or none of them
    bool   is_space = false;
    for (const unsigned char c : text) {
        if ((c & 0xc0) != 0x80) { // it begins a character
            run      = (c <= ' ') == is_space ? run + 1 : 1;
            is_space = c <= ' ';
            longest  = std::max(longest, run);
        }
    }
    if (longest > stack_bytes/FRAMES) {
        throw std::invalid_argument("a text with " + std::to_string(longest) + " characters in a row without white space, or of nothing else");
    }
}

static thread_local uint64_t grammar_ns = 0;
static thread_local intptr_t grammar_stack = 0; // where it was then

void llama_sparse_grammar_begin() {
    const char at = 0;
    grammar_ns    = 0;
    grammar_stack = (intptr_t) &at;
}

void llama_sparse_grammar_work(uint64_t ns) {
    constexpr uint64_t MOST_NS = 5'000'000'000;
    constexpr intptr_t STACK   = 2 << 20; // of 8 MiB that a main thread has
    const char at = 0;
    grammar_ns += most_bytes > 0 ? ns : 0;
    if (grammar_ns > MOST_NS || llama_sparse_is_ending() || grammar_stack - (intptr_t) &at > STACK) {
        grammar_ns = 0;
        throw std::runtime_error("a grammar or JSON schema with too many alternatives, repetitions or levels");
    }
}

void llama_sparse_check_rule(const std::string & name) {
    constexpr size_t MOST = 16 << 10; // std::regex, which replaces what is no letter, took 320 bytes of stack for each
    llama_sparse_grammar_work(10'000);
    if (name.size() > MOST) {
        throw std::runtime_error("a name of " + std::to_string(name.size()) + " bytes in a JSON schema or of a tool");
    }
}

void llama_sparse_check_body(const std::string & body) {
    constexpr int LEVELS = 256, NAMES = 1000; // in an object; the time for as many properties of a schema grows with their cube
    llama_sparse_grammar_begin();
    int    depth = 0, n_most = 0, n_names[LEVELS + 2] = {};
    size_t n_messages = 0;
    bool   is_string  = false;
    for (size_t i = 0; i < body.size() && 0 <= depth && depth <= LEVELS; ++i) {
        const char c = body[i];
        if (c == '"') {
            is_string = !is_string;
        } else if (is_string) {
            i += c == '\\'; // and what it escapes
        } else if (c == '{' || c == '[') {
            n_names[++depth] = c == '{' ? 0 : INT32_MIN;
            n_messages += c == '{' && depth == 3; // in a list of the body's
        } else if (c == '}' || c == ']') {
            --depth;
        } else if (c == ',' && depth >= 3) { // above are the biases of tokens
            n_most = std::max(n_most, ++n_names[depth]);
        }
    }
    if (depth > LEVELS || n_most >= NAMES || n_messages > most_messages) {
        throw std::invalid_argument("JSON of over 256 levels, with over 1000 names in an object, or with more messages than fit into a slot");
    }
}

bool llama_sparse_has_window(llama_context * ctx, llama_seq_id slot, size_t n_held) {
    const auto * memory  = llama_get_memory(ctx); // nullptr, of a model that only embeds
    const llama_pos next = (llama_pos) n_held, n_swa = llama_model_n_swa(&ctx->get_model());
    const llama_pos least = memory && n_swa > 0 ? memory->seq_pos_min(slot) : -1;
    return least > 0 && least <= next + 1 - n_swa && memory->seq_pos_max(slot) == next - 1;
}

// can a slot go back to its first n_held tokens? Recurrent layers cannot, and windows only as far as they reach
static bool can_go_back(llama_context * ctx, llama_seq_id slot, size_t n_held) {
    const auto n_seen = (llama_pos) n_held - llama_model_n_swa(&ctx->get_model()) - 1; // llama-server's own limit
    const auto * memory = llama_get_memory(ctx); // nullptr, of a model that only embeds
    return memory && memory->seq_pos_min(slot) <= std::max(n_seen, 0);
}

bool llama_sparse_document_take(llama_context * ctx, llama_seq_id slot, const std::vector<llama_token> & prompt, size_t n_held, bool goes_on,
        const char * why_not, std::vector<llama_token> & tokens) {
    constexpr size_t WORTH = 256; // so many tokens more; fewer are evaluated as fast as a document is opened
    const known_document * best = nullptr, * held = nullptr;
    size_t n_best = 0;
    for (const auto & d : documents()) {
        const size_t n_usable = goes_on || can_go_back(ctx, slot, n_held) ? n_held : 0;
        const size_t n        = n_common(prompt, d.tokens);
        if (n > WORTH && n <= n_usable + WORTH) {
            held = &d;
        }
        if (n > std::max(n_best, n_usable + WORTH)) {
            // the state is that of its end, and a token after it has to be evaluated
            if (d.has(",state=") && (n < d.tokens.size() || n == prompt.size())) {
                LLAMA_LOG_WARN("sparse document: unused %s: the prompt has %zu of its %zu tokens, and windows and recurrent layers "
                        "need one after all of them\n", d.path.c_str(), n, d.tokens.size());
                continue;
            }
            best   = &d;
            n_best = n;
        }
    }
    if (best && why_not) {
        LLAMA_LOG_WARN("sparse document: unused %s: %s\n", best->path.c_str(), why_not);
        return false;
    }
    if (!best) {
        if (held && !why_not) {
            LLAMA_LOG_INFO("sparse document: used %s: the slot has it\n", held->path.c_str());
        }
        return false;
    }
    llama_memory_seq_rm(llama_get_memory(ctx), slot, -1, -1);
    char err[512] = "cannot be opened";
    const auto & d = *best;
    if (llama_sparse_document_open(ctx, slot, d.fd, d.image_at, d.n_tokens, d.n_tokens, d.kind.c_str(), err, sizeof(err)) >= 0) {
        tokens = d.tokens;
        LLAMA_LOG_INFO("sparse document: used %s: %zu tokens of the prompt were read before\n", best->path.c_str(), n_best);
    } else {
        llama_memory_seq_rm(llama_get_memory(ctx), slot, -1, -1);
        tokens.clear();
        LLAMA_LOG_WARN("sparse document: unused %s: %s\n", best->path.c_str(), llama_sparse_in_one_line(err).c_str());
    }
    return true;
}
