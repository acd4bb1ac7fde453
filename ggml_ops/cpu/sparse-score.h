#pragma once

// Step 1: the components of q that count, approximate scores from the transposed K in f16, and how products become logits.
// sparse-score-codes.h has the scores from a quantised shadow; exact scores are dot products with rows of K, see sparse-rows.h.

#include "sparse-kth.h"

#include <cmath>

namespace sparse {

// sum_i |x[i]|*y[i]
static inline float abs_sum(const float * x, const float * y, int n) {
    vf sum = set1(0.0f);
    for (int i = 0; i < n; i += W) {
        const bool whole = n - i >= W;
        sum = fma(vabs(whole ? load(x + i) : load_n(x + i, n - i)), whole ? load(y + i) : load_n(y + i, n - i), sum);
    }
    return reduce_add(sum);
}

// comp: the r components c with the largest spread[c]*sum_h |q[h, c]|, ascending, ties to the lower one
// coef[h, i] = q[h, comp[i]]*scale/sqrt(sum_i |q[h, comp[i]]|*spread[comp[i]] / sum_c |q[h, c]|*spread[c])
//   q [n_head][d], spread [d], comp [r], coef [n_head][ld_coef], sum: scratch [d]; returns the number of components: r, or fewer if q holds NaN
//   Where the sums of a head are 0 or beyond f32 (q holds inf), its coefficients are 0
static inline int choose_components(int32_t * comp, float * coef, int ld_coef, float * sum, const float * q, int64_t ld_q, const float * spread,
        int n_head, int d, int r, float scale) {
    for (int h = 0; h < n_head; ++h) {
        for (int c = 0; c < d; ++c) {
            sum[c] = (h > 0 ? sum[c] : 0.0f) + fabsf(q[h*ld_q + c]);
        }
    }
    for (int c = 0; c < d; ++c) {
        sum[c] *= spread[c];
    }

    const float cut = kth_largest(sum, d, r, 0.0f);

    int n_tie = r; // how many components equal to the cut still fit
    for (int c = 0; c < d; ++c) {
        n_tie -= sum[c] > cut;
    }
    int n = 0;
    for (int c = 0; c < d && n < r; ++c) { // without a branch on the data
        const int tie = (sum[c] == cut) & (n_tie > 0);
        comp[n] = c;
        n      += (sum[c] > cut) | tie;
        n_tie  -= tie;
    }

    float * spread_r = sum;
    for (int i = 0; i < n; ++i) {
        spread_r[i] = spread[comp[i]];
    }
    for (int h = 0; h < n_head; ++h) {
        const float * qh = q + h*ld_q;
        float * res = coef + h*ld_coef;
        for (int i = 0; i < n; ++i) {
            res[i] = qh[comp[i]];
        }
        const float l1 = abs_sum(qh, spread, d), l1_r = abs_sum(res, spread_r, n);
        const float s  = l1_r > 0.0f ? scale/sqrtf(l1_r/l1) : 0.0f;
        for (int i = 0; i < n; ++i) {
            res[i] = std::isfinite(s) ? res[i]*s : 0.0f;
        }
    }
    return n;
}

// What the next scan will read, so that this one can prefetch it on the way. n_comp = 0: it is not known
struct scan_next {
    const int32_t * comp   = nullptr;
    int             n_comp = 0;
    int64_t         row    = 0; // components from the first of this scan's KV head to the first of the next scan's
    int64_t         dt     = 0; // positions from the first of this scan to the first of the next
};

// ---- the scan of f16: s[h, t] = sum_i coef[h, i]*k_t[comp[i], t] ----
//
// add_components_block takes HB heads and NC components, and score_components any number of either.

// how many positions before their use components are prefetched, into the first level of the cache
constexpr int POSITIONS_AHEAD = 256;

// s[h, t] += sum_c coef[h, c]*x[c][t], over n positions. first: s begins at 0
template <int NC, int HB>
static SPARQ_NOINLINE void add_components_block(float * s, int64_t ld_s, const f16 * const * x, const float * coef, int ld_coef, int64_t n,
        bool first, bool prefetches) {
    constexpr int NT = 32/W;                           // vectors of positions in a cache line
    constexpr int NB = NT*HB <= N_ACC ? NT : N_ACC/HB; // as many of them share a load of the coefficient as the registers allow
    int64_t t = 0;
    for (; t + NT*W <= n; t += NT*W) {
        for (int c = 0; c < NC && prefetches; ++c) {
            prefetch_first(x[c] + t + POSITIONS_AHEAD);
        }
        SPARQ_UNROLL
        for (int j = 0; j < NT*W; j += NB*W) {
            float * d = s + t + j;
            vf a[HB][NB];
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

// x points at the first position of component 0
// NUMERICS: given the coefficients, there is one fma per component, in ascending order, whatever the instruction set and the passes are
static inline void score_components(float * s, int64_t ld_s, int n_head, const f16 * x, int64_t ld_comp, const int32_t * comp, int n_comp,
        const float * coef, int ld_coef, int64_t n, const scan_next & next) {
    const f16 * row[16];
    for (int i = 0; i < n_comp; ) {
        const int nc = n_comp - i >= 16 && N_ACC >= 16 ? 16 : n_comp - i >= 8 ? 8 : n_comp - i >= 4 ? 4 : 1;
        for (int c = 0; c < nc; ++c) {
            row[c] = x + comp[i + c]*ld_comp;
        }
        const auto add = [&](auto known) {
            constexpr int NC = known();
            for_blocks<4>(n_head, [&](auto HB, int h) { // where the heads take several turns, the first one prefetches
                add_components_block<NC, HB()>(s + h*ld_s, ld_s, row, coef + h*ld_coef + i, ld_coef, n, i == 0, h == 0);
            });
        };
        switch (nc) {
            case 16: add(std::integral_constant<int, 16>()); break;
            case 8:  add(std::integral_constant<int, 8>());  break;
            case 4:  add(std::integral_constant<int, 4>());  break;
            default: add(std::integral_constant<int, 1>());
        }
        i += nc;
    }
    for (int c = 0; c < next.n_comp && c < 16; ++c) { // what the first pass of the next scan reads
        for (int t = 0; t < POSITIONS_AHEAD; t += 32) {
            prefetch_first(x + (next.row + next.comp[c])*ld_comp + next.dt + t);
        }
    }
}

// ---- logits ----

// res[t] = softcap(s[t]*scale) + slope*mask[t], and -inf where the mask hides, whatever s was. res may be s
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
