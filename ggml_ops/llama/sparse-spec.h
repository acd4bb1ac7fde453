#pragma once

// The parsed form of a spec, a line of text; llama-sparse.h describes the keys. Knows nothing of llama.cpp.

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

// what a user did wrong: the message, a line feed, a hint, as the C API returns them
struct llama_sparse_error : std::runtime_error {
    llama_sparse_error(const std::string & msg, const std::string & hint) : std::runtime_error(msg + "\n" + hint) {}
};

// the text of a llama_sparse_error in one line: "message; hint: hint"
std::string llama_sparse_in_one_line(std::string what);

enum llama_sparse_method {
    LLAMA_SPARSE_OFF,
    LLAMA_SPARSE_DENSE,
    LLAMA_SPARSE_SPARQ,
    LLAMA_SPARSE_TOPK,
};

struct llama_sparse_spec {
    llama_sparse_method method = LLAMA_SPARSE_OFF;

    double  ratio   = 1.0/8;
    int32_t rank    = 0;    // 0: from ratio
    int32_t topk    = 0;    // 0: from ratio
    int32_t local   = -1;   // < 0: topk/4
    int32_t sinks   = 4;
    int32_t min_k   = 128;
    int32_t min_ctx = 1024;
    int32_t gpu_min_mb = -1; // < 0: 320 on GPUs that are known to be faster so, dense on others
    int32_t mean_v  = -1;   // < 0: auto
    int32_t ramp    = 0;    // 1: k grows over the layers, -1: it falls
    double  top_p   = 1.0;
    double  cap     = 1.0;  // of top_p: up to so many times k
    int32_t n_bit   = 4;    // of the transposed copy of K, see sparse-codes.h
    int32_t prompt  = 1;    // of PREFILL, 0: f32, 1: products of few bits
    int32_t verify  = 1;    // of the tokens that verify a draft, 0: exact, 1: each as a decoded one

    struct layer_k {
        double x;       // positions, or percent of them
        bool   percent;
    };
    std::vector<layer_k> k_layers;
    std::vector<int32_t> rank_layers;

    // throws llama_sparse_error
    static llama_sparse_spec parse(const std::string & text);

    // The settings of one sequence of a context that has `all`. What one node of a graph has for all its tokens is taken from `all`, and a text
    // that says otherwise is refused. min_ctx comes from `all` if the text does not give it. Throws llama_sparse_error
    static llama_sparse_spec parse_own(const std::string & text, const llama_sparse_spec & all);

    std::string str() const; // canonical

    static std::string table(); // of llama_sparse_attn_keys()

    const char * method_name() const;

    bool is_off()    const { return method == LLAMA_SPARSE_OFF; }
    bool is_sparse() const { return method == LLAMA_SPARSE_SPARQ || method == LLAMA_SPARSE_TOPK; }

    bool wants_mean_v() const { return method == LLAMA_SPARSE_SPARQ && mean_v != 0; } // step 3

    // reads every position: run as the dense op
    bool is_dense() const;

    // does each token that verifies a draft get what it gets alone?
    bool verifies_alone() const { return is_sparse() && !is_dense() && verify == 1; }

    // reads the transposed copy of K
    bool has_shadow() const { return method == LLAMA_SPARSE_SPARQ && !is_dense(); }

    // f16_bytes: of K and V of one position and KV head in f16. A ratio selects the same from any type of cache
    int32_t rank_for(int32_t il, int32_t d_k, double f16_bytes) const;

    // k of layer il for a token that sees n_pos positions; score_shares [n_layer]: of the bytes of K and V in f16, read by step 1; 0: not our layer
    int32_t topk_for(int32_t il, int32_t n_pos, const std::vector<double> & score_shares) const;

    int32_t cap_for(int32_t k, int32_t n_pos) const; // most positions of a head

    int32_t local_for(int32_t k) const { return local >= 0 ? local : std::max(k/4, 1); }

    bool is_short(uint32_t n_kv) const; // is attention over so many cells exact?
};
