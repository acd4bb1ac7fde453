// ik_llama.cpp as one of the sides of `sparq-cpp bench --rival`: answers the requests of
// pyorch/measure/process.py that a stock side gets. In a checkout of its commit 8337e4cd3, built by
// `cmake -B build && cmake --build build --target llama` (its defaults; no other flags were compared;
// weights are rearranged if stock's are):
//
//   g++ -O2 -std=c++17 -fopenmp -Iinclude -Isrc -Iggml/include -Iggml/src -Ivendor \
//       .../bench/rivals/ik_llama.cpp -o ik_llama.cpp-8337e4cd3 build/src/libllama.so \
//       build/ggml/src/libggml.so -Wl,-rpath,$PWD/build/src:$PWD/build/ggml/src
//
// The cache is filled through its private structs, since its saved states have another layout.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <random>
#include <string>
#include <unistd.h>
#include <vector>

#include "llama-context.h"
#include "nlohmann/json.hpp"

using nlohmann::json;

static llama_model *   model = nullptr;
static llama_context * ctx   = nullptr;
static int             n_pos = 0;

static void close() {
    if (ctx)   llama_free(ctx);
    if (model) llama_free_model(model);
    ctx = nullptr, model = nullptr, n_pos = 0;
}

static void open(const json & a) {
    close();
    llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers   = 0;
    mp.repack_tensors = a["repack"];
    mp.use_mmap       = !mp.repack_tensors;
    model = llama_model_load_from_file(std::string(a["model"]).c_str(), mp);
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx      = a["n_ctx"];
    cp.n_batch    = a["n_batch"];
    cp.n_ubatch   = std::min(512u, cp.n_batch);
    cp.n_threads  = cp.n_threads_batch = a["n_threads"];
    cp.flash_attn = a["flash_attn"];
    ctx = model ? llama_init_from_model(model, cp) : nullptr;
    if (!ctx || a["type_k"] != "f16" || a["type_v"] != "f16") throw std::runtime_error("cannot load this");
}

// normally distributed f16 in K and V of all positions; the first `n` count as used
static void fill(int n, int seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<ggml_fp16_t> pool(8388593);
    for (auto & x : pool) x = ggml_fp32_to_fp16(normal(random));
    llama_kv_cache & kv = ctx->kv_self;
    for (auto * list : { &kv.k_l, &kv.v_l }) for (ggml_tensor * t : *list) {
        const size_t size = t ? ggml_nbytes(t) : 0, most = pool.size() * sizeof(pool[0]);
        for (size_t at = 0; at < size; at += most) ggml_backend_tensor_set(t, pool.data(), at, std::min(most, size - at));
    }
    for (int i = 0; i < n; i++) kv.cells[i].pos = i, kv.cells[i].seq_id = { 0 };
    kv.head = kv.used = n_pos = n;
}

static void decode(std::vector<llama_token> tokens, int at, int n_batch) {
    for (int i = 0; i < (int) tokens.size(); i += n_batch) {
        const int n = std::min(n_batch, (int) tokens.size() - i);
        if (llama_decode(ctx, llama_batch_get_one(tokens.data() + i, n, at + i, 0))) throw std::runtime_error("llama_decode failed");
    }
}

// tokens one by one after an untimed one, or all of a prompt; they are taken back
static json timed(int n, int seed, bool one_by_one) {
    std::mt19937 random(seed);
    std::vector<llama_token> tokens(n + one_by_one);
    for (auto & t : tokens) t = 3 + random() % 256;
    json samples = json::array();
    for (int i = 0, n_each = one_by_one ? 1 : n; i < (int) tokens.size(); i += n_each) {
        const auto start = std::chrono::steady_clock::now();
        decode({ tokens.begin() + i, tokens.begin() + i + n_each }, n_pos + i, llama_n_batch(ctx));
        if (!one_by_one || i) samples.push_back((std::chrono::steady_clock::now() - start).count());
    }
    llama_kv_cache_seq_rm(ctx, 0, n_pos, -1);
    return {{ "samples_ns", samples }, { "counters", json::object() }};
}

int main() {
    FILE * answers = fdopen(dup(1), "w");
    if (!freopen("/dev/null", "w", stdout)) return 1;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    for (std::string line; std::getline(std::cin, line);) {
        const json request = json::parse(line), & a = request["args"];
        const std::string call = request["call"];
        json result;
        try {
            if (call == "open")  open(a);
            if (call == "fill")  fill(a["n_pos"], a["seed"]);
            if (call == "close") close();
            if (call == "generate" || call == "prefill") result = timed(a["n"], a["seed"], call == "generate");
            result = {{ "result", result }};
        } catch (const std::exception & e) {
            result = {{ "error", std::string("ik_llama.cpp: ") + e.what() }, { "hint", "f16 caches on a CPU" }};
        }
        fprintf(answers, "%s\n", result.dump().c_str());
        fflush(answers);
    }
    close();
}
