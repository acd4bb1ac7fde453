// SCORE: approximate scores tile by tile from the shadow, or exact scores chunk by chunk from K.

#include "sparse-score.h"
#include "sparse-score-codes.h"
#include "sparse-score-select.h"
#include "sparse-visible.h"

static_assert(tile_grid::MAX_TILE <= MAX_GROUPS*GROUP, "a scan of codes has room for the groups of a tile");

namespace {

// positions per unit of the exact scores. A unit holds all KV heads, so that K is read in the order of memory
constexpr int64_t EXACT_CHUNK = 256;

enum tile_flag : uint8_t {
    PLAIN  = 1, // the mask of the tile is zero
    SHADOW = 2, // all its groups are visible and in k_t
};

} // namespace

sparse::score_src::score_src(const ggml_tensor * dst) :
    ggml_sparse_src(ggml_sparse_src_of(dst)), tile_grid(k->ne[2], k->ne[1], q->ne[1], q->ne[2], q->ne[3]),
    p(ggml_sparse_score_params_of(dst)) {
    i_k    = wanted ? ggml_sparse_select_params_of(dst).i_k : 0;
    n_grp  = ggml_sparse_n_groups(n_kv);
    n_head = (int) q->ne[1];
    d_k    = (int) q->ne[0];
    rank   = k_t ? p.rank : 0;
    ops_k  = ops_of(k->type);
}

sparse::score_work::score_work(const score_src & a, const void * wdata, int ith, int nth) {
    const int64_t n_row = a.n_tok*a.n_stream;
    bump shared(wdata);
    n_comp  = shared.take<int32_t>(a.rank ? a.n_all : 0);
    comp    = shared.take<int32_t>(a.n_all*a.rank);
    coef    = shared.take<float>(a.n_all*a.n_group_q*a.rank);
    visible = shared.take<int32_t>(a.visible ? 0 : n_row*a.n_grp);
    flags   = shared.take<uint8_t>(a.rank ? n_row*a.n_tile : 0);
    size    = take_per_thread(shared, ith, nth, [&](bump & own) {
        q     = own.take<float>(a.rank ? a.n_group_q*a.d_k : 0);
        x     = own.take<float>(a.n_group_q*GROUP);
        exact = own.take<float>(a.rank ? 0 : a.n_head*EXACT_CHUNK);
        sum   = own.take<float>(a.d_k);
        spread = own.take<float>(a.d_k);
        code  = own.take<uint8_t>(a.rank && ggml_sparse_has_codes(a.p.n_bit) ? code_scratch(a.n_group_q, a.rank) : 0);
    });
}

// ---- before the scan ----

// how far each component of a KV head of K spreads, as the contract of SCORE says
static void find_spread(float * res, const score_src & a, int64_t h, int64_t i, int64_t s) {
    int64_t group[GGML_SPARSE_SPREAD_GROUPS];
    int n = 0;
    const auto    in_shadow = [&](int64_t g) { return a.in_shadow(g, i, s); };
    const int64_t n_group   = a.k_range ? ggml_sparse_sealed_groups(a.n_kv, in_shadow) : 0;
    for (int j = 0; j < GGML_SPARSE_SPREAD_GROUPS && n_group > 0; ++j) {
        group[n] = ggml_sparse_spread_group(j, n_group);
        n       += in_shadow(group[n]);
    }
    if (n == 0) {
        std::fill(res, res + a.d_k, 1.0f);
        return;
    }
    for (int c = 0; c < a.d_k; ++c) {
        float mid[GGML_SPARSE_SPREAD_GROUPS], mean = 0.0f, square = 0.0f;
        for (int j = 0; j < n; ++j) {
            const f16 * range = at<const f16>(a.k_range, h*a.d_k + c, group[j], s);
            const float width = to_f32(range[0])*ggml_sparse_code_max(a.p.n_bit);
            mid[j]  = to_f32(range[1]) + 0.5f*width;
            mean   += mid[j]/n;
            square += width*width/(GGML_SPARSE_SPREAD_WIDTH*GGML_SPARSE_SPREAD_WIDTH);
        }
        for (int j = 0; j < n; ++j) {
            square += (mid[j] - mean)*(mid[j] - mean);
        }
        res[c] = sqrtf(square/n);
    }
}

