// ggml glue of the sparse attention steps: unpack tensors, split work over threads, call sparse-steps.h, merge.
//
//   types    q f32; K, V f16 | bf16 | f32; k_t f16 or codes of 8 or 4 bits; mask f16; everything else as in ggml-sparse.h (asserted by the constructors)
//   threads  work is cut into units whose size depends on shapes only, and partial results are merged in the order of the units:
//            the result has the same bits for any number of threads. Every thread reaches every barrier.
//   memory   scratch comes from params->wdata; its layout is written once, in *_work, and serves ggml_sparse_attn_work_size too
//   stats    thread 0 adds; the numbers follow from shapes, visible, sealed and n_sel

// gcc 12 takes the "undefined" operands inside its own AVX-512 header for mistakes (GCC bug 105593)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "sparse-attn.h"

#include "ggml-cpu-impl.h"
#include "sparse-quant.h"
#include "sparse-steps.h"

#include <algorithm>

using namespace sparse;

namespace {

// ---- helpers ----

template <typename T = char>
T * at(const ggml_tensor * t, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    return (T *) ((char *) t->data + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3]);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1)/b; }

// calls f with a pointer of the element type of K or V
template <typename F>
void with_type(ggml_type type, F f) {
    switch (type) {
        case GGML_TYPE_F16:  f((const f16   *) nullptr); break;
        case GGML_TYPE_BF16: f((const bf16  *) nullptr); break;
        case GGML_TYPE_F32:  f((const float *) nullptr); break;
        default: GGML_ABORT("sparse_attn: type %s of K or V is not supported", ggml_type_name(type));
    }
}

template <typename P>
P op_params(const ggml_tensor * dst) {
    P p;
    memcpy(&p, dst->op_params + 1, sizeof(p));
    return p;
}

// ALiBi; the same slopes as ggml's softmax
float head_slope(int h, int n_head, float max_bias) {
    if (max_bias <= 0.0f) {
        return 1.0f;
    }
    const int   n_log2 = 1 << (int) floorf(log2f((float) n_head));
    const float m0     = powf(2.0f, -max_bias/n_log2);
    const float m1     = powf(2.0f, -max_bias/2.0f/n_log2);
    return h < n_log2 ? powf(m0, h + 1) : powf(m1, 2*(h - n_log2) + 1);
}

// hands out pieces of the work buffer, in cache lines of their own; with a NULL buffer it only counts
struct bump {
    static constexpr size_t ALIGN = 128; // lines are fetched in pairs

    uintptr_t base;
    size_t    used = 0;

    explicit bump(const void * buf) : base(((uintptr_t) buf + ALIGN - 1)/ALIGN*ALIGN) {}

    template <typename T>
    T * take(size_t n) {
        T * res = (T *) (base + used);
        used += (n*sizeof(T) + ALIGN - 1)/ALIGN*ALIGN;
        return res;
    }

    const void * end() const { return (const void *) (base + used); }
};

// cells of a group that lie below n_kv
int group_size(int64_t g, int64_t n_kv) { return (int) std::min<int64_t>(GROUP, n_kv - g*GROUP); }

void add_stat(const ggml_tensor * stats, ggml_sparse_stat i, int64_t n) { ((int64_t *) stats->data)[i] += n; }

// how many rows before their use K and V are asked for: a block of rows is too short for the hardware to run ahead
constexpr int AHEAD = 2*ROW_BLOCK;

void prefetch_rows(const ggml_tensor * x, int64_t h, int64_t s, const int32_t * rows, int r, int n) {
    const size_t size = x->ne[0]*ggml_type_size(x->type);
    for (int i = r; i < std::min(r + ROW_BLOCK, n); ++i) {
        for (size_t o = 0; o < size; o += 64) {
            prefetch(at(x, h, rows[i], s) + o);
        }
    }
}

