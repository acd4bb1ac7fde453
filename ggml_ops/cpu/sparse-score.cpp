// ggml glue of SCORE, SELECT and SCORE_SELECT.

#include "sparse-glue.h"
#include "sparse-quant.h"
#include "sparse-select.h"

namespace {

// ---- SCORE ----

// positions per unit of work: long runs per channel, scores of all heads within L1
int64_t tile_size(int64_t n_group_q) { return n_group_q <= 2 ? 4096 : n_group_q <= 4 ? 2048 : 1024; }

static_assert(4096 <= MAX_RUN*RUN, "a scan of codes has room for so many runs");

// positions per unit of the exact scores; a unit holds all KV heads, so that K is read in the order of memory
constexpr int64_t EXACT_TILE = 256;

// what SCORE and SCORE_SELECT share: sources and sizes. A "head" below is one KV head of one token of one stream
struct score_src : ggml_sparse_src { // SCORE_SELECT has no visible, SCORE no wanted
    ggml_sparse_score_params p;
    int     i_k;
    int64_t n_kv, n_grp, n_head_kv, n_tok, n_all, tile, n_tile; // n_all: heads
    int     n_head, n_group_q, d_k, rank;

    explicit score_src(const ggml_tensor * dst) : ggml_sparse_src(ggml_sparse_src_of(dst)), p(ggml_sparse_score_params_of(dst)) {
        i_k       = wanted ? ggml_sparse_select_params_of(dst).i_k : 0;
        n_kv      = k->ne[2];
        n_grp     = ceil_div(n_kv, GROUP);
        n_head_kv = k->ne[1];
        n_tok     = q->ne[2];
        n_all     = n_head_kv*n_tok*q->ne[3];
        n_head    = (int) q->ne[1];
        n_group_q = (int) (n_head/n_head_kv);
        d_k       = (int) q->ne[0];
        rank      = k_t ? p.rank : 0;
        tile      = tile_size(n_group_q);
        n_tile    = ceil_div(n_kv, tile);
    }

    // is nothing of token i scored?
    bool skips(int64_t i, int64_t s) const { return wanted && at<const int32_t>(wanted, i, 0, s)[i_k] < 0; }
};

// what all of a tile is
enum : uint8_t {
    PLAIN  = 1, // the mask is zero
    SHADOW = 2, // visible and in k_t, group by group
};

struct score_work {
    int32_t * n_chan;   // [n_all]
    int32_t * chan;     // [n_all][rank]
    float   * coef;     // [n_all][n_group_q][rank]
    int32_t * visible;  // [n_stream][n_tok][n_grp]     where it is not given
    uint8_t * tile;     // [n_stream][n_tok][n_tile]    PLAIN | SHADOW
    float   * q;        // [n_group_q][d_k]             this thread's: q turned back, or its kept components only
    float   * x;        // [n_group_q][GROUP]
    float   * s;        // [n_head][EXACT_TILE]
    float   * sum;      // [d_k]
    uint8_t * code;     // what the scan of codes needs
    size_t    size;     // of all threads

    score_work(const score_src & a, const void * wdata, int ith, int nth) {
        bump shared(wdata);
        n_chan  = shared.take<int32_t>(a.rank ? a.n_all : 0);
        chan    = shared.take<int32_t>(a.n_all*a.rank);
        coef    = shared.take<float>(a.n_all*a.n_group_q*a.rank);
        visible = shared.take<int32_t>(a.visible ? 0 : a.n_tok*a.q->ne[3]*a.n_grp);
        tile    = shared.take<uint8_t>(a.rank ? a.n_tok*a.q->ne[3]*a.n_tile : 0);

        bump own(shared.end());
        for (int i = 0; i < nth; ++i) {
            if (i <= ith) {
                q    = own.take<float>(a.rank ? a.n_group_q*a.d_k : 0);
                x    = own.take<float>(a.n_group_q*GROUP);
                s    = own.take<float>(a.rank ? 0 : a.n_head*EXACT_TILE);
                sum  = own.take<float>(a.d_k);
                code = own.take<uint8_t>(a.rank && ggml_sparse_has_codes(a.p.n_bit) ? code_scratch(a.n_group_q, a.rank) : 0);
            }
            if (i == 0) {
                size = shared.used + nth*own.used + bump::ALIGN;
            }
        }
    }

