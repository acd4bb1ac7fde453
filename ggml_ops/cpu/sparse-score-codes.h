#pragma once

// Step 1 from a quantised shadow: the scan of k_t in 8 or 4 bits. sparse-seal.h says what the codes stand for, ../sparse-codes.h has their order.
//
// The scan is one of integers. The coefficients of a group, times the scales of its components, are rounded to small whole numbers, the codes
// of four components are zipped, and one instruction (VNNI; two or three without it) multiplies and adds four codes of every position.

#include "sparse-codes.h"
#include "sparse-rows.h"
#include "sparse-score.h"
#include "sparse-vec-int.h"

namespace sparse {

constexpr int LINE = GGML_SPARSE_LINE; // bytes

// components of a pass: so many that sums are seldom loaded and stored
constexpr int PASS_COMPONENTS = 32;

// How many bytes before their use codes are prefetched, into the first level of the cache. So near, a detour by the second would be too late
constexpr int CODES_AHEAD = 3*LINE;

// groups that a scan touches at most
constexpr int MAX_GROUPS = 32;

// ---- coefficients as whole numbers ----

// They are made for four components in four groups at a time: lane 4*j + i is the i-th component in the j-th group
constexpr int LANES = 16;
constexpr int N_VEC = LANES/W;

// vector v of p[0] to p[3] repeated
static inline vf load_quad(const float * p, int v) {
#if defined(SPARQ_AVX512)
    (void) v;
    return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
#elif defined(SPARQ_AVX2)
    (void) v;
    return _mm256_broadcast_ps((const __m128 *) p);
#elif defined(SPARQ_NEON)
    (void) v;
    return vld1q_f32(p);
#else
    return p[v % 4];
#endif
}

// The coefficients of one query head, which differ from group to group: logit = sum_i w[i]*step*code[i] + base.
//   4 bits: w = w0, |w0| <= 127; 8 bits: w = 64*w0 + w1, |w0| <= 64, |w1| <= 32
// Of group j: step[j], base[j], and for the components 4*q to 4*q + 3 what lies at w0 + 4*(q*MAX_GROUPS + j)
struct group_coef {
    int8_t * w0; // [n_comp rounded up to 4][MAX_GROUPS], with zeros behind n_comp
    int8_t * w1;
    float    step[MAX_GROUPS], base[MAX_GROUPS];
};

// where the codes of a KV head are, and their scales and zeros: those of component c in group j at range + c*nb_range + j*nb_group
struct code_rows {
    const uint8_t * codes;
    size_t          nb_codes;
    const char    * range;
    size_t          nb_range, nb_group;

    const f16 * range_of(int64_t c, int64_t group) const { return (const f16 *) (range + c*(int64_t) nb_range + group*nb_group); }
};

// res [n_quad][2][LANES] = scales, and what code `mid` stands for, of n_group <= 4 groups from `group` on; 0 where there is no component or no group
static inline void load_ranges(float * res, const code_rows & x, int64_t group, const int32_t * comp, int n_comp, int n_group, float mid) {
    const int n_quad = (n_comp + 3)/4;
    int i = 0;
#if defined(SPARQ_X86)
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15); // scales, then zeros
    for (; i + 4 <= n_comp && n_group == 4 && x.nb_group == 2*sizeof(f16); i += 4, res += 2*LANES) {
        __m128 r[4];
        for (int c = 0; c < 4; ++c) {
            r[c] = _mm_loadu_ps((const float *) x.range_of(comp[i + c], group));
        }
        _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
        for (int j = 0; j < 4; ++j) {
            const __m128i both = _mm_shuffle_epi8(_mm_castps_si128(r[j]), order);
            const __m128  size = _mm_cvtph_ps(both), zero = _mm_cvtph_ps(_mm_unpackhi_epi64(both, both));
            _mm_storeu_ps(res + 4*j, size);
            _mm_storeu_ps(res + LANES + 4*j, _mm_fmadd_ps(size, _mm_set1_ps(mid), zero));
        }
    }
#endif
    std::fill(res, res + (n_quad - i/4)*2*LANES, 0.0f);
    for (int c = 0; i < n_comp; ++i, ++c) {
        for (int j = 0; j < n_group; ++j) {
            const f16 * from = x.range_of(comp[i], group + j);
            float * to = res + c/4*2*LANES + c % 4 + 4*j;
            to[0]     = to_f32(from[0]);
            to[LANES] = fmaf(to[0], mid, to_f32(from[1]));
        }
    }
}