// the share of KV head h in asking for the block of rows from r on: a block holds all heads of its positions, and is asked for in the
// order of memory. Behind the n rows of x follow those of y
template <typename TX, typename TY>
const char * block_of(const ggml_tensor * x, const ggml_tensor * y, int64_t h, int64_t s, const int32_t * rows, int r, int n) {
    return r < n ? at(x, 0, rows[r], s) + h*ROW_BLOCK*x->ne[0]*sizeof(TX) :
        at(y, 0, rows[std::min(r - n, n - 1)], s) + h*ROW_BLOCK*y->ne[0]*sizeof(TY);
}

// the units [u0, u1) of this thread where consecutive units are neighbours in memory
struct unit_range {
    int64_t u0, u1;

    unit_range(const ggml_compute_params * params, int64_t n) : u0(n*params->ith/params->nth), u1(n*(params->ith + 1)/params->nth) {}
};

// ---- SEAL ----

// codes the run of group g anew, for one KV head; once per run, at the first of its groups in the list
void seal_codes(const ggml_tensor * dst, int64_t h, int64_t g, int64_t s, const int32_t * list, int64_t i) {
    constexpr int N = RUN/GROUP;
    const ggml_tensor * k_t     = dst->src[0];
    const ggml_tensor * k       = dst->src[2];
    const ggml_tensor * k_range = dst->src[6];
    const ggml_tensor * sealed  = dst->src[7];

    const int64_t run = g/N;
    for (int64_t j = 0; j < i; ++j) {
        if (list[j] >= 0 && list[j]/N == run) {
            return;
        }
    }
    uint8_t valid[N];
    for (int64_t j = 0; j < N; ++j) {
        valid[j] = (run*N + j + 1)*GROUP <= k->ne[2] && at<const int32_t>(sealed, s)[run*N + j] != 0;
    }
    const int n_bit = op_params<int32_t>(dst);
    const int d_k   = (int) k->ne[0];
    with_type(k->type, [&](auto * t) {
        seal_run<std::decay_t<decltype(*t)>>(at(k_t, h*d_k, s) + run*RUN*n_bit/8, k_t->nb[1], at<float>(k_range, h*d_k, run, s),
                at(k, h, run*RUN, s), k->nb[2], valid, d_k, n_bit);
    });
}

void forward_seal(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * k_t   = dst->src[0];
    const ggml_tensor * v_sum = dst->src[1];
    const ggml_tensor * k     = dst->src[2];
    const ggml_tensor * v     = dst->src[3];
    const ggml_tensor * list  = dst->src[4];
    const ggml_tensor * stats = dst->src[5];

    const int     n_bit     = op_params<int32_t>(dst);
    const int64_t n_list    = list->ne[0];
    const int64_t n_stream  = list->ne[1];
    const int64_t n_head_kv = k->ne[1];
    const int     d_k       = (int) k->ne[0];
    const int     d_v       = v_sum ? (int) v->ne[0] : 0;
    const int64_t n_kv      = k->ne[2];

    const auto valid = [&](int32_t g) { return g >= 0 && g*(int64_t) GROUP < n_kv; };

    for (int64_t u = params->ith; u < n_list*n_stream*n_head_kv; u += params->nth) {
        const int64_t h = u % n_head_kv;
        const int64_t s = u/n_head_kv/n_list;
        const int64_t g = at<const int32_t>(list, s)[u/n_head_kv % n_list];
        if (!valid((int32_t) g)) {
            continue;
        }
        const int n = group_size(g, n_kv);
        if (n_bit != 16) {
            seal_codes(dst, h, g, s, at<const int32_t>(list, s), u/n_head_kv % n_list);
        } else {
            with_type(k->type, [&](auto * t) {
                seal_k<std::decay_t<decltype(*t)>>(at(k_t, h*d_k, s) + g*GROUP*sizeof(f16), k_t->nb[1], at(k, h, g*GROUP, s), k->nb[2], n, d_k);
            });
        }
        if (v_sum) {
            with_type(v->type, [&](auto * t) {
                float * sum = at<float>(v_sum, g, s) + h*d_v;
                memset(sum, 0, d_v*sizeof(float));
                sum_v<std::decay_t<decltype(*t)>>(sum, at(v, h, g*GROUP, s), v->nb[2], n, d_v);
            });
        }
    }

    if (stats && params->ith == 0) {
        int64_t n = 0;
        for (int64_t i = 0; i < n_list*n_stream; ++i) {
            n += valid(((const int32_t *) list->data)[i]);
        }
        add_stat(stats, GGML_SPARSE_STAT_GROUPS_SEALED, n);
    }
}

