// ATTEND, in two stages. First, units of a fixed number of positions leave partial states, and with mean_v each thread leaves the mean of V of
// some KV heads. Then one unit per token and query head merges the states.
//
// Tokens that read a selection and tokens that read all they see are two passes over a batch, see forward_attend. Over a selection, a unit is
// one KV head and a part of its cells. Over all positions, it is all KV heads and a chunk of positions, so that K and V are read in the order
// of memory.

#include "sparse-attend.h"
#include "sparse-visible.h"
#include "sparse-work.h"

#include <numeric>

row_ops sparse::ops_of(ggml_type type) {
    row_ops res;
    with_kv_type(type, [&](auto * t) {
        using T = std::decay_t<decltype(*t)>;
        res = { dot_rows<T>, dot_positions<T>, add_rows<T>, add_positions<T>, sum_positions<T> };
    });
    return res;
}

namespace {

struct attend_src : ggml_sparse_src {
    ggml_sparse_attend_params p;
    bool    dense;  // the pass over the tokens that read all they see
    int64_t n_kv, n_head_kv, n_tok;
    int64_t n_row;  // tokens of all streams
    int64_t n_max;  // positions of one head, at most
    int64_t size_k, size_v, ldq;
    int     n_head, n_group_q, d_k, d_v;
    int     ahead;  // with dense, so many positions later is what is prefetched
    row_ops ops_k, ops_v;

    attend_src(const ggml_tensor * dst, bool dense) :
        ggml_sparse_src(ggml_sparse_src_of(dst)), p(ggml_sparse_params_of<ggml_sparse_attend_params>(dst)), dense(dense) {
        p.mean_v = p.mean_v && !dense;

        n_kv      = k->ne[2];
        n_head_kv = k->ne[1];
        n_tok     = q->ne[2];
        n_row     = n_tok*q->ne[3];
        size_k    = row_size(k);
        size_v    = row_size(v);
        ldq       = q->nb[1]/sizeof(float);
        n_head    = (int) q->ne[1];
        n_group_q = (int) (n_head/n_head_kv);
        d_k       = (int) k->ne[0];
        d_v       = (int) v->ne[0];
        ops_k     = ops_of(k->type);
        ops_v     = ops_of(v->type);
        ahead     = (int) ceil_div(BYTES_AHEAD, n_head_kv*size_k);
        n_max     = dense || !sel ? n_kv : sel->ne[0] - 1 - n_group_q;
    }

    bool reads_all(int64_t i, int64_t s) const { return !sel || at<const int32_t>(sel, 0, i, s)[0] == GGML_SPARSE_SELECT_ALL; }

    // is token i one of this pass?
    bool has(int64_t i, int64_t s) const { return reads_all(i, s) == dense; }

    int64_t n_sel(const int32_t * x) const { return std::min<int64_t>(std::max(x[0], 0), n_max); }

    float slope(int64_t head) const { return head_slope((int) head, n_head, p.max_bias); }
};

// Unit c of token i of stream s; over a selection, n cells of KV head h
struct attend_unit {
    int64_t i, s, c, h;
    const int32_t * cell;
    int n; // 0: there is no such unit
};

// positions whose mask is looked at together, over a selection
constexpr int64_t MASK_BLOCK = 1024;

struct attend_work {
    int64_t chunk;      // positions per unit, at most
    int64_t n_chunk;    // units per token, and over a selection per KV head of a token, at most
    int64_t least;      // positions per unit of the shortest selection
    int64_t n_mean;     // means of V per token: one per KV head, or none
    int64_t n_block;    // blocks of the mask per token, 0 if it is looked at cell by cell
    int     ld;         // floats per state
    int64_t ld_s;       // floats per head of s

    float   * state;    // [n_row][n_chunk][n_head][ld]
    float   * mean;     // [n_row][n_mean][d_v]
    uint8_t * plain;    // [n_row][n_block]                     is the mask zero all over the block?
    int32_t * cell;     // [chunk]                              this thread's: visible cells ..
    float   * bias;     // [chunk + W]                          .. their mask values ..
    const char ** row;  // [2*chunk + ROWS_AHEAD]               .. and the addresses of their rows, in the order of their use
    float   * s;        // [n_head or n_group_q][ld_s]          logits, then softmax numerators
    size_t    size;     // of all threads