    const int32_t * vis(const score_src & a, int64_t i, int64_t s) const {
        return a.visible ? at<const int32_t>(a.visible, i, 0, s) : visible + (s*a.n_tok + i)*a.n_grp;
    }
    bool is(uint8_t what, const score_src & a, int64_t i_tile, int64_t i, int64_t s) const {
        return tile[(s*a.n_tok + i)*a.n_tile + i_tile] & what;
    }
};

// may the group be read from k_t?
bool in_k_t(const int32_t * sealed, int64_t g, int64_t n_kv, int n_bit) { return sealed[g] != 0 && ggml_sparse_is_coded(g, n_kv, n_bit); }

void score_stats(const score_src & a, const score_work & w) {
    if (!a.stats) {
        return;
    }
    const int     n_bit = a.p.n_bit;
    const int64_t row   = row_size(a.k);

    int64_t bytes = 0;
    for (int64_t s = 0; s < a.q->ne[3]; ++s) {
        for (int64_t i = 0; i < a.n_tok; ++i) {
            if (a.skips(i, s)) {
                continue;
            }
            const int32_t * vis = w.vis(a, i, s);
            for (int64_t g = 0; g < a.n_grp; ++g) {
                if (a.k_t && vis[g] > 0 && in_k_t(at<const int32_t>(a.sealed, s), g, a.n_kv, n_bit)) {
                    bytes += a.rank*ggml_sparse_scan_bytes(group_size(g, a.n_kv), n_bit);
                } else {
                    bytes += vis[g]*row;
                }
            }
        }
    }
    add_stat(a.stats, GGML_SPARSE_STAT_BYTES_SCORE, bytes*a.n_head_kv);
}

// before the scan: the channels of every head, the visible positions where they are not given, tiles without a mask. Ends at a barrier
void score_prepare(const ggml_compute_params * params, const score_src & a, const score_work & w) {
    for (int64_t u = params->ith; u < a.n_all; u += params->nth) {
        const int64_t h = u % a.n_head_kv, i = u/a.n_head_kv % a.n_tok, s = u/a.n_head_kv/a.n_tok;
        const float * q  = at<const float>(a.q, h*a.n_group_q, i, s);
        int64_t       ld = a.q->nb[1]/sizeof(float);
        if (a.skips(i, s)) {
            w.n_chan[u] = 0;
            continue;
        }
        if (a.p.n_rot > 0) {
            for (int j = 0; j < a.n_group_q; ++j) {
                memcpy(w.q + j*a.d_k, q + j*ld, a.d_k*sizeof(float));
                ggml_sparse_hadamard(w.q + j*a.d_k, a.d_k, a.p.n_rot);
            }
            q  = w.q;
            ld = a.d_k;
        }
        w.n_chan[u] = choose_channels(w.chan + u*a.rank, w.coef + u*a.n_group_q*a.rank, w.sum, q, ld, a.n_group_q, a.d_k, a.rank, a.p.scale);
    }
    for (int64_t u = params->ith; u < a.n_tile*a.n_tok*a.q->ne[3]; u += params->nth) {
        const int64_t t0 = u % a.n_tile*a.tile, t1 = std::min(t0 + a.tile, a.n_kv), i = u/a.n_tile % a.n_tok, s = u/a.n_tile/a.n_tok;
        const f16 * m = at<const f16>(a.mask, i, 0, s);
        if (a.skips(i, s)) {
            w.tile[u] = 0;
            continue;
        }
        bool shadow = true;
        for (int64_t g = t0/GROUP; g*GROUP < t1; ++g) {
            if (!a.visible) {
                w.visible[(s*a.n_tok + i)*a.n_grp + g] = count_visible(m + g*GROUP, group_size(g, a.n_kv));
            }
            shadow &= w.vis(a, i, s)[g] > 0 && in_k_t(at<const int32_t>(a.sealed, s), g, a.n_kv, a.p.n_bit);
        }
        w.tile[u] = (is_zero(m + t0, t1 - t0) ? PLAIN : 0) | (shadow ? SHADOW : 0);
    }
    unit_queue::open(params);
    ggml_barrier(params->threadpool);
}

// step 1 for one tile: logits of head u at out + j*ld + position; next: the head of the tile that this thread scores then, and its place
// T: the type of K
template <typename T>
void score_tile(const score_src & a, const score_work & w, int64_t u, int64_t i_tile, float * out, int64_t ld, int64_t next) {
    const int64_t h = u % a.n_head_kv, i = u/a.n_head_kv % a.n_tok, s = u/a.n_head_kv/a.n_tok;
    const int64_t t0 = i_tile*a.tile, t1 = std::min(t0 + a.tile, a.n_kv);

    const int32_t * vis    = w.vis(a, i, s);
    const int32_t * seal   = at<const int32_t>(a.sealed, s);
    const f16     * m      = at<const f16>(a.mask, i, 0, s);
    const int32_t * chan   = w.chan + u*a.rank;
    const int       n_chan = w.n_chan[u];
    const float   * coef   = w.coef + u*a.n_group_q*a.rank;

    bool kept = false; // w.q is filled

    // runs of groups of one kind: hidden, sealed, or (one at a time) neither
    for (int64_t p = t0, b; p < t1; p = b) {
        const int64_t g = p/GROUP;
        b = std::min(p + GROUP, t1);
        if (vis[g] == 0) {
            for (int j = 0; j < a.n_group_q; ++j) {
                std::fill(out + j*ld + p, out + j*ld + b, -INFINITY);
            }
            continue;
        }
        if (in_k_t(seal, g, a.n_kv, a.p.n_bit)) {
            b = w.is(SHADOW, a, i_tile, i, s) ? t1 : b;
            while (b < t1 && vis[b/GROUP] > 0 && in_k_t(seal, b/GROUP, a.n_kv, a.p.n_bit)) {
                b = std::min(b + GROUP, t1);
            }
            scan_next then;
            if (next >= 0 && next/a.n_tile/a.n_head_kv == u/a.n_head_kv) { // of the same token
                const int64_t un = next/a.n_tile;
                then = { w.chan + un*a.rank, w.n_chan[un], (un - u)*a.d_k, next % a.n_tile*a.tile - p };
            }
            const char * x = at(a.k_t, h*a.d_k, s);
            if (n_chan == 0) { // a q of NaN
                for (int j = 0; j < a.n_group_q; ++j) {
                    std::fill(out + j*ld + p, out + j*ld + b, 0.0f);
                }
            } else if (!ggml_sparse_has_codes(a.p.n_bit)) {
                score_channels(out + p, ld, a.n_group_q, (const f16 *) x + p, a.k_t->nb[1]/sizeof(f16), chan, n_chan, coef, a.rank, b - p, then);
            } else {
                const code_rows rows = { (const uint8_t *) x, a.k_t->nb[1], at<const float>(a.k_range, h*a.d_k, 0, s),
                                         (int64_t) (a.k_range->nb[1]/sizeof(float)), (int64_t) (a.k_range->nb[2]/sizeof(float)) };
                ggml_sparse_with_bits(a.p.n_bit, [&](auto bits) {
                    if constexpr (ggml_sparse_has_codes(bits())) {
                        score_codes<bits()>(out + p, ld, a.n_group_q, rows, chan, n_chan, coef, a.rank, p, b, then, w.code);
                    }
                });
            }
        } else {
            // products of whole rows with the kept components of q, turned as K is
            if (!kept) {
                kept = true;
                memset(w.q, 0, a.n_group_q*a.d_k*sizeof(float));
                for (int j = 0; j < a.n_group_q; ++j) {
                    for (int c = 0; c < n_chan; ++c) {
                        w.q[j*a.d_k + chan[c]] = coef[j*a.rank + c];
                    }
                    ggml_sparse_hadamard(w.q + j*a.d_k, a.d_k, a.p.n_rot);
                }
            }
            int32_t      rows[GROUP];
            const char * row[GROUP], * next[GROUP]; // the next group's, or the same again
            int n = 0;
            for (int64_t t = p; t < b; ++t) {
                if (m[t].bits != F16_NEG_INF) {
                    rows[n]   = (int32_t) (t - p);
                    row[n]    = at(a.k, h, t, s);
                    next[n++] = at(a.k, h, std::min(t + GROUP, a.n_kv - 1), s);
                }
            }
            for (int r = n; r % ROW_BLOCK != 0; ++r) {
                row[r]  = row[n - 1];
                next[r] = next[n - 1];
            }
            dot_rows<T>(w.x, GROUP, w.q, a.d_k, a.n_group_q, row, 0, n, a.d_k, next);
            for (int j = 0; j < a.n_group_q; ++j) {
                std::fill(out + j*ld + p, out + j*ld + b, 0.0f); // hidden ones become -inf below
                for (int r = 0; r < n; ++r) {
                    out[j*ld + p + rows[r]] = w.x[j*GROUP + r];
                }
            }
        }
        const bool done = a.p.softcap <= 0.0f && w.is(PLAIN, a, i_tile, i, s);
        for (int j = 0; j < a.n_group_q && !done; ++j) {
            float * x = out + j*ld + p;
            finish_logits(x, x, m + p, b - p, 1.0f, a.p.softcap, head_slope((int) h*a.n_group_q + j, a.n_head, a.p.max_bias));
        }
    }
}

// what the scan of a tile reads, if all of it is in k_t; x: head and tile, -1: none
line_stream tile_lines(const score_src & a, const score_work & w, int64_t x) {
    line_stream res;
    if (x < 0 || a.rank == 0) {
        return res;
    }
    const int64_t u = x/a.n_tile, h = u % a.n_head_kv, i = u/a.n_head_kv % a.n_tok, s = u/a.n_head_kv/a.n_tok;
    const int64_t t0 = x % a.n_tile*a.tile, t1 = std::min(t0 + a.tile, a.n_kv);
    if (!w.is(SHADOW, a, x % a.n_tile, i, s)) {
        return res;
    }
    res.base     = at(a.k_t, h*a.d_k, s) + ggml_sparse_shadow_bytes(t0, a.p.n_bit);
    res.nb_chan  = a.k_t->nb[1];
    res.size     = ggml_sparse_shadow_bytes(t1 - t0, a.p.n_bit);
    res.chan     = w.chan + u*a.rank;
    res.chan_end = res.chan + w.n_chan[u];
    return res;
}

// step 1 from k_t
template <typename T>
void score_approx(const ggml_compute_params * params, ggml_tensor * dst, const score_src & a, const score_work & w) {
    score_prepare(params, a, w);
    unit_queue queue(params, a.n_all*a.n_tile, a.n_tile);
    for (int64_t x; (x = queue.take()) >= 0; ) {
        const int64_t u = x/a.n_tile, h = u % a.n_head_kv, i = u/a.n_head_kv % a.n_tok, s = u/a.n_head_kv/a.n_tok;
        score_tile<T>(a, w, u, x % a.n_tile, at<float>(dst, h*a.n_group_q, i, s), dst->nb[1]/sizeof(float), queue.peek());
    }
}

// exact scores from K
template <typename T>
void score_exact(const ggml_compute_params * params, ggml_tensor * dst, const score_src & a, const score_work & w) {
    const int64_t n_tile = ceil_div(a.n_kv, EXACT_TILE);

    unit_queue::open(params);
    ggml_barrier(params->threadpool);
    unit_queue queue(params, n_tile*a.n_tok*a.q->ne[3]);
    for (int64_t u; (u = queue.take()) >= 0; ) {
        const int64_t i = u/n_tile % a.n_tok, s = u/n_tile/a.n_tok;
        const int64_t t0 = u % n_tile*EXACT_TILE, t1 = std::min(t0 + EXACT_TILE, a.n_kv);

        const int32_t * vis = w.vis(a, i, s);
        const f16     * m   = at<const f16>(a.mask, i, 0, s);
        const int64_t   ldq = a.q->nb[1]/sizeof(float);

        int32_t      rows[EXACT_TILE]; // visible positions, relative to t0
        const char * row [EXACT_TILE];
        int n = 0;
        for (int64_t t = t0; t < t1; ++t) {
            if (vis[t/GROUP] > 0 && m[t].bits != F16_NEG_INF) {
                rows[n]  = (int32_t) (t - t0);
                row[n++] = at(a.k, 0, t, s);
            }
        }
        for (int r = n; r % ROW_BLOCK != 0 && n > 0; ++r) {
            row[r] = row[n - 1];
        }
        const bool all = n == t1 - t0;

        for (int r = 0; r < n; r += POS_BLOCK) {
            dot_positions<T>(w.s + r, EXACT_TILE, at<const float>(a.q, 0, i, s), ldq, a.n_head, a.n_group_q, row + r, a.k->nb[1],
                    std::min(POS_BLOCK, n - r), a.d_k, row[r] + AHEAD_BYTES);
        }
        for (int h = 0; h < a.n_head; ++h) {
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
            finish_logits(out, out, m + t0, t1 - t0, a.p.scale, a.p.softcap, head_slope(h, a.n_head, a.p.max_bias));
        }
    }
}

// ---- SELECT, SCORE_SELECT ----

// the sources of step 2, of either node, and their sizes
struct select_src : ggml_sparse_src {
    ggml_sparse_select_params p;
    int64_t n_kv, n_head_kv, n_tok, n_all, tile, n_tile;
    int     n_group_q, n_forced;

