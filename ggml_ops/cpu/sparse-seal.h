#pragma once

// SEAL, "store K twice": groups of positions of K to the shadow, which is K transposed, in f16 or in codes.
//
// Codes: x = zero + scale*code, code in 0..255 or 0..15. The positions of a group share scale and zero (f16), which follow from the smallest
// and the largest value of the group. Keys differ between components, not between positions, so a scale along positions loses little; and a
// zero costs nothing in the scan, where it is one constant per group. ../sparse-codes.h has the order of the codes.

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

// a group of one KV head
template <typename T>
static void seal_group_f16(char * k_t, size_t nb_comp, const char * k, size_t nb_pos, int d) {
    constexpr int NC = 32; // reads a cache line of each position, then writes whole lines of k_t
    for (int c0 = 0; c0 < d; c0 += NC) {
        const int nc = d - c0 < NC ? d - c0 : NC;

        f16 x[NC][GROUP];
        for (int t = 0; t < GROUP; ++t) {
            const T * row = (const T *) (k + t*nb_pos) + c0;
            for (int c = 0; c < nc; ++c) {
                x[c][t] = clamp_f16(row[c]);
            }
        }
        for (int c = 0; c < nc; ++c) {
            memcpy(k_t + (c0 + c)*nb_comp, x[c], sizeof(x[c]));
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

// n <= SEAL_WIDTH neighbouring components of the positions of a group
template <typename T>
struct seal_columns {
    const char * k; // of the first position
    size_t       nb_pos;
    int          n;

    // vector v of position t as the shadow has it, which is finite; 0 for NaN
    SPARQ_INLINE vf value(int t, int v) const {
        const T * p = (const T *) (k + t*nb_pos) + v*W;
        const int m = n - v*W;
        vf x = m >= W ? load(p) : load_n(p, std::max(m, 0));
        x = select(eq(x, x), x, set1(0.0f));
        return vmin(set1(SHADOW_MAX), vmax(set1(-SHADOW_MAX), x));
    }
};

// zero[c] = min_t x[t, c], scale[c] = (max_t x[t, c] - zero[c])/top, rounded to f16: to `range`, nb_comp bytes apart. Leaves zero and 1/scale in
// vectors
template <typename T>
static SPARQ_INLINE void find_ranges(const seal_columns<T> & x, float top, vf * zero, vf * inv, char * range, size_t nb_comp) {
    for (int v = 0; v < SEAL_VEC; ++v) {
        vf lo = x.value(0, v), hi = lo;
        for (int t = 1; t < GROUP; ++t) {
            const vf y = x.value(t, v);
            lo = vmin(lo, y);
            hi = vmax(hi, y);
        }
        float sc[W], ze[W];
        store(sc, div(sub(hi, lo), set1(top)));
        store(ze, lo);
        for (int i = 0; i < W; ++i) {
            const f16 rounded[2] = { to_f16(sc[i]), to_f16(ze[i]) };
            sc[i] = to_f32(rounded[0]);
            ze[i] = to_f32(rounded[1]);
            if (v*W + i < x.n) {
                memcpy(range + (v*W + i)*nb_comp, rounded, sizeof(rounded));
            }
        }
        zero[v] = load(ze);
        inv[v]  = select(lt(set1(0.0f), load(sc)), div(set1(1.0f), load(sc)), set1(0.0f));
    }
}

// Codes the d components of one KV head over one group.
//   codes, range: of the head's first component; k: of the group's first position
template <typename T>
static void seal_group_codes(char * codes, size_t nb_codes, char * range, size_t nb_range, const char * k, size_t nb_pos, int d, int n_bit) {
    GGML_ASSERT(n_bit == 8 || n_bit == 4); // as codes are packed below
    const float top = (float) ggml_sparse_code_max(n_bit);
    for (int c0 = 0; c0 < d; c0 += SEAL_WIDTH) {
        const seal_columns<T> x = { k + c0*sizeof(T), nb_pos, std::min(SEAL_WIDTH, d - c0) };
        vf zero[SEAL_VEC], inv[SEAL_VEC];
        find_ranges(x, top, zero, inv, range + c0*nb_range, nb_range);

        uint8_t code[GROUP][SEAL_WIDTH];
        for (int t = 0; t < GROUP; ++t) {
            for (int v = 0; v < SEAL_VEC; ++v) {
                const vf y = round_even(mul(sub(x.value(t, v), zero[v]), inv[v]));
                store_u8(&code[t][v*W], vmin(set1(top), vmax(set1(0.0f), y)));
            }
        }
        for (int c = 0; c < x.n; ++c) {
            uint8_t * dst = (uint8_t *) (codes + (c0 + c)*nb_codes);
            for (int b = 0; b < GROUP; b += ggml_sparse_line_pos(n_bit), dst += GGML_SPARSE_LINE) {
                for (int t = 0; t < GGML_SPARSE_LINE; ++t) {
                    dst[ggml_sparse_line_byte(t)] = n_bit == 8 ? code[b + t][c] : code[b + t][c] | code[b + GGML_SPARSE_LINE + t][c] << 4;
                }
            }
        }
    }
}

} // namespace sparse
