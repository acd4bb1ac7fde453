// --sparse-attn in the programs of llama.cpp.

#include "llama-sparse-tools.h"

#include "llama-sparse.h"
#include "sparse-state.h"

#include "llama-context.h"

#include <cstdio>
#include <sstream>
#include <stdexcept>

static void check(const std::string & spec) {
    char err[512];
    if (llama_sparse_attn_parse(spec.c_str(), err, sizeof(err)) < 0) {
        throw std::invalid_argument(err);
    }
}

std::string llama_sparse_arg(const std::string & spec) {
    check(spec);
    return spec;
}

// of the scope that is there; empty: none is
static thread_local std::string scope_spec, scope_path;

llama_sparse_scope::llama_sparse_scope(const std::string & spec, const std::string & path_model) : is_set(!spec.empty()) {
    if (is_set) {
        scope_spec = spec;
        scope_path = path_model;
        llama_sparse_attn_default(spec.c_str());
    }
}

llama_sparse_scope::~llama_sparse_scope() {
    if (is_set) {
        scope_spec.clear();
        llama_sparse_attn_default(nullptr);
    }
}

llama_sparse_measured::llama_sparse_measured(const std::string & path_model) : is_other(!scope_spec.empty() && path_model != scope_path) {
    if (is_other) {
        llama_sparse_attn_default("");
    }
}

llama_sparse_measured::~llama_sparse_measured() {
    if (is_other) {
        llama_sparse_attn_default(scope_spec.c_str());
    }
}

static std::vector<std::string> bench_specs; // empty: the option was not given

void llama_sparse_bench_arg(const std::string & specs) {
    if (specs.empty()) {
        check(specs); // refuses it
    }
    std::istringstream list(specs);
    for (std::string spec; std::getline(list, spec, ';');) {
        check(spec);
        bench_specs.push_back(spec);
    }
}

std::vector<std::string> llama_sparse_bench_specs() {
    return bench_specs.empty() ? std::vector<std::string>{ "" } : bench_specs;
}

std::vector<std::string> llama_sparse_bench_fields(const std::vector<std::string> & fields) {
    auto res = fields;
    if (!bench_specs.empty()) {
        res.insert(res.end(), { "sparse_attn", "sparse_calls" });
    }
    return res;
}

std::vector<std::string> llama_sparse_bench_values(llama_context * ctx) {
    if (bench_specs.empty()) {
        return {};
    }
    ctx->synchronize();
    const auto & state = ctx->get_cparams().sparse;
    if (!state) {
        return { "off", "0" };
    }
    return { state->spec.str(), std::to_string(state->read_stats()[GGML_SPARSE_STAT_ATTEND_SPARSE]) };
}

bool llama_sparse_bench_begin(llama_context * ctx, const std::string & spec) {
    char err[512];
    if (!spec.empty() && llama_set_sparse_attn(ctx, spec.c_str(), err, sizeof(err)) != 0) {
        fprintf(stderr, "llama_bench: error: --sparse-attn %s: %s\n", spec.c_str(), err);
        return false;
    }
    return true;
}

void llama_sparse_bench_ready(llama_context * ctx) {
    llama_sparse_attn_seal(ctx);
    llama_sparse_attn_reset_counters(ctx);
}