// ---- VISIBLE ----

void forward_visible(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * mask = dst->src[0];

    const int64_t n_kv  = mask->ne[0];
    const int64_t n_grp = dst->ne[0];
    const int64_t n_tok = dst->ne[1];

    for (int64_t u = params->ith; u < n_grp*n_tok*dst->ne[3]; u += params->nth) {
        const int64_t g = u % n_grp;
        const int64_t i = u/n_grp % n_tok;
        const int64_t s = u/n_grp/n_tok;
        at<int32_t>(dst, i, 0, s)[g] = count_visible(at<const f16>(mask, i, 0, s) + g*GROUP, group_size(g, n_kv));
    }
}

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

void forward_score(const ggml_compute_params * params, ggml_tensor * dst) {
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

void forward_select(const ggml_compute_params * params, ggml_tensor * dst) {
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

// ---- ATTEND ----

// Stage 1: units of a fixed number of positions leave partial states; with mean_v, further units leave partial sums of V.
// Stage 2: one unit per (token, query head) merges.
//   over a selection: a unit is one KV head and part of its cells; over all: all KV heads and a run of positions, so that K and V are
//   read in the order of memory
struct attend_work {
    bool    dense;
    int64_t chunk;      // positions per unit
    int64_t n_chunk;    // units per token (and KV head, over a selection)
    int64_t n_mean;     // units of the mean per token
    int     ld;         // floats per state

    float   * state;    // [n_tok*n_stream][n_head][n_chunk][ld]
    float   * mean;     // [n_tok*n_stream][n_mean][d_v*n_head_kv]
    int32_t * rows;     // [chunk]                              this thread's
    float   * bias;     // [chunk + W]                          mask values
    float   * s;        // [n_head or n_group_q][chunk + W]     logits, then softmax numerators
    size_t    size;

    static constexpr int64_t MEAN_GROUPS = 64; // groups per unit of the mean

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
        n_mean = op_params<ggml_sparse_attend_params>(dst).mean_v ? ceil_div(ceil_div(k->ne[2], GROUP), MEAN_GROUPS) : 0;

        // larger units when many tokens would need much memory for their states
        const int64_t n_max = dense ? k->ne[2] : sel->ne[0] - 1 - n_group_q;
        const int64_t limit = 64*1024*1024/(n_row*n_head*ld*(int64_t) sizeof(float)) + 1;
        chunk = dense ? 256 : 128;
        while (ceil_div(n_max, chunk) > limit) {
            chunk *= 2;
        }
        n_chunk = ceil_div(n_max, chunk);

        bump shared(wdata);
        state = shared.take<float>(n_row*n_head*n_chunk*ld);
        mean  = shared.take<float>(n_row*n_mean*v->ne[0]*v->ne[1]);

        bump own(shared.end());
        for (int i = 0; i < nth; ++i) {
            if (i <= ith) {
                rows = own.take<int32_t>(chunk);
                bias = own.take<float>(chunk + W);
                s    = own.take<float>((dense ? n_head : n_group_q)*(chunk + W));
            }
            if (i == 0) {
                size = shared.used + nth*own.used + bump::ALIGN;
            }
        }
    }
};

// attention of the query heads of KV heads [h0, h1) over the n rows in w.rows
template <typename TK, typename TV>
void attend_rows(const ggml_tensor * dst, const attend_work & w, int64_t h0, int64_t h1, int64_t i, int64_t s, int64_t c, int n) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * v = dst->src[2];
    const auto p = op_params<ggml_sparse_attend_params>(dst);

    const int     n_head    = (int) q->ne[1];
    const int     n_group_q = (int) (n_head/k->ne[1]);
    const int     d_k       = (int) k->ne[0];
    const int     d_v       = (int) v->ne[0];
    const int64_t ld_s      = w.chunk + W;

    float * state = w.state + ((s*q->ne[2] + i)*n_head*w.n_chunk + c)*w.ld;
    const int64_t ld_h = w.n_chunk*w.ld; // from one query head to the next

    for (int r = 0; r < AHEAD && !w.dense; r += ROW_BLOCK) {
        prefetch_rows(k, h0, s, w.rows, r, n);
    }

    // logits: q . k, rows outside so that all heads of a few positions are read together
    for (int r = 0; r < n; r += ROW_BLOCK) {
        for (int64_t h = h0; h < h1; ++h) {
            const char * next = nullptr;
            if (w.dense) { // what follows, in the order of memory; then the first rows of V
                next = block_of<TK, TV>(k, v, h, s, w.rows, r + AHEAD, n);
            } else {
                prefetch_rows(k, h, s, w.rows, r + AHEAD, n);
                prefetch_rows(v, h, s, w.rows, r, n);
            }
            dot_rows<TK>(w.s + (h - h0)*n_group_q*ld_s + r, ld_s, at<const float>(q, h*n_group_q, i, s), q->nb[1]/sizeof(float), n_group_q,
                    at(k, h, 0, s), k->nb[2], w.rows + r, std::min(ROW_BLOCK, n - r), d_k, next);
        }
    }

    // softmax within the unit
    for (int r = n; r < n + W; ++r) {
        w.bias[r] = -INFINITY;
    }
    for (int64_t j = h0*n_group_q; j < h1*n_group_q; ++j) {
        const attn_state st { state + j*ld_h, d_v };
        float * x = w.s + (j - h0*n_group_q)*ld_s;
        std::fill(x + n, x + n + W, 0.0f);
        softmax_part(st, x, w.bias, n, p.scale, p.softcap, head_slope((int) j, n_head, p.max_bias));
        std::fill(st.acc(), st.acc() + d_v, 0.0f);
    }

    // sum of p * v
    for (int r = 0; r < n; r += ROW_BLOCK) {
        for (int64_t h = h0; h < h1; ++h) {
            const char * next = nullptr;
            if (w.dense && r + AHEAD < n) {
                next = block_of<TV, TV>(v, v, h, s, w.rows, r + AHEAD, n);
            } else if (w.dense) { // then the first rows of K of the next unit
                next = at(k, 0, std::min<int64_t>(w.rows[n - 1] + 1 + r + AHEAD - n, k->ne[2] - 1), s) + h*ROW_BLOCK*d_k*sizeof(TK);
            }
            add_rows<TV>(state + h*n_group_q*ld_h, ld_h, w.s + (h - h0)*n_group_q*ld_s + r, ld_s, n_group_q,
                    at(v, h, 0, s), v->nb[2], w.rows + r, std::min(ROW_BLOCK, n - r), d_v, next);
        }
    }
}

