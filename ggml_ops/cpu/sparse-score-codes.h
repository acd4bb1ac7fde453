#pragma once

// Step 1 from a quantised shadow: the scan of k_t in 8 or 4 bits. sparse-seal.h says what the codes stand for, ../sparse-codes.h has their order.
//
// The scan is one of integers. The coefficients of a run, times the scales of its components, are rounded to small whole numbers, the codes
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

// runs that a scan touches at most
constexpr int MAX_RUN = 8;

// ---- coefficients as whole numbers ----

// They are made for four components in four runs at a time: lane 4*j + i is the i-th component in the j-th run
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

// The coefficients of one query head, which differ from run to run: logit = sum_i w[i]*step*code[i] + base.
//   4 bits: w = w0, |w0| <= 127; 8 bits: w = 64*w0 + w1, |w0| <= 64, |w1| <= 32
// Of run j: step[j], base[j], and for the components 4*q to 4*q + 3 what lies at w0 + 4*(q*MAX_RUN + j)
struct run_coef {
    int8_t * w0; // [n_comp rounded up to 4][MAX_RUN], with zeros behind n_comp
    int8_t * w1;
    float    step[MAX_RUN], base[MAX_RUN];
};

// res [MAX_RUN/4][n_quad][2][LANES] = scales and zeros of n_run runs; 0 where there is no component or no run
//   range: of the first run, see code_rows
static inline void load_ranges(float * res, const float * range, int64_t ld_comp, int64_t ld_run, const int32_t * comp, int n_comp, int n_run) {
    const int n_quad = (n_comp + 3)/4;
    if (n_comp % 4 != 0 || n_run % 4 != 0) {
        std::fill(res, res + (n_run + 3)/4*n_quad*2*LANES, 0.0f);
    }
    int i = 0;
#if defined(SPARQ_AVX512) // a vector has two components in four runs, scale and zero in turns
    const __m512i scale = _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30);
    const __m512i zero  = _mm512_add_epi32(scale, _mm512_set1_epi32(1));
    for (; i + 4 <= n_comp && n_run % 4 == 0 && ld_run == 2; i += 4) {
        for (int j = 0; j < n_run; j += 4) {
            const auto two = [&](const int32_t * c) {
                const float * x = range + 2*j;
                return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(x + c[0]*ld_comp)), _mm256_loadu_ps(x + c[1]*ld_comp), 1);
            };
            const vf x = two(comp + i), y = two(comp + i + 2);
            float * to = res + (j/4*n_quad + i/4)*2*LANES;
            store(to,         _mm512_permutex2var_ps(x, scale, y));
            store(to + LANES, _mm512_permutex2var_ps(x, zero,  y));
        }
    }
#endif
    for (; i < n_comp; ++i) {
        const float * from = range + comp[i]*ld_comp;
        float * to = res + i/4*2*LANES + i % 4;
        for (int j = 0; j < n_run; ++j) {
            float * x = to + j/4*n_quad*2*LANES + j % 4*4;
            x[0]     = from[j*ld_run];
            x[LANES] = from[j*ld_run + 1];
        }
    }
}

// step[j] = max_i |coef[i]*scale[i, j]| / most, for four runs; the same and its inverse for each lane
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

