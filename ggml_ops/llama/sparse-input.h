#pragma once

// What the sparse layers of one graph need from the host.

#include "sparse-shadow.h"
#include "sparse-state.h"

#include "llama-graph.h"

#include <map>

class llm_graph_input_sparse : public llm_graph_input_i {
public:
    // the one of this graph, made by the first layer that asks
    static llm_graph_input_sparse * input_of(const llm_graph_context & g);

    llm_graph_input_sparse(const llm_graph_context & g, const llama_kv_cache_context * mctx);

    void set_input(const llama_ubatch * ubatch) override;
    bool can_reuse(const llm_graph_params & params) override;

    const std::shared_ptr<llama_sparse_state> state;
    const llama_kv_cache_context *            mctx;

    // Tokens of the ubatch, some of which are replies: decoded ones
    struct tokens {
        uint32_t n;       // all
        uint32_t n_reply;
        uint32_t lo, hi;  // the smallest range that has all replies; with several streams all tokens, or none
        bool     is_stock;   // the attention of all their sequences is off
        bool     has_common; // a reply has the context's settings
        std::vector<std::shared_ptr<const llama_sparse_spec>> own; // the settings that other replies have, each once, in order of address

        bool is_mixed()   const { return n_reply < hi - lo; } // prompts between replies
        bool has_prompt() const { return n_reply < n; }
        bool same_graph(const tokens & other) const;
    };
    tokens         tok; // of the ubatch at hand
    const uint32_t n_kv;
    const uint32_t n_stream;

    // what replies of this graph have for settings: the context's, those of single sequences, or both
    struct setting {
        std::shared_ptr<const llama_sparse_spec> own; // nullptr: the context's
        const llama_sparse_spec & spec;
        std::vector<double>       score_shares; // [n_layer], see llama_sparse_score_shares()
    };
    std::vector<setting> settings;

    bool    reads_all(const setting & x, int32_t il) const; // every position of a layer, whatever the sequence
    bool    is_exact (const setting & x, int32_t il, uint32_t n_pos) const; // for a token that sees n_pos positions
    int32_t topk_for (const setting & x, int32_t il) const { return x.spec.topk_for(il, n_kv, x.score_shares); }
    int32_t rank_for (const setting & x, int32_t il) const;

    llama_kv_cache      & kv()      const { return llama_sparse_access::kv(*mctx); }
    llama_sparse_shadow & shadow()  const { return *llama_sparse_access::shadow(kv()); }
    uint32_t              stream0() const { return llama_sparse_access::sinfo(*mctx).s0; } // the first of the graph's

    // ---- inputs: made by the first layer that needs them

    ggml_tensor * list   = nullptr; // I32 [n_list, n_stream]: groups to seal; none where seals() is false
    ggml_tensor * sealed = nullptr; // I32 [n_grp, n_stream]: 1 + the first token of the range that may read a group from the shadow, 0: none may
    ggml_tensor * wanted = nullptr; // I32 [i_forced + n_local_max + n_sinks, n_tok, 1, n_stream], of the range: k and l by layer, with several
                                    // settings the rank by layer, local window, sinks
    ggml_tensor * hide_prompts = nullptr; // F32 [1, n_tok, 1, n_stream], of a mixed range: -inf for tokens of prompts, else 0
    ggml_tensor * hide_replies = nullptr; // the reverse
    ggml_tensor * keep_prompts = nullptr; // F32 [1, n_tok*n_stream], of a mixed range: 1 for tokens of prompts, else 0

    void need_seal  (const llm_graph_context & g); // list and sealed
    void need_wanted(const llm_graph_context & g);
    void need_hide  (const llm_graph_context & g); // both
    void need_keep  (const llm_graph_context & g);

    int32_t n_local_max = 0;
    bool    has_ranks()      const { return settings.size() > 1 && state->spec.has_shadow(); }
    int32_t i_rank(int il)   const { return has_ranks() ? 2*state->n_layer + il : 0; } // in wanted
    int32_t i_forced()       const { return (has_ranks() ? 3 : 2)*state->n_layer; }

    // ---- nodes that layers share, by the device that runs them (nullptr: the CPU)

    ggml_tensor * mask_reply  = nullptr; // of the range; in a mixed one, each of them hides all positions from the tokens of the other kind
    std::map<const ggml_tensor *, ggml_tensor *> mask_prompt; // by the mask of all, which layers with a sliding window have of their own
    std::map<std::pair<const ggml_tensor *, uint32_t>, ggml_tensor *> mask_stock; // of what llama.cpp reads, by its first token too

    std::map<ggml_backend_dev_t, ggml_tensor *> visible;
    std::map<int32_t, ggml_tensor *> k_t; // SEAL's result, by layer of the cache

    struct layer {
        int         il;
        std::string reason;  // why its decoded tokens are not ours, "" if they are
        bool        uses_stock; // all of its attention is llama.cpp's
        bool        prompt_uses_stock = false; // that of prompts beside replies that are ours
        bool        is_exact          = false; // its decoded tokens are ours in spite of the reason, which says why they read everything
    };
    std::vector<layer> layers;

private:
    bool    has_stages() const { return tok.n > n_stream; } // a token may read from the shadow what another one of the graph completes
    bool    seals()      const; // does the graph seal? Else what it completes waits for llama_sparse_decode_begin() of the next call
    int64_t n_waiting()  const; // complete groups that the graph should seal, in the stream with most of them
    const std::vector<uint32_t> & written(uint32_t stream) const; // cells; of streams without tokens in this ubatch none

    void set_seal  (uint32_t s, uint32_t stream);
    void set_wanted(const llama_ubatch * ubatch);
    void account   (const llama_ubatch * ubatch); // of each sequence

    const setting & setting_of(llama_seq_id seq) const;
    int32_t         n_seen(llama_seq_id seq, llama_pos at) const; // positions that a token sees
};

// Which sequences of a batch reply, by the rule in llama-sparse.h: sets state.replying and state.verifying. kv == nullptr: as if nothing was known
// of the tokens before
void llama_sparse_find_replies(llama_sparse_state & state, llama_kv_cache * kv, const llama_batch & batch);