    attend_work(const attend_src & a, const void * wdata, int ith, int nth) {
        ld      = attn_state::size(a.d_v);
        n_mean  = a.p.mean_v ? a.n_head_kv : 0;
        least   = least_chunk(a, ld);
        chunk   = chunk_of(a, a.n_max);
        ld_s    = chunk + W;
        n_chunk = most_chunks(a, least);
        n_block = a.dense || a.n_max*a.n_head_kv < a.n_kv/32 ? 0 : ceil_div(a.n_kv, MASK_BLOCK); // the masks of few cells are fewer lines

        bump shared(wdata);
        state = shared.take<float>(a.n_row*a.n_head*n_chunk*ld);
        mean  = shared.take<float>(a.n_row*n_mean*a.d_v);
        plain = shared.take<uint8_t>(a.n_row*n_block);
        size  = take_per_thread(shared, ith, nth, [&](bump & own) {
            cell = own.take<int32_t>(chunk);
            bias = own.take<float>(chunk + W);
            row  = own.take<const char *>(2*chunk + ROWS_AHEAD);
            s    = own.take<float>((a.dense ? a.n_head : a.n_group_q)*ld_s);
        });
    }

    // A unit is as large as the token's own selection asks for, so that what it gets has the same bits whoever else is in the batch: small where
    // cells are few, so that many threads find some, and larger while there are about 512 units
    static constexpr int64_t SMALL = 32, MIDDLE = 128, LARGE = 256;
    static constexpr int64_t N_SMALL = 8; // units of a short selection

    static int64_t few(const attend_src & a) { return std::max<int64_t>(N_SMALL*LARGE, 512*LARGE/a.n_head_kv); } // from here on, LARGE ones

    // positions per unit, where n are read
    int64_t chunk_of(const attend_src & a, int64_t n) const {
        if (a.dense || n >= few(a)) {
            return std::max(LARGE, least);
        }
        return std::max(std::min(MIDDLE, ceil_div(n, N_SMALL*SMALL)*SMALL), least);
    }

    // units where up to n_max positions are read
    static int64_t most_chunks(const attend_src & a, int64_t least) {
        const int64_t n_large = ceil_div(a.n_max, std::max(LARGE, least));
        if (a.dense) {
            return n_large;
        }
        const int64_t n_small = std::min(N_SMALL, ceil_div(a.n_max, std::max(SMALL, least)));
        return std::max({ n_small, n_large, ceil_div(std::min(a.n_max, few(a)), std::max(MIDDLE, least)) });
    }

    // more than SMALL when the states of many tokens would need more than 64 MB
    static int64_t least_chunk(const attend_src & a, int ld) {
        const int64_t limit = 64*1024*1024/(a.n_row*a.n_head*ld*(int64_t) sizeof(float)) + 1;
        int64_t res = SMALL;
        while (most_chunks(a, res) > limit && res < a.n_max) {
            res *= 2;
        }
        return res;
    }