    explicit select_src(const ggml_tensor * dst) : ggml_sparse_src(ggml_sparse_src_of(dst)), p(ggml_sparse_select_params_of(dst)) {
        n_kv      = logits ? logits->ne[0] : k->ne[2];
        n_head_kv = dst->ne[1];
        n_tok     = dst->ne[2];
        n_all     = n_head_kv*n_tok*dst->ne[3];
        n_group_q = (int) ((logits ? logits : q)->ne[1]/n_head_kv);
        n_forced  = (int) wanted->ne[0] - p.i_forced;
        tile      = tile_size(n_group_q);
        n_tile    = ceil_div(n_kv, tile);
    }
};

// Logits wait in slots of a head each. Of consecutive units (tiles, head by head) a thread has whole heads, one after another in one slot
// that stays in its cache, and where heads are few perhaps a part of one at either end; that head has a slot of the thread that has its
// first tile
struct select_work : select_scratch {
    char  * slots;
    size_t  slot_size;
    int64_t n_slot;
    size_t  size;       // of all threads

    select_work(const select_src & a, const void * wdata, int ith, int nth) {
        n_slot    = std::min<int64_t>(2*nth, a.n_all);
        slot_size = slot(a, nullptr, nullptr).used;

        bump shared(wdata);
        slots = shared.take<char>(n_slot*slot_size);

        bump own(shared.end());
        for (int i = 0; i < nth; ++i) {
            if (i <= ith) {
                key      = own.take<float>(a.n_group_q > 1 ? a.n_kv + 2*W : 0);
                cand     = own.take<float>(a.n_kv + (a.n_tile + 2)*W);
                cell     = own.take<int32_t>(a.n_kv + (a.n_tile + 2)*W);
                weight   = own.take<float>(is_top_p(a.p.top_p) ? a.n_kv + 2*W : 0);
                saved    = own.take<float>(a.n_forced + W);
                top      = own.take<float>(a.n_group_q);
                all      = own.take<float>(a.n_group_q);
                factor   = own.take<float>(a.n_group_q*a.n_tile);
                guess    = own.take<float>(1);
                n_wanted = own.take<int32_t>(1);
                n_cand   = own.take<int32_t>(a.n_tile);
            }
            if (i == 0) {
                size = shared.used + nth*own.used + bump::ALIGN;
            }
        }
    }

