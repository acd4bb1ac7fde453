#pragma once

// The quantised shadow: k_t in 8 or 4 bits, and the scan of it (step 1).
//
//   A run is GGML_SPARSE_RUN positions of one channel: x = zero + scale*code, code in 0..255 or 0..15, scale and zero (f32) from the
//   run's smallest and largest value. Keys differ between channels, not between positions, so a scale along positions loses little; a
//   zero point costs nothing in the scan (one constant per run).
//   Sealing a group codes its whole run anew from K, with the groups that were sealed before: K is still there, and a later key may
//   lie outside the range of those before it.
//
//   8 bits: one byte a position. 4 bits: blocks of 128 positions in 64 bytes; the low halves of the bytes hold the first 64.
//
//   The 4-bit scan looks products up: a channel's contribution to a logit takes 16 values, so a table of 16 bytes per (query head,
//   channel, run) and a byte shuffle give 64 of them at once; they are summed as integers.

#include "sparse-score.h"

#include <algorithm>

namespace sparse {

constexpr int RUN   = GGML_SPARSE_RUN;
constexpr int BLOCK = 128; // positions of 4-bit codes that share 64 bytes

struct u8 { uint8_t code; };

static inline float to_f32(u8 x) { return x.code; }

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

// K as the shadow sees it: finite
static inline vf seal_value(vf x) {
    x = select(eq(x, x), x, set1(0.0f));
    return vmin(set1(65504.0f), vmax(set1(-65504.0f), x));
}

// codes the d channels of one KV head over one run; only groups with valid[g] count, the others get code 0 and are not read
//   codes, range: of the head's first channel; k: the run's first position
// Channels lie in the lanes: a scale and a zero for each come out of the first pass over the positions, codes out of the second
template <typename T>
static void seal_run(char * codes, size_t nb_chan, float * range, const char * k, size_t nb_pos, const uint8_t * valid, int d, int n_bit) {
    constexpr int G  = GGML_SPARSE_GROUP;
    constexpr int NC = 16;   // channels at a time
    constexpr int NV = NC/W; // vectors of them
    const vf top = set1(n_bit == 8 ? 255.0f : 15.0f);

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
                range[2*(c0 + v*W + i)]     = sc[i];
                range[2*(c0 + v*W + i) + 1] = ze[i];
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
            if (n_bit == 8) {
                for (int t = 0; t < RUN; ++t) {
                    dst[t] = tile[t][c];
                }
            } else for (int b = 0; b < RUN; b += BLOCK) {
                for (int t = 0; t < BLOCK/2; ++t) {
                    dst[b/2 + t] = tile[b + t][c] | tile[b + BLOCK/2 + t][c] << 4;
                }
            }
        }
    }
}

// ---- step 1 from 8 bits ----

#if defined(SPARQ_AVX512)
static inline vf load(const u8 * p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p))); }
#elif defined(SPARQ_AVX2)
static inline vf load(const u8 * p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p))); }
#else
static inline vf load(const u8 * p) {
    float x[W];
    for (int i = 0; i < W; ++i) {
        x[i] = p[i].code;
    }
    return load(x);
}
#endif

// s[h][t - t0] for the positions t0 <= t < t1 of one KV head, as score_channels() does from f16; the coefficients change with the run
//   codes, range: of the head's first channel; range of run i at range + i*ld_range
//   w: scratch [runs touched][n_head][n_chan + 1]; the last is the constant of the run
static inline void score_q8(float * s, int64_t ld_s, int n_head, const char * codes, size_t nb_chan, const float * range, int64_t ld_range,
        const int32_t * chan, int n_chan, const float * coef, int ld_coef, int64_t t0, int64_t t1, float * w) {
    const int     ld_w = n_chan + 1;
    const int64_t run0 = t0/RUN;
    for (int64_t run = run0; run*RUN < t1; ++run) {
        const float * r = range + run*ld_range;
        for (int h = 0; h < n_head; ++h) {
            float * wh = w + ((run - run0)*n_head + h)*ld_w;
            wh[n_chan] = 0.0f;
            for (int i = 0; i < n_chan; ++i) {
                wh[i] = coef[h*ld_coef + i]*r[2*chan[i]];
                wh[n_chan] += coef[h*ld_coef + i]*r[2*chan[i] + 1];
            }
        }
    }
    const u8 * row[8];
    for (int i = 0; i < n_chan; ) { // few channels at a time over all runs: long reads
        const int nc = n_chan - i >= 8 ? 8 : n_chan - i >= 4 ? 4 : 1;
        for (int64_t run = run0; run*RUN < t1; ++run) {
            const int64_t a = std::max(run*RUN, t0), b = std::min((run + 1)*RUN, t1);
            const float * wr = w + (run - run0)*n_head*ld_w + i;
            for (int c = 0; c < nc; ++c) {
                row[c] = (const u8 *) (codes + chan[i + c]*nb_chan) + a;
            }
            float * d = s + (a - t0);
            switch (nc) {
                case 8:  add_channels<8>(d, ld_s, n_head, row, (const u8 * const *) nullptr, wr, ld_w, b - a, i == 0); break;
                case 4:  add_channels<4>(d, ld_s, n_head, row, (const u8 * const *) nullptr, wr, ld_w, b - a, i == 0); break;
                default: add_channels<1>(d, ld_s, n_head, row, (const u8 * const *) nullptr, wr, ld_w, b - a, i == 0); break;
            }
        }
        i += nc;
    }
    for (int64_t run = run0; run*RUN < t1; ++run) {
        const int64_t a = std::max(run*RUN, t0), b = std::min((run + 1)*RUN, t1);
        for (int h = 0; h < n_head; ++h) {
            const float base = w[((run - run0)*n_head + h)*ld_w + n_chan];
            for (int64_t t = a; t < b; ++t) {
                s[h*ld_s + t - t0] += base;
            }
        }
    }
}

