// ggml glue of ATTEND.

#include "sparse-glue.h"

#include <numeric>

namespace {

// what is done with rows of a type of K or V
struct row_ops {
    decltype(&dot_rows<float>) dot;
    decltype(&add_rows<float>) add;
    decltype(&sum_v<float>)    sum;
};

row_ops ops_of(ggml_type type) {
    row_ops res;
    with_kv_type(type, [&](auto * t) {
        using T = std::decay_t<decltype(*t)>;
        res = { dot_rows<T>, add_rows<T>, sum_v<T> };
    });
    return res;
}

// the cells of a unit over a selection: those of KV head h of stream s
struct unit_cells {
    const int32_t * cell;
    int     n;
    int64_t h, s;
};

// ---- ATTEND ----

// how far dense attention asks ahead: a block is too short for the hardware to run ahead by itself
constexpr int64_t AHEAD_BYTES = 32*1024;

// positions whose mask is looked at together, over a selection
constexpr int64_t MASK_TILE = 1024;

// Stage 1: units of a fixed number of positions leave partial states; with mean_v, a unit per KV head leaves the mean of V.
// Stage 2: one unit per (token, query head) merges.
//   over a selection: a unit is one KV head and part of its cells; over all: all KV heads and a run of positions, so that K and V are
//   read in the order of memory
struct attend_work {
    bool    dense;
    int64_t chunk;      // positions per unit
    int64_t n_chunk;    // units per token (and KV head, over a selection)
    int64_t n_mean;     // units of the mean per token: one per KV head, or none
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

    attend_work(const ggml_tensor * dst, const void * wdata, int ith, int nth) {
        const ggml_tensor * q   = dst->src[0];
        const ggml_tensor * k   = dst->src[1];
        const ggml_tensor * v   = dst->src[2];
        const ggml_tensor * sel = dst->src[5];

        const int64_t n_head    = q->ne[1];
        const int64_t n_group_q = n_head/k->ne[1];
        const int64_t n_row     = q->ne[2]*q->ne[3];

        dense  = sel == nullptr;
        ld     = attn_state::size((int) v->ne[0]);
        n_mean = op_params<ggml_sparse_attend_params>(dst).mean_v ? k->ne[1] : 0;

        // smaller units where cells are few, so that many threads find some; larger ones while there are 512 of them, and when many tokens
        // would need much memory for their states
        const int64_t n_max = dense ? k->ne[2] : sel->ne[0] - 1 - n_group_q;
        const int64_t limit = 64*1024*1024/(n_row*n_head*ld*(int64_t) sizeof(float)) + 1;
        chunk = dense ? 256 : std::max(std::min<int64_t>(128, ceil_div(n_max, 8*32)*32), std::min<int64_t>(256, n_max*k->ne[1]/(512*32)*32));
        while (ceil_div(n_max, chunk) > limit) {
            chunk *= 2;
        }
        n_chunk = ceil_div(n_max, chunk);
        n_tile  = dense || n_max*k->ne[1] < k->ne[2]/32 ? 0 : ceil_div(k->ne[2], MASK_TILE); // few cells: their masks are fewer lines

        bump shared(wdata);
        state = shared.take<float>(n_row*n_head*n_chunk*ld);
        mean  = shared.take<float>(n_row*n_mean*v->ne[0]);
        plain = shared.take<uint8_t>(n_row*n_tile);

        bump own(shared.end());
        for (int i = 0; i < nth; ++i) {
            if (i <= ith) {
                cell = own.take<int32_t>(chunk);
                bias = own.take<float>(chunk + W);
                row  = own.take<const char *>(2*chunk + AHEAD);
                s    = own.take<float>((dense ? n_head : n_group_q)*(chunk + W));
            }
            if (i == 0) {
                size = shared.used + nth*own.used + bump::ALIGN;
            }
        }
    }
};

// attention of the query heads of KV heads [h0, h1) over the n cells in w.cell; then: the cells that this thread reads next (over a selection)
void attend_rows(const ggml_tensor * dst, const attend_work & w, int64_t h0, int64_t h1, int64_t i, int64_t s, int64_t c, int n, const unit_cells & then) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * v = dst->src[2];
    const auto p = op_params<ggml_sparse_attend_params>(dst);
    const row_ops ops_k = ops_of(k->type), ops_v = ops_of(v->type);