    float * state_of(const attend_src & a, const attend_unit & x) const {
        return state + ((x.s*a.n_tok + x.i)*n_chunk + x.c)*a.n_head*ld;
    }
};

// ---- stage 1: units ----

// Brings the visible ones of n cells to w.cell and w.bias, and returns their number; at(j) is the j-th cell, plain as in attend_work. Where
// blocks tell enough, the masks of single cells are not read: those loads would wait behind the rows that are on their way (2 % of ATTEND)
template <typename F>
int visible_cells(const attend_work & w, const f16 * mask, const uint8_t * plain, int64_t n_kv, int64_t n, F at) {
    int32_t lo = INT32_MAX, hi = -1;
    for (int64_t j = 0; j < n; ++j) {
        const int32_t t = (int32_t) at(j);
        w.cell[j] = t;
        lo = std::min(lo, t);
        hi = std::max(hi, t);
    }
    // most often all are visible and nothing is added
    bool all = lo >= 0 && hi < n_kv;
    if (all) {
        all = w.n_block > 0;
        for (int64_t i = lo/MASK_BLOCK; all && i <= hi/MASK_BLOCK; ++i) {
            all = plain[i];
        }
        uint32_t bits = 0;
        for (int64_t j = 0; !all && j < n; ++j) {
            bits |= mask[w.cell[j]].bits;
        }
        all = bits == 0;
    }
    if (all) {
        std::fill(w.bias, w.bias + n, 0.0f);
        return (int) n;
    }
    int res = 0;
    for (int64_t j = 0; j < n; ++j) {
        const int64_t t = at(j);
        if (t >= 0 && t < n_kv && mask[t].bits != F16_NEG_INF) {
            w.cell[res] = (int32_t) t;
            w.bias[res] = to_f32(mask[t]);
            ++res;
        }
    }
    return res;
}

// Fills w.row with the rows of K of the cells in w.cell, from KV head h on, and then those of V, both up to whole blocks; returns those of V
const char ** list_rows(const attend_src & a, const attend_work & w, int n, int64_t h, int64_t s) {
    const int n_pad = (int) ceil_div(n, ROW_BLOCK)*ROW_BLOCK;
    const char ** const row_v = w.row + n_pad;
    const char * const k0 = at(a.k, h, 0, s), * const v0 = at(a.v, h, 0, s);
    for (int j = 0; j < n_pad; ++j) {
        const int64_t t = w.cell[std::min(j, n - 1)];
        w.row[j] = k0 + t*a.k->nb[2];
        row_v[j] = v0 + t*a.v->nb[2];
    }
    return row_v;
}

// softmax within the unit, for the heads [h0, h1), and sums of p*v that begin at 0
void softmax_heads(const attend_src & a, const attend_work & w, float * state, int n, int64_t h0, int64_t h1) {
    std::fill(w.bias + n, w.bias + n + W, -INFINITY);
    for (int64_t h = h0; h < h1; ++h) {
        const attn_state st { state + h*w.ld, a.d_v };
        float * s = w.s + (h - h0)*w.ld_s;
        std::fill(s + n, s + n + W, 0.0f);
        softmax_unit(st, s, w.bias, n, a.p.scale, a.p.softcap, a.slope(h), w.n_mean > 0);
        std::fill(st.acc(), st.acc() + a.d_v, 0.0f);
    }
}

// attention over the n cells in w.cell, a part of a selection. While rows are used, those ROWS_AHEAD later are prefetched; behind the last of V
// are the first of K of `next`, the unit that this thread has then
void attend_selected(const attend_src & a, const attend_work & w, const attend_unit & x, int n, const attend_unit & next) {
    const char ** const row_v = list_rows(a, w, n, x.h, x.s), ** const row_next = row_v + (row_v - w.row);
    const char * const k_next = at(a.k, next.h, 0, next.s);
    for (int j = 0; j < ROWS_AHEAD; ++j) { // behind the last unit, something that is in the cache
        row_next[j] = j < next.n ? k_next + std::max(next.cell[j], 0)*a.k->nb[2] : (const char *) w.row;
    }
    const int64_t h0    = x.h*a.n_group_q;
    float       * state = w.state_of(a, x);
    a.ops_k.dot_rows(w.s, w.ld_s, at<const float>(a.q, h0, x.i, x.s), a.ldq, a.n_group_q, w.row, 0, n, a.d_k, w.row + ROWS_AHEAD);
    softmax_heads(a, w, state, n, h0, h0 + a.n_group_q);
    a.ops_v.add_rows(state + h0*w.ld, w.ld, w.s, w.ld_s, a.n_group_q, row_v, 0, n, a.d_v, row_v + ROWS_AHEAD);
}

// attention of all heads over the n cells in w.cell, a chunk of all positions. What is prefetched lies a.ahead positions later
void attend_positions(const attend_src & a, const attend_work & w, const attend_unit & x, int n) {
    const char ** const row_v = list_rows(a, w, n, 0, x.s);
    const int n_pad = (int) (row_v - w.row);
    const auto later = [&](int y) {
        y += a.ahead;
        return y < 2*n_pad ? w.row[y] : at(a.k, 0, 0, x.s) + std::min<int64_t>(w.cell[n - 1] + 1 + y - 2*n_pad, a.n_kv - 1)*a.k->nb[2];
    };
    const float * q     = at<const float>(a.q, 0, x.i, x.s);
    float       * state = w.state_of(a, x);
    for (int r = 0; r < n; r += POS_BLOCK) {
        a.ops_k.dot_positions(w.s + r, w.ld_s, q, a.ldq, a.n_head, a.n_group_q, w.row + r, a.k->nb[1], std::min(POS_BLOCK, n - r), a.d_k, later(r));
    }
    softmax_heads(a, w, state, n, 0, a.n_head);
    for (int r = 0; r < n; r += POS_BLOCK) {
        a.ops_v.add_positions(state, w.ld, w.s + r, w.ld_s, a.n_head, a.n_group_q, row_v + r, a.v->nb[1], std::min(POS_BLOCK, n - r), a.d_v,
                later(n_pad + r));
    }
}

// this thread's next unit that has cells; units without cells are not merged either
attend_unit take_unit(const attend_src & a, const attend_work & w, unit_queue & queue) {
    for (int64_t u; (u = queue.take()) >= 0; ) {
        digits d { u };
        attend_unit x = {};
        x.c = d.next(w.n_chunk);
        x.h = a.dense ? 0 : d.next(a.n_head_kv);
        x.i = d.next(a.n_tok);
        x.s = d.rest;
        if (!a.has(x.i, x.s)) {
            continue;
        }
        int64_t n = a.n_kv;
        if (!a.dense) {
            const int32_t * sel = at<const int32_t>(a.sel, x.h, x.i, x.s);
            n      = a.n_sel(sel);
            x.cell = sel + 1 + a.n_group_q + x.c*w.chunk_of(a, n);
        }
        const int64_t chunk = w.chunk_of(a, n);
        x.n = (int) std::min(chunk, n - x.c*chunk);
        if (x.n > 0) {
            return x;
        }
    }
    return {};
}

void attend_units(const attend_src & a, const attend_work & w, unit_queue & queue) {
    attend_unit x = take_unit(a, w, queue);
    for (int j = 0; !a.dense && j < std::min(x.n, ROWS_AHEAD); ++j) {
        prefetch_bytes(at(a.k, x.h, std::max(x.cell[j], 0), x.s), a.size_k);
    }
    for (attend_unit next; x.n > 0; x = next) {
        next = take_unit(a, w, queue);
        const f16 * mask = at<const f16>(a.mask, x.i, 0, x.s);
        if (a.dense) {
            const int64_t t0 = x.c*w.chunk;
            attend_positions(a, w, x, visible_cells(w, mask, nullptr, a.n_kv, x.n, [&](int64_t j) { return t0 + j; }));
        } else {
            prefetch_bytes((const char *) next.cell, next.n*sizeof(int32_t));
            const uint8_t * plain = w.plain + (x.s*a.n_tok + x.i)*w.n_block;
            attend_selected(a, w, x, visible_cells(w, mask, plain, a.n_kv, x.n, [&](int64_t j) { return x.cell[j]; }), next);
        }
    }
}

// ---- stage 1: means of V ----

// Walks the positions that token i sees: on_sum(row of v_sum, positions) where groups are sealed and wholly visible, many at a time or one;
// on_group(group) for the others
template <typename F, typename G>
void for_mean(const attend_src & a, int64_t i, int64_t s, F on_sum, G on_group) {
    const int32_t * visible = at<const int32_t>(a.visible, i, 0, s);
    const int32_t * sealed  = at<const int32_t>(a.sealed, s);
    const int64_t   n_grp   = a.visible->ne[0];
    const auto is_whole = [&](int64_t g) { return visible[g] == GROUP && ggml_sparse_is_sealed(sealed[g], i); };

    for (int64_t g0 = 0; g0 < n_grp; g0 += SUM) {
        const int64_t n = std::min<int64_t>(SUM, n_grp - g0);
        int64_t n_whole = 0;
        for (int64_t g = g0; g < g0 + n; ++g) {
            n_whole += is_whole(g);
        }
        if (n_whole == SUM) {
            on_sum(ggml_sparse_total_row(g0), SUM*GROUP);
            continue;
        }
        for (int64_t g = g0; g < g0 + n; ++g) {
            if (is_whole(g)) {
                on_sum(ggml_sparse_sum_row(g), GROUP);
            } else if (visible[g] > 0) {
                on_group(g);
            }
        }
    }
}

// the mean prefetches totals 16 ahead, which is so many rows of v_sum
constexpr int64_t SUM_ROWS_AHEAD = 16*(SUM + 1);

// prefetches what the mean of KV head h reads of a row of v_sum, if there is such a row. Inlined, as prefetch_bytes must be
SPARQ_INLINE void prefetch_sum(const ggml_tensor * v_sum, int64_t row, int64_t h, int64_t d_v, int64_t s) {
    if (row < v_sum->ne[1]) {
        prefetch_bytes(at(v_sum, row, s) + h*d_v*sizeof(float), d_v*sizeof(float));
    }
}

// mean[h, c] = sum_t v[t, h, c]/n, over the n positions that token i sees, for n_head KV heads from h on. Together their rows are neighbours in
// memory; head by head, each row is in a page of its own (ATTEND with 64 positions not sealed, k = 128: 28 % longer by one thread)
void mean_unit(const attend_src & a, float * mean, int64_t h, int64_t n_head, int64_t i, int64_t s) {
    const f16 * mask = at<const f16>(a.mask, i, 0, s);
    const int     d      = (int) (n_head*a.d_v);
    const int64_t n_near = (int64_t) a.v->nb[1] == a.size_v ? n_head : 1; // heads whose rows of V are one after another

    int64_t n_vis = 0;
    std::fill(mean, mean + d, 0.0f);
    const auto add_sum = [&](int64_t row, int n) {
        if (n > GROUP) {
            prefetch_sum(a.v_sum, row + SUM_ROWS_AHEAD, h, a.d_v, s);
        }
        sum_positions<float>(mean, at(a.v_sum, row, s) + h*a.d_v*sizeof(float), 0, 1, d);
        n_vis += n;
    };
    const auto add_group = [&](int64_t g) {
        for (int64_t t = g*GROUP; t < g*GROUP + group_size(g, a.n_kv); ++t) {
            if (mask[t].bits != F16_NEG_INF) {
                for (int64_t j = 0; j < n_head; j += n_near) {
                    a.ops_v.sum_positions(mean + j*a.d_v, at(a.v, h + j, t, s), 0, 1, (int) (n_near*a.d_v));
                }
                ++n_vis;
            }
        }
    };
    for_mean(a, i, s, add_sum, add_group);
    for (int c = 0; c < d && n_vis > 0; ++c) {
        mean[c] /= n_vis;
    }
}

void mean_units(const attend_src & a, const attend_work & w, int64_t ith, int64_t nth) {
    const int64_t n_part = std::min<int64_t>(w.n_mean, nth); // of the KV heads
    for (int64_t u = ith; u < a.n_row*n_part; u += nth) {
        digits d { u };
        const int64_t i_part = d.next(n_part), i = d.next(a.n_tok), s = d.rest;
        if (!a.has(i, s)) {
            continue;
        }
        const int64_t h0 = i_part*a.n_head_kv/n_part, h1 = (i_part + 1)*a.n_head_kv/n_part;
        for (int64_t row = SUM; row < SUM_ROWS_AHEAD; row += SUM + 1) {
            prefetch_sum(a.v_sum, row, h0, a.d_v, s);
        }
        mean_unit(a, w.mean + ((s*a.n_tok + i)*a.n_head_kv + h0)*a.d_v, h0, h1 - h0, i, s);
    }
}

// ---- stage 2 ----

// the result of one query head of one token: res = merged states; with mean_v, res = alpha*res + (1 - alpha)*mean
void merge_unit(const attend_src & a, const attend_work & w, ggml_tensor * dst, int64_t j, int64_t i, int64_t s) {
    const int64_t h = j/a.n_group_q, r = s*a.n_tok + i;
    const int32_t * x = a.dense ? nullptr : at<const int32_t>(a.sel, h, i, s);
    const int64_t   n = a.dense ? w.n_chunk : ceil_div(a.n_sel(x), w.chunk_of(a, a.n_sel(x)));
    float * res = (float *) dst->data + r*dst->nb[1]/sizeof(float) + j*a.d_v;
    const float * sink = a.sinks ? (const float *) a.sinks->data + j : nullptr;
    const float * state = w.state + (r*w.n_chunk*a.n_head + j)*w.ld;
    const softmax_sum all = merge_states(res, state, a.n_head*w.ld, (int) n, a.d_v, sink);

    if (w.n_mean > 0) {
        const float * mean = w.mean + (r*a.n_head_kv + h)*a.d_v;
        float rest;
        memcpy(&rest, x + 1 + j % a.n_group_q, sizeof(rest));
        const float alpha = kept_share(state, a.n_head*w.ld, (int) n, a.d_v, all, rest);
        for (int c = 0; c < a.d_v; ++c) {
            res[c] = alpha*res[c] + (1.0f - alpha)*mean[c];
        }
    }
}

// ---- the node ----

void attend(const ggml_compute_params * params, ggml_tensor * dst, const attend_src & a) {
    const int64_t ith = params->ith, nth = params->nth;
    const attend_work w(a, params->wdata, params->ith, params->nth);

    for (int64_t u = ith; u < a.n_row*w.n_block; u += nth) {
        digits d { u };
        const int64_t t = d.next(w.n_block)*MASK_BLOCK, i = d.next(a.n_tok), s = d.rest;
        w.plain[u] = is_zero(at<const f16>(a.mask, i, 0, s) + t, std::min(MASK_BLOCK, a.n_kv - t));
    }
    unit_queue::open(params);
    ggml_barrier(params->threadpool);

    unit_queue queue(params, a.n_row*w.n_chunk*(a.dense ? 1 : a.n_head_kv));
    attend_units(a, w, queue);
    mean_units(a, w, ith, nth);
    ggml_barrier(params->threadpool);

    for (int64_t u = ith; u < a.n_row*a.n_head; u += nth) {
        digits d { u };
        const int64_t j = d.next(a.n_head), i = d.next(a.n_tok), s = d.rest;
        if (a.has(i, s)) {
            merge_unit(a, w, dst, j, i, s);
        }
    }
}

// the counters of the tokens of a pass
void attend_stats(const attend_src & a) {
    int64_t n_call = 0, n_vis = 0, n_read = 0, bytes_mean = 0;
    for (int64_t s = 0; s < a.q->ne[3]; ++s) {
        for (int64_t i = 0; i < a.n_tok; ++i) {
            if (!a.has(i, s)) {
                continue;
            }
            const int32_t * visible = at<const int32_t>(a.visible, i, 0, s);
            const int64_t   n       = std::accumulate(visible, visible + a.visible->ne[0], (int64_t) 0);
            n_vis  += n;
            n_call += n > 0;
            if (a.p.mean_v) {
                const auto add_sum   = [&](int64_t, int) { bytes_mean += a.d_v*(int64_t) sizeof(float); };
                const auto add_group = [&](int64_t g) { bytes_mean += visible[g]*a.size_v; };
                for_mean(a, i, s, add_sum, add_group);
            }
            for (int64_t h = 0; !a.dense && h < a.n_head_kv; ++h) {
                n_read += at<const int32_t>(a.sel, h, i, s)[0];
            }
        }
    }
    n_read = a.dense ? n_vis*a.n_head_kv : n_read;

    const int64_t row = a.v->data == a.k->data ? std::max(a.size_k, a.size_v) : a.size_k + a.size_v; // V may be a part of K (MLA)
    add_stat(a.stats, a.dense ? GGML_SPARSE_STAT_ATTEND_DENSE : GGML_SPARSE_STAT_ATTEND_SPARSE, n_call);
    add_stat(a.stats, GGML_SPARSE_STAT_POS_VISIBLE,  n_vis*a.n_head_kv);
    add_stat(a.stats, GGML_SPARSE_STAT_POS_READ,     n_read);
    add_stat(a.stats, GGML_SPARSE_STAT_BYTES_ATTEND, n_read*row + bytes_mean*a.n_head_kv);
    add_stat(a.stats, GGML_SPARSE_STAT_BYTES_DENSE,  n_vis*a.n_head_kv*row);
}

} // namespace

// First the tokens that read a selection, then, in the same memory, those that read all, each as if it were a node of its own. The barrier in
// front of a pass's units is the one between the passes.
void sparse::forward_attend(const ggml_compute_params * params, ggml_tensor * dst) {
    for (const bool dense : { false, true }) {
        const attend_src a(dst, dense);
        bool any = false;
        for (int64_t r = 0; r < a.n_row; ++r) {
            any = any || a.has(r % a.n_tok, r/a.n_tok);
        }
        if (!any) {
            continue;
        }
        attend(params, dst, a);
        if (a.stats && params->ith == 0) {
            attend_stats(a);
        }
    }
}

size_t sparse::attend_work_size(const ggml_tensor * dst, int n_threads) {
    const auto size = [&](bool dense) { return attend_work(attend_src(dst, dense), nullptr, 0, n_threads).size; };
    return ggml_sparse_src_of(dst).sel ? std::max(size(false), size(true)) : size(true);
}
