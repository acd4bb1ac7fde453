#pragma once

// The quantised shadow: k_t in 8 or 4 bits, and the scan of it (step 1).
//
//   A run is GGML_SPARSE_RUN positions of one channel: x = zero + scale*code, code in 0..255 or 0..15, scale and zero (f32) from the
//   run's smallest and largest value. Keys differ between channels, not between positions, so a scale along positions loses little; a
//   zero point costs nothing in the scan (one constant per run).
//   Sealing a group codes its whole run anew from K, with the groups that were sealed before: K is still there, and a later key may
//   lie outside the range of those before it.
//
//   The order of the codes: ../sparse-codes.h.
//
//   The scan is one of integers: the coefficients of a run (times the scales of its channels) are rounded to small whole numbers, four
//   channels are zipped, and one instruction (VNNI; two or three without it) multiplies and adds four codes of every position.

#include "sparse-codes.h"
#include "sparse-score.h"

#include <algorithm>

namespace sparse {

constexpr int RUN  = GGML_SPARSE_RUN;
constexpr int LINE = GGML_SPARSE_LINE; // bytes

// ---- seal ----

// W values in 0..255 to bytes
static inline void store_u8(uint8_t * p, vf x) {
#if defined(SPARQ_AVX512)
    _mm_storeu_si128((__m128i *) p, _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(x)));
#else
    float y[W];
    store(y, x);
    for (int i = 0; i < W; ++i) {
        p[i] = (uint8_t) y[i];
    }
#endif
}