    const int     n_head    = (int) q->ne[1];
    const int     n_group_q = (int) (n_head/k->ne[1]);
    const int     d_k       = (int) k->ne[0];
    const int     d_v       = (int) v->ne[0];
    const int64_t ld_s      = w.chunk + W;
    const int64_t size_k    = row_size(k);
    const int64_t size_v    = row_size(v);

    float * state = w.state + ((s*q->ne[2] + i)*w.n_chunk + c)*n_head*w.ld;

    // the rows in the order of their use: those of K, of V, and the first of K of the next unit. K and V are filled up to whole blocks
    const int n_pad = (int) ceil_div(n, ROW_BLOCK)*ROW_BLOCK;
    const char ** const row_v = w.row + n_pad, ** const row_then = row_v + n_pad;
    const char * const k0 = at(k, h0, 0, s), * const v0 = at(v, h0, 0, s);
    for (int j = 0; j < n_pad; ++j) {
        const int64_t t = w.cell[std::min(j, n - 1)];
        w.row[j] = k0 + t*k->nb[2];
        row_v[j] = v0 + t*v->nb[2];
    }

    // what is asked for while block r of rows is used. Over a selection, the rows AHEAD later. Over all positions K and V are read in the
    // order of memory, a block of positions, all its heads, then the next block: a head's share of the block `ahead` positions later
    if (!w.dense) {
        for (int j = 0; j < AHEAD; ++j) { // after the last unit, something that is in the cache
            row_then[j] = j < then.n ? at(k, then.h, std::max(then.cell[j], 0), then.s) : (const char *) w.row;
        }
    }
    const int ahead = (int) ceil_div(AHEAD_BYTES, ROW_BLOCK*k->ne[1]*size_k)*ROW_BLOCK;
    const char * share[ROW_BLOCK];
    const auto next = [&](int r, int64_t h) -> const char * const * {
        if (!w.dense) {
            return w.row + r + AHEAD;
        }
        const int    x    = r + ahead;
        const bool   is_v = x >= n_pad && x < 2*n_pad;
        const char * base = x < 2*n_pad ? w.row[x] : k0 + std::min<int64_t>(w.cell[n - 1] + 1 + x - 2*n_pad, k->ne[2] - 1)*k->nb[2];
        for (int j = 0; j < ROW_BLOCK; ++j) {
            share[j] = base + (h*ROW_BLOCK + j)*(is_v ? size_v : size_k);
        }
        return share;
    };

    // logits: q . k
    for (int r = 0; r < n; r += ROW_BLOCK) {
        for (int64_t h = h0; h < h1; ++h) {
            ops_k.dot(w.s + (h - h0)*n_group_q*ld_s + r, ld_s, at<const float>(q, h*n_group_q, i, s), q->nb[1]/sizeof(float), n_group_q,
                    w.row + r, (h - h0)*k->nb[1], std::min(ROW_BLOCK, n - r), d_k, next(r, h));
        }
    }

    // softmax within the unit
    for (int r = n; r < n + W; ++r) {
        w.bias[r] = -INFINITY;
    }
    for (int64_t j = h0*n_group_q; j < h1*n_group_q; ++j) {
        const attn_state st { state + j*w.ld, d_v };
        float * x = w.s + (j - h0*n_group_q)*ld_s;
        std::fill(x + n, x + n + W, 0.0f);
        softmax_part(st, x, w.bias, n, p.scale, p.softcap, head_slope((int) j, n_head, p.max_bias));
        std::fill(st.acc(), st.acc() + d_v, 0.0f);
    }