// step[j] = max_i |coef[i]*scale[i, j]| / most, for four groups; the same and its inverse for each lane
static SPARQ_INLINE void coef_steps(float * res, float * step, float * inv, const float * coef, const float * range, int n_quad, float most) {
    vf max[N_VEC];
    SPARQ_UNROLL
    for (int v = 0; v < N_VEC; ++v) {
        max[v] = set1(0.0f);
    }
    for (int q = 0; q < n_quad; ++q) {
        SPARQ_UNROLL
        for (int v = 0; v < N_VEC; ++v) {
            max[v] = vmax(vabs(mul(load_quad(coef + 4*q, v), load(range + q*2*LANES + v*W))), max[v]);
        }
    }
    float x[LANES];
    SPARQ_UNROLL
    for (int v = 0; v < N_VEC; ++v) {
        store(x + v*W, max[v]);
    }
    for (int j = 0; j < 4; ++j) {
        const float m   = std::max(std::max(x[4*j], x[4*j + 1]), std::max(x[4*j + 2], x[4*j + 3]));
        const float top = m > 1e-30f && m < INFINITY ? m : 0.0f; // anything smaller would overflow when inverted, and weighs nothing
        res[j] = top/most;
        std::fill(step + 4*j, step + 4*j + 4, top/most);
        std::fill(inv  + 4*j, inv  + 4*j + 4, top > 0.0f ? most/top : 0.0f);
    }
}

// of the groups j0 to j0 + 3: w[i, j] = round(coef[i]*scale[i, j]/step[j]); base[j] = sum_i coef[i]*middle[i, j] - w[i, j]*step[j]*mid, mid the middle code
// NUMERICS: rounding a coefficient costs less than the codes themselves do (test_scan_equals_the_values_of_the_codes). The part of its error
// that all positions share, which is that of a code in the middle, goes into the base
//   coef [n_quad][4], 0 where there is no component; range: what load_ranges made
static inline void make_coef(group_coef & res, int j0, const float * coef, const float * range, int n_quad, int n_bit) {
    GGML_ASSERT(n_bit == 8 || n_bit == 4);
    const float most = (float) ggml_sparse_coef_max(n_bit), mid = ggml_sparse_code_max(n_bit)/2.0f;
    float x[LANES], step[LANES], inv[LANES];
    coef_steps(res.step + j0, step, inv, coef, range, n_quad, most);

    vf base[N_VEC], sum[N_VEC];
    SPARQ_UNROLL
    for (int v = 0; v < N_VEC; ++v) {
        base[v] = sum[v] = set1(0.0f);
    }
    for (int q = 0; q < n_quad; ++q) {
        SPARQ_UNROLL
        for (int v = 0; v < N_VEC; ++v) {
            const float * r = range + q*2*LANES + v*W;
            const vf c = load_quad(coef + 4*q, v), b = round_even(mul(mul(c, load(r)), load(inv + v*W)));
            const vf w = select(eq(b, b), b, set1(0.0f)); // where the product is beyond f32 it is NaN, which has no whole number
            base[v] = fma(c, load(r + LANES), base[v]);
            sum[v]  = add(w, sum[v]);
            const vf w0 = n_bit == 4 ? w : round_even(mul(w, set1(1.0f/64.0f)));
            store_low(res.w0 + 4*(q*MAX_GROUPS + j0) + v*W, to_int(w0), W);
            if (n_bit == 8) {
                store_low(res.w1 + 4*(q*MAX_GROUPS + j0) + v*W, to_int(sub(w, mul(w0, set1(64.0f)))), W);
            }
        }
    }
    SPARQ_UNROLL
    for (int v = 0; v < N_VEC; ++v) {
        store(x + v*W, sub(base[v], mul(sum[v], mul(load(step + v*W), set1(mid)))));
    }
    for (int j = 0; j < 4; ++j) {
        res.base[j0 + j] = (x[4*j] + x[4*j + 1]) + (x[4*j + 2] + x[4*j + 3]);
    }
}

