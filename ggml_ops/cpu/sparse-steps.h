#pragma once

// The steps of sparse attention on plain pointers and strides: no ggml tensors, no threads. Contracts in ggml-sparse.h;
// the same steps, one float at a time, in ref/. Strides called nb_* are in bytes, ld_* in elements.

#include "ggml-sparse.h"
#include "sparse-vec.h"

#include <cfloat>

namespace sparse {

constexpr int GROUP = GGML_SPARSE_GROUP;

// rows handled together by the gather: a multiple of every W
constexpr int ROW_BLOCK = 16;

// ---- seal: "store K twice" ----

static inline f16 clamp_f16(f16 x) {
    return (x.bits & 0x7FFF) == 0x7C00 ? f16 { (uint16_t) (x.bits - 1) } : x; // +-inf -> +-65504
}
static inline f16 clamp_f16(float x) { return to_f16(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }
static inline f16 clamp_f16(bf16  x) { return clamp_f16(to_f32(x)); }

// the n <= GROUP positions of a group of one KV head: k [n][d] -> k_t [d][n]
template <typename T>
static void seal_k(char * k_t, size_t nb_chan, const char * k, size_t nb_pos, int n, int d) {
    constexpr int NC = 32; // one line of K per position, then whole lines of k_t
    for (int c0 = 0; c0 < d; c0 += NC) {
        const int nc = d - c0 < NC ? d - c0 : NC;

        f16 tile[NC][GROUP];
        for (int t = 0; t < n; ++t) {
            const T * row = (const T *) (k + t*nb_pos) + c0;
            for (int c = 0; c < nc; ++c) {
                tile[c][t] = clamp_f16(row[c]);
            }
        }
        for (int c = 0; c < nc; ++c) {
            memcpy(k_t + (c0 + c)*nb_chan, tile[c], n*sizeof(f16));
        }
    }
}

// sum[c] += v[t][c] over n positions
template <typename T>
static void sum_v(float * sum, const char * v, size_t nb_pos, int n, int d) {
    for (int t = 0; t < n; ++t) {
        const T * row = (const T *) (v + t*nb_pos);
        int c = 0;
        for (; c + W <= d; c += W) {
            store(sum + c, add(load(sum + c), load(row + c)));
        }
        for (; c < d; ++c) {
            sum[c] += to_f32(row[c]);
        }
    }
}

// ---- visible ----

static inline int count_visible(const f16 * mask, int n) {
    int res = 0;
    for (int t = 0; t < n; ++t) {
        res += mask[t].bits != F16_NEG_INF;
    }
    return res;
}

// ---- order statistics ----

static inline int count_ge(const float * x, int64_t n, float lim) {
    const vf l = set1(lim);
    int res = 0;
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        res += popcount(bits(ge(load(x + i), l)));
    }
    if (i < n) {
        res += popcount(bits(ge(load_n(x + i, (int) (n - i)), l)) & ((1u << (n - i)) - 1));
    }
    return res;
}

// floats in the order of integers, and back
static inline int64_t to_order(float x) {
    int32_t b;
    memcpy(&b, &x, sizeof(b));
    return b >= 0 ? b : INT32_MIN - (int64_t) b;
}
static inline float from_order(int64_t o) {
    const int32_t b = (int32_t) (o >= 0 ? o : INT32_MIN - o);
    float res;
    memcpy(&res, &b, sizeof(res));
    return res;
}

// the largest value that at least k of the n values reach; lo if fewer than k are >= lo. Bisection over the floats between lo and hi:
// at most 32 counting passes without a branch on the data
static inline float kth_largest(const float * x, int64_t n, int64_t k, float lo, float hi) {
    int64_t a = to_order(lo); // count_ge(a) >= k, or a == lo
    int64_t b = to_order(hi);
    while (a < b) {
        const int64_t m = a + (b - a + 1)/2;
        if (count_ge(x, n, from_order(m)) >= k) {
            a = m;
        } else {
            b = m - 1;
        }
    }
    return from_order(a);
}

// ---- step 1: approximate scores ----

// the r channels with the largest sum over the heads of |q|, ascending, and per head the coefficients q*scale/sqrt(|q_r|_1/|q|_1)
//   q [n_head][d], chan [r], coef [n_head][r], sum: scratch [d]; returns the number of channels (r, or fewer if q holds NaN)
static int choose_channels(int32_t * chan, float * coef, float * sum, const float * q, int64_t ld_q, int n_head, int d, int r, float scale) {
    for (int c = 0; c < d; ++c) {
        sum[c] = 0.0f;
        for (int h = 0; h < n_head; ++h) {
            sum[c] += fabsf(q[h*ld_q + c]);
        }
    }

    const float cut = kth_largest(sum, d, r, 0.0f, INFINITY);

    int n_tie = r; // channels equal to the cut that still fit
    for (int c = 0; c < d; ++c) {
        n_tie -= sum[c] > cut;
    }
    int n = 0;
    for (int c = 0; c < d; ++c) {
        if (sum[c] > cut || (sum[c] == cut && n_tie-- > 0)) {
            chan[n++] = c;
        }
    }

    for (int h = 0; h < n_head; ++h) {
        const float * qh = q + h*ld_q;
        float l1 = 0.0f, l1_r = 0.0f;
        for (int c = 0; c < d; ++c) {
            l1 += fabsf(qh[c]);
        }
        for (int i = 0; i < n; ++i) {
            l1_r += fabsf(qh[chan[i]]);
        }
        const float s = l1_r > 0.0f ? scale/sqrtf(l1_r/l1) : 0.0f;
        for (int i = 0; i < n; ++i) {
            coef[h*r + i] = qh[chan[i]]*s;
        }
    }
    return n;
}

// s[h][t] += sum over NC channels of coef[h][c]*x[c][t] for n positions and n_head heads; first: s starts from 0
//   next [NC]: rows that the next pass will read (or NULL), asked for on the way: rows are too short for the hardware to run ahead
template <int NC, typename T>
static SPARQ_NOINLINE void add_channels(float * s, int64_t ld_s, int n_head, const T * const * x, const T * const * next,
        const float * coef, int ld_coef, int64_t n, bool first) {
    constexpr int NT = 64/sizeof(T) > W ? 64/sizeof(T)/W : 1; // vectors per cache line
    constexpr int NB = NT*NC <= N_ACC ? NT : 1;               // vectors that share a coefficient, as the registers allow
    int64_t t = 0;
    for (; t + NT*W <= n; t += NT*W) {
        for (int c = 0; c < NC && next; ++c) {
            prefetch(next[c] + t);
        }
        for (int j = 0; j < NT*W; j += NB*W) {
            vf k[NC][NB];
            for (int c = 0; c < NC; ++c) {
                for (int i = 0; i < NB; ++i) {
                    k[c][i] = load(x[c] + t + j + i*W);
                }
            }
            for (int h = 0; h < n_head; ++h) {
                float * sh = s + h*ld_s + t + j;
                vf a[NB];
                for (int i = 0; i < NB; ++i) {
                    a[i] = first ? set1(0.0f) : load(sh + i*W);
                }
                for (int c = 0; c < NC; ++c) {
                    const vf b = set1(coef[h*ld_coef + c]);
                    for (int i = 0; i < NB; ++i) {
                        a[i] = fma(k[c][i], b, a[i]);
                    }
                }
                for (int i = 0; i < NB; ++i) {
                    store(sh + i*W, a[i]);
                }
            }
        }
    }
    for (; t < n; ++t) {
        for (int h = 0; h < n_head; ++h) {
            float a = first ? 0.0f : s[h*ld_s + t];
            for (int c = 0; c < NC; ++c) {
                a = fmaf(to_f32(x[c][t]), coef[h*ld_coef + c], a);
            }
            s[h*ld_s + t] = a;
        }
    }
}

// s[h][t] = sum over all n_chan channels, in their order; x points at position t of channel 0, chan == NULL: channel i is row i
// NUMERICS: one fma per channel in ascending order, whatever the instruction set and the split into passes
template <typename T>
static void score_channels(float * s, int64_t ld_s, int n_head, const char * x, size_t nb_chan, const int32_t * chan, int n_chan,
        const float * coef, int ld_coef, int64_t n) {
    const T * row[16];
    const T * next[16];
    for (int i = 0; i < n_chan; ) {
        const int nc = n_chan - i >= 16 && N_ACC >= 16 ? 16 : n_chan - i >= 8 ? 8 : n_chan - i >= 4 ? 4 : 1;
        for (int c = 0; c < nc; ++c) {
            row[c] = (const T *) (x + (chan ? chan[i + c] : i + c)*nb_chan);
        }
        const bool more = i + 2*nc <= n_chan && chan;
        for (int c = 0; c < nc && more; ++c) {
            next[c] = (const T *) (x + chan[i + nc + c]*nb_chan);
        }
        switch (nc) {
            case 16: add_channels<16>(s, ld_s, n_head, row, more ? next : nullptr, coef + i, ld_coef, n, i == 0); break;
            case 8:  add_channels<8>(s, ld_s, n_head, row, more ? next : nullptr, coef + i, ld_coef, n, i == 0); break;
            case 4:  add_channels<4>(s, ld_s, n_head, row, more ? next : nullptr, coef + i, ld_coef, n, i == 0); break;
            default: add_channels<1>(s, ld_s, n_head, row, more ? next : nullptr, coef + i, ld_coef, n, i == 0); break;
        }
        i += nc;
    }
}

// the chosen channels of n positions of K, transposed: x [n_chan][GROUP]; for a group that is not sealed
template <typename T>
static void gather_channels(float * x, const char * k, size_t nb_pos, const int32_t * chan, int n_chan, const f16 * mask, int n) {
    for (int t = 0; t < n; ++t) {
        if (mask[t].bits == F16_NEG_INF) {
            for (int i = 0; i < n_chan; ++i) {
                x[i*GROUP + t] = 0.0f;
            }
            continue;
        }
        const T * row = (const T *) (k + t*nb_pos);
        for (int i = 0; i < n_chan; ++i) {
            x[i*GROUP + t] = to_f32(row[chan[i]]);
        }
    }
}

// ---- logits: scale, softcap, mask ----

static inline vf soft_cap(vf x, float cap) {
    return mul(set1(cap), tanh(div(x, set1(cap))));
}

// res = softcap(s*scale) + slope*mask; -inf where hidden, whatever s was. res may be s
static void finish_logits(float * res, const float * s, const f16 * mask, int64_t n, float scale, float softcap, float slope) {
    const vf inf = set1(-INFINITY);
    for (int64_t t = 0; t < n; t += W) {
        const int  nt = n - t < W ? (int) (n - t) : W;
        const vf   m  = nt == W ? load(mask + t) : load_n(mask + t, nt);
        vf x = mul(nt == W ? load(s + t) : load_n(s + t, nt), set1(scale));
        if (softcap > 0.0f) {
            x = soft_cap(x, softcap);
        }
        x = select(eq(m, inf), inf, fma(m, set1(slope), x));
        if (nt == W) {
            store(res + t, x);
        } else {
            store_n(res + t, x, nt);
        }
    }
}

// ---- exact scores: dot products with gathered rows ----

// s[h][i] = q[h] . k[rows[i]] for HB heads and up to W rows; NR rows share each load of q
//   next: if given, W*d elements there are asked for, a line at a time (bursts of requests stall)
template <int HB, int NR, typename T>
static SPARQ_NOINLINE void dot_block( // inlined, its pointers no longer fit the registers (2x slower)
        float * s, int64_t ld_s, const float * q, int64_t ld_q, const char * k, size_t nb_pos, const int32_t * rows, int n, int d, const char * next) {
    constexpr int NW = NR < W ? NR : W;
    vf part[HB][W];
    for (int j = 0; j < W; j += NW) {
        const T * x[NW];
        for (int i = 0; i < NW; ++i) {
            x[i] = (const T *) (k + rows[j + i < n ? j + i : n - 1]*nb_pos);
        }
        vf a[HB][NW];
        for (int h = 0; h < HB; ++h) {
            for (int i = 0; i < NW; ++i) {
                a[h][i] = set1(0.0f);
            }
        }
        int c = 0;
        for (; c + W <= d; c += W) {
            if (next && c % (64/sizeof(T)) == 0) {
                for (int i = 0; i < NW; ++i) {
                    prefetch((const T *) next + (j + i)*d + c);
                }
            }
            vf kx[NW];
            for (int i = 0; i < NW; ++i) {
                kx[i] = load(x[i] + c);
            }
            for (int h = 0; h < HB; ++h) {
                const vf qx = load(q + h*ld_q + c);
                for (int i = 0; i < NW; ++i) {
                    a[h][i] = fma(qx, kx[i], a[h][i]);
                }
            }
        }
        if (c < d) {
            for (int h = 0; h < HB; ++h) {
                const vf qx = load_n(q + h*ld_q + c, d - c);
                for (int i = 0; i < NW; ++i) {
                    a[h][i] = fma(qx, load_n(x[i] + c, d - c), a[h][i]);
                }
            }
        }
        for (int h = 0; h < HB; ++h) {
            for (int i = 0; i < NW; ++i) {
                part[h][j + i] = a[h][i];
            }
        }
    }
    for (int h = 0; h < HB; ++h) {
        store_n(s + h*ld_s, sum_rows(part[h]), n);
    }
}

// s[h][i] = q[h] . k[rows[i]] for n rows; next as above (n*d elements); each row is loaded once for all heads (once per 4 heads from L1)
template <typename T>
static void dot_rows(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * k, size_t nb_pos, const int32_t * rows, int n, int d,
        const char * next) {
    for (int i = 0; i < n; i += W) {
        const int ni = n - i < W ? n - i : W;
        int h = 0;
        for (; h + 4 <= n_head; h += 4) {
            dot_block<4, N_ACC/4, T>(s + h*ld_s + i, ld_s, q + h*ld_q, ld_q, k, nb_pos, rows + i, ni, d, next && h == 0 ? next + i*d*sizeof(T) : nullptr);
        }
        for (; h + 2 <= n_head; h += 2) {
            dot_block<2, N_ACC/2, T>(s + h*ld_s + i, ld_s, q + h*ld_q, ld_q, k, nb_pos, rows + i, ni, d, next && h == 0 ? next + i*d*sizeof(T) : nullptr);
        }
        for (; h < n_head; ++h) {
            dot_block<1, 8, T>(s + h*ld_s + i, ld_s, q + h*ld_q, ld_q, k, nb_pos, rows + i, ni, d, next && h == 0 ? next + i*d*sizeof(T) : nullptr);
        }
    }
}

// ---- step 2: the top k positions ----

// scratch of select_topk; key, cand, cell: n_kv + 2*W each
struct select_scratch {
    float   * key;      // what is ranked: > -inf where visible
    float   * cand;     // keys near or above the cut ..
    int32_t * cell;     // .. and their cells
    float   * e;        // [n_head][n_kv + 2*W] exp(logit - ref), if there is more than one head
    float   * ref;      // [n_head] about the largest logit
    float   * sum;      // [n_head] sum of exp(logit - ref) ..
    float   * inv;      // .. and its inverse
};

// W logits of a row with n left; -inf behind its end
static inline vf load_row(const float * x, int64_t n) {
    return n >= W ? load(x) : select(lt(iota(), set1((float) n)), load_n(x, (int) n), set1(-INFINITY));
}

// sum of exp(x - ref) over a row, where ref is at most a little below the largest x: the largest of a sample, so that the row need not
// be read twice; of all, in the rare case that the sample misses it by far or saw nothing. e, if given, gets the terms, and -inf where x is
static float sum_exp(float * ref, const float * x, int64_t n, float * e) {
    constexpr float FAR = 60.0f; // e^60 times the length of a row is within f32
    const vf inf = set1(-INFINITY);

    vf top = inf;
    for (int64_t t = 0; t < n; t += 16*W) {
        top = vmax(load_row(x + t, n - t), top);
    }
    while (true) {
        const float m = reduce_max(top);
        *ref = m == -INFINITY ? 0.0f : m < FLT_MAX ? m : FLT_MAX;

        const vf r = set1(*ref);
        vf sum = set1(0.0f);
        for (int64_t t = 0; t < n; t += W) {
            prefetch(x + t + 1024); // two pages: exp leaves the processor little room to run ahead
            const vf y = load_row(x + t, n - t);
            const vf z = exp(sub(y, r));
            top = vmax(y, top);
            sum = add(sum, z);
            if (e) {
                store(e + t, select(eq(y, inf), inf, z));
            }
        }
        const float max = reduce_max(top);
        const bool  low = m == -INFINITY && max > -INFINITY; // all of the sample was hidden: ref says nothing
        if ((max - *ref <= FAR && !low) || *ref == FLT_MAX) {
            return reduce_add(sum);
        }
    }
}

// key[t] = sum_h softmax(logits[h])[t], or the logit itself with one head; -inf where hidden (or NaN), and behind n
//   w.ref and w.sum are filled with want_softmax or several heads
static void rank_keys(const select_scratch & w, const float * logits, int64_t ld, int n_head, int64_t n, bool want_softmax) {
    const vf inf = set1(-INFINITY);
    const int64_t ld_e = n + 2*W;

    for (int h = 0; h < n_head && (want_softmax || n_head > 1); ++h) {
        w.sum[h] = sum_exp(w.ref + h, logits + h*ld, n, n_head > 1 ? w.e + h*ld_e : nullptr);
        w.inv[h] = w.sum[h] > 0.0f ? 1.0f/w.sum[h] : 0.0f;
    }
    for (int64_t t = 0; t < n; t += W) {
        vf p;
        if (n_head == 1) {
            p = load_row(logits + t, n - t);
        } else {
            p = set1(0.0f);
            for (int h = 0; h < n_head; ++h) {
                p = fma(load(w.e + h*ld_e + t), set1(w.inv[h]), p);
            }
        }
        store(w.key + t, select(lt(inf, p), vmin(p, set1(FLT_MAX)), inf)); // +inf is left for the forced cells
    }
}

// the cells with the k largest keys, ascending, ties to the lower cell; returns their number, fewer than k if fewer are visible
static int take_largest(int32_t * res, const select_scratch & w, int64_t n, int k) {
    // a guess of the cut from a sample, low enough to leave at least k candidates almost always; the result does not depend on it
    constexpr int N_SAMPLE = 256;
    float guess = -FLT_MAX;
    if (n > 8*N_SAMPLE) {
        float sample[N_SAMPLE];
        const int64_t step = n/N_SAMPLE;
        for (int i = 0; i < N_SAMPLE; ++i) {
            sample[i] = w.key[i*step + i % step];
        }
        const float want = (float) k*N_SAMPLE/n;
        guess = kth_largest(sample, N_SAMPLE, (int64_t) (want + 3.0f*sqrtf(want) + 2.0f), -FLT_MAX, INFINITY);
    }

    int n_cand = 0;
    while (true) {
        n_cand = 0;
        const vf g = set1(guess);
        for (int64_t t = 0; t < n; t += W) { // keys behind n are -inf
            const vf x = load(w.key + t);
            const vm m = ge(x, g);
            append(w.cand + n_cand, x, m);
            n_cand += append_index(w.cell + n_cand, (int32_t) t, m);
        }
        if (n_cand >= k || guess == -FLT_MAX) {
            break;
        }
        guess = -FLT_MAX;
    }

    const float cut = n_cand > k ? kth_largest(w.cand, n_cand, k, guess, INFINITY) : -FLT_MAX;

    int n_tie = n_cand > k ? k : n_cand; // candidates equal to the cut that still fit
    for (int i = 0; i < n_cand; ++i) {
        n_tie -= w.cand[i] > cut;
    }
    int n_res = 0;
    for (int i = 0; i < n_cand; ++i) {
        const bool tie  = w.cand[i] == cut && n_tie > 0;
        const bool take = w.cand[i] > cut || tie;
        n_tie -= tie;
        if (take) {
            res[n_res++] = w.cell[i];
        }
    }
    return n_res;
}

// one KV head of one token: res = n_sel, alpha [n_head], cells, -1 ..
//   forced: the first n_local, then those from n_local_max on; sinks [n_head] or NULL
static void select_topk(int32_t * res, int topk_max, const select_scratch & w, const float * logits, int64_t ld, int n_head, int64_t n,
        const int32_t * forced, int n_forced, int n_local, int n_local_max, int k, const float * sinks, bool want_alpha) {
    rank_keys(w, logits, ld, n_head, n, want_alpha);

    int n_in = 0; // forced cells, each counted once
    for (int i = 0; i < n_forced && n_in < topk_max; ++i) {
        const int32_t cell = forced[i];
        if ((i >= n_local && i < n_local_max) || cell < 0 || cell >= n || !(w.key[cell] > -INFINITY && w.key[cell] < INFINITY)) {
            continue;
        }
        w.key[cell] = INFINITY;
        ++n_in;
    }

    k = k < topk_max ? k : topk_max;
    k = k > n_in     ? k : n_in;

    int32_t * cells = res + 1 + n_head;
    const int n_sel = k > 0 ? take_largest(cells, w, n, k) : 0;
    res[0] = n_sel;
    for (int i = n_sel; i < topk_max; ++i) {
        cells[i] = -1;
    }

    for (int h = 0; h < n_head; ++h) {
        float alpha = 1.0f;
        if (want_alpha) {
            float part = 0.0f;
            for (int i = 0; i < n_sel; i += W) {
                float x[W];
                for (int j = 0; j < W; ++j) {
                    x[j] = i + j < n_sel ? logits[h*ld + cells[i + j]] - w.ref[h] : -INFINITY;
                }
                part += reduce_add(exp(load(x)));
            }
            // the sink takes mass but carries no value: its share stays with the selection
            const float sink = sinks ? expf(sinks[h] - w.ref[h]) : 0.0f;
            const float all  = w.sum[h] + sink;
            alpha = all > 0.0f ? std::fmin((part + sink)/all, 1.0f) : 1.0f;
        }
        memcpy(res + 1 + h, &alpha, sizeof(alpha));
    }
}

// ---- step 3: attention over rows ----

// the partial result of one query head over some positions: acc [d_v], max logit m, sum of exp(logit - m)
struct attn_state {
    float * x;
    int     d;

