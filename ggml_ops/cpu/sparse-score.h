#pragma once

// Step 1: the channels of q that count, approximate scores from the transposed K, and what turns scores into logits.
// On plain pointers and strides: no ggml tensors, no threads. Contracts in ggml-sparse.h; the same step, one float at a time, in ref/.
// Strides called nb_* are in bytes, ld_* in elements.

#include "sparse-seal.h"

#include <cfloat>

namespace sparse {

// ---- order statistics ----

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

// the values that reach a limit: how many, and the smallest; the largest of those below another limit, and how many reach that one. NaN is
// none of them
struct split {
    int64_t n;
    float   min; // +inf: none
    float   max; // -inf: none
    int64_t n_above;
};

static inline split split_at(const float * x, int64_t n, float lim, float below) {
    constexpr int N = 2; // in turns: each waits for the one before
    const vf l = set1(lim), u = set1(below), inf = set1(INFINITY), none = set1(-INFINITY);
    vf min[N] = { inf, inf }, max[N] = { none, none };
    split res = { 0, INFINITY, -INFINITY, 0 };
    int64_t i = 0;
    for (; i + N*W <= n; i += N*W) {
        for (int j = 0; j < N; ++j) {
            const vf v = load(x + i + j*W);
            const vm m = ge(v, l);
            res.n       += popcount(bits(m));
            res.n_above += popcount(bits(ge(v, u)));
            min[j] = min_where(min[j], m, v);
            max[j] = max_where(max[j], lt(v, u), v);
        }
    }
    for (; i < n; ++i) {
        const float v = x[i];
        res.n       += v >= lim;
        res.n_above += v >= below;
        res.min = v >= lim  && v < res.min ? v : res.min;
        res.max = v < below && v > res.max ? v : res.max;
    }
    res.min = std::fmin(-reduce_max(sub(set1(0.0f), vmin(min[0], min[1]))), res.min);
    res.max = std::fmax(reduce_max(vmax(max[0], max[1])), res.max);
    return res;
}

// the k-th largest of the n values, or with a slack one of the k-th to the (k + slack)-th; lo if fewer than k reach lo. NaN does not count.
// Splits between the smallest and the largest value that it can be: at a place guessed from their ranks, in the middle, and at last, each
// fourth time, in the middle of all floats. That decides how many passes there are (7 or so, 4*32 at most), not the result; once few values
// are left, they are set apart
static inline float kth_largest(const float * x, int64_t n, int64_t k, float lo, int64_t slack = 0) {
    const split all = split_at(x, n, lo, INFINITY);
    if (all.n < k) {
        return lo;
    }
    if (all.n_above >= k) {
        return INFINITY;
    }
    constexpr int FEW = 256; // a multiple of every W
    float few[FEW + W];
    float   a   = all.min, b   = all.max;     // what is wanted is in [a, b]
    int64_t n_a = all.n,   n_b = all.n_above; // values >= a (k or more), values > b (fewer than k)
    for (int i_pass = 0; n_a > k + slack && a < b; ++i_pass) {
        if (n > FEW && n_a - n_b <= FEW) {
            int n_few = 0;
            int64_t i = 0;
            for (; i + W <= n; i += W) {
                const vf v = load(x + i);
                n_few += append(few + n_few, v, ge(select(ge(set1(b), v), v, set1(-INFINITY)), set1(a)));
            }
            for (; i < n; ++i) {
                if (x[i] >= a && x[i] <= b) {
                    few[n_few++] = x[i];
                }
            }
            store(few + n_few, set1(-INFINITY)); // up to whole vectors, with what counts nowhere
            x    = few;
            n    = (n_few + W - 1)/W*W;
            k   -= n_b;
            n_a -= n_b;
            n_b  = 0;
        }
        const int64_t oa = to_order(a), ob = to_order(b);
        float m = from_order(oa + (ob - oa + 1)/2);
        if (i_pass % 4 < 3) {
            m = a + (b - a)*(i_pass % 2 ? 0.5f : (float) (n_a - k)/(float) (n_a - n_b));
            m = m > a ? std::fmin(m, b) : from_order(oa + 1);
        }
        const split part = split_at(x, n, m, m);
        if (part.n >= k) {
            a   = part.min;
            n_a = part.n;
        } else {
            b   = part.max;
            n_b = part.n;
        }
    }
    return a;
}

// ---- step 1: approximate scores ----

// |x|_1
static inline float abs_sum(const float * x, int n) {
    vf sum = set1(0.0f);
    for (int i = 0; i < n; i += W) {
        sum = add(vabs(n - i < W ? load_n(x + i, n - i) : load(x + i)), sum);
    }
    return reduce_add(sum);
}

// the r channels with the largest sum over the heads of |q|, ascending, and per head the coefficients q*scale/sqrt(|q_r|_1/|q|_1)
//   q [n_head][d], chan [r], coef [n_head][r], sum: scratch [d]; returns the number of channels (r, or fewer if q holds NaN)
static inline int choose_channels(int32_t * chan, float * coef, float * sum, const float * q, int64_t ld_q, int n_head, int d, int r, float scale) {
    for (int h = 0; h < n_head; ++h) {
        for (int c = 0; c < d; ++c) {
            sum[c] = (h > 0 ? sum[c] : 0.0f) + fabsf(q[h*ld_q + c]);
        }
    }

    const float cut = kth_largest(sum, d, r, 0.0f);

    int n_tie = r; // channels equal to the cut that still fit
    for (int c = 0; c < d; ++c) {
        n_tie -= sum[c] > cut;
    }
    int n = 0;
    for (int c = 0; c < d && n < r; ++c) { // without a branch on the data
        const int tie = (sum[c] == cut) & (n_tie > 0);
        chan[n] = c;
        n      += (sum[c] > cut) | tie;
        n_tie  -= tie;
    }

    for (int h = 0; h < n_head; ++h) {
        const float * qh = q + h*ld_q;
        float * res = coef + h*r;
        for (int i = 0; i < n; ++i) {
            res[i] = qh[chan[i]];
        }
        const float l1 = abs_sum(qh, d), l1_r = abs_sum(res, n);
        const float s  = l1_r > 0.0f ? scale/sqrtf(l1_r/l1) : 0.0f;
        for (int i = 0; i < n; ++i) {
            res[i] *= s;
        }
    }
    return n;
}

// how many positions before their use channels are asked for, into the first level
constexpr int CHAN_AHEAD = 256;

// s[h][t] += sum over NC channels of coef[h][c]*x[c][t] for n positions and HB heads; first: s starts from 0; ask: x is asked for ahead
template <int NC, int HB>
static SPARQ_NOINLINE void add_channels(float * s, int64_t ld_s, const f16 * const * x, const float * coef, int ld_coef, int64_t n, bool first,
        bool ask) {
    constexpr int NT = 32/W; // vectors per cache line
    constexpr int NB = NT*HB <= N_ACC ? NT : N_ACC/HB; // vectors that share a coefficient, as the registers allow
    int64_t t = 0;
    for (; t + NT*W <= n; t += NT*W) {
        for (int c = 0; c < NC && ask; ++c) {
            prefetch_first(x[c] + t + CHAN_AHEAD);
        }
        SPARQ_UNROLL
        for (int j = 0; j < NT*W; j += NB*W) {
            float * d = s + t + j;
            vf a[HB][NB]; // in turns: each sum waits for the one before
            SPARQ_UNROLL
            for (int h = 0; h < HB; ++h) {
                SPARQ_UNROLL
                for (int i = 0; i < NB; ++i) {
                    a[h][i] = first ? set1(0.0f) : load(d + h*ld_s + i*W);
                }
            }
            SPARQ_UNROLL
            for (int c = 0; c < NC; ++c) {
                vf k[NB];
                SPARQ_UNROLL
                for (int i = 0; i < NB; ++i) {
                    k[i] = load(x[c] + t + j + i*W);
                }
                SPARQ_UNROLL
                for (int h = 0; h < HB; ++h) {
                    const vf b = set1(coef[h*ld_coef + c]);
                    SPARQ_UNROLL
                    for (int i = 0; i < NB; ++i) {
                        a[h][i] = fma(k[i], b, a[h][i]);
                    }
                }
            }
            SPARQ_UNROLL
            for (int h = 0; h < HB; ++h) {
                SPARQ_UNROLL
                for (int i = 0; i < NB; ++i) {
                    store(d + h*ld_s + i*W, a[h][i]);
                }
            }
        }
    }
    for (; t < n; ++t) {
        for (int h = 0; h < HB; ++h) {
            float a = first ? 0.0f : s[h*ld_s + t];
            for (int c = 0; c < NC; ++c) {
                a = fmaf(to_f32(x[c][t]), coef[h*ld_coef + c], a);
            }
            s[h*ld_s + t] = a;
        }
    }
}

// the same for any number of heads; where they take several turns, the first asks
template <int NC>
static void add_channels_heads(float * s, int64_t ld_s, int n_head, const f16 * const * x, const float * coef, int ld_coef, int64_t n, bool first) {
    for (int h = 0; h < n_head; ) {
        const int  nh  = n_head - h >= 4 ? 4 : n_head - h >= 2 ? 2 : 1;
        const auto add = nh == 4 ? add_channels<NC, 4> : nh == 2 ? add_channels<NC, 2> : add_channels<NC, 1>;
        add(s + h*ld_s, ld_s, x, coef + h*ld_coef, ld_coef, n, first, h == 0);
        h += nh;
    }
}

// what the next scan will read, so that this one can ask for it on the way; n_chan = 0: not known
struct scan_next {
    const int32_t * chan   = nullptr;
    int             n_chan = 0;
    int64_t         row    = 0; // channels from this KV head's first to that one's
    int64_t         dt     = 0; // positions from this scan's first to that one's
};

// s[h][t] = sum over all n_chan channels, in their order; x points at position t of channel 0
// NUMERICS: given the coefficients, one fma per channel in ascending order, whatever the instruction set and the split into passes
static inline void score_channels(float * s, int64_t ld_s, int n_head, const f16 * x, int64_t ld_chan, const int32_t * chan, int n_chan,
        const float * coef, int ld_coef, int64_t n, const scan_next & then) {
    const f16 * row[16];
    for (int i = 0; i < n_chan; ) {
        const int nc = n_chan - i >= 16 && N_ACC >= 16 ? 16 : n_chan - i >= 8 ? 8 : n_chan - i >= 4 ? 4 : 1;
        for (int c = 0; c < nc; ++c) {
            row[c] = x + chan[i + c]*ld_chan;
        }
        const auto add = nc == 16 ? add_channels_heads<16> : nc == 8 ? add_channels_heads<8>
                       : nc ==  4 ? add_channels_heads<4>  : add_channels_heads<1>;
        add(s, ld_s, n_head, row, coef + i, ld_coef, n, i == 0);
        i += nc;
    }
    for (int c = 0; c < then.n_chan && c < 16; ++c) { // its first pass
        for (int t = 0; t < CHAN_AHEAD; t += 32) {
            prefetch_first(x + (then.row + then.chan[c])*ld_chan + then.dt + t);
        }
    }
}

// ---- logits: scale, softcap, mask ----

// res = softcap(s*scale) + slope*mask; -inf where hidden, whatever s was. res may be s
static inline void finish_logits(float * res, const float * s, const f16 * mask, int64_t n, float scale, float softcap, float slope) {
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

} // namespace sparse
