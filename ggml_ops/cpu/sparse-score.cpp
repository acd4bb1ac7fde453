// ggml glue of SCORE and SELECT.

#include "sparse-glue.h"
#include "sparse-quant.h"
#include "sparse-select.h"

namespace {

// ---- SCORE ----

// positions per unit of the approximate scores: long runs per channel, accumulators of all heads within L1
int64_t score_tile(int64_t n_group_q) { return n_group_q <= 2 ? 4096 : n_group_q <= 4 ? 2048 : 1024; }

// positions per unit of the exact scores; a unit holds all KV heads, so that K is read in the order of memory
constexpr int64_t EXACT_TILE = 256;

struct score_work {
    int32_t * n_chan;   // [n_unit0]                one per (stream, token, KV head)
    int32_t * chan;     // [n_unit0][rank]
    float   * coef;     // [n_unit0][n_group_q][rank]
    float   * x;        // [rank][GROUP]            this thread's
    float   * s;        // [n_head or n_group_q][tile]
    float   * sum;      // [d_k]
    uint8_t * table;    // what the scan of codes needs
    size_t    size;     // of all threads

    score_work(const ggml_tensor * dst, const void * wdata, int ith, int nth) {
        const ggml_tensor * q = dst->src[0];
        const ggml_tensor * k = dst->src[1];
        const auto p = op_params<ggml_sparse_score_params>(dst);

        const int64_t n_group_q = q->ne[1]/k->ne[1];
        const int64_t n_unit0   = k->ne[1]*q->ne[2]*q->ne[3];
        const bool    approx    = dst->src[2] != nullptr;
        const int64_t rank      = approx ? p.rank : 0;

        bump shared(wdata);
        n_chan = shared.take<int32_t>(n_unit0);
        chan   = shared.take<int32_t>(n_unit0*rank);
        coef   = shared.take<float>(n_unit0*n_group_q*rank);

        bump own(shared.end());
        for (int i = 0; i < nth; ++i) {
            if (i <= ith) {
                x   = own.take<float>(rank*GROUP);
                s   = own.take<float>(approx ? n_group_q*score_tile(n_group_q) : q->ne[1]*EXACT_TILE);
                sum = own.take<float>(q->ne[0]);
                table = own.take<uint8_t>(!approx || p.n_bit == 16 ? 0 : p.n_bit == 4 ?
                        n_group_q*(rank + 1)*16 : (score_tile(n_group_q)/RUN + 2)*n_group_q*(rank + 1)*sizeof(float));
            }
            if (i == 0) {
                size = shared.used + nth*own.used + bump::ALIGN;
            }
        }
    }
};

// may the group be read from k_t? Codes exist for complete groups only
bool in_k_t(const int32_t * sealed, int64_t g, int64_t n_kv, int64_t n_bit) {
    return sealed[g] != 0 && (n_bit == 16 || (g + 1)*GROUP <= n_kv);
}

void score_stats(const ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * k_t     = dst->src[2];
    const ggml_tensor * sealed  = dst->src[3];
    const ggml_tensor * visible = dst->src[5];

    const int64_t rank  = op_params<ggml_sparse_score_params>(dst).rank;
    const int64_t n_bit = op_params<ggml_sparse_score_params>(dst).n_bit;
    const int64_t ts    = ggml_type_size(k->type);

    int64_t bytes = 0;
    for (int64_t s = 0; s < q->ne[3]; ++s) {
        for (int64_t i = 0; i < q->ne[2]; ++i) {
            const int32_t * vis = at<const int32_t>(visible, i, 0, s);
            for (int64_t g = 0; g < visible->ne[0]; ++g) {
                if (!k_t) {
                    bytes += vis[g]*k->ne[0]*ts;
                } else if (vis[g] > 0 && in_k_t(at<const int32_t>(sealed, s), g, k->ne[2], n_bit)) {
                    // the positions, and the group's share of scale and zero of its run
                    bytes += group_size(g, k->ne[2])*rank*n_bit/8 + (n_bit == 16 ? 0 : rank*2*(int64_t) sizeof(float)*GROUP/RUN);
                } else {
                    bytes += vis[g]*rank*ts;
                }
            }
        }
    }
    add_stat(dst->src[6], GGML_SPARSE_STAT_BYTES_SCORE, bytes*k->ne[1]);
}

// step 1 from k_t; T: the type of K
template <typename T>
void score_approx(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * k_t     = dst->src[2];
    const ggml_tensor * sealed  = dst->src[3];
    const ggml_tensor * mask    = dst->src[4];
    const ggml_tensor * visible = dst->src[5];
    const ggml_tensor * k_range = dst->src[7];
    const auto p = op_params<ggml_sparse_score_params>(dst);

    const int64_t n_kv      = k->ne[2];
    const int64_t n_head_kv = k->ne[1];
    const int64_t n_tok     = q->ne[2];
    const int64_t n_unit0   = n_head_kv*n_tok*q->ne[3];
    const int     n_head    = (int) q->ne[1];
    const int     n_group_q = (int) (n_head/n_head_kv);
    const int     d_k       = (int) q->ne[0];
    const int64_t tile      = score_tile(n_group_q);
    const int64_t n_tile    = ceil_div(n_kv, tile);

    const score_work w(dst, params->wdata, params->ith, params->nth);

    for (int64_t u = params->ith; u < n_unit0; u += params->nth) {
        const int64_t h = u % n_head_kv, i = u/n_head_kv % n_tok, s = u/n_head_kv/n_tok;
        w.n_chan[u] = choose_channels(w.chan + u*p.rank, w.coef + u*n_group_q*p.rank, w.sum,
                at<const float>(q, h*n_group_q, i, s), q->nb[1]/sizeof(float), n_group_q, d_k, p.rank, p.scale);
    }
    ggml_barrier(params->threadpool);

    for (int64_t u = params->ith; u < n_unit0*n_tile; u += params->nth) {
        const int64_t u0 = u/n_tile;
        const int64_t h = u0 % n_head_kv, i = u0/n_head_kv % n_tok, s = u0/n_head_kv/n_tok;
        const int64_t t0 = u % n_tile*tile, t1 = std::min(t0 + tile, n_kv);

        const int32_t * vis  = at<const int32_t>(visible, i, 0, s);
        const int32_t * seal = at<const int32_t>(sealed, s);
        const f16     * m    = at<const f16>(mask, i, 0, s);
        const int32_t * chan = w.chan + u0*p.rank;
        const float   * coef = w.coef + u0*n_group_q*p.rank;
        float         * out  = at<float>(dst, h*n_group_q, i, s);
        const int64_t   ld   = dst->nb[1]/sizeof(float);

        // runs of groups of one kind: hidden, sealed, or (one at a time) neither
        for (int64_t a = t0, b; a < t1; a = b) {
            const int64_t g = a/GROUP;
            b = std::min(a + GROUP, t1);
            if (vis[g] == 0) {
                for (int j = 0; j < n_group_q; ++j) {
                    std::fill(out + j*ld + a, out + j*ld + b, -INFINITY);
                }
                continue;
            }
            if (in_k_t(seal, g, n_kv, p.n_bit)) {
                while (b < t1 && vis[b/GROUP] > 0 && in_k_t(seal, b/GROUP, n_kv, p.n_bit)) {
                    b = std::min(b + GROUP, t1);
                }
                const char * x = at(k_t, h*d_k, s);
                if (p.n_bit == 16) {
                    score_channels<f16>(w.s, tile, n_group_q, x + a*sizeof(f16), k_t->nb[1], chan, w.n_chan[u0], coef, p.rank, b - a);
                } else {
                    const float * range = at<const float>(k_range, h*d_k, 0, s);
                    const int64_t ld_range = k_range->nb[2]/sizeof(float);
                    if (p.n_bit == 8) {
                        score_q8(w.s, tile, n_group_q, x, k_t->nb[1], range, ld_range, chan, w.n_chan[u0], coef, p.rank, a, b, (float *) w.table);
                    } else {
                        score_q4(w.s, tile, n_group_q, x, k_t->nb[1], range, ld_range, chan, w.n_chan[u0], coef, p.rank, a, b, w.table);
                    }
                }
            } else {
                gather_channels<T>(w.x, at(k, h, a, s), k->nb[2], chan, w.n_chan[u0], m + a, (int) (b - a));
                score_channels<float>(w.s, tile, n_group_q, (const char *) w.x, GROUP*sizeof(float), nullptr, w.n_chan[u0], coef, p.rank, b - a);
            }
            for (int j = 0; j < n_group_q; ++j) {
                finish_logits(out + j*ld + a, w.s + j*tile, m + a, b - a, 1.0f, p.softcap, head_slope((int) h*n_group_q + j, n_head, p.max_bias));
            }
        }
    }
}

// exact scores from K
template <typename T>
void score_exact(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * mask    = dst->src[4];
    const ggml_tensor * visible = dst->src[5];
    const auto p = op_params<ggml_sparse_score_params>(dst);

    const int64_t n_kv      = k->ne[2];
    const int     n_head_kv = (int) k->ne[1];
    const int64_t n_tok     = q->ne[2];
    const int     n_head    = (int) q->ne[1];
    const int     n_group_q = n_head/n_head_kv;
    const int     d_k       = (int) q->ne[0];
    const int64_t n_tile    = ceil_div(n_kv, EXACT_TILE);

    const score_work w(dst, params->wdata, params->ith, params->nth);

    const unit_range own(params, n_tile*n_tok*q->ne[3]);
    for (int64_t u = own.u0; u < own.u1; ++u) {
        const int64_t i = u/n_tile % n_tok, s = u/n_tile/n_tok;
        const int64_t t0 = u % n_tile*EXACT_TILE, t1 = std::min(t0 + EXACT_TILE, n_kv);

        const int32_t * vis = at<const int32_t>(visible, i, 0, s);
        const f16     * m   = at<const f16>(mask, i, 0, s);
        const int64_t   ldq = q->nb[1]/sizeof(float);

        int32_t rows[EXACT_TILE]; // visible positions, relative to t0
        int     n = 0;
        for (int64_t t = t0; t < t1; ++t) {
            if (vis[t/GROUP] > 0 && m[t].bits != F16_NEG_INF) {
                rows[n++] = (int32_t) (t - t0);
            }
        }
        const bool all = n == t1 - t0;

        for (int r = 0; r < n; r += ROW_BLOCK) {
            for (int h = 0; h < n_head_kv; ++h) {
                const char * next = at(k, 0, t0 + r + AHEAD, s) + h*ROW_BLOCK*d_k*sizeof(T); // in the order of memory
                dot_rows<T>(w.s + h*n_group_q*EXACT_TILE + r, EXACT_TILE, at<const float>(q, h*n_group_q, i, s), ldq, n_group_q,
                        at(k, h, t0, s), k->nb[2], rows + r, std::min(ROW_BLOCK, n - r), d_k, next);
            }
        }
        for (int h = 0; h < n_head; ++h) {
            float * x   = w.s + h*EXACT_TILE;
            float * out = at<float>(dst, h, i, s) + t0;
            if (all) {
                memcpy(out, x, n*sizeof(float));
            } else {
                std::fill(out, out + (t1 - t0), 0.0f); // hidden ones become -inf below
                for (int r = 0; r < n; ++r) {
                    out[rows[r]] = x[r];
                }
            }
            finish_logits(out, out, m + t0, t1 - t0, p.scale, p.softcap, head_slope(h, n_head, p.max_bias));
        }
    }
}

// ---- SELECT ----

struct select_work : select_scratch {
    size_t size;    // of all threads

