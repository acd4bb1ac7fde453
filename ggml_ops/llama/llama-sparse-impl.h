#pragma once

// What llama-sparse.cpp and llama-sparse-graph.cpp share.

#include "llama-sparse.h"

#include "ggml-cpp.h"
#include "ggml-sparse.h"

#include <array>
#include <map>
#include <string>

struct llama_hparams;
class  llama_kv_cache;

enum llama_sparse_method {
    LLAMA_SPARSE_OFF,
    LLAMA_SPARSE_DENSE,
    LLAMA_SPARSE_SPARQ,
    LLAMA_SPARSE_TOPK,
};

// the parsed form of a spec; the keys are described in llama-sparse.h
struct llama_sparse_spec {
    llama_sparse_method method = LLAMA_SPARSE_OFF;

    double  ratio   = 1.0/8;
    int32_t rank    = 0;    // 0: from ratio
    int32_t topk    = 0;    // 0: from ratio
    int32_t local   = -1;   // < 0: topk/4
    int32_t sinks   = 4;
    int32_t min_k   = 128;
    int32_t min_ctx = 1024;
    int32_t gpu_min_mb = 256;
    int32_t mean_v  = -1;   // < 0: auto
    int32_t ramp    = 0;    // 1: k grows over the layers, -1: it falls
    double  top_p   = 1.0;
    double  cap     = 1.0;  // of top_p: up to so many times k
    int32_t n_bit   = 4;    // of the transposed copy of K: 16 (f16), 8 or 4

    struct layer_k {
        double x;       // positions, or percent of them
        bool   percent;
    };
    std::vector<layer_k> k_layers;
    std::vector<int32_t> rank_layers;

    std::string str() const;

    const char * shadow_name() const;

    // reads every position: run as the dense op
    bool is_dense() const;

    // row_bytes: of K and V of one position and KV head
    int32_t rank_for(int32_t il, int32_t d_k, double row_bytes) const;

    // k of layer il for a token that sees n_pos positions; score_shares [n_layer]: of dense attention's bytes, read by step 1; 0: not our layer
    int32_t topk_for(int32_t il, int32_t n_pos, const std::vector<double> & score_shares) const;

    int32_t cap_for(int32_t k, int32_t n_pos) const; // most positions of a head

    int32_t local_for(int32_t k) const;
};

// per context
struct llama_sparse_state {
    llama_sparse_spec spec;

    int32_t     n_layer = 0;
    std::string reason; // why nothing is sparse, whatever the layer

    // layer -> why its decode attention is not ours, "" if it is; as of the last graph that decoded
    std::map<int, std::string> layers;

    // counters: the ops add to stats when they run; attention left to llama.cpp is counted here, by reason
    uint64_t n_steps = 0;
    std::map<std::string, uint64_t> n_stock;

    ~llama_sparse_state(); // logs the counters

    // I64 [GGML_SPARSE_STAT_COUNT] in the memory of a device, nullptr: of the host; made when first asked for
    ggml_tensor * stats(ggml_backend_dev_t dev);

    // the sum over all of them; what runs on a device must be done
    std::array<int64_t, GGML_SPARSE_STAT_COUNT> read_stats() const;

    void reset_counters();

private:
    struct stats_tensor {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
        ggml_tensor           * t = nullptr;
    };
    std::map<ggml_backend_dev_t, stats_tensor> all_stats;
};

// the shadow of a cache: made on first use, kept until the cache goes; nullptr where there is none.
// create throws std::runtime_error when there is no memory for it.
void                  llama_sparse_shadow_create(llama_kv_cache * kv, const llama_sparse_spec & spec, const llama_hparams & hparams);
const char *          llama_sparse_shadow_why_not(const llama_kv_cache * kv); // "" or why nothing in this cache can be sparse
llama_sparse_shadow * llama_sparse_shadow_get   (const llama_kv_cache * kv);
size_t                llama_sparse_shadow_bytes (const llama_kv_cache * kv);
int64_t               llama_sparse_shadow_seal  (llama_kv_cache * kv, ggml_backend_sched_t like, llama_sparse_state & state); // see llama_sparse_attn_seal(); with the backends of `like`
int64_t               llama_sparse_shadow_check (const llama_kv_cache * kv); // see llama_sparse_attn_check()
