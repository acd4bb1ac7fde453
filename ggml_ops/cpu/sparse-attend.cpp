// ggml glue of ATTEND.

#include "sparse-glue.h"

#include <numeric>

namespace {

// what is done with rows of a type of K or V
struct row_ops {
    decltype(&dot_rows<float>) dot;
    decltype(&add_rows<float>) add;
    decltype(&sum_v<float>)    sum;
    decltype(&dot_positions<float>) dot_positions;
    decltype(&add_positions<float>) add_positions;
};

row_ops ops_of(ggml_type type) {
    row_ops res;
    with_kv_type(type, [&](auto * t) {
        using T = std::decay_t<decltype(*t)>;
        res = { dot_rows<T>, add_rows<T>, sum_v<T>, dot_positions<T>, add_positions<T> };
    });
    return res;
}

// ---- ATTEND ----

// sources and sizes. Tokens that read a selection and tokens that read all they see are two passes over a batch, see forward_attend
struct attend_src : ggml_sparse_src {
    ggml_sparse_attend_params p;
    bool    dense;
    int64_t n_kv, n_head_kv, n_tok, n_row, n_max, size_k, size_v; // n_row: tokens of all streams; n_max: positions of one head
    int     n_head, n_group_q, d_k, d_v, ahead; // ahead: of how many rows K and V are asked for, dense
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
        n_head    = (int) q->ne[1];
        n_group_q = (int) (n_head/n_head_kv);
        d_k       = (int) k->ne[0];
        d_v       = (int) v->ne[0];
        ops_k     = ops_of(k->type);
        ops_v     = ops_of(v->type);
        ahead     = (int) ceil_div(AHEAD_BYTES, n_head_kv*size_k);
        n_max     = dense || !sel ? n_kv : sel->ne[0] - 1 - n_group_q;
    }

    // does token i read all that it sees?
    bool reads_all(int64_t i, int64_t s) const { return !sel || at<const int32_t>(sel, 0, i, s)[0] == GGML_SPARSE_SELECT_ALL; }

    // is token i one of this pass?
    bool has(int64_t i, int64_t s) const { return reads_all(i, s) == dense; }

    int64_t n_sel(const int32_t * x) const { return std::min<int64_t>(std::max(x[0], 0), n_max); }
};

// the c-th unit of token i of stream s; over a selection: the cells, some of those of KV head h. n = 0: none
struct attend_unit {
    int64_t i, s, c, h;
    const int32_t * cell;
    int n;
};

// positions whose mask is looked at together, over a selection
constexpr int64_t MASK_TILE = 1024;

// Stage 1: units of a fixed number of positions leave partial states; with mean_v, each thread leaves the mean of V of some KV heads.
// Stage 2: one unit per (token, query head) merges.
//   over a selection: a unit is one KV head and part of its cells; over all: all KV heads and a run of positions, so that K and V are
//   read in the order of memory
struct attend_work {
    int64_t chunk;      // positions per unit
    int64_t n_chunk;    // units per token (and KV head, over a selection)
    int64_t n_mean;     // means of V per token: one per KV head, or none
    int     ld;         // floats per state

    float   * state;    // [n_tok*n_stream][n_chunk][n_head][ld]
    float   * mean;     // [n_tok*n_stream][n_mean][d_v]
    int64_t n_tile;     // of the mask; 0: it is looked at cell by cell
    uint8_t * plain;    // [n_tok*n_stream][n_tile]             is the mask zero all over the tile?
    int32_t * cell;     // [chunk]                              this thread's: visible cells ..
    float   * bias;     // [chunk + W]                          .. their mask values ..
    const char ** row;  // [2*chunk + AHEAD]                    .. and the addresses of their rows, see attend_rows
    float   * s;        // [n_head or n_group_q][chunk + W]     logits, then softmax numerators
    size_t    size;