// the visible cells among n cells -> w.rows, w.bias; cell(j): the j-th
template <typename F>
int visible_rows(const attend_work & w, const f16 * mask, int64_t n_kv, int64_t n, F cell) {
    int res = 0;
    for (int64_t j = 0; j < n; ++j) {
        const int64_t t = cell(j);
        if (t >= 0 && t < n_kv && mask[t].bits != F16_NEG_INF) {
            w.rows[res] = (int32_t) t;
            w.bias[res] = to_f32(mask[t]);
            ++res;
        }
    }
    return res;
}

// sums of V over the visible positions of the groups [g0, g1), all KV heads: from v_sum where a group is sealed and fully visible
template <typename TV>
void mean_unit(const ggml_tensor * dst, float * sum, int64_t g0, int64_t g1, int64_t i, int64_t s) {
    const ggml_tensor * v       = dst->src[2];
    const ggml_tensor * mask    = dst->src[3];
    const ggml_tensor * visible = dst->src[4];
    const ggml_tensor * v_sum   = dst->src[6];
    const ggml_tensor * sealed  = dst->src[7];

    const int     d_v       = (int) v->ne[0];
    const int64_t n_head_kv = v->ne[1];

    memset(sum, 0, d_v*n_head_kv*sizeof(float));
    for (int64_t g = g0; g < g1; ++g) {
        const int32_t vis = at<const int32_t>(visible, i, 0, s)[g];
        if (vis == GROUP && at<const int32_t>(sealed, s)[g]) {
            sum_v<float>(sum, at(v_sum, g, s), 0, 1, (int) (d_v*n_head_kv));
            continue;
        }
        const f16 * m = at<const f16>(mask, i, 0, s);
        for (int64_t t = g*GROUP; vis > 0 && t < g*GROUP + group_size(g, v->ne[2]); ++t) {
            for (int64_t h = 0; h < n_head_kv && m[t].bits != F16_NEG_INF; ++h) {
                sum_v<TV>(sum + h*d_v, at(v, h, t, s), 0, 1, d_v);
            }
        }
    }
}