// w[i, j] = round(a/step[j]), a = coef[i]*scale[i, j]; base[j] = sum_i coef[i]*zero[i, j] + (a - w[i, j]*step[j])*mid, mid the middle code
// NUMERICS: rounding a coefficient costs less than the codes themselves do (test_scan_equals_the_values_of_the_codes). The part of its error
// that all positions share, which is that of a code in the middle, goes into the base
//   coef [n_quad][4], 0 where there is no component; range: what load_ranges made
static inline void make_coef(run_coef & res, const float * coef, const float * range, int n_quad, int n_run, int n_bit) {
    GGML_ASSERT(n_bit == 8 || n_bit == 4);
    const float most = (float) ggml_sparse_coef_max(n_bit), mid = ggml_sparse_code_max(n_bit)/2.0f;
    for (int j0 = 0; j0 < n_run; j0 += 4, range += n_quad*2*LANES) {
        float x[LANES], step[LANES], inv[LANES];
        coef_steps(res.step + j0, step, inv, coef, range, n_quad, most);

        vf base[N_VEC], rest[N_VEC];
        SPARQ_UNROLL
        for (int v = 0; v < N_VEC; ++v) {
            base[v] = rest[v] = set1(0.0f);
        }
        for (int q = 0; q < n_quad; ++q) {
            SPARQ_UNROLL
            for (int v = 0; v < N_VEC; ++v) {
                const float * r = range + q*2*LANES + v*W;
                const vf c = load_quad(coef + 4*q, v), a = mul(c, load(r)), b = round_even(mul(a, load(inv + v*W)));
                const vf w = select(eq(b, b), b, set1(0.0f)); // where a is beyond f32 it is NaN, which has no whole number
                base[v] = fma(c, load(r + LANES), base[v]);
                rest[v] = add(sub(a, mul(w, load(step + v*W))), rest[v]);
                const vf w0 = n_bit == 4 ? w : round_even(mul(w, set1(1.0f/64.0f)));
                store_low(res.w0 + 4*(q*MAX_RUN + j0) + v*W, to_int(w0), W);
                if (n_bit == 8) {
                    store_low(res.w1 + 4*(q*MAX_RUN + j0) + v*W, to_int(sub(w, mul(w0, set1(64.0f)))), W);
                }
            }
        }
        SPARQ_UNROLL
        for (int v = 0; v < N_VEC; ++v) {
            store(x + v*W, fma(rest[v], set1(mid), base[v]));
        }
        for (int j = 0; j < 4; ++j) {
            res.base[j0 + j] = (x[4*j] + x[4*j + 1]) + (x[4*j + 2] + x[4*j + 3]);
        }
    }
}

// ---- the scan: s[h, t] = sum_i w[h, i]*step[h]*code[comp[i], t] + base[h] ----

// Adds n_line lines of codes of 4*n_quad components, from the c0-th chosen one on, within the run-th run, for HB heads. first: s begins at
// the base.
//   row [4*n_quad]: the first line of each component. NQ is n_quad where it is known when compiling. There is no loop then, whose loads and
//   branches would wait behind the codes that are still on their way (4 bits, one thread: 50 instead of 64 % of bandwidth)
#if defined(SPARQ_SCALAR)