static void prepare_head(const score_src & a, const score_work & w, const head_index & x) {
    const float * q  = at<const float>(a.q, x.h*a.n_group_q, x.i, x.s);
    int64_t       ld = a.q->nb[1]/sizeof(float);
    if (a.skips(x.i, x.s)) {
        w.n_comp[x.u] = 0;
        return;
    }
    if (a.p.n_rot > 0) {
        for (int j = 0; j < a.n_group_q; ++j) {
            memcpy(w.q + j*a.d_k, q + j*ld, a.d_k*sizeof(float));
            ggml_sparse_hadamard(w.q + j*a.d_k, a.d_k, a.p.n_rot);
        }
        q  = w.q;
        ld = a.d_k;
    }
    find_spread(w.spread, a, x.h, x.i, x.s);
    w.n_comp[x.u] = choose_components(w.comp + x.u*a.rank, w.coef + x.u*a.n_group_q*a.rank, a.rank, w.sum, q, ld, w.spread, a.n_group_q, a.d_k,
            a.rank_of(x.i, x.s), a.p.scale);
}

static void prepare_tile(const score_src & a, const score_work & w, int64_t i_tile, int64_t i, int64_t s) {
    uint8_t & flags = w.flags_of(a, i_tile, i, s);
    if (a.skips(i, s)) {
        flags = 0;
        return;
    }
    const int64_t t0 = i_tile*a.tile, t1 = std::min(t0 + a.tile, a.n_kv);
    const f16 * m = at<const f16>(a.mask, i, 0, s);
    bool shadow = true;
    for (int64_t g = t0/GROUP; g*GROUP < t1; ++g) {
        if (!a.visible) {
            w.visible[(s*a.n_tok + i)*a.n_grp + g] = count_visible(m + g*GROUP, group_size(g, a.n_kv));
        }
        shadow &= w.visible_of(a, i, s)[g] > 0 && a.in_shadow(g, i, s);
    }
    flags = (is_zero(m + t0, t1 - t0) ? PLAIN : 0) | (shadow ? SHADOW : 0);
}

void sparse::score_prepare(const ggml_compute_params * params, const score_src & a, const score_work & w) {
    for (int64_t u = params->ith; u < a.n_all; u += params->nth) {
        prepare_head(a, w, a.head(u));
    }
    for (int64_t u = params->ith; u < a.n_tile*a.n_tok*a.n_stream; u += params->nth) {
        digits d { u };
        const int64_t i_tile = d.next(a.n_tile), i = d.next(a.n_tok);
        prepare_tile(a, w, i_tile, i, d.rest);
    }
    unit_queue::open(params);
    ggml_barrier(params->threadpool);
}

// ---- approximate scores of a tile ----

static void fill_logits(const score_src & a, float * out, int64_t ld, int64_t t0, int64_t t1, float x) {
    for (int j = 0; j < a.n_group_q; ++j) {
        std::fill(out + j*ld + t0, out + j*ld + t1, x);
    }
}

// the positions [t0, t1) from k_t
static void score_shadow(const score_src & a, const score_work & w, const tile_unit & u, int64_t t0, int64_t t1, float * out, int64_t ld,
        const tile_unit & next) {
    const int64_t   head   = u.head.u;
    const int32_t * comp   = w.comp + head*a.rank;
    const int       n_comp = w.n_comp[head];
    const float   * coef   = w.coef + head*a.n_group_q*a.rank;
    const char    * k_t    = at(a.k_t, u.head.h*a.d_k, u.head.s);
    if (n_comp == 0) { // q is NaN
        fill_logits(a, out, ld, t0, t1, 0.0f);
        return;
    }
    scan_next then;
    if (next.exists && next.head.i == u.head.i && next.head.s == u.head.s) { // of the same token
        const int64_t then_head = next.head.u;
        then = { w.comp + then_head*a.rank, w.n_comp[then_head], (next.head.h - u.head.h)*a.d_k, next.t0 - t0 };
    }
    if (!ggml_sparse_has_codes(a.p.n_bit)) {
        score_components(out + t0, ld, a.n_group_q, (const f16 *) k_t + t0, a.k_t->nb[1]/sizeof(f16), comp, n_comp, coef, a.rank, t1 - t0, then);
        return;
    }
    const code_rows rows = { (const uint8_t *) k_t, a.k_t->nb[1], at(a.k_range, u.head.h*a.d_k, 0, u.head.s), a.k_range->nb[1], a.k_range->nb[2] };
    ggml_sparse_with_bits(a.p.n_bit, [&](auto bits) {
        if constexpr (ggml_sparse_has_codes(bits())) {
            score_codes<bits()>(out + t0, ld, a.n_group_q, rows, comp, n_comp, coef, a.rank, t0, t1, then, w.code);
        }
    });
}