// ---- the scan: s[h, t] = sum_i w[h, i]*step[h]*code[comp[i], t] + base[h] ----

// Adds n_line lines of codes of 4*n_quad components, from the c0-th chosen one on, for HB heads. first: s begins at the base.
//   row [4*n_quad]: the first line of each component. NQ is n_quad where it is known when compiling. There is no loop then, whose loads and
//   branches would wait behind the codes that are still on their way (4 bits, one thread: 50 instead of 64 % of bandwidth)
#if defined(SPARQ_SCALAR)

template <int N_BIT, int HB, int NQ>
static SPARQ_NOINLINE void score_lines(float * s, int64_t ld_s, const group_coef * coef, int c0, const uint8_t * const * row,
        int64_t at, int n_line, int n_quad, bool first) {
    static_assert(N_BIT == 8 || N_BIT == 4);
    constexpr int N_POS = ggml_sparse_line_pos(N_BIT);
    for (int h = 0; h < HB; ++h) {
        for (int t = 0; t < n_line*N_POS; ++t) {
            const int64_t byte = at + t/N_POS*LINE + ggml_sparse_line_byte(t % LINE), g = t/GROUP;
            const int8_t * w0 = coef[h].w0 + c0*MAX_GROUPS + 4*g, * w1 = coef[h].w1 + c0*MAX_GROUPS + 4*g;
            int32_t sum = 0;
            for (int i = 0; i < 4*n_quad; ++i) {
                const int x = row[i][byte];
                const int at_w = i/4*4*MAX_GROUPS + i % 4, w = N_BIT == 4 ? w0[at_w] : 64*w0[at_w] + w1[at_w];
                sum += w*(N_BIT == 8 ? x : t % N_POS < LINE ? x & 15 : x >> 4);
            }
            float & d = s[h*ld_s + t];
            d = fmaf((float) sum, coef[h].step[g], first ? coef[h].base[g] : d);
        }
    }
}

#else

// With 4 bits, a byte may be used as it is instead of its high half, which is one step less: whole = 16*high + low
template <int N_BIT> constexpr bool WHOLE_BYTES = N_BIT == 4 && DOT_ANY;

// zips VB bytes of four components at `at`: vector j then has codes of four components of VB/4 positions, side by side
static SPARQ_INLINE void zip_rows(vi * res, const uint8_t * const * row, int64_t at) {
    vi x[4];
    for (int i = 0; i < 4; ++i) {
        x[i] = load_int(row[i] + at);
        if (at % LINE == 0) {
            prefetch_first(row[i] + at + CODES_AHEAD);
        }
    }
    const vi l01 = zip8_lo(x[0], x[1]), h01 = zip8_hi(x[0], x[1]);
    const vi l23 = zip8_lo(x[2], x[3]), h23 = zip8_hi(x[2], x[3]);
    res[0] = zip16_lo(l01, l23);
    res[1] = zip16_hi(l01, l23);
    res[2] = zip16_lo(h01, h23);
    res[3] = zip16_hi(h01, h23);
}

