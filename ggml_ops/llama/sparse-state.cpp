#include "sparse-state.h"

#include "llama-impl.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

void llama_sparse_state::make_stats(ggml_backend_dev_t dev) {
    if (all_stats.count(dev)) {
        return;
    }
    stats_tensor s;
    s.ctx.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    s.t = ggml_new_tensor_1d(s.ctx.get(), GGML_TYPE_I64, GGML_SPARSE_STAT_COUNT);
    ggml_set_name(s.t, "sparse_stats");
    s.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(s.ctx.get(), dev ? ggml_backend_dev_buffer_type(dev) : ggml_backend_cpu_buffer_type()));
    if (!s.buf) {
        throw std::runtime_error("no memory for the counters of sparse attention\nleave some memory of the device free");
    }
    ggml_backend_buffer_clear(s.buf.get(), 0);
    all_stats.emplace(dev, std::move(s));
}

llama_sparse_state::counts llama_sparse_state::read_stats(ggml_backend_dev_t dev) const {
    counts res;
    ggml_backend_tensor_get(stats(dev), res.data(), 0, sizeof(res));
    return res;
}

llama_sparse_state::counts llama_sparse_state::read_stats() const {
    counts sum = {};
    for (const auto & [dev, _] : all_stats) {
        const counts one = read_stats(dev);
        std::transform(one.begin(), one.end(), sum.begin(), sum.begin(), std::plus<>());
    }
    return sum;
}

// at the end of a context: what was asked for and what ran. Not one sparse call is worth a warning: nobody else says it in the programs
// of llama.cpp
llama_sparse_state::~llama_sparse_state() {
    const auto stat = read_stats();
    const int64_t n_sparse = stat[GGML_SPARSE_STAT_ATTEND_SPARSE], n_dense = stat[GGML_SPARSE_STAT_ATTEND_DENSE];
    const int64_t n_prefill = stat[GGML_SPARSE_STAT_PREFILL];
    if (n_sparse + n_dense + n_prefill == 0 && n_stock.empty()) {
        return;
    }
    std::string left;
    for (const auto & [reason, n] : n_stock) {
        left += (left.empty() ? "\"" : ", \"") + std::string(reason) + "\": " + std::to_string(n);
    }
    const std::string text = "{\"spec\": \"" + spec.str() + "\", \"sparse\": " + std::to_string(n_sparse) + ", \"exact\": " +
            std::to_string(n_dense) + ", \"prompt\": " + std::to_string(n_prefill) + ", \"left\": {" + left + "}}";
    const bool none = n_sparse == 0 && spec.is_sparse();
    if (none) {
        LLAMA_LOG_WARN("sparse attention calls: %s\n", text.c_str());
    } else {
        LLAMA_LOG_INFO("sparse attention calls: %s\n", text.c_str());
    }
}

void llama_sparse_state::reset_counters() {
    for (const auto & [_, s] : all_stats) {
        ggml_backend_buffer_clear(s.buf.get(), 0);
    }
    n_steps    = 0;
    n_verified = 0;
    n_stock.clear();
}