// W whole numbers in -128..127 to bytes
static inline void store_i8(int8_t * p, vf x) {
#if defined(SPARQ_AVX512)
    _mm_storeu_si128((__m128i *) p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
#else
    float y[W];
    store(y, x);
    for (int i = 0; i < W; ++i) {
        p[i] = (int8_t) y[i];
    }
#endif
}

// K as the shadow sees it: finite
static inline vf seal_value(vf x) {
    x = select(eq(x, x), x, set1(0.0f));
    return vmin(set1(65504.0f), vmax(set1(-65504.0f), x));
}

// codes the d channels of one KV head over one run; only groups with valid[g] count, the others get code 0 and are not read
//   codes, range: of the head's first channel, ld_range floats apart; k: the run's first position
// Channels lie in the lanes: a scale and a zero for each come out of the first pass over the positions, codes out of the second
template <typename T>
static void seal_run(char * codes, size_t nb_chan, float * range, const char * k, size_t nb_pos, const uint8_t * valid, int d, int n_bit, int64_t ld_range = 2) {
    constexpr int G  = GGML_SPARSE_GROUP;
    constexpr int NC = 16;   // channels at a time
    constexpr int NV = NC/W; // vectors of them
    const vf top = set1((float) ggml_sparse_code_max(n_bit));

    for (int c0 = 0; c0 < d; c0 += NC) {
        const int nc = std::min(NC, d - c0);
        const auto value = [&](int t, int v) {
            const T * x = (const T *) (k + t*nb_pos) + c0 + v*W;
            const int n = nc - v*W;
            return seal_value(n >= W ? load(x) : load_n(x, std::max(n, 0)));
        };

        vf lo[NV], hi[NV];
        for (int v = 0; v < NV; ++v) {
            lo[v] = set1(65504.0f);
            hi[v] = set1(-65504.0f);
        }
        for (int t = 0; t < RUN; ++t) {
            for (int v = 0; valid[t/G] && v < NV; ++v) {
                const vf x = value(t, v);
                lo[v] = vmin(lo[v], x);
                hi[v] = vmax(hi[v], x);
            }
        }
        vf inv[NV];
        for (int v = 0; v < NV; ++v) {
            const vf none  = set1(0.0f);
            const vf scale = vmax(none, div(sub(hi[v], lo[v]), top)); // no valid group: hi < lo
            lo[v]  = select(lt(hi[v], lo[v]), none, lo[v]);
            inv[v] = select(lt(none, scale), div(set1(1.0f), scale), none);
            float sc[W], ze[W];
            store(sc, scale);
            store(ze, lo[v]);
            for (int i = 0; i < W && v*W + i < nc; ++i) {
                range[(c0 + v*W + i)*ld_range]     = sc[i];
                range[(c0 + v*W + i)*ld_range + 1] = ze[i];
            }
        }

        uint8_t tile[RUN][NC];
        for (int t = 0; t < RUN; ++t) {
            for (int v = 0; v < NV; ++v) {
                vf x = set1(0.0f);
                if (valid[t/G]) {
                    x = round_even(mul(sub(value(t, v), lo[v]), inv[v]));
                    x = vmin(top, vmax(set1(0.0f), x));
                }
                store_u8(&tile[t][v*W], x);
            }
        }
        for (int c = 0; c < nc; ++c) {
            uint8_t * dst = (uint8_t *) (codes + (c0 + c)*nb_chan);
            for (int b = 0; b < RUN; b += ggml_sparse_line_pos(n_bit), dst += LINE) {
                for (int t = 0; t < LINE; ++t) {
                    dst[ggml_sparse_line_byte(t)] = n_bit == 8 ? tile[b + t][c] : tile[b + t][c] | tile[b + LINE + t][c] << 4;
                }
            }
        }
    }
}

// ---- step 1 from codes ----

// vectors of bytes, VB of them, and of 32-bit sums
//   zip8, zip16   interleave bytes or pairs of bytes of a and b, within 128 bits: the lower or the upper half of each
//   dot           acc + the sum over four neighbouring bytes of x (unsigned) times w (signed); |w| <= 64 where bytes exceed 127 and
//                 not DOT_ANY
#if defined(SPARQ_AVX512)
typedef __m512i vi;
constexpr int VB = 64;
#if defined(__AVX512VNNI__)
constexpr bool DOT_ANY = true;
#else
constexpr bool DOT_ANY = false;
#endif
static inline vi vi_load(const uint8_t * p)       { return _mm512_loadu_si512(p); }
static inline vi vi_set4(const int8_t * p)        { int32_t x; memcpy(&x, p, 4); return _mm512_set1_epi32(x); }
static inline vi vi_zero()                        { return _mm512_setzero_si512(); }
static inline vi zip8_lo(vi a, vi b)              { return _mm512_unpacklo_epi8(a, b); }
static inline vi zip8_hi(vi a, vi b)              { return _mm512_unpackhi_epi8(a, b); }
static inline vi zip16_lo(vi a, vi b)             { return _mm512_unpacklo_epi16(a, b); }
static inline vi zip16_hi(vi a, vi b)             { return _mm512_unpackhi_epi16(a, b); }
static inline vi low4(vi x)                       { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
static inline vi high4(vi x)                      { return low4(_mm512_srli_epi16(x, 4)); }
static inline vf to_float(vi x)                   { return _mm512_cvtepi32_ps(x); }
static inline vi dot(vi acc, vi x, vi w) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(acc, x, w);
#else
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(x, w), _mm512_set1_epi16(1)));
#endif
}
#elif defined(SPARQ_AVX2)
typedef __m256i vi;
constexpr int  VB      = 32;
#if defined(__AVXVNNI__)
constexpr bool DOT_ANY = true;
#else
constexpr bool DOT_ANY = false;
#endif
static inline vi vi_load(const uint8_t * p)       { return _mm256_loadu_si256((const __m256i *) p); }
static inline vi vi_set4(const int8_t * p)        { int32_t x; memcpy(&x, p, 4); return _mm256_set1_epi32(x); }
static inline vi vi_zero()                        { return _mm256_setzero_si256(); }
static inline vi zip8_lo(vi a, vi b)              { return _mm256_unpacklo_epi8(a, b); }
static inline vi zip8_hi(vi a, vi b)              { return _mm256_unpackhi_epi8(a, b); }
static inline vi zip16_lo(vi a, vi b)             { return _mm256_unpacklo_epi16(a, b); }
static inline vi zip16_hi(vi a, vi b)             { return _mm256_unpackhi_epi16(a, b); }
static inline vi low4(vi x)                       { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
static inline vi high4(vi x)                      { return low4(_mm256_srli_epi16(x, 4)); }
static inline vf to_float(vi x)                   { return _mm256_cvtepi32_ps(x); }
static inline vi dot(vi acc, vi x, vi w) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, x, w);
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)));
#endif
}
#elif defined(SPARQ_NEON)
typedef uint8x16_t vi;
constexpr int  VB      = 16;
constexpr bool DOT_ANY = true;
static inline vi vi_load(const uint8_t * p)       { return vld1q_u8(p); }
static inline vi vi_set4(const int8_t * p)        { int32_t x; memcpy(&x, p, 4); return vreinterpretq_u8_s32(vdupq_n_s32(x)); }
static inline vi vi_zero()                        { return vdupq_n_u8(0); }
static inline vi zip8_lo(vi a, vi b)              { return vzip1q_u8(a, b); }
static inline vi zip8_hi(vi a, vi b)              { return vzip2q_u8(a, b); }
static inline vi zip16_lo(vi a, vi b)             { return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b))); }
static inline vi zip16_hi(vi a, vi b)             { return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b))); }
static inline vi low4(vi x)                       { return vandq_u8(x, vdupq_n_u8(15)); }
static inline vi high4(vi x)                      { return vshrq_n_u8(x, 4); }
static inline vf to_float(vi x)                   { return vcvtq_f32_s32(vreinterpretq_s32_u8(x)); }
static inline vi dot(vi acc, vi x, vi w) {
    const int8x16_t s = vreinterpretq_s8_u8(w);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vreinterpretq_u8_s32(vusdotq_s32(vreinterpretq_s32_u8(acc), x, s));
#else
    const int16x8_t lo = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x))), vmovl_s8(vget_low_s8(s)));
    const int16x8_t hi = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(x)), vmovl_high_s8(s));
    return vreinterpretq_u8_s32(vaddq_s32(vreinterpretq_s32_u8(acc), vpaddq_s32(vpaddlq_s16(lo), vpaddlq_s16(hi))));