    attend_work(const attend_src & a, const void * wdata, int ith, int nth) {
        ld     = attn_state::size(a.d_v);
        n_mean = a.p.mean_v ? a.n_head_kv : 0;

        // smaller units where cells are few, so that many threads find some; larger ones while there are 512 of them, and when many tokens
        // would need much memory for their states
        const int64_t limit = 64*1024*1024/(a.n_row*a.n_head*ld*(int64_t) sizeof(float)) + 1;
        chunk = a.dense ? 256 : std::max(std::min<int64_t>(128, ceil_div(a.n_max, 8*32)*32), std::min<int64_t>(256, a.n_max*a.n_head_kv/(512*32)*32));
        while (ceil_div(a.n_max, chunk) > limit) {
            chunk *= 2;
        }
        n_chunk = ceil_div(a.n_max, chunk);
        n_tile  = a.dense || a.n_max*a.n_head_kv < a.n_kv/32 ? 0 : ceil_div(a.n_kv, MASK_TILE); // few cells: their masks are fewer lines

        bump shared(wdata);
        state = shared.take<float>(a.n_row*a.n_head*n_chunk*ld);
        mean  = shared.take<float>(a.n_row*n_mean*a.d_v);
        plain = shared.take<uint8_t>(a.n_row*n_tile);

        bump own(shared.end());
        for (int i = 0; i < nth; ++i) {
            if (i <= ith) {
                cell = own.take<int32_t>(chunk);
                bias = own.take<float>(chunk + W);
                row  = own.take<const char *>(2*chunk + AHEAD);
                s    = own.take<float>((a.dense ? a.n_head : a.n_group_q)*(chunk + W));
            }
            if (i == 0) {
                size = shared.used + nth*own.used + bump::ALIGN;
            }
        }
    }
};

// attention over the n visible cells of unit x, which are in w.cell; then: the unit that this thread has next, if any (over a selection)
void attend_rows(const attend_src & a, const attend_work & w, const attend_unit & x, int n, const attend_unit & then) {
    const int64_t h0   = a.dense ? 0 : x.h, h1 = a.dense ? a.n_head_kv : x.h + 1;
    const int64_t ld_s = w.chunk + W;

    float * state = w.state + ((x.s*a.n_tok + x.i)*w.n_chunk + x.c)*a.n_head*w.ld;

    // the rows in the order of their use: those of K, of V, and the first of K of the next unit. K and V are filled up to whole blocks
    const int n_pad = (int) ceil_div(n, ROW_BLOCK)*ROW_BLOCK;
    const char ** const row_v = w.row + n_pad, ** const row_then = row_v + n_pad;
    const char * const k0 = at(a.k, h0, 0, x.s), * const v0 = at(a.v, h0, 0, x.s);
    for (int j = 0; j < n_pad; ++j) {
        const int64_t t = w.cell[std::min(j, n - 1)];
        w.row[j] = k0 + t*a.k->nb[2];
        row_v[j] = v0 + t*a.v->nb[2];
    }

    // what is asked for on the way. Over a selection, the rows AHEAD later; over all positions, what lies `ahead` positions later
    if (!a.dense) {
        const char * const k1 = at(a.k, then.h, 0, then.s);
        for (int j = 0; j < AHEAD; ++j) { // after the last unit, something that is in the cache
            row_then[j] = j < then.n ? k1 + std::max(then.cell[j], 0)*a.k->nb[2] : (const char *) w.row;
        }
    }
    const auto later = [&](int y) {
        y += a.ahead;
        return y < 2*n_pad ? w.row[y] : k0 + std::min<int64_t>(w.cell[n - 1] + 1 + y - 2*n_pad, a.n_kv - 1)*a.k->nb[2];
    };

    // logits: q . k
    const float * q   = at<const float>(a.q, h0*a.n_group_q, x.i, x.s);
    const int64_t ldq = a.q->nb[1]/sizeof(float);
    for (int r = 0; r < n && a.dense; r += POS_BLOCK) {
        a.ops_k.dot_positions(w.s + r, ld_s, q, ldq, a.n_head, a.n_group_q, w.row + r, a.k->nb[1], std::min(POS_BLOCK, n - r), a.d_k, later(r));
    }
    if (!a.dense) {
        a.ops_k.dot(w.s, ld_s, q, ldq, a.n_group_q, w.row, 0, n, a.d_k, w.row + AHEAD);
    }

    // softmax within the unit
    for (int r = n; r < n + W; ++r) {
        w.bias[r] = -INFINITY;
    }
    for (int64_t j = h0*a.n_group_q; j < h1*a.n_group_q; ++j) {
        const attn_state st { state + j*w.ld, a.d_v };
        float * s = w.s + (j - h0*a.n_group_q)*ld_s;
        std::fill(s + n, s + n + W, 0.0f);
        softmax_part(st, s, w.bias, n, a.p.scale, a.p.softcap, head_slope((int) j, a.n_head, a.p.max_bias));
        std::fill(st.acc(), st.acc() + a.d_v, 0.0f);
    }

    // sum of p * v
    for (int r = 0; r < n && a.dense; r += POS_BLOCK) {
        a.ops_v.add_positions(state, w.ld, w.s + r, ld_s, a.n_head, a.n_group_q, row_v + r, a.v->nb[1],
                std::min(POS_BLOCK, n - r), a.d_v, later(n_pad + r));
    }
    if (!a.dense) {
        a.ops_v.add(state + h0*a.n_group_q*w.ld, w.ld, w.s, ld_s, a.n_group_q, row_v, 0, n, a.d_v, row_v + AHEAD);
    }
}