    select_work(const ggml_tensor * dst, const void * wdata, int ith, int nth) {
        const int64_t n_kv      = dst->src[0]->ne[0];
        const int64_t n_group_q = dst->src[0]->ne[1]/dst->ne[1];

        bump own(wdata);
        for (int i = 0; i < nth; ++i) {
            if (i <= ith) {
                key  = own.take<float>(n_kv + 2*W);
                cand = own.take<float>(n_kv + 2*W);
                cell = own.take<int32_t>(n_kv + 2*W);
                e    = own.take<float>(n_group_q > 1 ? n_group_q*(n_kv + 2*W) : 0);
                ref  = own.take<float>(n_group_q);
                sum  = own.take<float>(n_group_q);
                inv  = own.take<float>(n_group_q);
            }
            if (i == 0) {
                size = nth*own.used + bump::ALIGN;
            }
        }
    }
};

} // namespace

void sparse::forward_score(const ggml_compute_params * params, ggml_tensor * dst) {
    with_type(dst->src[1]->type, [&](auto * t) {
        using T = std::decay_t<decltype(*t)>;
        if (dst->src[2]) {
            score_approx<T>(params, dst);
        } else {
            score_exact<T>(params, dst);
        }
    });
    if (dst->src[6] && params->ith == 0) {
        score_stats(dst);
    }
}

