// VISIBLE: threads take groups in turns.

#include "sparse-visible.h"
#include "sparse-work.h"

void sparse::forward_visible(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_sparse_src a = ggml_sparse_src_of(dst);

    const int64_t n_kv  = a.mask->ne[0];
    const int64_t n_grp = dst->ne[0];
    const int64_t n_tok = a.mask->ne[1];
    const int64_t n_row = dst->ne[1]; // with sealed there is one more row than tokens, a copy of it
    for (int64_t u = params->ith; u < n_grp*n_row*dst->ne[3]; u += params->nth) {
        digits d { u };
        const int64_t g = d.next(n_grp), i = d.next(n_row), s = d.rest;
        int32_t & res = at<int32_t>(dst, i, 0, s)[g];
        if (i == n_tok) {
            res = at<const int32_t>(a.sealed, s)[g];
        } else {
            res = count_visible(at<const f16>(a.mask, i, 0, s) + g*GROUP, group_size(g, n_kv));
        }
    }
}