// the visible cells among n cells -> w.cell, w.bias; at(j): the j-th; plain: see attend_work. Where tiles tell, the mask of each cell need not
// be read: such loads wait behind the rows that are on their way (2 % of ATTEND)
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
        all = w.n_tile > 0;
        for (int64_t i = lo/MASK_TILE; all && i <= hi/MASK_TILE; ++i) {
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

// walks the visible positions of token i: on_sum(row of v_sum, positions) where groups are sealed and fully visible, many at a time or one;
// on_group(group) for the others
template <typename F, typename G>
void for_mean(const attend_src & a, int64_t i, int64_t s, F on_sum, G on_group) {
    const int32_t * vis    = at<const int32_t>(a.visible, i, 0, s);
    const int32_t * sealed = at<const int32_t>(a.visible, a.n_tok, 0, s); // VISIBLE's last row
    const int64_t   n_grp  = a.visible->ne[0];

    for (int64_t g0 = 0; g0 < n_grp; g0 += SUM) {
        const int64_t n = std::min<int64_t>(SUM, n_grp - g0);
        int64_t n_whole = 0;
        for (int64_t g = g0; g < g0 + n; ++g) {
            n_whole += vis[g] == GROUP && sealed[g];
        }
        if (n_whole == SUM) {
            on_sum(ggml_sparse_sum_row(g0) + SUM, SUM*GROUP);
            continue;
        }
        for (int64_t g = g0; g < g0 + n; ++g) {
            if (vis[g] == GROUP && sealed[g]) {
                on_sum(ggml_sparse_sum_row(g), GROUP);
            } else if (vis[g] > 0) {
                on_group(g);
            }
        }
    }
}

// the mean asks for totals 16 ahead: so many rows of v_sum
constexpr int64_t AHEAD_SUM = 16*(SUM + 1);

// asks for what the mean of KV head h reads of a row of v_sum, if there is such a row. Inlined, as prefetch_bytes
SPARQ_INLINE void ask_sum(const ggml_tensor * v_sum, int64_t row, int64_t h, int64_t d_v, int64_t s) {
    if (row < v_sum->ne[1]) {
        prefetch_bytes(at(v_sum, row, s) + h*d_v*sizeof(float), d_v*sizeof(float));
    }
}

// mean [n_head][d_v]: of V over the positions that token i sees, for n_head KV heads from h on. Together their rows are runs in memory;
// head by head each row is in a page of its own (ATTEND with 64 positions not sealed, k = 128: 28 % longer by one thread)
void mean_unit(const attend_src & a, float * mean, int64_t h, int64_t n_head, int64_t i, int64_t s) {
    const f16 * mask = at<const f16>(a.mask, i, 0, s);
    const int     d     = (int) (n_head*a.d_v);
    const int64_t n_run = (int64_t) a.v->nb[1] == a.size_v ? n_head : 1; // heads whose rows of V are one after another

    int64_t n_vis = 0;
    std::fill(mean, mean + d, 0.0f);
    for_mean(a, i, s,
        [&](int64_t row, int n) {
            if (n > GROUP) {
                ask_sum(a.v_sum, row + AHEAD_SUM, h, a.d_v, s);
            }
            sum_v<float>(mean, at(a.v_sum, row, s) + h*a.d_v*sizeof(float), 0, 1, d);
            n_vis += n;
        },
        [&](int64_t g) {
            for (int64_t t = g*GROUP; t < g*GROUP + group_size(g, a.n_kv); ++t) {
                if (mask[t].bits != F16_NEG_INF) {
                    for (int64_t j = 0; j < n_head; j += n_run) {
                        a.ops_v.sum(mean + j*a.d_v, at(a.v, h + j, t, s), 0, 1, (int) (n_run*a.d_v));
                    }
                    ++n_vis;
                }
            }
        });
    for (int c = 0; c < d && n_vis > 0; ++c) {
        mean[c] /= n_vis;
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
            const int32_t * vis = at<const int32_t>(a.visible, i, 0, s);
            const int64_t   n   = std::accumulate(vis, vis + a.visible->ne[0], (int64_t) 0);
            n_vis  += n;
            n_call += n > 0;
            if (a.p.mean_v) {
                for_mean(a, i, s,
                    [&](int64_t, int) { bytes_mean += a.d_v*(int64_t) sizeof(float); },
                    [&](int64_t g) { bytes_mean += vis[g]*a.size_v; });
            }
            for (int64_t h = 0; !a.dense && h < a.n_head_kv; ++h) {
                n_read += at<const int32_t>(a.sel, h, i, s)[0];
            }
        }
    }
    n_read = a.dense ? n_vis*a.n_head_kv : n_read;

    const int64_t row = a.size_k + a.size_v;
    add_stat(a.stats, a.dense ? GGML_SPARSE_STAT_ATTEND_DENSE : GGML_SPARSE_STAT_ATTEND_SPARSE, n_call);
    add_stat(a.stats, GGML_SPARSE_STAT_POS_VISIBLE,  n_vis*a.n_head_kv);
    add_stat(a.stats, GGML_SPARSE_STAT_POS_READ,     n_read);
    add_stat(a.stats, GGML_SPARSE_STAT_BYTES_ATTEND, n_read*row + bytes_mean*a.n_head_kv);
    add_stat(a.stats, GGML_SPARSE_STAT_BYTES_DENSE,  n_vis*a.n_head_kv*row);
}