// w.q = the kept components of q, times their coefficients, rotated as K is: for products with whole rows
static void spread_components(const score_src & a, const score_work & w, int64_t head) {
    const int32_t * comp = w.comp + head*a.rank;
    const float   * coef = w.coef + head*a.n_group_q*a.rank;
    memset(w.q, 0, a.n_group_q*a.d_k*sizeof(float));
    for (int j = 0; j < a.n_group_q; ++j) {
        for (int c = 0; c < w.n_comp[head]; ++c) {
            w.q[j*a.d_k + comp[c]] = coef[j*a.rank + c];
        }
        ggml_sparse_hadamard(w.q + j*a.d_k, a.d_k, a.p.n_rot);
    }
}

// the positions [t0, t1) of one group from rows of K, with w.q
static void score_rows(const score_src & a, const score_work & w, const head_index & x, int64_t t0, int64_t t1, float * out, int64_t ld) {
    const f16  * m = at<const f16>(a.mask, x.i, 0, x.s);
    int32_t      seen[GROUP];                 // visible positions, relative to t0
    const char * row[GROUP], * ahead[GROUP];  // their rows, and those one group later
    int n = 0;
    for (int64_t t = t0; t < t1; ++t) {
        if (m[t].bits != F16_NEG_INF) {
            seen[n]    = (int32_t) (t - t0);
            row[n]     = at(a.k, x.h, t, x.s);
            ahead[n++] = at(a.k, x.h, std::min(t + GROUP, a.n_kv - 1), x.s);
        }
    }
    for (int r = n; r % ROW_BLOCK != 0; ++r) {
        row[r]   = row[n - 1];
        ahead[r] = ahead[n - 1];
    }
    a.ops_k.dot_rows(w.x, GROUP, w.q, a.d_k, a.n_group_q, row, 0, n, a.d_k, ahead);
    fill_logits(a, out, ld, t0, t1, 0.0f); // finish_logits makes hidden ones -inf
    for (int j = 0; j < a.n_group_q; ++j) {
        for (int r = 0; r < n; ++r) {
            out[j*ld + t0 + seen[r]] = w.x[j*GROUP + r];
        }
    }
}

void sparse::score_tile(const score_src & a, const score_work & w, const tile_unit & u, float * out, int64_t ld, const tile_unit & next) {
    const head_index & x = u.head;
    const int32_t * visible = w.visible_of(a, x.i, x.s);
    const f16     * m       = at<const f16>(a.mask, x.i, 0, x.s);
    const uint8_t   flags   = w.flags_of(a, u.i_tile, x.i, x.s);
    const bool      done    = a.p.softcap <= 0.0f && flags & PLAIN; // products are logits already
    bool spread = false;

    // in stretches of groups that are hidden, in the shadow, or (one at a time) neither
    for (int64_t t0 = u.t0, t1; t0 < u.t1; t0 = t1) {
        t1 = std::min(t0 + GROUP, u.t1);
        if (visible[t0/GROUP] == 0) {
            fill_logits(a, out, ld, t0, t1, -INFINITY);
            continue;
        }
        if (a.in_shadow(t0/GROUP, x.i, x.s)) {
            t1 = flags & SHADOW ? u.t1 : t1;
            while (t1 < u.t1 && visible[t1/GROUP] > 0 && a.in_shadow(t1/GROUP, x.i, x.s)) {
                t1 = std::min(t1 + GROUP, u.t1);
            }
            score_shadow(a, w, u, t0, t1, out, ld, next);
        } else {
            if (!spread) {
                spread = true;
                spread_components(a, w, x.u);
            }
            score_rows(a, w, x, t0, t1, out, ld);
        }
        for (int j = 0; j < a.n_group_q && !done; ++j) {
            float * y = out + j*ld + t0;
            finish_logits(y, y, m + t0, t1 - t0, 1.0f, a.p.softcap, head_slope((int) x.h*a.n_group_q + j, a.n_head, a.p.max_bias));
        }
    }
}

line_stream sparse::tile_lines(const score_src & a, const score_work & w, const tile_unit & u) {
    line_stream res;
    if (!u.exists || a.rank == 0 || !(w.flags_of(a, u.i_tile, u.head.i, u.head.s) & SHADOW)) {
        return res;
    }
    res.base     = at(a.k_t, u.head.h*a.d_k, u.head.s) + ggml_sparse_shadow_bytes(u.t0, a.p.n_bit);
    res.nb_comp  = a.k_t->nb[1];
    res.size     = ggml_sparse_shadow_bytes(u.t1 - u.t0, a.p.n_bit);
    res.comp     = w.comp + u.head.u*a.rank;
    res.comp_end = res.comp + w.n_comp[u.head.u];
    return res;
}

// ---- the node ----

