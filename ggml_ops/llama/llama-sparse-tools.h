#pragma once

// --sparse-attn in the programs of llama.cpp: what common/ and llama-server call. Templates, where only they know the types.

#include "llama-sparse.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

// Returns a spec. Throws std::invalid_argument: what is wrong with it, and a hint.
LLAMA_API std::string llama_sparse_arg(const std::string & spec);

// The program has begun, and has no threads yet
LLAMA_API void llama_sparse_begin();

// Its line has all options: config.ini of llama.cpp is not read
LLAMA_API bool llama_sparse_no_config();

// adds --sparse-attn SPEC to the options of these programs
template <typename Arg, typename Params, typename Add, typename Example> void llama_sparse_add_arg(Add add, std::initializer_list<Example> programs) {
    llama_sparse_begin();
    const char * help = "attention of decoded tokens: off, dense, sparq or topk, then keys, as in sparq,ratio=1/8 (default: off)";
    add(Arg({ "--sparse-attn" }, "SPEC", help, [](Params & params, const std::string & value) {
        params.sparse_attn = llama_sparse_arg(value);
    }).set_examples(programs).set_env("LLAMA_ARG_SPARSE_ATTN"));
}

// The contexts that this thread makes while one of these is there have that spec; "": they take SPARQ_ATTN as ever. A model's own context is made
// under one, that of a draft is not.
struct llama_sparse_scope {
    LLAMA_API llama_sparse_scope(const std::string & spec, const std::string & path_model);
    LLAMA_API ~llama_sparse_scope();
};

// Under a scope, the memory of a draft is measured too, by a context of its own: while one of these is there, contexts are those of a draft if
// `path_model` is not the scope's, without a spec.
struct llama_sparse_measured {
    LLAMA_API explicit llama_sparse_measured(const std::string & path_model);
    LLAMA_API ~llama_sparse_measured();

private:
    bool is_other;
};

// llama-server: what is thrown where JSON is wrong. From 0.3.36 on it is common_json_error, before an exception of the class for JSON
struct common_json_error;
template <typename Json, typename Error, typename = void> struct llama_sparse_json_error { using type = typename Json::exception; };
template <typename Json, typename Error> struct llama_sparse_json_error<Json, Error, std::void_t<decltype(sizeof(Error))>> { using type = Error; };

// llama-server: throws std::invalid_argument, in one line, if a text cannot be tokenised, or if it is much too long for a slot: that takes minutes
LLAMA_API void llama_sparse_check_text(const std::string & text);

// llama-server: a request begins in this thread. Throws std::invalid_argument, in one line, if its JSON is nested too deep or has too many messages
LLAMA_API void llama_sparse_check_body(const std::string & body);

// llama-server: work on a schema or a grammar, of about so many ns, or on a rule of that name. Throws std::runtime_error, in one line, if all of this
// request or token takes seconds, for which others wait, or if a signal asked the server to end
LLAMA_API void llama_sparse_grammar_work(uint64_t ns);
LLAMA_API void llama_sparse_check_rule(const std::string & name);
void llama_sparse_grammar_begin(); // the next request or token

// llama-server: from here on SIGINT and SIGTERM are handled by `handler` in a thread that holds no lock, and not in the one that they interrupt. Then
// clients who wait are hung up on, or their threads would wait for them. On systems with POSIX signals; if that is refused, all stays as it is
LLAMA_API void llama_sparse_signals(void (*handler)(int));

// llama-server: `sparse_attn` of a request. Returns it; throws std::invalid_argument, in one line
LLAMA_API std::string llama_sparse_request_arg(const std::string & spec);

// adds that field to those of a completion
template <typename Field, typename Context, typename Json, typename Add> void llama_sparse_add_field(Add add) {
    add((new Field("sparse_attn"))
                    ->set_desc("Attention of the reply, as in --sparse-attn: sparq,ratio=1/8 or dense or off; without it the server's own")
                    ->set_handler([](Context & ctx, const Json & data) {
                        ctx.params.sparse_attn = llama_sparse_request_arg(data.at("sparse_attn").template get<std::string>());
                    }));
}

// What a request runs with: `spec`, or if that is empty the server's own
LLAMA_API std::string llama_sparse_request_of(const std::string & spec);

// A request begins in a slot. spec: its `sparse_attn`, "": the server's own. is_child: its prompt is copied from another slot, so that it begins
// with a decoded token. False: it can not have that spec, and `why` says why, in one line
LLAMA_API bool llama_sparse_request(llama_context * ctx, llama_seq_id slot, const std::string & spec, bool is_child, std::string & why);

// What its reply has read so far, as JSON, see llama_get_sparse_attn_seq_info(). "": the server never had sparse attention
LLAMA_API std::string llama_sparse_reply(const llama_context * ctx, llama_seq_id slot);

// Counters of all requests for Prometheus, in lines of text
LLAMA_API std::string llama_sparse_metrics(llama_context * ctx);

// Were documents named, in the list that the variable SPARQ_DOCUMENTS names?
LLAMA_API bool llama_sparse_has_documents();

// Leaves out those that this context cannot open, because its K and V are others, and warns of them
LLAMA_API void llama_sparse_check_documents(llama_context * ctx);

// The document that has more of `prompt` than the n_held tokens that a slot holds already takes their place, and `tokens` are what the slot holds
// then: none, if that failed. False: nothing changed. goes_on: the slot holds no other tokens, which would have to be taken back. why_not: why such a
// document may not be used, which is logged; nullptr: it may
LLAMA_API bool llama_sparse_document_take(llama_context * ctx, llama_seq_id slot, const std::vector<llama_token> & prompt, size_t n_held,
        bool goes_on, const char * why_not, std::vector<llama_token> & tokens);