void attend(const ggml_compute_params * params, ggml_tensor * dst, const attend_src & a) {
    const attend_work w(a, params->wdata, params->ith, params->nth);

    for (int64_t u = params->ith; u < a.n_row*w.n_tile; u += params->nth) {
        const int64_t t = u % w.n_tile*MASK_TILE, r = u/w.n_tile;
        w.plain[u] = is_zero(at<const f16>(a.mask, r % a.n_tok, 0, r/a.n_tok) + t, std::min(MASK_TILE, a.n_kv - t));
    }

    // stage 1
    unit_queue::open(params);
    ggml_barrier(params->threadpool);
    unit_queue queue(params, a.n_row*w.n_chunk*(a.dense ? 1 : a.n_head_kv));
    const auto take = [&]() -> attend_unit { // the next one that has cells; the others are not merged either
        for (int64_t u; (u = queue.take()) >= 0; ) {
            attend_unit x = {};
            x.c = u % w.n_chunk;
            u  /= w.n_chunk;
            if (!a.dense) {
                x.h = u % a.n_head_kv;
                u  /= a.n_head_kv;
            }
            x.i = u % a.n_tok;
            x.s = u/a.n_tok;
            if (!a.has(x.i, x.s)) {
                continue;
            }
            int64_t n = a.n_kv;
            if (!a.dense) {
                const int32_t * sel = at<const int32_t>(a.sel, x.h, x.i, x.s);
                x.cell = sel + 1 + a.n_group_q + x.c*w.chunk;
                n      = a.n_sel(sel);
            }
            x.n = (int) std::min(w.chunk, n - x.c*w.chunk);
            if (x.n > 0) {
                return x;
            }
        }
        return {};
    };
    attend_unit x = take();
    for (int j = 0; !a.dense && j < std::min(x.n, AHEAD); ++j) {
        prefetch_bytes(at(a.k, x.h, std::max(x.cell[j], 0), x.s), a.size_k);
    }
    for (attend_unit then; x.n > 0; x = then) {
        then = take();
        const f16 * mask = at<const f16>(a.mask, x.i, 0, x.s);
        int n;
        if (a.dense) {
            const int64_t t0 = x.c*w.chunk;
            n = visible_cells(w, mask, nullptr, a.n_kv, x.n, [&](int64_t j) { return t0 + j; });
        } else {
            prefetch_bytes((const char *) then.cell, then.n*sizeof(int32_t));
            n = visible_cells(w, mask, w.plain + (x.s*a.n_tok + x.i)*w.n_tile, a.n_kv, x.n, [&](int64_t j) { return x.cell[j]; });
        }
        attend_rows(a, w, x, n, then);
    }
    const int64_t n_part = std::min<int64_t>(w.n_mean, params->nth);
    for (int64_t u = params->ith; u < a.n_row*n_part; u += params->nth) {
        if (!a.has(u/n_part % a.n_tok, u/n_part/a.n_tok)) {
            continue;
        }
        const int64_t i_part = u % n_part, r = u/n_part, h = i_part*a.n_head_kv/n_part, h1 = (i_part + 1)*a.n_head_kv/n_part;
        for (int64_t row = SUM; row < AHEAD_SUM; row += SUM + 1) {
            ask_sum(a.v_sum, row, h, a.d_v, r/a.n_tok);
        }
        mean_unit(a, w.mean + (r*a.n_head_kv + h)*a.d_v, h, h1 - h, r % a.n_tok, r/a.n_tok);
    }
    ggml_barrier(params->threadpool);

    // stage 2
    for (int64_t u = params->ith; u < a.n_row*a.n_head; u += params->nth) {
        const int64_t j = u % a.n_head, r = u/a.n_head, h = j/a.n_group_q, i = r % a.n_tok, s = r/a.n_tok;
        if (!a.has(i, s)) {
            continue;
        }

        const int32_t * x = a.dense ? nullptr : at<const int32_t>(a.sel, h, i, s);
        const int64_t   n = a.dense ? w.n_chunk : ceil_div(a.n_sel(x), w.chunk);
        float * res = (float *) dst->data + r*dst->nb[1]/sizeof(float) + j*a.d_v;
        merge(res, w.state + (r*w.n_chunk*a.n_head + j)*w.ld, a.n_head*w.ld, (int) n, a.d_v, a.sinks ? (const float *) a.sinks->data + j : nullptr);

        if (w.n_mean > 0) {
            const float * mean = w.mean + (r*a.n_head_kv + h)*a.d_v;
            float alpha;
            memcpy(&alpha, x + 1 + j % a.n_group_q, sizeof(alpha));
            for (int c = 0; c < a.d_v; ++c) {
                res[c] = alpha*res[c] + (1.0f - alpha)*mean[c];
            }
        }
    }
}

} // namespace

// the tokens that read a selection, then, in the same memory, those that read all: each as if it were a node of its own. The barrier in front
// of a pass's units is the one between the passes
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
