#pragma once

// --sparse-attn in the programs of llama.cpp: what common/arg.cpp, llama-bench and llama-server call.

#include "llama.h"

#include <string>
#include <type_traits>
#include <vector>

// --sparse-attn SPEC of all programs but llama-bench: returns it. Throws std::invalid_argument: what is wrong with the spec, and a hint.
LLAMA_API std::string llama_sparse_arg(const std::string & spec);

// The contexts that this thread makes while one of these is there have that spec; "": they take SPARQ_ATTN as ever. A model's own context is made
// under one, that of a draft is not.
struct llama_sparse_scope {
    LLAMA_API llama_sparse_scope(const std::string & spec, const std::string & path_model);
    LLAMA_API ~llama_sparse_scope();

private:
    bool is_set;
};

// Under a scope, the memory of a draft is measured too, by a context of its own: while one of these is there, contexts have no spec if
// `path_model` is not the scope's.
struct llama_sparse_measured {
    LLAMA_API explicit llama_sparse_measured(const std::string & path_model);
    LLAMA_API ~llama_sparse_measured();

private:
    bool is_other;
};

// llama-bench: -sa, --sparse-attn SPEC[;SPEC]... Given again, it adds. A spec has commas in it, so they do not separate. Throws likewise.
LLAMA_API void llama_sparse_bench_arg(const std::string & specs);

// the specs to run one after the other; without the option one empty text, which leaves a context as it is
LLAMA_API std::vector<std::string> llama_sparse_bench_specs();

// each test of llama-bench with each spec, one after the other
template <typename T> std::vector<T> llama_sparse_bench_each(const std::vector<T> & instances) {
    std::vector<T> res;
    for (T instance : instances) {
        for (const auto & spec : llama_sparse_bench_specs()) {
            instance.sparse_attn = spec;
            res.push_back(instance);
        }
    }
    return res;
}

// `fields`, and with the option two more: sparse_attn (the spec in full) and sparse_calls (attention calls that ran sparse in the last
// repetition: of n_gen tokens in every layer that can). Their values are in the same order.
LLAMA_API std::vector<std::string> llama_sparse_bench_fields(const std::vector<std::string> & fields);
LLAMA_API std::vector<std::string> llama_sparse_bench_values(llama_context * ctx);

// sets the spec of a fresh context; false: refused, and said so on stderr
LLAMA_API bool llama_sparse_bench_begin(llama_context * ctx, const std::string & spec);

// before the clock starts: what sealing the tokens of the depth costs is not part of a generated token
LLAMA_API void llama_sparse_bench_ready(llama_context * ctx);

// llama-server: what is thrown where JSON is wrong. From 0.3.36 on it is common_json_error, before an exception of the class for JSON
struct common_json_error;
template <typename Json, typename Error, typename = void> struct llama_sparse_json_error { using type = typename Json::exception; };
template <typename Json, typename Error> struct llama_sparse_json_error<Json, Error, std::void_t<decltype(sizeof(Error))>> { using type = Error; };

// llama-server: from here on SIGINT and SIGTERM are handled by `handler` in a thread that holds no lock, and not in the one that they interrupt. On
// systems with POSIX signals; if that is refused, all stays as it is
LLAMA_API void llama_sparse_signals(void (*handler)(int));

// llama-server: `sparse_attn` of a request. Returns it; throws std::invalid_argument, in one line
LLAMA_API std::string llama_sparse_request_arg(const std::string & spec);

// What a request runs with: `spec`, or if that is empty the server's own
LLAMA_API std::string llama_sparse_request_of(const std::string & spec);

// A request begins in a slot. spec: its `sparse_attn`, "": the server's own. is_child: its prompt is copied from another slot, so that it begins
// with a decoded token. False: it can not have that spec, and `why` says why, in one line
LLAMA_API bool llama_sparse_request(llama_context * ctx, llama_seq_id slot, const std::string & spec, bool is_child, std::string & why);

// What its reply has read so far, as JSON, see llama_get_sparse_attn_seq_info(). "": the server never had sparse attention
LLAMA_API std::string llama_sparse_reply(const llama_context * ctx, llama_seq_id slot);

// Counters of all requests for Prometheus, in lines of text
LLAMA_API std::string llama_sparse_metrics(llama_context * ctx);

// A prompt begins in a slot that holds the tokens `held`. If one of the documents in the list that the variable SPARQ_DOCUMENTS names has more of
// it, the slot gets that document in their place, and `tokens` are what it holds then: none, if that failed. False: nothing changed
LLAMA_API bool llama_sparse_document_use(llama_context * ctx, llama_seq_id slot, const std::vector<llama_token> & prompt,
        const std::vector<llama_token> & held, std::vector<llama_token> & tokens);