    static bump slot(const select_src & a, const void * base, head_scores * s) {
        bump b(base);
        const int64_t ld = ceil_div(a.n_kv, W)*W + 2*W; // rows do not share their lines of the cache
        float * x   = b.take<float>(a.n_group_q*ld);
        float * max = b.take<float>(a.n_group_q*a.n_tile);
        float * sum = b.take<float>(a.n_group_q*a.n_tile);
        if (s) {
            *s = { x, max, sum, ld, a.n_kv, a.tile, a.n_group_q };
        }
        return b;
    }

    // of head u; owner: the thread that has its first tile, and all of them if heads are not few
    head_scores scores(const select_src & a, int64_t u, int owner, bool whole, int nth) const {
        head_scores s;
        slot(a, slots + (n_slot == a.n_all ? u : whole ? owner : nth + owner)*slot_size, &s);
        return s;
    }
};

// threads per head, and positions, from which on threads share the ranking of a head too, not only its tiles: by one thread it takes 5 us per
// 16k positions (four query heads), and three more barriers are not free, least of all on a busy machine
constexpr int     MANY_SHARE = 4;
constexpr int64_t LONG_SHARE = 32768;

// step 2, after unit_queue::open and a barrier; make_tile(u, i_tile, x, ld, next): writes the logits of a tile of head u at x + j*ld + position;
// lines(next): what it will read for the tile `next`; scratch(i): that of thread i
template <typename F, typename G, typename H>
void select_heads(const ggml_compute_params * params, ggml_tensor * dst, const select_src & a, H scratch, F make_tile, G lines) {
    const int ith = params->ith, nth = params->nth;
    const select_work w = scratch(ith);
    const auto args = [&](int64_t u) -> select_args {
        const int64_t h = u % a.n_head_kv, i = u/a.n_head_kv % a.n_tok, s = u/a.n_head_kv/a.n_tok;
        const int32_t * wanted = at<const int32_t>(a.wanted, i, 0, s), * kl = wanted + a.p.i_k;
        return { wanted + a.p.i_forced, a.n_forced, kl[1], a.p.n_local_max, kl[0], a.p.topk_max,
                 a.sinks ? (const float *) a.sinks->data + h*a.n_group_q : nullptr, a.p.alpha != 0, a.p.top_p };
    };
    const auto result = [&](int64_t u) { return at<int32_t>(dst, u % a.n_head_kv, u/a.n_head_kv % a.n_tok, u/a.n_head_kv/a.n_tok); };

    unit_queue queue(params, a.n_all*a.n_tile, a.n_tile);
    const auto is_whole = [&](int64_t u) { return u*a.n_tile >= queue.u0 && (u + 1)*a.n_tile <= queue.u1; };

    // the parts of heads that this thread shares with others: at either end of what it has
    struct { int64_t u, i0, i1; int owner; } part[2];
    int n_part = 0;
    const bool shares = queue.size == 0 && a.n_all % nth != 0 && a.n_tile > 1; // the same for all threads
    for (int64_t x : { queue.u0, queue.u1 - 1 }) {
        const int64_t u = x/a.n_tile, x0 = u*a.n_tile;
        if (shares && queue.u0 < queue.u1 && !is_whole(u) && (n_part == 0 || part[0].u != u)) {
            part[n_part++] = { u, std::max(queue.u0, x0) - x0, std::min(queue.u1, x0 + a.n_tile) - x0, queue.owner(x0) };
        }
    }

    const bool only_scores = a.p.topk_max == 0;
    const auto reads_all = [&](int64_t u) { return args(u).k < 0; };
    for (int64_t u = ith; u < a.n_all; u += nth) {
        if (only_scores || reads_all(u)) {
            select_none(result(u), a.n_group_q, a.p.topk_max, reads_all(u) ? GGML_SPARSE_SELECT_ALL : 0);
        }
    }
    line_stream next;
    for (int64_t x; (x = queue.take()) >= 0; ) {
        const int64_t u = x/a.n_tile, i_tile = x % a.n_tile;
        if (reads_all(u)) {
            continue;
        }
        const bool whole = is_whole(u);
        const head_scores s = w.scores(a, u, whole ? ith : part[n_part > 1 && part[1].u == u].owner, whole, nth);
        make_tile(u, i_tile, s.x, s.ld, queue.peek());
        if (only_scores) {
            continue;
        }
        next = lines(queue.peek());
        finish_tile(s, i_tile, a.p.alpha != 0 || is_top_p(a.p.top_p), next);
        if (whole && i_tile == a.n_tile - 1) {
            select_topk(result(u), w, s, args(u), next);
        }
    }
    if (!shares || only_scores) {
        return;
    }
    const auto each_part = [&](auto f) {
        ggml_barrier(params->threadpool);
        for (int i = 0; i < n_part; ++i) {
            if (reads_all(part[i].u)) {
                continue;
            }
            f(part[i], w.scores(a, part[i].u, part[i].owner, false, nth), scratch(part[i].owner));
        }
    };
    if (nth < MANY_SHARE*a.n_all || a.n_kv < LONG_SHARE) {
        each_part([&](auto & p, const head_scores & s, const select_work &) {
            if (p.owner == ith) {
                line_stream none;
                select_topk(result(p.u), w, s, args(p.u), none);
            }
        });
        return;
    }
    each_part([&](auto & p, const head_scores & s, const select_work & o) { share_keys(o, w, s, p.i0, p.i1); });
    each_part([&](auto & p, const head_scores & s, const select_work & o) {
        if (p.owner == ith) {
            share_guess(o, s, args(p.u));
        }
    });
    each_part([&](auto & p, const head_scores & s, const select_work & o) { share_candidates(o, s, p.i0, p.i1); });
    each_part([&](auto & p, const head_scores & s, const select_work & o) {
        if (p.owner == ith) {
            share_finish(result(p.u), o, s, args(p.u));
        }
    });
}

} // namespace