// adds the sums of one head to VB positions, or to twice as many of 4 bits
//   a0, a1: the sums of the low and of the high halves (or of whole bytes); with 8 bits those with w0 and with w1
template <int N_BIT>
static SPARQ_INLINE void add_line_sums(float * s, const vi * a0, const vi * a1, float step_of_group, float base_of_group, bool first) {
    static_assert(N_BIT == 8 || N_BIT == 4);
    const vf step = set1(step_of_group), high = set1(step_of_group/16.0f), base = set1(base_of_group);
    for (int j = 0; j < 4; ++j) {
        float * d = s + 16*j;
        if constexpr (N_BIT == 4) {
            // sums of whole bytes are below 2^24, so they are exact as floats, and 16 times the sums of the high halves more
            const vf lo = to_float(a0[j]), hi = to_float(a1[j]);
            store(d,        fma(lo, step, first ? base : load(d)));
            store(d + LINE, fma(WHOLE_BYTES<N_BIT> ? sub(hi, lo) : hi, WHOLE_BYTES<N_BIT> ? high : step, first ? base : load(d + LINE)));
        } else { // either sum is below 2^24, so it is exact as a float
            store(d, fma(fma(to_float(a0[j]), set1(64.0f), to_float(a1[j])), step, first ? base : load(d)));
        }
    }
}