static void score_approx(const ggml_compute_params * params, ggml_tensor * dst, const score_src & a, const score_work & w) {
    score_prepare(params, a, w);
    unit_queue queue(params, a.n_all*a.n_tile, a.n_tile);
    for (int64_t x; (x = queue.take()) >= 0; ) {
        const tile_unit u = a.unit(x);
        score_tile(a, w, u, at<float>(dst, u.head.h*a.n_group_q, u.head.i, u.head.s), dst->nb[1]/sizeof(float), a.unit(queue.peek()));
    }
}

// the chunk that begins at position t0, of all heads of token i
static void score_exact_chunk(ggml_tensor * dst, const score_src & a, const score_work & w, int64_t t0, int64_t i, int64_t s) {
    const int64_t   t1      = std::min(t0 + EXACT_CHUNK, a.n_kv);
    const int32_t * visible = w.visible_of(a, i, s);
    const f16     * m       = at<const f16>(a.mask, i, 0, s);

    int32_t      seen[EXACT_CHUNK]; // visible positions, relative to t0
    const char * row [EXACT_CHUNK];
    int n = 0;
    for (int64_t t = t0; t < t1; ++t) {
        if (visible[t/GROUP] > 0 && m[t].bits != F16_NEG_INF) {
            seen[n]  = (int32_t) (t - t0);
            row[n++] = at(a.k, 0, t, s);
        }
    }
    for (int r = n; r % ROW_BLOCK != 0 && n > 0; ++r) {
        row[r] = row[n - 1];
    }
    for (int r = 0; r < n; r += POS_BLOCK) {
        a.ops_k.dot_positions(w.exact + r, EXACT_CHUNK, at<const float>(a.q, 0, i, s), a.q->nb[1]/sizeof(float), a.n_head, a.n_group_q, row + r,
                a.k->nb[1], std::min(POS_BLOCK, n - r), a.d_k, address_ahead(row[r], BYTES_AHEAD));
    }
    const bool all = n == t1 - t0;
    for (int h = 0; h < a.n_head; ++h) {
        float * x   = w.exact + h*EXACT_CHUNK;
        float * out = at<float>(dst, h, i, s) + t0;
        if (all) {
            memcpy(out, x, n*sizeof(float));
        } else {
            std::fill(out, out + (t1 - t0), 0.0f); // finish_logits makes hidden ones -inf
            for (int r = 0; r < n; ++r) {
                out[seen[r]] = x[r];
            }
        }
        finish_logits(out, out, m + t0, t1 - t0, a.p.scale, a.p.softcap, head_slope(h, a.n_head, a.p.max_bias));
    }
}

static void score_exact(const ggml_compute_params * params, ggml_tensor * dst, const score_src & a, const score_work & w) {
    const int64_t n_chunk = ceil_div(a.n_kv, EXACT_CHUNK);
    unit_queue::open(params);
    ggml_barrier(params->threadpool);
    unit_queue queue(params, n_chunk*a.n_tok*a.n_stream);
    for (int64_t u; (u = queue.take()) >= 0; ) {
        digits d { u };
        const int64_t c = d.next(n_chunk), i = d.next(a.n_tok);
        score_exact_chunk(dst, a, w, c*EXACT_CHUNK, i, d.rest);
    }
}

void sparse::score_stats(const score_src & a, const score_work & w) {
    if (!a.stats) {
        return;
    }
    const int64_t row = row_size(a.k);
    int64_t bytes = 0;
    for (int64_t s = 0; s < a.n_stream; ++s) {
        for (int64_t i = 0; i < a.n_tok; ++i) {
            if (a.skips(i, s)) {
                continue;
            }
            const int32_t * visible = w.visible_of(a, i, s);
            bytes += a.k_t ? ggml_sparse_spread_bytes(a.d_k, a.n_kv, a.p.n_bit) : 0;
            for (int64_t g = 0; g < a.n_grp; ++g) {
                if (a.k_t && visible[g] > 0 && a.in_shadow(g, i, s)) {
                    bytes += a.rank_of(i, s)*ggml_sparse_scan_bytes(a.p.n_bit);
                } else {
                    bytes += visible[g]*row;
                }
            }
        }
    }
    add_stat(a.stats, GGML_SPARSE_STAT_BYTES_SCORE, bytes*a.n_head_kv);
}

void sparse::forward_score(const ggml_compute_params * params, ggml_tensor * dst) {
    const score_src  a(dst);
    const score_work w(a, params->wdata, params->ith, params->nth);
    if (a.k_t) {
        score_approx(params, dst, a, w);
    } else {
        score_exact(params, dst, a, w);
    }
    if (params->ith == 0) {
        score_stats(a, w);
    }
}

size_t sparse::score_work_size(const ggml_tensor * dst, int n_threads) { return score_work(score_src(dst), nullptr, 0, n_threads).size; }
