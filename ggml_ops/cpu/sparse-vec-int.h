#pragma once

// Vectors of whole numbers, beside those of floats in sparse-vec.h: one type `vi` of W numbers of 32 bits, or of VB bytes. Vectors of gcc and clang
// have operators, and NEON's are such vectors. Without vectors there is what one number can do, so no zips.

#include "sparse-vec.h"

namespace sparse {

constexpr int VB = 4*W; // bytes

// ---- what each instruction set provides ----
//
//   load_int(p)      VB bytes                             store_int(p, x)  VB bytes
//   set1_int(x)      x in all lanes                       store_low(p, x, n)  the lowest bytes of the first n lanes
//   to_int(x)        x, which is whole                    to_float(x)      x as floats
//   as_bits(x)       the bits of floats                   as_float(x)      and back; where PREFILL multiplies bf16
//   zip8, zip16      interleave the bytes, or the pairs of bytes, of a and b within 128 bits: of the lower or the upper half of each
//   dot_bytes(acc, x, w)  acc + the sum over the four bytes of a lane of x (unsigned) times w (signed). Without DOT_ANY |w| must be at most 64 where
//                    bytes exceed 127
//   dot_bf16(acc, a, b)   acc + the products of the two bf16 of a lane

#if defined(SPARQ_AVX512)
typedef int32_t vi __attribute__((vector_size(64))); // gcc 12 keeps arrays of __m512i in memory, because the products of VNNI take another type
#if defined(__AVX512VNNI__)
constexpr bool DOT_ANY = true;
#else
constexpr bool DOT_ANY = false;
#endif

static inline vi   load_int(const void * p)      { return (vi) _mm512_loadu_si512(p); }
static inline void store_int(void * p, vi x)     { _mm512_storeu_si512(p, (__m512i) x); }
static inline vi   set1_int(int32_t x)           { return (vi) _mm512_set1_epi32(x); }
static inline vi   to_int(vf x)                  { return (vi) _mm512_cvtps_epi32(x); }
static inline vf   to_float(vi x)                { return _mm512_cvtepi32_ps((__m512i) x); }
static inline vi   as_bits(vf x)                 { return (vi) _mm512_castps_si512(x); }
static inline vf   as_float(vi x)                { return _mm512_castsi512_ps((__m512i) x); }
static inline vi   zip8_lo(vi a, vi b)           { return (vi) _mm512_unpacklo_epi8((__m512i) a, (__m512i) b); }
static inline vi   zip8_hi(vi a, vi b)           { return (vi) _mm512_unpackhi_epi8((__m512i) a, (__m512i) b); }
static inline vi   zip16_lo(vi a, vi b)          { return (vi) _mm512_unpacklo_epi16((__m512i) a, (__m512i) b); }
static inline vi   zip16_hi(vi a, vi b)          { return (vi) _mm512_unpackhi_epi16((__m512i) a, (__m512i) b); }
static inline void store_low(int8_t * p, vi x, int n) {
    if (n == W) {
        _mm_storeu_si128((__m128i *) p, _mm512_cvtepi32_epi8((__m512i) x));
    } else {
        _mm512_mask_cvtepi32_storeu_epi8(p, (__mmask16) ((1u << n) - 1), (__m512i) x);
    }
}
static inline vi dot_bytes(vi acc, vi x, vi w) {
#if defined(__AVX512VNNI__)
    return (vi) _mm512_dpbusd_epi32((__m512i) acc, (__m512i) x, (__m512i) w);
#else
    return acc + (vi) _mm512_madd_epi16(_mm512_maddubs_epi16((__m512i) x, (__m512i) w), _mm512_set1_epi16(1));
#endif
}
#if defined(__AVX512BF16__)
static inline vf dot_bf16(vf acc, vi a, vi b)    { return _mm512_dpbf16_ps(acc, (__m512bh) a, (__m512bh) b); }
#endif

#elif defined(SPARQ_AVX2)
typedef int32_t vi __attribute__((vector_size(32)));
#if defined(__AVXVNNI__)
constexpr bool DOT_ANY = true;
#else
constexpr bool DOT_ANY = false;
#endif

static inline vi   load_int(const void * p)      { return (vi) _mm256_loadu_si256((const __m256i *) p); }
static inline void store_int(void * p, vi x)     { _mm256_storeu_si256((__m256i *) p, (__m256i) x); }
static inline vi   set1_int(int32_t x)           { return (vi) _mm256_set1_epi32(x); }
static inline vi   to_int(vf x)                  { return (vi) _mm256_cvtps_epi32(x); }
static inline vf   to_float(vi x)                { return _mm256_cvtepi32_ps((__m256i) x); }
static inline vi   zip8_lo(vi a, vi b)           { return (vi) _mm256_unpacklo_epi8((__m256i) a, (__m256i) b); }
static inline vi   zip8_hi(vi a, vi b)           { return (vi) _mm256_unpackhi_epi8((__m256i) a, (__m256i) b); }
static inline vi   zip16_lo(vi a, vi b)          { return (vi) _mm256_unpacklo_epi16((__m256i) a, (__m256i) b); }
static inline vi   zip16_hi(vi a, vi b)          { return (vi) _mm256_unpackhi_epi16((__m256i) a, (__m256i) b); }
static inline void store_low(int8_t * p, vi x, int n) {
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128((__m256i) x), _mm256_extracti128_si256((__m256i) x, 1));
    const int64_t bytes = _mm_cvtsi128_si64(_mm_packs_epi16(half, half));
    memcpy(p, &bytes, n == W ? W : n);
}
static inline vi dot_bytes(vi acc, vi x, vi w) {
#if defined(__AVXVNNI__)
    return (vi) _mm256_dpbusd_avx_epi32((__m256i) acc, (__m256i) x, (__m256i) w);
#else
    return acc + (vi) _mm256_madd_epi16(_mm256_maddubs_epi16((__m256i) x, (__m256i) w), _mm256_set1_epi16(1));
#endif
}