#endif
}
#endif

// channels of a pass: so many that sums are seldom loaded and stored
constexpr int PASS_CHAN = 32;

// how many bytes before their use codes are asked for, into the first level: so near, a second step would be too late
constexpr int CODE_AHEAD = 3*LINE;

// runs that a scan touches at most
constexpr int MAX_RUN = 8;

// Coefficients are made for four channels in four runs at a time: lane 4*j + i is the i-th channel in the j-th run
constexpr int LANES = 16;
constexpr int N_VEC = LANES/W;

// the v-th vector of p[0] to p[3], again and again
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

// the coefficients of one query head as whole numbers, in each run others: logit = sum_i w[i]*step*code[i] + base
//   4 bits: w = w0, |w0| <= 127; 8 bits: w = 64*w0 + w1, |w0| <= 64, |w1| <= 32
// what belongs to run j lies at step[j], base[j], and of the channels 4*q to 4*q + 3 at w0 + 4*(q*MAX_RUN + j)
struct run_coef {
    int8_t * w0; // [n_chan rounded up to 4][MAX_RUN], zeros behind n_chan
    int8_t * w1;
    float    step[MAX_RUN], base[MAX_RUN];
};

// res [MAX_RUN/4][n_quad][2][LANES] = scales and zeros of n_run runs, 0 where there is no channel or run
//   range: of the first run, see code_rows
static inline void load_ranges(float * res, const float * range, int64_t ld_chan, int64_t ld_run, const int32_t * chan, int n_chan, int n_run) {
    const int n_quad = (n_chan + 3)/4;
    if (n_chan % 4 != 0 || n_run % 4 != 0) {
        std::fill(res, res + (n_run + 3)/4*n_quad*2*LANES, 0.0f);
    }
    int i = 0;
#if defined(SPARQ_AVX512) // two channels in a vector: scale and zero in turns, of four runs
    const __m512i scale = _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30);
    const __m512i zero  = _mm512_add_epi32(scale, _mm512_set1_epi32(1));
    for (; i + 4 <= n_chan && n_run % 4 == 0 && ld_run == 2; i += 4) {
        for (int j = 0; j < n_run; j += 4) {
            const auto two = [&](const int32_t * c) {
                const float * x = range + 2*j;
                return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(x + c[0]*ld_chan)), _mm256_loadu_ps(x + c[1]*ld_chan), 1);
            };
            const vf x = two(chan + i), y = two(chan + i + 2);
            float * to = res + (j/4*n_quad + i/4)*2*LANES;
            store(to,         _mm512_permutex2var_ps(x, scale, y));
            store(to + LANES, _mm512_permutex2var_ps(x, zero,  y));
        }
    }
#endif
    for (; i < n_chan; ++i) {
        const float * from = range + chan[i]*ld_chan;
        float * to = res + i/4*2*LANES + i % 4;
        for (int j = 0; j < n_run; ++j) {
            float * x = to + j/4*n_quad*2*LANES + j % 4*4;
            x[0]     = from[j*ld_run];
            x[LANES] = from[j*ld_run + 1];
        }
    }
}