    // sum of p * v
    for (int r = 0; r < n; r += ROW_BLOCK) {
        for (int64_t h = h0; h < h1; ++h) {
            ops_v.add(state + h*n_group_q*w.ld, w.ld, w.s + (h - h0)*n_group_q*ld_s + r, ld_s, n_group_q,
                    row_v + r, (h - h0)*v->nb[1], std::min(ROW_BLOCK, n - r), d_v, next(n_pad + r, h));
        }
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
void for_mean(const ggml_tensor * dst, int64_t i, int64_t s, F on_sum, G on_group) {
    const ggml_tensor * visible = dst->src[4];
    const int32_t * vis    = at<const int32_t>(visible, i, 0, s);
    const int32_t * sealed = at<const int32_t>(dst->src[7], s);
    const int64_t   n_grp  = visible->ne[0];

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

// the mean of V over the positions that token i sees, one KV head
void mean_unit(const ggml_tensor * dst, float * mean, int64_t h, int64_t i, int64_t s) {
    const ggml_tensor * v     = dst->src[2];
    const ggml_tensor * v_sum = dst->src[6];

    const f16 * mask    = at<const f16>(dst->src[3], i, 0, s);
    const int   d_v     = (int) v->ne[0];
    const auto  sum_row = ops_of(v->type).sum;

    int64_t n_vis = 0;
    std::fill(mean, mean + d_v, 0.0f);
    for_mean(dst, i, s,
        [&](int64_t row, int n) {
            if (n > GROUP) {
                ask_sum(v_sum, row + AHEAD_SUM, h, d_v, s);
            }
            sum_v<float>(mean, at(v_sum, row, s) + h*d_v*sizeof(float), 0, 1, d_v);
            n_vis += n;
        },
        [&](int64_t g) {
            for (int64_t t = g*GROUP; t < g*GROUP + group_size(g, v->ne[2]); ++t) {
                if (mask[t].bits != F16_NEG_INF) {
                    sum_row(mean, at(v, h, t, s), 0, 1, d_v);
                    ++n_vis;
                }
            }
        });
    for (int c = 0; c < d_v && n_vis > 0; ++c) {
        mean[c] /= n_vis;
    }
}

void attend_stats(const ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * v       = dst->src[2];
    const ggml_tensor * visible = dst->src[4];
    const ggml_tensor * sel     = dst->src[5];
    const ggml_tensor * stats   = dst->src[9];
    const bool mean_v = op_params<ggml_sparse_attend_params>(dst).mean_v;

    const int64_t n_head_kv = k->ne[1];
    const int64_t row_v     = row_size(v);
    const int64_t row       = row_size(k) + row_v;

    int64_t n_vis = 0, n_read = 0, bytes_mean = 0;
    for (int64_t s = 0; s < q->ne[3]; ++s) {
        for (int64_t i = 0; i < q->ne[2]; ++i) {
            const int32_t * vis = at<const int32_t>(visible, i, 0, s);
            n_vis += std::accumulate(vis, vis + visible->ne[0], (int64_t) 0);
            if (mean_v) {
                for_mean(dst, i, s, [&](int64_t, int) { bytes_mean += v->ne[0]*(int64_t) sizeof(float); }, [&](int64_t g) { bytes_mean += vis[g]*row_v; });
            }
            for (int64_t h = 0; sel && h < n_head_kv; ++h) {
                n_read += at<const int32_t>(sel, h, i, s)[0];
            }
        }
    }
    n_read = sel ? n_read : n_vis*n_head_kv;

    add_stat(stats, sel ? GGML_SPARSE_STAT_ATTEND_SPARSE : GGML_SPARSE_STAT_ATTEND_DENSE, q->ne[2]*q->ne[3]);
    add_stat(stats, GGML_SPARSE_STAT_POS_VISIBLE,  n_vis*n_head_kv);
    add_stat(stats, GGML_SPARSE_STAT_POS_READ,     n_read);
    add_stat(stats, GGML_SPARSE_STAT_BYTES_ATTEND, n_read*row + bytes_mean*n_head_kv);
    add_stat(stats, GGML_SPARSE_STAT_BYTES_DENSE,  n_vis*n_head_kv*row);
}

void attend(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * v       = dst->src[2];
    const ggml_tensor * mask    = dst->src[3];
    const ggml_tensor * sel     = dst->src[5];
    const ggml_tensor * sinks   = dst->src[8];

    const int64_t n_kv      = k->ne[2];
    const int64_t n_head_kv = k->ne[1];
    const int64_t n_head    = q->ne[1];
    const int64_t n_group_q = n_head/n_head_kv;
    const int64_t n_tok     = q->ne[2];
    const int64_t n_row     = n_tok*q->ne[3];
    const int     d_v       = (int) v->ne[0];

    const attend_work w(dst, params->wdata, params->ith, params->nth);

    const auto n_sel = [&](const int32_t * x) { return std::min<int64_t>(std::max(x[0], 0), sel->ne[0] - 1 - n_group_q); };

    const auto cells = [&](int64_t u) -> unit_cells {
        const int64_t c = u % w.n_chunk, h = u/w.n_chunk % n_head_kv, i = u/w.n_chunk/n_head_kv % n_tok, s = u/w.n_chunk/n_head_kv/n_tok;
        const int32_t * x = at<const int32_t>(sel, h, i, s);
        return { x + 1 + n_group_q + c*w.chunk, (int) std::min(w.chunk, n_sel(x) - c*w.chunk), h, s };
    };

    for (int64_t u = params->ith; u < n_row*w.n_tile; u += params->nth) {
        const int64_t t = u % w.n_tile*MASK_TILE, r = u/w.n_tile;
        w.plain[u] = is_zero(at<const f16>(mask, r % n_tok, 0, r/n_tok) + t, std::min(MASK_TILE, n_kv - t));
    }

    // stage 1
    unit_queue::open(params);
    ggml_barrier(params->threadpool);
    unit_queue queue(params, n_row*w.n_chunk*(w.dense ? 1 : n_head_kv));
    const auto next = [&]() { // the next unit that has cells; the others are not merged either
        int64_t u = queue.peek();
        while (u >= 0 && !w.dense && cells(u).n <= 0) {
            queue.take();
            u = queue.peek();
        }
        return u;
    };
    for (bool first = true; next() >= 0; first = false) {
        const int64_t u = queue.take();
        if (w.dense) {
            const int64_t c = u % w.n_chunk, i = u/w.n_chunk % n_tok, s = u/w.n_chunk/n_tok;
            const int64_t t0 = c*w.chunk;
            const int n = visible_cells(w, at<const f16>(mask, i, 0, s), nullptr, n_kv, std::min(w.chunk, n_kv - t0), [&](int64_t j) { return t0 + j; });
            attend_rows(dst, w, 0, n_head_kv, i, s, c, n, {});
        } else {
            const unit_cells x = cells(u);
            for (int j = 0; first && j < std::min(x.n, AHEAD); ++j) {
                prefetch_bytes(at(k, x.h, std::max(x.cell[j], 0), x.s), row_size(k));
            }
            const int64_t c = u % w.n_chunk, i = u/w.n_chunk/n_head_kv % n_tok;
            const unit_cells then = next() >= 0 ? cells(next()) : unit_cells{};
            prefetch_bytes((const char *) then.cell, std::max(then.n, 0)*sizeof(int32_t));
            const int n = visible_cells(w, at<const f16>(mask, i, 0, x.s), w.plain + (x.s*n_tok + i)*w.n_tile, n_kv, x.n, [&](int64_t j) { return x.cell[j]; });
            attend_rows(dst, w, x.h, x.h + 1, i, x.s, c, n, then);
        }
    }
    for (int64_t u = params->ith; u < n_row*w.n_mean; u += params->nth) {
        const int64_t h = u % n_head_kv, r = u/n_head_kv;
        for (int64_t row = SUM; row < AHEAD_SUM; row += SUM + 1) {
            ask_sum(dst->src[6], row, h, d_v, r/n_tok);
        }
        mean_unit(dst, w.mean + u*d_v, h, r % n_tok, r/n_tok);
    }
    ggml_barrier(params->threadpool);

    // stage 2
    for (int64_t u = params->ith; u < n_row*n_head; u += params->nth) {
        const int64_t j = u % n_head, r = u/n_head, h = j/n_group_q, i = r % n_tok, s = r/n_tok;

        const int32_t * x = sel ? at<const int32_t>(sel, h, i, s) : nullptr;
        float * res = (float *) dst->data + r*dst->nb[1]/sizeof(float) + j*d_v;
        merge(res, w.state + (r*w.n_chunk*n_head + j)*w.ld, n_head*w.ld, (int) (sel ? ceil_div(n_sel(x), w.chunk) : w.n_chunk), d_v, sinks ? (const float *) sinks->data + j : nullptr);

        if (w.n_mean > 0) {
            const float * mean = w.mean + (r*n_head_kv + h)*d_v;
            float alpha;
            memcpy(&alpha, x + 1 + j % n_group_q, sizeof(alpha));
            for (int c = 0; c < d_v; ++c) {
                res[c] = alpha*res[c] + (1.0f - alpha)*mean[c];
            }
        }
    }
}

} // namespace

void sparse::forward_attend(const ggml_compute_params * params, ggml_tensor * dst) {
    attend(params, dst);
    if (dst->src[9] && params->ith == 0) {
        attend_stats(dst);
    }
}

size_t sparse::attend_work_size(const ggml_tensor * dst, int n_threads) { return attend_work(dst, nullptr, 0, n_threads).size; }