void attend_stats(const ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * v       = dst->src[2];
    const ggml_tensor * visible = dst->src[4];
    const ggml_tensor * sel     = dst->src[5];
    const ggml_tensor * sealed  = dst->src[7];
    const ggml_tensor * stats   = dst->src[9];
    const bool mean_v = op_params<ggml_sparse_attend_params>(dst).mean_v;

    const int64_t n_head_kv = k->ne[1];
    const int64_t row_v     = v->ne[0]*ggml_type_size(v->type);
    const int64_t row       = k->ne[0]*ggml_type_size(k->type) + row_v;

    int64_t n_vis = 0, n_read = 0, bytes_mean = 0;
    for (int64_t s = 0; s < q->ne[3]; ++s) {
        for (int64_t i = 0; i < q->ne[2]; ++i) {
            for (int64_t g = 0; g < visible->ne[0]; ++g) {
                const int32_t vis = at<const int32_t>(visible, i, 0, s)[g];
                n_vis += vis;
                if (mean_v) {
                    bytes_mean += vis == GROUP && at<const int32_t>(sealed, s)[g] ? v->ne[0]*(int64_t) sizeof(float) : vis*row_v;
                }
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

template <typename TK, typename TV>
void attend(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * v       = dst->src[2];
    const ggml_tensor * mask    = dst->src[3];
    const ggml_tensor * visible = dst->src[4];
    const ggml_tensor * sel     = dst->src[5];
    const ggml_tensor * sinks   = dst->src[8];

    const int64_t n_kv      = k->ne[2];
    const int64_t n_grp     = visible->ne[0];
    const int64_t n_head_kv = k->ne[1];
    const int64_t n_head    = q->ne[1];
    const int64_t n_group_q = n_head/n_head_kv;
    const int64_t n_tok     = q->ne[2];
    const int64_t n_row     = n_tok*q->ne[3];
    const int     d_v       = (int) v->ne[0];
    const int64_t d_mean    = d_v*n_head_kv;

    const attend_work w(dst, params->wdata, params->ith, params->nth);

    const auto n_sel = [&](const int32_t * x) { return std::min<int64_t>(std::max(x[0], 0), sel->ne[0] - 1 - n_group_q); };

    // stage 1
    const int64_t n_unit = n_row*w.n_chunk*(w.dense ? 1 : n_head_kv);
    const unit_range own(params, n_unit + n_row*w.n_mean);
    for (int64_t u = own.u0; u < own.u1; ++u) {
        if (u >= n_unit) {
            const int64_t b = (u - n_unit) % w.n_mean, r = (u - n_unit)/w.n_mean;
            mean_unit<TV>(dst, w.mean + (u - n_unit)*d_mean, b*w.MEAN_GROUPS, std::min((b + 1)*w.MEAN_GROUPS, n_grp), r % n_tok, r/n_tok);
        } else if (w.dense) {
            const int64_t c = u % w.n_chunk, i = u/w.n_chunk % n_tok, s = u/w.n_chunk/n_tok;
            const int64_t t0 = c*w.chunk;
            const int n = visible_rows(w, at<const f16>(mask, i, 0, s), n_kv, std::min(w.chunk, n_kv - t0), [&](int64_t j) { return t0 + j; });
            attend_rows<TK, TV>(dst, w, 0, n_head_kv, i, s, c, n);
        } else {
            const int64_t c = u % w.n_chunk, h = u/w.n_chunk % n_head_kv, i = u/w.n_chunk/n_head_kv % n_tok, s = u/w.n_chunk/n_head_kv/n_tok;
            const int32_t * x = at<const int32_t>(sel, h, i, s);
            const int64_t j0 = c*w.chunk, n_cell = std::min(w.chunk, n_sel(x) - j0);
            if (n_cell <= 0) {
                continue; // not merged either
            }
            const int n = visible_rows(w, at<const f16>(mask, i, 0, s), n_kv, n_cell, [&](int64_t j) { return x[1 + n_group_q + j0 + j]; });
            attend_rows<TK, TV>(dst, w, h, h + 1, i, s, c, n);
        }
    }
    ggml_barrier(params->threadpool);

    // stage 2
    for (int64_t u = params->ith; u < n_row*n_head; u += params->nth) {
        const int64_t j = u % n_head, r = u/n_head, h = j/n_group_q, i = r % n_tok, s = r/n_tok;

        const int32_t * x = sel ? at<const int32_t>(sel, h, i, s) : nullptr;
        float * res = (float *) dst->data + r*dst->nb[1]/sizeof(float) + j*d_v;
        merge(res, w.state + u*w.n_chunk*w.ld, w.ld, (int) (sel ? ceil_div(n_sel(x), w.chunk) : w.n_chunk), d_v, sinks ? (const float *) sinks->data + j : nullptr);

        if (w.n_mean > 0) {
            int64_t n_vis = 0;
            for (int64_t g = 0; g < n_grp; ++g) {
                n_vis += at<const int32_t>(visible, i, 0, s)[g];
            }
            float alpha;
            memcpy(&alpha, x + 1 + j % n_group_q, sizeof(alpha));
            for (int c = 0; c < d_v && n_vis > 0; ++c) {
                float sum = 0.0f;
                for (int64_t b = 0; b < w.n_mean; ++b) {
                    sum += w.mean[(r*w.n_mean + b)*d_mean + h*d_v + c];
                }
                res[c] = alpha*res[c] + (1.0f - alpha)*(sum/n_vis);
            }
        }
    }
}

void forward_attend(const ggml_compute_params * params, ggml_tensor * dst) {
    with_type(dst->src[1]->type, [&](auto * tk) {
        with_type(dst->src[2]->type, [&](auto * tv) {
            attend<std::decay_t<decltype(*tk)>, std::decay_t<decltype(*tv)>>(params, dst);
        });
    });
    if (dst->src[9] && params->ith == 0) {
        attend_stats(dst);
    }
}

} // namespace

size_t ggml_sparse_attn_work_size(const ggml_tensor * node, int n_threads) {
    switch ((ggml_sparse_attn_op) node->op_params[0]) {
        case GGML_SPARSE_ATTN_SCORE:  return score_work (node, nullptr, 0, n_threads).size;
        case GGML_SPARSE_ATTN_SELECT: return select_work(node, nullptr, 0, n_threads).size;
        case GGML_SPARSE_ATTN_ATTEND: return attend_work(node, nullptr, 0, n_threads).size;
        default:                      return 0;
    }
}

void ggml_compute_forward_sparse_attn(const ggml_compute_params * params, ggml_tensor * dst) {
    switch ((ggml_sparse_attn_op) dst->op_params[0]) {
        case GGML_SPARSE_ATTN_SEAL:    forward_seal   (params, dst); break;
        case GGML_SPARSE_ATTN_VISIBLE: forward_visible(params, dst); break;
        case GGML_SPARSE_ATTN_SCORE:   forward_score  (params, dst); break;
        case GGML_SPARSE_ATTN_SELECT:  forward_select (params, dst); break;
        case GGML_SPARSE_ATTN_ATTEND:  forward_attend (params, dst); break;
        default: GGML_ABORT("sparse_attn: unknown sub-operation %d", dst->op_params[0]);
    }
}