template <int N_BIT, int HB, int NQ>
static SPARQ_NOINLINE void score_lines(float * s, int64_t ld_s, const run_coef * coef, int64_t run, int c0, const uint8_t * const * row,
        int64_t at, int n_line, int n_quad, bool first) {
    static_assert(N_BIT == 8 || N_BIT == 4);
    constexpr int N_POS = ggml_sparse_line_pos(N_BIT);
    for (int h = 0; h < HB; ++h) {
        const int8_t * w0 = coef[h].w0 + c0*MAX_RUN + 4*run, * w1 = coef[h].w1 + c0*MAX_RUN + 4*run;
        for (int t = 0; t < n_line*N_POS; ++t) {
            const int64_t byte = at + t/N_POS*LINE + ggml_sparse_line_byte(t % LINE);
            int32_t sum = 0;
            for (int i = 0; i < 4*n_quad; ++i) {
                const int x = row[i][byte];
                const int at_w = i/4*4*MAX_RUN + i % 4, w = N_BIT == 4 ? w0[at_w] : 64*w0[at_w] + w1[at_w];
                sum += w*(N_BIT == 8 ? x : t % N_POS < LINE ? x & 15 : x >> 4);
            }
            float & d = s[h*ld_s + t];
            d = fmaf((float) sum, coef[h].step[run], first ? coef[h].base[run] : d);
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
static SPARQ_INLINE void add_line_sums(float * s, const vi * a0, const vi * a1, float step_of_run, float base_of_run, bool first) {
    static_assert(N_BIT == 8 || N_BIT == 4);
    const vf step = set1(step_of_run), high = set1(step_of_run/16.0f), base = set1(base_of_run);
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
static SPARQ_NOINLINE void score_lines(float * s, int64_t ld_s, const run_coef * coef, int64_t run, int c0, const uint8_t * const * row,
        int64_t at, int n_line, int any_quad, bool first) {
    static_assert(N_BIT == 8 || N_BIT == 4);
    const int n_quad = NQ > 0 ? NQ : any_quad;
    const int8_t * w0[HB], * w1[HB];
    for (int h = 0; h < HB; ++h) {
        w0[h] = coef[h].w0 + c0*MAX_RUN + 4*run;
        w1[h] = coef[h].w1 + c0*MAX_RUN + 4*run;
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
                    const vi w = four(w0[h] + 4*q*MAX_RUN);
                    a0[h][j] = dot_bytes(a0[h][j], lo, w);
                    a1[h][j] = dot_bytes(a1[h][j], hi, N_BIT == 4 ? w : four(w1[h] + 4*q*MAX_RUN));
                }
            }
        }
        for (int h = 0; h < HB; ++h) {
            add_line_sums<N_BIT>(s + h*ld_s, a0[h], a1[h], coef[h].step[run], coef[h].base[run], first);
        }
        // where a line is several vectors, the positions of each begin VB/4 behind those of the one before
        s += (at + VB) % LINE == 0 ? ggml_sparse_line_pos(N_BIT) - (LINE - VB)/4 : VB/4;
    }
}

#endif

// where the codes of a KV head are, and their scales and zeros: those of component c in run i at range + c*ld_comp + i*ld_run
struct code_rows {
    const uint8_t * codes;
    size_t          nb_comp;
    const float   * range;
    int64_t         ld_comp, ld_run;
};

// query heads that share the zipping, as the registers allow
#if defined(SPARQ_AVX2)
constexpr int ZIP_HEADS = 1;
#else
constexpr int ZIP_HEADS = 2;
#endif

// One pass of a scan over the positions [t0, t1): n_quad quads of components, from the c0-th chosen one on. Lines are read whole. One that
// is only half ours, at either end, goes to a buffer of its own.
template <int N_BIT>
static SPARQ_INLINE void score_pass(float * s, int64_t ld_s, int n_head, const run_coef * coef, int64_t run0, int c0, const uint8_t * const * row,
        int n_quad, int64_t t0, int64_t t1) {
    constexpr int N_POS     = ggml_sparse_line_pos(N_BIT);
    constexpr int ALL_QUADS = PASS_COMPONENTS/4;
    constexpr int HB        = ZIP_HEADS;
    for (int64_t t = t0/N_POS*N_POS, b; t < t1; t = b) {
        const bool whole = t >= t0 && t + N_POS <= t1;
        b = whole ? std::min((t/RUN + 1)*RUN, t1/N_POS*N_POS) : t + N_POS; // whole lines up to the end of their run
        const int64_t a0 = std::max(t, t0), a1 = std::min(b, t1);
        for (int h = 0; h < n_head; ) {
            const int n = n_head - h < HB ? 1 : HB;
            float part[HB][N_POS];
            for (int j = 0; j < n && !whole && c0 > 0; ++j) {
                memcpy(part[j] + (a0 - t), s + (h + j)*ld_s + (a0 - t0), (a1 - a0)*sizeof(float));
            }
            const auto some  = n == HB ? score_lines<N_BIT, HB, 0> : score_lines<N_BIT, 1, 0>;
            const auto all   = n == HB ? score_lines<N_BIT, HB, ALL_QUADS> : score_lines<N_BIT, 1, ALL_QUADS>;
            const auto lines = n_quad < ALL_QUADS ? some : all;
            lines(whole ? s + h*ld_s + (t - t0) : part[0], whole ? ld_s : N_POS, coef + h, t/RUN - run0, c0, row,
                    t*N_BIT/8, (int) ((b - t)/N_POS), n_quad, c0 == 0);
            for (int j = 0; j < n && !whole; ++j) {
                memcpy(s + (h + j)*ld_s + (a0 - t0), part[j] + (a0 - t), (a1 - a0)*sizeof(float));
            }
            h += n;
        }
    }
}

// bytes that score_codes needs
static inline size_t code_scratch(int n_head, int n_comp) {
    const size_t n_quad = (n_comp + 3)/4;
    return n_head*(sizeof(run_coef) + 2*n_quad*4*MAX_RUN) + n_quad*(4 + MAX_RUN/4*2*LANES)*sizeof(float);
}

// of one KV head, for the positions t0 <= t < t1 (multiples of GROUP), which touch no more than MAX_RUN runs
//   s [n_head][ld_s]: position t at t - t0; scratch: code_scratch() bytes
template <int N_BIT>
static void score_codes(float * s, int64_t ld_s, int n_head, const code_rows & x, const int32_t * comp, int n_comp,
        const float * coef, int ld_coef, int64_t t0, int64_t t1, const scan_next & next, void * scratch) {
    const int64_t run0   = t0/RUN;
    const int     n_run  = (int) ((t1 - 1)/RUN - run0 + 1);
    const int     n_quad = (n_comp + 3)/4;

    float    * range = (float *) scratch;
    float    * quads = range + n_quad*MAX_RUN/4*2*LANES; // [n_quad][4] coefficients
    run_coef * rc    = (run_coef *) (quads + 4*n_quad);  // [n_head]
    int8_t   * w     = (int8_t *) (rc + n_head);
    load_ranges(range, x.range + run0*x.ld_run, x.ld_comp, x.ld_run, comp, n_comp, n_run);
    for (int h = 0; h < n_head; ++h, w += 2*n_quad*4*MAX_RUN) {
        std::fill(std::copy_n(coef + h*ld_coef, n_comp, quads), quads + 4*n_quad, 0.0f);
        rc[h].w0 = w;
        rc[h].w1 = w + n_quad*4*MAX_RUN;
        make_coef(rc[h], quads, range, n_quad, n_run, N_BIT);
    }

    for (int i = 0; i < next.n_comp; ++i) { // now, because at the end much else is prefetched
        prefetch(x.range + (next.row + next.comp[i])*x.ld_comp + (t0 + next.dt)/RUN*x.ld_run);
    }
    const uint8_t * row[PASS_COMPONENTS];
    for (int c0 = 0; c0 < n_comp; c0 += PASS_COMPONENTS) {
        const int n = (std::min(PASS_COMPONENTS, n_comp - c0) + 3)/4;
        for (int i = 0; i < 4*n; ++i) { // where there is no component its coefficient is zero
            row[i] = x.codes + comp[std::min(c0 + i, n_comp - 1)]*x.nb_comp;
        }
        score_pass<N_BIT>(s, ld_s, n_head, rc, run0, c0, row, n, t0, t1);
    }

    for (int i = 0; i < next.n_comp; ++i) { // into the first level of the cache, ahead of the many lines that follow
        prefetch_first(x.range + (next.row + next.comp[i])*x.ld_comp + (t0 + next.dt)/RUN*x.ld_run);
    }
    for (int i = 0; i < next.n_comp; ++i) {
        const int64_t c = next.row + next.comp[i], t = t0 + next.dt;
        for (int b = 0; b < CODES_AHEAD; b += LINE) {
            prefetch(x.codes + c*(int64_t) x.nb_comp + t*N_BIT/8 + b);
        }
    }
}

} // namespace sparse