template <int N_BIT, int HB, int NQ>
static SPARQ_NOINLINE void score_lines(float * s, int64_t ld_s, const group_coef * coef, int c0, const uint8_t * const * row,
        int64_t at, int n_line, int any_quad, bool first) {
    static_assert(N_BIT == 8 || N_BIT == 4);
    const int n_quad = NQ > 0 ? NQ : any_quad;
    const int8_t * w0[HB], * w1[HB];
    int group = 0;
    for (int h = 0; h < HB; ++h) {
        w0[h] = coef[h].w0 + c0*MAX_GROUPS;
        w1[h] = coef[h].w1 + c0*MAX_GROUPS;
    }
    for (const int64_t end = at + n_line*LINE; at < end; at += VB) {
        vi a0[HB][4], a1[HB][4];
        for (int h = 0; h < HB; ++h) {
            for (int j = 0; j < 4; ++j) {
                a0[h][j] = a1[h][j] = set1_int(0);
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < n_quad; ++q) {
            vi x[4];
            zip_rows(x, row + 4*q, at);
            for (int j = 0; j < 4; ++j) {
                const vi lo = N_BIT == 4 ? low4(x[j]) : x[j], hi = WHOLE_BYTES<N_BIT> || N_BIT == 8 ? x[j] : high4(x[j]);
                for (int h = 0; h < HB; ++h) {
                    const vi w = four(w0[h] + 4*q*MAX_GROUPS);
                    a0[h][j] = dot_bytes(a0[h][j], lo, w);
                    a1[h][j] = dot_bytes(a1[h][j], hi, N_BIT == 4 ? w : four(w1[h] + 4*q*MAX_GROUPS));
                }
            }
        }
        for (int h = 0; h < HB; ++h) {
            add_line_sums<N_BIT>(s + h*ld_s, a0[h], a1[h], coef[h].step[group], coef[h].base[group], first);
        }
        // where a line is several vectors, the positions of each begin VB/4 behind those of the one before
        s += (at + VB) % LINE == 0 ? ggml_sparse_line_pos(N_BIT) - (LINE - VB)/4 : VB/4;
        if ((at + VB) % ggml_sparse_shadow_bytes(GROUP, N_BIT) == 0) {
            ++group;
            for (int h = 0; h < HB; ++h) {
                w0[h] += 4;
                w1[h] += 4;
            }
        }
    }
}

#endif

// query heads that share the zipping, as the registers allow
#if defined(SPARQ_AVX2)
constexpr int ZIP_HEADS = 1;
#else
constexpr int ZIP_HEADS = 2;
#endif

// bytes that score_codes needs
static inline size_t code_scratch(int n_head, int n_comp) {
    const size_t n_quad = (n_comp + 3)/4;
    return n_head*(sizeof(group_coef) + 2*n_quad*4*MAX_GROUPS + n_quad*4*sizeof(float)) + n_quad*2*LANES*sizeof(float);
}

// of one KV head, for the positions t0 <= t < t1 (multiples of GROUP), which touch no more than MAX_GROUPS groups
//   s [n_head][ld_s]: position t at t - t0; scratch: code_scratch() bytes
template <int N_BIT>
static void score_codes(float * s, int64_t ld_s, int n_head, const code_rows & x, const int32_t * comp, int n_comp,
        const float * coef, int ld_coef, int64_t t0, int64_t t1, const scan_next & next, void * scratch) {
    constexpr int   ALL_QUADS = PASS_COMPONENTS/4;
    constexpr float MID = ggml_sparse_code_max(N_BIT)/2.0f;
    const int     n_group = (int) ((t1 - t0)/GROUP), n_quad = (n_comp + 3)/4;
    const int64_t at      = ggml_sparse_shadow_bytes(t0, N_BIT), then = (t0 + next.dt)/GROUP;

    float      * range = (float *) scratch;
    float      * quads = range + n_quad*2*LANES;                     // [n_head][n_quad][4] coefficients
    group_coef * gc    = (group_coef *) (quads + n_head*4*n_quad);   // [n_head]
    int8_t     * w     = (int8_t *) (gc + n_head);
    for (int h = 0; h < n_head; ++h, w += 2*n_quad*4*MAX_GROUPS) {
        std::fill(std::copy_n(coef + h*ld_coef, n_comp, quads + h*4*n_quad), quads + (h + 1)*4*n_quad, 0.0f);
        gc[h].w0 = w;
        gc[h].w1 = w + n_quad*4*MAX_GROUPS;
    }
    for (int j = 0; j < n_group; j += 4) {
        load_ranges(range, x, t0/GROUP + j, comp, n_comp, std::min(4, n_group - j), MID);
        for (int h = 0; h < n_head; ++h) {
            make_coef(gc[h], j, quads + h*4*n_quad, range, n_quad, N_BIT);
        }
    }

    const auto each_next_range = [&](auto f) { // a line of each component holds those of 16 groups
        for (int i = 0; i < next.n_comp; ++i) {
            for (int j = 0; j < n_group; j += LINE/4) {
                f(x.range_of(next.row + next.comp[i], then + j));
            }
        }
    };
    each_next_range([](const f16 * p) { prefetch(p); }); // now, because at the end much else is prefetched
    const uint8_t * row[PASS_COMPONENTS];
    for (int c0 = 0; c0 < n_comp; c0 += PASS_COMPONENTS) {
        const int n = (std::min(PASS_COMPONENTS, n_comp - c0) + 3)/4;
        for (int i = 0; i < 4*n; ++i) { // where there is no component its coefficient is zero
            row[i] = x.codes + comp[std::min(c0 + i, n_comp - 1)]*x.nb_codes;
        }
        for (int h = 0, m; h < n_head; h += m) {
            m = n_head - h < ZIP_HEADS ? 1 : ZIP_HEADS;
            const auto some  = m == ZIP_HEADS ? score_lines<N_BIT, ZIP_HEADS, 0> : score_lines<N_BIT, 1, 0>;
            const auto all   = m == ZIP_HEADS ? score_lines<N_BIT, ZIP_HEADS, ALL_QUADS> : score_lines<N_BIT, 1, ALL_QUADS>;
            (n < ALL_QUADS ? some : all)(s + h*ld_s, ld_s, gc + h, c0, row, at, (int) ((t1 - t0)/ggml_sparse_line_pos(N_BIT)), n, c0 == 0);
        }
    }

    each_next_range([](const f16 * p) { prefetch_first(p); }); // into the first level of the cache, ahead of the many lines that follow
    for (int i = 0; i < next.n_comp; ++i) {
        const int64_t c = next.row + next.comp[i], t = t0 + next.dt;
        for (int b = 0; b < CODES_AHEAD; b += LINE) {
            prefetch(x.codes + c*(int64_t) x.nb_codes + t*N_BIT/8 + b);
        }
    }
}

} // namespace sparse