void sparse::forward_score(const ggml_compute_params * params, ggml_tensor * dst) {
    const score_src  a(dst);
    const score_work w(a, params->wdata, params->ith, params->nth);
    with_kv_type(a.k->type, [&](auto * t) {
        using T = std::decay_t<decltype(*t)>;
        if (a.k_t) {
            score_approx<T>(params, dst, a, w);
        } else {
            score_exact<T>(params, dst, a, w);
        }
    });
    if (params->ith == 0) {
        score_stats(a, w);
    }
}

size_t sparse::score_work_size(const ggml_tensor * dst, int n_threads) { return score_work(score_src(dst), nullptr, 0, n_threads).size; }

void sparse::forward_select(const ggml_compute_params * params, ggml_tensor * dst) {
    const select_src a(dst);
    unit_queue::open(params);
    ggml_barrier(params->threadpool);
    const auto scratch = [&](int i) { return select_work(a, params->wdata, i, params->nth); };
    select_heads(params, dst, a, scratch, [&](int64_t u, int64_t i_tile, float * x, int64_t ld, int64_t) {
        const int64_t h = u % a.n_head_kv, i = u/a.n_head_kv % a.n_tok, s = u/a.n_head_kv/a.n_tok;
        const int64_t t0 = i_tile*a.tile, n = std::min(a.tile, a.n_kv - t0);
        for (int j = 0; j < a.n_group_q; ++j) {
            memcpy(x + j*ld + t0, at<const float>(a.logits, h*a.n_group_q + j, i, s) + t0, n*sizeof(float));
        }
    }, [](int64_t) { return line_stream(); });
}

size_t sparse::select_work_size(const ggml_tensor * dst, int n_threads) { return select_work(select_src(dst), nullptr, 0, n_threads).size; }

void sparse::forward_score_select(const ggml_compute_params * params, ggml_tensor * dst) {
    const score_src  a(dst);
    const select_src b(dst);
    const score_work w(a, params->wdata, params->ith, params->nth);
    const auto scratch = [&](int i) { return select_work(b, (const char *) params->wdata + w.size, i, params->nth); };
    score_prepare(params, a, w);
    with_kv_type(a.k->type, [&](auto * t) {
        select_heads(params, dst, b, scratch, [&](int64_t u, int64_t i_tile, float * x, int64_t ld, int64_t next) {
            score_tile<std::decay_t<decltype(*t)>>(a, w, u, i_tile, x, ld, next);
        }, [&](int64_t next) { return tile_lines(a, w, next); });
    });
    if (params->ith == 0) {
        score_stats(a, w);
    }
}

size_t sparse::score_select_work_size(const ggml_tensor * dst, int n_threads) {
    return score_work_size(dst, n_threads) + select_work_size(dst, n_threads);
}