// ---- step 1 from 4 bits ----

// what the scan needs of one (query head, run): table [n_chan][16], and logit = step*sum + base
struct run_table {
    uint8_t * u;
    float     step;
    float     base;
};

// NUMERICS: a table entry is a whole number of steps; the step lets the largest pair of channels sum to 254 (255 after rounding), so that
// pairs are added as bytes. Its rounding stays below that of the 4-bit codes themselves (test_scan_equals_the_values_of_the_codes)
static inline void make_table(run_table & res, const float * coef, const int32_t * chan, int n_chan, const float * range) {
    float max  = 0.0f; // of |a_i| + |a_j| over the pairs
    float prev = 0.0f;
    res.base = 0.0f;
    for (int i = 0; i < n_chan; ++i) {
        const float * r = range + 2*chan[i];
        const float   a = coef[i]*r[0];
        prev = std::fabs(a) + (i % 2 ? prev : 0.0f);
        max  = std::max(max, prev);
        res.base += coef[i]*r[1] + (a < 0.0f ? 15.0f*a : 0.0f);
    }
    res.step = max*15.0f/254.0f;
    const float inv = max > 0.0f ? 254.0f/(max*15.0f) : 0.0f;
    for (int i = 0; i < n_chan; ++i) {
        const float a = coef[i]*range[2*chan[i]]*inv;
        uint8_t * u = res.u + 16*i;
#if defined(SPARQ_AVX512)
        // a < 0: |a|*(15 - code)
        const __m512 code = iota();
        const __m512 y    = a < 0.0f ? mul(set1(-a), sub(set1(15.0f), code)) : mul(set1(a), code);
        _mm_storeu_si128((__m128i *) u, _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(y)));
#else
        for (int c = 0; c < 16; ++c) {
            u[c] = (uint8_t) std::nearbyint(a < 0.0f ? -a*(15 - c) : a*c);
        }
#endif
    }
    if (n_chan % 2) { // channels are summed in pairs
        memset(res.u + 16*n_chan, 0, 16);
    }
}

