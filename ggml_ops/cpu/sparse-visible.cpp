// VISIBLE: threads take groups in turns.

#include "sparse-visible.h"
#include "sparse-work.h"

void sparse::forward_visible(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * mask = ggml_sparse_src_of(dst).mask;

    const int64_t n_kv = mask->ne[0], n_grp = dst->ne[0];
    for (int64_t u = params->ith; u < n_grp*dst->ne[1]*dst->ne[3]; u += params->nth) {
        digits d { u };
        const int64_t g = d.next(n_grp), i = d.next(dst->ne[1]), s = d.rest;
        at<int32_t>(dst, i, 0, s)[g] = count_visible(at<const f16>(mask, i, 0, s) + g*GROUP, group_size(g, n_kv));
    }
}