    static int size(int d) { return (d + 2 + 15)/16*16; } // floats; whole cache lines

    float * acc() const { return x; }
    float & m()   const { return x[d]; }
    float & l()   const { return x[d + 1]; }
};

// acc[h][c] += sum_i p[h][i]*v[rows[i]][c] for HB heads and NV vectors of c; next: rows of d elements to be asked for, as in dot_block
template <int HB, int NV, typename T>
static SPARQ_NOINLINE void add_rows_block(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, const char * v, size_t nb_pos, const int32_t * rows, int n,
        const char * next, int d) {
    vf a[HB][NV];
    for (int h = 0; h < HB; ++h) {
        for (int j = 0; j < NV; ++j) {
            a[h][j] = load(acc + h*ld_acc + j*W);
        }
    }
    for (int i = 0; i < n; ++i) {
        const T * row = (const T *) (v + rows[i]*nb_pos);
        for (int j = 0; j < NV && next; j += 64/(int) sizeof(T) > W ? 64/(int) sizeof(T)/W : 1) {
            prefetch((const T *) next + i*d + j*W);
        }
        vf x[NV];
        for (int j = 0; j < NV; ++j) {
            x[j] = load(row + j*W);
        }
        for (int h = 0; h < HB; ++h) {
            const vf ph = set1(p[h*ld_p + i]);
            for (int j = 0; j < NV; ++j) {
                a[h][j] = fma(ph, x[j], a[h][j]);
            }
        }
    }
    for (int h = 0; h < HB; ++h) {
        for (int j = 0; j < NV; ++j) {
            store(acc + h*ld_acc + j*W, a[h][j]);
        }
    }
}

// acc[h][c] += sum_i p[h][i]*v[rows[i]][c] for HB heads and d columns
template <int HB, typename T>
static inline void add_rows_heads(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, const char * v, size_t nb_pos, const int32_t * rows, int n, int d,
        const char * next) {
    constexpr int NV = N_ACC/HB < 8 ? N_ACC/HB : 8;
    int c = 0;
    for (; c + NV*W <= d; c += NV*W) {
        add_rows_block<HB, NV, T>(acc + c, ld_acc, p, ld_p, v + c*sizeof(T), nb_pos, rows, n, next ? next + c*sizeof(T) : nullptr, d);
    }
    for (; c + W <= d; c += W) {
        add_rows_block<HB, 1, T>(acc + c, ld_acc, p, ld_p, v + c*sizeof(T), nb_pos, rows, n, next ? next + c*sizeof(T) : nullptr, d);
    }
    for (; c < d; ++c) {
        for (int h = 0; h < HB; ++h) {
            float a = acc[h*ld_acc + c];
            for (int i = 0; i < n; ++i) {
                a = fmaf(p[h*ld_p + i], to_f32(((const T *) (v + rows[i]*nb_pos))[c]), a);
            }
            acc[h*ld_acc + c] = a;
        }
    }
}

template <typename T>
static void add_rows(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, const char * v, size_t nb_pos, const int32_t * rows, int n, int d,
        const char * next) {
    int h = 0;
    for (; h + 4 <= n_head; h += 4) {
        add_rows_heads<4, T>(acc + h*ld_acc, ld_acc, p + h*ld_p, ld_p, v, nb_pos, rows, n, d, h == 0 ? next : nullptr);
    }
    for (; h + 2 <= n_head; h += 2) {
        add_rows_heads<2, T>(acc + h*ld_acc, ld_acc, p + h*ld_p, ld_p, v, nb_pos, rows, n, d, h == 0 ? next : nullptr);
    }
    for (; h < n_head; ++h) {
        add_rows_heads<1, T>(acc + h*ld_acc, ld_acc, p + h*ld_p, ld_p, v, nb_pos, rows, n, d, h == 0 ? next : nullptr);
    }
}

// logits of one query head over n rows -> softmax numerators in place; fills m and l of the state
static void softmax_part(const attn_state & st, float * s, const float * bias, int n, float scale, float softcap, float slope) {
    const vf inf = set1(-INFINITY);
    vf m = inf;
    for (int i = 0; i < n; i += W) { // s and bias are readable up to a multiple of W; bias is -inf there
        vf x = mul(load(s + i), set1(scale));
        if (softcap > 0.0f) {
            x = soft_cap(x, softcap);
        }
        const vf b = load(bias + i);
        x = select(eq(b, inf), inf, fma(b, set1(slope), x));
        store(s + i, x);
        m = vmax(x, m);
    }
    st.m() = reduce_max(m);

    const vf m0 = set1(st.m() == -INFINITY ? 0.0f : st.m());
    vf l = set1(0.0f);
    for (int i = 0; i < n; i += W) {
        const vf p = exp(sub(load(s + i), m0));
        store(s + i, p);
        l = add(l, p);
    }
    st.l() = reduce_add(l);
}

// res [d] = sum over the states (x, x + ld, ..) of one query head, in order; then the sink, if any. Zeros if nothing was seen
static void merge(float * res, const float * x, int64_t ld, int n_state, int d, const float * sink) {
    float m = sink ? *sink : -INFINITY;
    for (int i = 0; i < n_state; ++i) {
        const float mi = x[i*ld + d];
        m = mi > m ? mi : m;
    }
    const float m0 = m == -INFINITY ? 0.0f : m;

    for (int c = 0; c < d; ++c) {
        res[c] = 0.0f;
    }
    float l = 0.0f;
    for (int i = 0; i < n_state; ++i) {
        const float * xi = x + i*ld;
        const float   f  = expf(xi[d] - m0);
        l += xi[d + 1]*f;
        for (int c = 0; c < d; ++c) {
            res[c] += xi[c]*f;
        }
    }
    if (sink) {
        l += expf(*sink - m0);
    }
    const float inv = l != 0.0f ? 1.0f/l : 0.0f;
    for (int c = 0; c < d; ++c) {
        res[c] *= inv;
    }
}

} // namespace sparse