// s[h][0 .. 128) = step*sum of table entries + base over one block; code[i]: 64 bytes of channel i. HB heads at a time
// a pair of channels sums to at most 255, a byte; the sums of even and odd bytes are kept apart in 16 bits
#if defined(SPARQ_AVX512)
typedef __m512i vb;
constexpr int NB = 64;
static inline vb  vb_load(const uint8_t * p)  { return _mm512_loadu_si512(p); }
static inline vb  vb_table(const uint8_t * p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) p)); }
static inline vb  vb_lo(vb x)                 { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
static inline vb  vb_hi(vb x)                 { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
static inline vb  vb_look(vb t, vb x)         { return _mm512_shuffle_epi8(t, x); }
static inline vb  vb_add8(vb a, vb b)         { return _mm512_add_epi8(a, b); }
static inline vb  vb_add16(vb a, vb b)        { return _mm512_add_epi16(a, b); }
static inline vb  vb_shr8(vb a)               { return _mm512_srli_epi16(a, 8); }
static inline vb  vb_zero()                   { return _mm512_setzero_si512(); }
static inline void vb_store(float * s, vb e, vb o, float step, float base) {
    e = _mm512_sub_epi16(e, _mm512_slli_epi16(o, 8));
    const vb lo = _mm512_unpacklo_epi16(e, o), hi = _mm512_unpackhi_epi16(e, o); // 8 positions per 128 bits, alternating
    const vb p0 = _mm512_permutex2var_epi64(lo, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), hi);
    const vb p1 = _mm512_permutex2var_epi64(lo, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), hi);
    const vf st = set1(step), ba = set1(base);
    const auto put = [&](float * d, __m256i x) { store(d, fma(_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(x)), st, ba)); };
    put(s,      _mm512_castsi512_si256(p0));
    put(s + 16, _mm512_extracti64x4_epi64(p0, 1));
    put(s + 32, _mm512_castsi512_si256(p1));
    put(s + 48, _mm512_extracti64x4_epi64(p1, 1));
}
#elif defined(SPARQ_AVX2)
typedef __m256i vb;
constexpr int NB = 32;
static inline vb  vb_load(const uint8_t * p)  { return _mm256_loadu_si256((const __m256i *) p); }
static inline vb  vb_table(const uint8_t * p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) p)); }
static inline vb  vb_lo(vb x)                 { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
static inline vb  vb_hi(vb x)                 { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
static inline vb  vb_look(vb t, vb x)         { return _mm256_shuffle_epi8(t, x); }
static inline vb  vb_add8(vb a, vb b)         { return _mm256_add_epi8(a, b); }
static inline vb  vb_add16(vb a, vb b)        { return _mm256_add_epi16(a, b); }
static inline vb  vb_shr8(vb a)               { return _mm256_srli_epi16(a, 8); }
static inline vb  vb_zero()                   { return _mm256_setzero_si256(); }
static inline void vb_store(float * s, vb e, vb o, float step, float base) {
    e = _mm256_sub_epi16(e, _mm256_slli_epi16(o, 8));
    const vb lo = _mm256_unpacklo_epi16(e, o), hi = _mm256_unpackhi_epi16(e, o);
    const vf st = set1(step), ba = set1(base);
    const auto put = [&](float * d, __m128i x) { store(d, fma(_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(x)), st, ba)); };
    put(s,      _mm256_castsi256_si128(lo));
    put(s + 8,  _mm256_castsi256_si128(hi));
    put(s + 16, _mm256_extracti128_si256(lo, 1));
    put(s + 24, _mm256_extracti128_si256(hi, 1));
}
#elif defined(SPARQ_NEON)
typedef uint8x16_t vb;
constexpr int NB = 16;
static inline vb  vb_load(const uint8_t * p)  { return vld1q_u8(p); }
static inline vb  vb_table(const uint8_t * p) { return vld1q_u8(p); }
static inline vb  vb_lo(vb x)                 { return vandq_u8(x, vdupq_n_u8(15)); }
static inline vb  vb_hi(vb x)                 { return vshrq_n_u8(x, 4); }
static inline vb  vb_look(vb t, vb x)         { return vqtbl1q_u8(t, x); }
static inline vb  vb_add8(vb a, vb b)         { return vaddq_u8(a, b); }
static inline vb  vb_add16(vb a, vb b)        { return vreinterpretq_u8_u16(vaddq_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b))); }
static inline vb  vb_shr8(vb a)               { return vreinterpretq_u8_u16(vshrq_n_u16(vreinterpretq_u16_u8(a), 8)); }
static inline vb  vb_zero()                   { return vdupq_n_u8(0); }
static inline void vb_store(float * s, vb e8, vb o8, float step, float base) {
    const uint16x8_t o = vreinterpretq_u16_u8(o8);
    const uint16x8_t e = vsubq_u16(vreinterpretq_u16_u8(e8), vshlq_n_u16(o, 8));
    const uint16x8_t p[2] = { vzip1q_u16(e, o), vzip2q_u16(e, o) };
    for (int i = 0; i < 2; ++i) {
        store(s + 8*i,     fma(vcvtq_f32_u32(vmovl_u16(vget_low_u16(p[i]))), set1(step), set1(base)));
        store(s + 8*i + 4, fma(vcvtq_f32_u32(vmovl_high_u16(p[i])),          set1(step), set1(base)));
    }
}
#endif