// Does the cache hold, of layers with a sliding window, all that the token after the n_held ones of this slot sees?
LLAMA_API bool llama_sparse_has_window(llama_context * ctx, llama_seq_id slot, size_t n_held);

// llama-server: a prompt begins in a slot that was restored from a file. Of layers with a window the file has what the next token sees, and no more,
// where llama-server asks for a position more and would read all again; a checkpoint of what is there lets it go on
template <typename Slot, typename Task> void llama_sparse_window_use(Slot & slot, const Task & task) {
    auto & prompt = slot.prompt;
    const size_t n = prompt.tokens.size();
    if (task.is_child() || !prompt.checkpoints.empty() || n == 0 || prompt.tokens.get_common_prefix(task.tokens) < n ||
            task.tokens.size() == n || !llama_sparse_has_window(slot.ctx_tgt, slot.id, n)) {
        return;
    }
    auto & checkpoint = prompt.checkpoints.emplace_back();
    checkpoint.update_pos(n, 0, n); // from the beginning, as far as the tokens from n on can tell
    checkpoint.update_tgt(slot.ctx_tgt, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
}

// Does `--override-kv KEY=..` change what K and V are, beside the rotations, which a document knows?
LLAMA_API bool llama_sparse_override_matters(const char * key);

// The adapters of the request that begins in this slot. Returns whether they changed: then its K and V are worth nothing
LLAMA_API bool llama_sparse_update_adapters(const void * slot, const std::string & adapters);

// The adapters that change every token of a request, with their scales. One that begins at a word of its own changes nothing before that
template <typename Slot> std::string llama_sparse_adapters_of(const Slot & slot) {
    std::string res;
    for (const auto & adapter : slot.lora) {
        if (adapter.scale != 0.0f && llama_adapter_get_alora_n_invocation_tokens(adapter.ptr) == 0) {
            res += adapter.path + " " + std::to_string(adapter.scale) + "\n";
        }
    }
    return res;
}

// Why a document, computed from the weights alone, cannot stand in for this prompt; nullptr if it can
template <typename Params, typename Slot, typename Task>
const char * llama_sparse_why_no_document(const Params & params, const Slot & slot, const Task & task) {
    const auto matters = [](const auto & entry) { return llama_sparse_override_matters(entry.key); };
    const auto & keys    = params.kv_overrides;
    const bool   is_anew = task.need_embd() || !task.params.cache_prompt;
    return is_anew                                          ? "the request asks for a prompt that is read anew (cache_prompt)" :
            !llama_sparse_adapters_of(slot).empty()         ? "it was read without the LoRA adapter of this request" :
            !params.control_vectors.empty()                 ? "it was read without the control vector of this server" :
            std::any_of(keys.begin(), keys.end(), matters)  ? "it was read without the --override-kv of this server" :
            slot.ctx_dft                                    ? "the draft model of this server has not read it" : nullptr;
}

// llama-server: a prompt begins in a slot. If it begins with a document, the slot gets that document. The arguments are upstream's common_params,
// server_slot and server_task, which only the server knows. Upstream forgets what a slot holds when a request names other adapters, but not after
// POST /lora-adapters
template <typename Params, typename Slot, typename Task>
void llama_sparse_document_use(const Params & params, Slot & slot, const Task & task) {
    if (llama_sparse_update_adapters(&slot, llama_sparse_adapters_of(slot))) {
        slot.prompt.clear();
    }
    llama_sparse_window_use(slot, task);
    if (!llama_sparse_has_documents() || task.is_child()) { // a child copies what its parent holds
        return;
    }
    std::vector<llama_token> prompt, tokens;
    for (size_t i = 0; i < task.tokens.size(); ++i) {
        prompt.push_back(task.tokens[i]); // LLAMA_TOKEN_NULL where an image is: no document has that
    }
    const size_t n_held = slot.prompt.tokens.get_common_prefix(task.tokens);
    const bool   goes_on = n_held == slot.prompt.tokens.size();
    if (llama_sparse_document_take(slot.ctx_tgt, slot.id, prompt, n_held, goes_on, llama_sparse_why_no_document(params, slot, task), tokens)) {
        slot.prompt.clear();
        slot.prompt.tokens.insert(tokens);
    }
}

// llama-server: where the options of RoPE stretch it, the context that was asked for is what the model serves, and not the one of its training.
// Upstream does so for YaRN, and then up to a length of its own
LLAMA_API void llama_sparse_train_on(llama_model * model, uint32_t n_ctx);

// llama-server: its context is made. A text may be as long as a slot, and a signal stops a prompt that is read
LLAMA_API void llama_sparse_serve(llama_context * ctx);

template <typename Params> void llama_sparse_serve_stretched(llama_context * ctx, llama_model * model, const Params & params) {
    llama_sparse_serve(ctx);
    llama_sparse_check_documents(ctx); // opens them before the first request: one that is replaced by then would not be what the list says
    const Params none{};
    if (params.rope_scaling_type != none.rope_scaling_type || params.rope_freq_base != none.rope_freq_base ||
            params.rope_freq_scale != none.rope_freq_scale || params.yarn_orig_ctx != none.yarn_orig_ctx ||
            params.yarn_ext_factor != none.yarn_ext_factor || params.yarn_attn_factor != none.yarn_attn_factor ||
            params.yarn_beta_fast != none.yarn_beta_fast || params.yarn_beta_slow != none.yarn_beta_slow) {
        llama_sparse_train_on(model, llama_n_ctx_seq(ctx));
    }
}
