#pragma once

// SEAL, "store K twice": groups of positions of K to the shadow, which is K transposed, in f16 or in codes.
//
// Codes: x = zero + scale*code, code in 0..255 or 0..15. The positions of a run share scale and zero (f32), which follow from the smallest
// and the largest value of the run. Keys differ between components, not between positions, so a scale along positions loses little; and a
// zero costs nothing in the scan, where it is one constant per run.
// Sealing a group codes its whole run anew from K, together with the groups that were sealed before. K is still there, and a later key may
// lie outside the range of those before it. ../sparse-codes.h has the order of the codes.

#include "sparse-codes.h"
#include "sparse-rows.h"

namespace sparse {

constexpr float SHADOW_MAX = GGML_SPARSE_SHADOW_MAX;

// ---- f16: k_t[c, t] = k[t, c] ----

static inline f16 clamp_f16(f16 x) {
    return (x.bits & 0x7FFF) == 0x7C00 ? f16 { (uint16_t) (x.bits - 1) } : x; // +-inf -> +-SHADOW_MAX
}
static inline f16 clamp_f16(float x) { return to_f16(x > SHADOW_MAX ? SHADOW_MAX : x < -SHADOW_MAX ? -SHADOW_MAX : x); }
static inline f16 clamp_f16(bf16  x) { return clamp_f16(to_f32(x)); }

// the n <= GROUP positions of a group of one KV head
template <typename T>
static void seal_group_f16(char * k_t, size_t nb_comp, const char * k, size_t nb_pos, int n, int d) {
    constexpr int NC = 32; // reads a cache line of each position, then writes whole lines of k_t
    for (int c0 = 0; c0 < d; c0 += NC) {
        const int nc = d - c0 < NC ? d - c0 : NC;

        f16 x[NC][GROUP];
        for (int t = 0; t < n; ++t) {
            const T * row = (const T *) (k + t*nb_pos) + c0;
            for (int c = 0; c < nc; ++c) {
                x[c][t] = clamp_f16(row[c]);
            }
        }
        for (int c = 0; c < nc; ++c) {
            memcpy(k_t + (c0 + c)*nb_comp, x[c], n*sizeof(f16));
        }
    }
}

// ---- codes: k_t[c, t] = round((k[t, c] - zero[c])/scale[c]) ----

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

// Components lie in the lanes, SEAL_WIDTH of them at a time. A first pass over the positions finds their scales and zeros, a second one their
// codes
constexpr int SEAL_WIDTH = 16;
constexpr int SEAL_VEC   = SEAL_WIDTH/W;

// n <= SEAL_WIDTH neighbouring components of the positions of a run, of which only those in groups with valid[g] count
template <typename T>
struct seal_columns {
    const char    * k; // of the first position
    size_t          nb_pos;
    const uint8_t * valid;
    int             n;

    bool is_valid(int t) const { return valid[t/GROUP]; }

    // vector v of position t as the shadow has it, which is finite; 0 for NaN
    SPARQ_INLINE vf value(int t, int v) const {
        const T * p = (const T *) (k + t*nb_pos) + v*W;
        const int m = n - v*W;
        vf x = m >= W ? load(p) : load_n(p, std::max(m, 0));
        x = select(eq(x, x), x, set1(0.0f));
        return vmin(set1(SHADOW_MAX), vmax(set1(-SHADOW_MAX), x));
    }
};

// zero[c] = min_t x[t, c], scale[c] = (max_t x[t, c] - zero[c])/top: to `range`, ld_range floats apart. Leaves zero and 1/scale in vectors
template <typename T>
static SPARQ_INLINE void find_ranges(const seal_columns<T> & x, vf top, vf * zero, vf * inv, float * range, int64_t ld_range) {
    const vf none = set1(0.0f);
    vf lo[SEAL_VEC], hi[SEAL_VEC];
    for (int v = 0; v < SEAL_VEC; ++v) {
        lo[v] = set1(SHADOW_MAX);
        hi[v] = set1(-SHADOW_MAX);
    }
    for (int t = 0; t < RUN; ++t) {
        for (int v = 0; x.is_valid(t) && v < SEAL_VEC; ++v) {
            const vf y = x.value(t, v);
            lo[v] = vmin(lo[v], y);
            hi[v] = vmax(hi[v], y);
        }
    }
    for (int v = 0; v < SEAL_VEC; ++v) {
        const vf scale = vmax(none, div(sub(hi[v], lo[v]), top)); // without a valid group, hi < lo
        zero[v] = select(lt(hi[v], lo[v]), none, lo[v]);
        inv[v]  = select(lt(none, scale), div(set1(1.0f), scale), none);
        float sc[W], ze[W];
        store(sc, scale);
        store(ze, zero[v]);
        for (int i = 0; i < W && v*W + i < x.n; ++i) {
            range[(v*W + i)*ld_range]     = sc[i];
            range[(v*W + i)*ld_range + 1] = ze[i];
        }
    }
}

// Codes the d components of one KV head over one run. Groups that are not valid are not read, and their codes are 0.
//   codes, range: of the head's first component; k: of the run's first position
template <typename T>
static void seal_run_codes(char * codes, size_t nb_comp, float * range, const char * k, size_t nb_pos, const uint8_t * valid, int d, int n_bit,
        int64_t ld_range) {
    GGML_ASSERT(n_bit == 8 || n_bit == 4); // as codes are packed below
    const vf top = set1((float) ggml_sparse_code_max(n_bit));
    for (int c0 = 0; c0 < d; c0 += SEAL_WIDTH) {
        const seal_columns<T> x = { k + c0*sizeof(T), nb_pos, valid, std::min(SEAL_WIDTH, d - c0) };
        vf zero[SEAL_VEC], inv[SEAL_VEC];
        find_ranges(x, top, zero, inv, range + c0*ld_range, ld_range);

        uint8_t code[RUN][SEAL_WIDTH];
        for (int t = 0; t < RUN; ++t) {
            for (int v = 0; v < SEAL_VEC; ++v) {
                vf y = set1(0.0f);
                if (x.is_valid(t)) {
                    y = round_even(mul(sub(x.value(t, v), zero[v]), inv[v]));
                    y = vmin(top, vmax(set1(0.0f), y));
                }
                store_u8(&code[t][v*W], y);
            }
        }
        for (int c = 0; c < x.n; ++c) {
            uint8_t * dst = (uint8_t *) (codes + (c0 + c)*nb_comp);
            for (int b = 0; b < RUN; b += ggml_sparse_line_pos(n_bit), dst += GGML_SPARSE_LINE) {
                for (int t = 0; t < GGML_SPARSE_LINE; ++t) {
                    dst[ggml_sparse_line_byte(t)] = n_bit == 8 ? code[b + t][c] : code[b + t][c] | code[b + GGML_SPARSE_LINE + t][c] << 4;
                }
            }
        }
    }
}

} // namespace sparse