size_t sparse::score_work_size(const ggml_tensor * dst, int n_threads) { return score_work(dst, nullptr, 0, n_threads).size; }

void sparse::forward_select(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * logits = dst->src[0];
    const ggml_tensor * forced = dst->src[1];
    const ggml_tensor * kl     = dst->src[2];
    const ggml_tensor * sinks  = dst->src[3];
    const auto p = op_params<ggml_sparse_select_params>(dst);

    const int64_t n_head_kv = dst->ne[1];
    const int64_t n_tok     = dst->ne[2];
    const int     n_group_q = (int) (logits->ne[1]/n_head_kv);

    const select_work w(dst, params->wdata, params->ith, params->nth);

    for (int64_t u = params->ith; u < n_head_kv*n_tok*dst->ne[3]; u += params->nth) {
        const int64_t h = u % n_head_kv, i = u/n_head_kv % n_tok, s = u/n_head_kv/n_tok;

        const int32_t * kl_i = at<const int32_t>(kl, i, 0, s);
        select_topk(at<int32_t>(dst, h, i, s), p.topk_max, w, at<const float>(logits, h*n_group_q, i, s), logits->nb[1]/sizeof(float), n_group_q, logits->ne[0],
                at<const int32_t>(forced, i, 0, s), (int) forced->ne[0], kl_i[1], p.n_local_max, kl_i[0],
                sinks ? (const float *) sinks->data + h*n_group_q : nullptr, p.alpha != 0);
    }
}

size_t sparse::select_work_size(const ggml_tensor * dst, int n_threads) { return select_work(dst, nullptr, 0, n_threads).size; }
