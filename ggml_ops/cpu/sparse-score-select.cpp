// SCORE_SELECT: SELECT, with logits that SCORE makes tile by tile. They stay in the cache of the thread that makes them.

#include "sparse-score-select.h"

namespace {

struct scored_tiles : logit_source {
    const score_src  & a;
    const score_work & w;

    scored_tiles(const score_src & a, const score_work & w) : a(a), w(w) {}

    void write(const tile_unit & u, float * out, int64_t ld, const tile_unit & next) const override { score_tile(a, w, u, out, ld, next); }

    line_stream lines(const tile_unit & u) const override { return tile_lines(a, w, u); }
};

} // namespace

void sparse::forward_score_select(const ggml_compute_params * params, ggml_tensor * dst) {
    const score_src  a(dst);
    const score_work w(a, params->wdata, params->ith, params->nth);
    score_prepare(params, a, w);
    select_heads(params, dst, select_src(dst), (const char *) params->wdata + w.size, scored_tiles(a, w));
    if (params->ith == 0) {
        score_stats(a, w);
    }
}

size_t sparse::score_select_work_size(const ggml_tensor * dst, int n_threads) {
    return score_work_size(dst, n_threads) + select_work_size(dst, n_threads);
}