#elif defined(SPARQ_NEON)
typedef int32x4_t vi;
constexpr bool DOT_ANY = true;

static inline vi   load_int(const void * p)      { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t *) p)); }
static inline void store_int(void * p, vi x)     { vst1q_u8((uint8_t *) p, vreinterpretq_u8_s32(x)); }
static inline vi   set1_int(int32_t x)           { return vdupq_n_s32(x); }
static inline vi   to_int(vf x)                  { return vcvtq_s32_f32(x); }
static inline vf   to_float(vi x)                { return vcvtq_f32_s32(x); }
static inline vi   as_bits(vf x)                 { return vreinterpretq_s32_f32(x); }
static inline vf   as_float(vi x)                { return vreinterpretq_f32_s32(x); }
static inline vi   zip8_lo(vi a, vi b)           { return vreinterpretq_s32_s8(vzip1q_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b))); }
static inline vi   zip8_hi(vi a, vi b)           { return vreinterpretq_s32_s8(vzip2q_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b))); }
static inline vi   zip16_lo(vi a, vi b)          { return vreinterpretq_s32_s16(vzip1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b))); }
static inline vi   zip16_hi(vi a, vi b)          { return vreinterpretq_s32_s16(vzip2q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b))); }
static inline void store_low(int8_t * p, vi x, int n) {
    const int8x8_t bytes = vmovn_s16(vcombine_s16(vmovn_s32(x), vmovn_s32(x)));
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
    memcpy(p, &four, n == W ? W : n);
}
static inline vi dot_bytes(vi acc, vi a, vi b) {
    const uint8x16_t x = vreinterpretq_u8_s32(a);
    const int8x16_t  w = vreinterpretq_s8_s32(b);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(acc, x, w);
#else
    const int16x8_t lo = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x))), vmovl_s8(vget_low_s8(w)));
    const int16x8_t hi = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(x)), vmovl_high_s8(w));
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(lo), vpaddlq_s16(hi)));
#endif
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
static inline vf dot_bf16(vf acc, vi a, vi b)    { return vbfdotq_f32(acc, vreinterpretq_bf16_s32(a), vreinterpretq_bf16_s32(b)); }
#endif

#else
typedef int32_t vi;

static inline vi   load_int(const void * p)      { vi x; memcpy(&x, p, sizeof(x)); return x; }
static inline void store_int(void * p, vi x)     { memcpy(p, &x, sizeof(x)); }
static inline vi   set1_int(int32_t x)           { return x; }
static inline vi   to_int(vf x)                  { return (int32_t) x; }
static inline vf   to_float(vi x)                { return (float) x; }
static inline void store_low(int8_t * p, vi x, int) { *p = (int8_t) x; }
#endif

// ---- common to all ----

// the four bytes at p in all lanes
static inline vi four(const int8_t * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return set1_int(x);
}

// the low and the high halves of bytes
static inline vi low4(vi x)  { return x & set1_int(0x0f0f0f0f); }
static inline vi high4(vi x) { return low4(x >> 4); }

} // namespace sparse