#if defined(SPARQ_SCALAR)
template <int HB>
static void score_block(float * s, int64_t ld_s, const run_table * tab, const uint8_t * const * code, int n_chan, int64_t) {
    for (int h = 0; h < HB; ++h) {
        for (int t = 0; t < BLOCK; ++t) {
            uint32_t sum = 0;
            for (int i = 0; i < n_chan; ++i) {
                const uint8_t c = code[i][t % (BLOCK/2)];
                sum += tab[h].u[16*i + (t < BLOCK/2 ? c & 15 : c >> 4)];
            }
            s[h*ld_s + t] = fmaf((float) sum, tab[h].step, tab[h].base);
        }
    }
}
#else
template <int HB>
static void score_block(float * s, int64_t ld_s, const run_table * tab, const uint8_t * const * code, int n_chan, int64_t ahead) {
    for (int b = 0; b < BLOCK/2; b += NB) {
        vb e[HB][2], o[HB][2];
        for (int h = 0; h < HB; ++h) {
            e[h][0] = e[h][1] = o[h][0] = o[h][1] = vb_zero();
        }
        for (int i = 0; i < n_chan; i += 2) {
            const uint8_t * c0 = code[i] + b;
            const uint8_t * c1 = code[i + 1 < n_chan ? i + 1 : i] + b; // its table is zero where there is no second
            if (b == 0) {
                prefetch(c0 + ahead);
                prefetch(c1 + ahead);
            }
            const vb x0 = vb_load(c0), x1 = vb_load(c1);
            const vb l0 = vb_lo(x0), l1 = vb_lo(x1), h0 = vb_hi(x0), h1 = vb_hi(x1);
            for (int h = 0; h < HB; ++h) {
                const vb t0 = vb_table(tab[h].u + 16*i), t1 = vb_table(tab[h].u + 16*i + 16);
                const vb lo = vb_add8(vb_look(t0, l0), vb_look(t1, l1));
                const vb hi = vb_add8(vb_look(t0, h0), vb_look(t1, h1));
                e[h][0] = vb_add16(e[h][0], lo);
                o[h][0] = vb_add16(o[h][0], vb_shr8(lo));
                e[h][1] = vb_add16(e[h][1], hi);
                o[h][1] = vb_add16(o[h][1], vb_shr8(hi));
            }
        }
        for (int h = 0; h < HB; ++h) {
            vb_store(s + h*ld_s + b,           e[h][0], o[h][0], tab[h].step, tab[h].base);
            vb_store(s + h*ld_s + BLOCK/2 + b, e[h][1], o[h][1], tab[h].step, tab[h].base);
        }
    }
}
#endif

// s[h][t - t0] for the positions t0 <= t < t1 (multiples of GROUP, or t1 the end of the cache) of one KV head
//   codes, range: of the head's first channel; range of run i at range + i*ld_range
//   u: scratch [n_head][n_chan + 1][16]
static inline void score_q4(float * s, int64_t ld_s, int n_head, const char * codes, size_t nb_chan, const float * range, int64_t ld_range,
        const int32_t * chan, int n_chan, const float * coef, int ld_coef, int64_t t0, int64_t t1, uint8_t * u) {
    constexpr int MAX_HB = 4, MAX_CHAN = 512;
    run_table tab[MAX_HB];
    const uint8_t * code[MAX_CHAN];

    for (int h0 = 0; h0 < n_head; ) {
        const int hb = n_head - h0 >= 4 ? 4 : n_head - h0 >= 2 ? 2 : 1;
        int64_t run = -1;
        for (int64_t b = t0/BLOCK*BLOCK; b < t1; b += BLOCK) {
            if (b/RUN != run) {
                run = b/RUN;
                for (int h = 0; h < hb; ++h) {
                    tab[h].u = u + (h0 + h)*(n_chan + 1)*16;
                    make_table(tab[h], coef + (h0 + h)*ld_coef, chan, n_chan, range + run*ld_range);
                }
            }
            for (int i = 0; i < n_chan; ++i) {
                code[i] = (const uint8_t *) codes + chan[i]*nb_chan + b/2;
            }
            // blocks at the ends may be half ours
            float part[MAX_HB][BLOCK];
            const bool whole = b >= t0 && b + BLOCK <= t1;
            float * out = whole ? s + h0*ld_s + (b - t0) : part[0];
            const int64_t ld = whole ? ld_s : BLOCK;
            constexpr int64_t AHEAD = RUN/2;
            switch (hb) {
                case 4:  score_block<4>(out, ld, tab, code, n_chan, AHEAD); break;
                case 2:  score_block<2>(out, ld, tab, code, n_chan, AHEAD); break;
                default: score_block<1>(out, ld, tab, code, n_chan, AHEAD); break;
            }
            if (!whole) {
                const int64_t a0 = std::max(b, t0), a1 = std::min(b + BLOCK, t1);
                for (int h = 0; h < hb; ++h) {
                    memcpy(s + (h0 + h)*ld_s + (a0 - t0), part[h] + (a0 - b), (a1 - a0)*sizeof(float));
                }
            }
        }
        h0 += hb;
    }
}

} // namespace sparse