// NUMERICS: rounding a coefficient costs less than the codes themselves (test_scan_equals_the_values_of_the_codes). Of the error
// (a - w*step)*code the part that all positions share, with a code in the middle, goes to the base
//   coef [n_quad][4], 0 where there is no channel; range: what load_ranges made
static inline void make_coef(run_coef & res, const float * coef, const float * range, int n_quad, int n_run, int n_bit) {
    const float most = (float) ggml_sparse_coef_max(n_bit), mid = ggml_sparse_code_max(n_bit)/2.0f;
    for (int j0 = 0; j0 < n_run; j0 += 4, range += n_quad*2*LANES) {
        vf max[N_VEC], base[N_VEC], rest[N_VEC];
        SPARQ_UNROLL
        for (int v = 0; v < N_VEC; ++v) {
            max[v] = base[v] = rest[v] = set1(0.0f);
        }
        for (int q = 0; q < n_quad; ++q) {
            SPARQ_UNROLL
            for (int v = 0; v < N_VEC; ++v) {
                max[v] = vmax(vabs(mul(load_quad(coef + 4*q, v), load(range + q*2*LANES + v*W))), max[v]);
            }
        }
        float x[LANES], step[LANES], inv[LANES];
        SPARQ_UNROLL
        for (int v = 0; v < N_VEC; ++v) {
            store(x + v*W, max[v]);
        }
        for (int j = 0; j < 4; ++j) {
            const float m   = std::max(std::max(x[4*j], x[4*j + 1]), std::max(x[4*j + 2], x[4*j + 3]));
            const float top = m > 1e-30f ? m : 0.0f; // what is smaller would overflow below, and weighs nothing
            res.step[j0 + j] = top/most;
            std::fill(step + 4*j, step + 4*j + 4, top/most);
            std::fill(inv  + 4*j, inv  + 4*j + 4, top > 0.0f ? most/top : 0.0f);
        }
        for (int q = 0; q < n_quad; ++q) {
            SPARQ_UNROLL
            for (int v = 0; v < N_VEC; ++v) {
                const float * r = range + q*2*LANES + v*W;
                const vf c = load_quad(coef + 4*q, v), a = mul(c, load(r)), w = round_even(mul(a, load(inv + v*W)));
                base[v] = fma(c, load(r + LANES), base[v]);
                rest[v] = add(sub(a, mul(w, load(step + v*W))), rest[v]);
                const vf w0 = n_bit == 4 ? w : round_even(mul(w, set1(1.0f/64.0f)));
                store_i8(res.w0 + 4*(q*MAX_RUN + j0) + v*W, w0);
                if (n_bit == 8) {
                    store_i8(res.w1 + 4*(q*MAX_RUN + j0) + v*W, sub(w, mul(w0, set1(64.0f))));
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

// s[h][..] += or = n_line lines of codes of 4*n_quad channels, from c0 on, within the run-th run, for HB heads
//   row [4*n_quad]: the first lines. NQ: n_quad where it is known, without a loop then: its loads and branches wait behind the codes that
//   are still on their way (4 bits, one thread: 50 instead of 64 % of bandwidth)
template <int N_BIT, int HB, int NQ>
static SPARQ_NOINLINE void score_lines(float * s, int64_t ld_s, const run_coef * coef, int64_t run, int c0, const uint8_t * const * row,
        int64_t at, int n_line, int any_quad, bool first) {
    const int n_quad = NQ > 0 ? NQ : any_quad;
    const int8_t * w0[HB], * w1[HB];
    for (int h = 0; h < HB; ++h) {
        w0[h] = coef[h].w0 + c0*MAX_RUN + 4*run;
        w1[h] = coef[h].w1 + c0*MAX_RUN + 4*run;
    }
#if defined(SPARQ_SCALAR)
    for (int h = 0; h < HB; ++h) {
        for (int t = 0; t < n_line*ggml_sparse_line_pos(N_BIT); ++t) {
            const int64_t byte = at + t/ggml_sparse_line_pos(N_BIT)*LINE + ggml_sparse_line_byte(t % LINE);
            int32_t sum = 0;
            for (int i = 0; i < 4*n_quad; ++i) {
                const int x = row[i][byte];
                const int at_w = i/4*4*MAX_RUN + i % 4, w = N_BIT == 4 ? w0[h][at_w] : 64*w0[h][at_w] + w1[h][at_w];
                sum += w*(N_BIT == 8 ? x : t % ggml_sparse_line_pos(N_BIT) < LINE ? x & 15 : x >> 4);
            }
            float & d = s[h*ld_s + t];
            d = fmaf((float) sum, coef[h].step[run], first ? coef[h].base[run] : d);
        }
    }
#else
    constexpr bool WHOLE = N_BIT == 4 && DOT_ANY; // a byte as it is instead of its high half: one step less
    for (const int64_t end = at + n_line*LINE; at < end; at += VB) {
        vi a0[HB][4], a1[HB][4]; // sums of the low and high halves (or of the whole bytes), or with w0 and w1
        for (int h = 0; h < HB; ++h) {
            for (int j = 0; j < 4; ++j) {
                a0[h][j] = a1[h][j] = vi_zero();
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < n_quad; ++q) {
            vi x[4], v[4];
            for (int i = 0; i < 4; ++i) {
                x[i] = vi_load(row[4*q + i] + at);
                if (at % LINE == 0) {
                    prefetch_first(row[4*q + i] + at + CODE_AHEAD);
                }
            }
            const vi l01 = zip8_lo(x[0], x[1]), h01 = zip8_hi(x[0], x[1]);
            const vi l23 = zip8_lo(x[2], x[3]), h23 = zip8_hi(x[2], x[3]);
            v[0] = zip16_lo(l01, l23);
            v[1] = zip16_hi(l01, l23);
            v[2] = zip16_lo(h01, h23);
            v[3] = zip16_hi(h01, h23);
            for (int j = 0; j < 4; ++j) {
                const vi lo = N_BIT == 4 ? low4(v[j]) : v[j], hi = WHOLE || N_BIT == 8 ? v[j] : high4(v[j]);
                for (int h = 0; h < HB; ++h) {
                    const vi w = vi_set4(w0[h] + 4*q*MAX_RUN);
                    a0[h][j] = dot(a0[h][j], lo, w);
                    a1[h][j] = dot(a1[h][j], hi, N_BIT == 4 ? w : vi_set4(w1[h] + 4*q*MAX_RUN));
                }
            }
        }
        for (int h = 0; h < HB; ++h) {
            const vf step = set1(coef[h].step[run]), high = set1(coef[h].step[run]/16.0f), base = set1(coef[h].base[run]);
            for (int j = 0; j < 4; ++j) {
                float * d = s + h*ld_s + 16*j;
                if (N_BIT == 4) {
                    // whole sums are below 2^24, so exact as floats, and 16 times those of the high halves more
                    const vf lo = to_float(a0[h][j]), hi = to_float(a1[h][j]);
                    store(d,        fma(lo, step, first ? base : load(d)));
                    store(d + LINE, WHOLE ? fma(sub(hi, lo), high, first ? base : load(d + LINE)) : fma(hi, step, first ? base : load(d + LINE)));
                } else { // either sum is below 2^24, so exact as a float
                    store(d, fma(fma(to_float(a0[h][j]), set1(64.0f), to_float(a1[h][j])), step, first ? base : load(d)));
                }
            }
        }
        // the sums of a part of a line lie VB/4 positions behind those of the part before
        s += (at + VB) % LINE == 0 ? ggml_sparse_line_pos(N_BIT) - (LINE - VB)/4 : VB/4;
    }
#endif
}

// where the codes of a KV head are, and their scales and zeros: range of channel c in run i at range + c*ld_chan + i*ld_run
struct code_rows {
    const uint8_t * codes;
    size_t          nb_chan;
    const float   * range;
    int64_t         ld_chan, ld_run;
};

static inline size_t code_scratch(int n_head, int n_chan) {
    const size_t n_quad = (n_chan + 3)/4;
    return n_head*(sizeof(run_coef) + 2*n_quad*4*MAX_RUN) + n_quad*(4 + MAX_RUN/4*2*LANES)*sizeof(float);
}

// s[h][t - t0] for the positions t0 <= t < t1 (multiples of GROUP) of one KV head, within MAX_RUN runs
//   scratch: code_scratch() bytes
template <int N_BIT>
static void score_codes(float * s, int64_t ld_s, int n_head, const code_rows & x, const int32_t * chan, int n_chan,
        const float * coef, int ld_coef, int64_t t0, int64_t t1, const scan_next & then, void * scratch) {
    constexpr int N_POS     = ggml_sparse_line_pos(N_BIT);
    constexpr int ALL_QUADS = PASS_CHAN/4;
#if defined(SPARQ_AVX2)
    constexpr int HB = 1; // query heads that share the zipping, as the registers allow
#else
    constexpr int HB = 2;
#endif
    const int64_t run0  = t0/RUN;
    const int     n_run = (int) ((t1 - 1)/RUN - run0 + 1);
    const int     n_all = (n_chan + 3)/4; // quads

    float    * range = (float *) scratch;
    float    * quads = range + n_all*MAX_RUN/4*2*LANES; // [n_all][4] coefficients
    run_coef * rc    = (run_coef *) (quads + 4*n_all);  // [n_head]
    int8_t   * w     = (int8_t *) (rc + n_head);
    load_ranges(range, x.range + run0*x.ld_run, x.ld_chan, x.ld_run, chan, n_chan, n_run);
    for (int h = 0; h < n_head; ++h, w += 2*n_all*4*MAX_RUN) {
        std::fill(std::copy_n(coef + h*ld_coef, n_chan, quads), quads + 4*n_all, 0.0f);
        rc[h].w0 = w;
        rc[h].w1 = w + n_all*4*MAX_RUN;
        make_coef(rc[h], quads, range, n_all, n_run, N_BIT);
    }

    for (int i = 0; i < then.n_chan; ++i) { // now: at the end there would be much at once
        prefetch(x.range + (then.row + then.chan[i])*x.ld_chan + (t0 + then.dt)/RUN*x.ld_run);
    }
    const uint8_t * row[PASS_CHAN];
    for (int c0 = 0; c0 < n_chan; c0 += PASS_CHAN) {
        const int n_quad = (std::min(PASS_CHAN, n_chan - c0) + 3)/4;
        for (int i = 0; i < 4*n_quad; ++i) { // where there is no channel its coefficient is zero
            row[i] = x.codes + chan[std::min(c0 + i, n_chan - 1)]*x.nb_chan;
        }
        for (int64_t t = t0/N_POS*N_POS, b; t < t1; t = b) {
            // up to the end of the run; a line that is only half ours, at an end, by itself
            const bool whole = t >= t0 && t + N_POS <= t1;
            b = whole ? std::min((t/RUN + 1)*RUN, t1/N_POS*N_POS) : t + N_POS;
            const int64_t a0 = std::max(t, t0), a1 = std::min(b, t1);
            for (int h = 0; h < n_head; ) {
                const int n = n_head - h < HB ? 1 : HB;
                float part[HB][N_POS];
                for (int j = 0; j < n && !whole && c0 > 0; ++j) {
                    memcpy(part[j] + (a0 - t), s + (h + j)*ld_s + (a0 - t0), (a1 - a0)*sizeof(float));
                }
                const auto lines = n_quad < ALL_QUADS ? (n == HB ? score_lines<N_BIT, HB, 0> : score_lines<N_BIT, 1, 0>)
                                                      : (n == HB ? score_lines<N_BIT, HB, ALL_QUADS> : score_lines<N_BIT, 1, ALL_QUADS>);
                lines(whole ? s + h*ld_s + (t - t0) : part[0], whole ? ld_s : N_POS, rc + h, t/RUN - run0, c0, row,
                        t*N_BIT/8, (int) ((b - t)/N_POS), n_quad, c0 == 0);
                for (int j = 0; j < n && !whole; ++j) {
                    memcpy(s + (h + j)*ld_s + (a0 - t0), part[j] + (a0 - t), (a1 - a0)*sizeof(float));
                }
                h += n;
            }
        }
    }

    for (int i = 0; i < then.n_chan; ++i) { // into the first level, in front of the many that follow
        prefetch_first(x.range + (then.row + then.chan[i])*x.ld_chan + (t0 + then.dt)/RUN*x.ld_run);
    }
    for (int i = 0; i < then.n_chan; ++i) {
        const int64_t c = then.row + then.chan[i], t = t0 + then.dt;
        for (int b = 0; b < CODE_AHEAD; b += LINE) {
            prefetch(x.codes + c*(int64_t) x.nb_chan + t*N_BIT/8 + b);
        }
    }
}

} // namespace sparse
