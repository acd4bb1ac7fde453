#pragma once

// A thin vector layer: one type `vf` of W floats and one type `vm` of W booleans. The steps are written once on top of it.
//
// The instruction set is the one that the file is compiled for, since ggml builds the CPU backend once per variant: AVX-512 (F, BW, DQ, VL),
// AVX2 with FMA and F16C, NEON, or one float at a time. -DSPARQ_SCALAR forces the last.

// gcc 12 takes the "undefined" operands inside its own AVX-512 header for mistakes (GCC bug 105593)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "ggml-impl.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if !defined(SPARQ_SCALAR) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SPARQ_AVX512
#include <immintrin.h>
#elif !defined(SPARQ_SCALAR) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SPARQ_AVX2
#include <immintrin.h>
#elif !defined(SPARQ_SCALAR) && defined(__ARM_NEON) && defined(__aarch64__)
#define SPARQ_NEON
#include <arm_neon.h>
#elif !defined(SPARQ_SCALAR)
#define SPARQ_SCALAR
#endif

#if defined(__GNUC__) || defined(__clang__)
#define SPARQ_NOINLINE __attribute__((noinline))
#define SPARQ_INLINE   inline __attribute__((always_inline))
#else
#define SPARQ_NOINLINE
#define SPARQ_INLINE   inline
#endif

// Stands in front of a loop with a constant count. The loop is then unrolled early, so that arrays of vectors become registers; left to itself,
// gcc may keep them in memory
#if defined(__GNUC__) && !defined(__clang__)
#define SPARQ_UNROLL _Pragma("GCC unroll 16")
#elif defined(__clang__)
#define SPARQ_UNROLL _Pragma("unroll")
#else
#define SPARQ_UNROLL
#endif

namespace sparse {

// calls f(N, i) for the things i to i + N - 1 of n, which are worked on together: MOST of them, then two, then one
template <int MOST, typename F>
static SPARQ_INLINE void for_blocks(int n, const F & f) {
    int i = 0;
    for (; i + MOST <= n; i += MOST) {
        f(std::integral_constant<int, MOST>(), i);
    }
    for (; i + 2 <= n; i += 2) {
        f(std::integral_constant<int, 2>(), i);
    }
    for (; i < n; ++i) {
        f(std::integral_constant<int, 1>(), i);
    }
}

// element types in memory, besides float
struct f16  { uint16_t bits; };
struct bf16 { uint16_t bits; };

constexpr uint16_t F16_NEG_INF = 0xFC00;

static inline float to_f32(float x) { return x; }
static inline float to_f32(f16 x)   {
#if defined(SPARQ_AVX512) || defined(SPARQ_AVX2)
    return _cvtsh_ss(x.bits);
#else
    return GGML_FP16_TO_FP32(x.bits);
#endif
}
static inline float to_f32(bf16 x) {
    const uint32_t bits = (uint32_t) x.bits << 16;
    float res;
    memcpy(&res, &bits, sizeof(res));
    return res;
}

static inline f16 to_f16(float x) {
#if defined(SPARQ_AVX512) || defined(SPARQ_AVX2)
    return { (uint16_t) _cvtss_sh(x, 0) };
#else
    return { (uint16_t) GGML_FP32_TO_FP16(x) };
#endif
}

// ---- what each instruction set provides ----
//
//   set1(x)          x in all lanes                        iota()           lane i = i
//   load(p)          W elements of f32, f16 or bf16        load_n(p, n)     the first n < W of them, with zeros behind
//   store(p, x)      W floats                              store_n(p, x, n) the first n of them
//   select(m, a, b)  m ? a : b                             bits(m)          lane i -> bit i
//   min_where(a, m, x), max_where: the smaller (larger) of a and x where m is set, else a
//   vmin, vmax       a < b ? a : b, and a > b ? a : b: if either operand is NaN, the second is the result
//   mul_2n(x, n)     x * 2^n for an integer n in [-150, 128]
//   split_2n(y, f)   f = y - floor(y); returns n, such that mul_2n(x, n) = x * 2^floor(y) for y <= 128; -inf: f = 0, and 0 for |x| <= 1
//   sum_rows(x)      lane i = the sum of the lanes of x[i], for W vectors

#if defined(SPARQ_AVX512)
constexpr int W = 16;
typedef __m512    vf;
typedef __mmask16 vm;
#define SPARQ_X86(name) _mm512_##name
#elif defined(SPARQ_AVX2)
constexpr int W = 8;
typedef __m256 vf;
typedef __m256 vm;
#define SPARQ_X86(name) _mm256_##name
#endif

#if defined(SPARQ_X86)
static inline vf set1(float x)           { return SPARQ_X86(set1_ps)(x); }
static inline vf load(const float * p)   { return SPARQ_X86(loadu_ps)(p); }
static inline void store(float * p, vf x) { SPARQ_X86(storeu_ps)(p, x); }
static inline vf add(vf a, vf b)         { return SPARQ_X86(add_ps)(a, b); }
static inline vf sub(vf a, vf b)         { return SPARQ_X86(sub_ps)(a, b); }
static inline vf mul(vf a, vf b)         { return SPARQ_X86(mul_ps)(a, b); }
static inline vf div(vf a, vf b)         { return SPARQ_X86(div_ps)(a, b); }
static inline vf vsqrt(vf a)             { return SPARQ_X86(sqrt_ps)(a); }
static inline vf fma(vf a, vf b, vf c)   { return SPARQ_X86(fmadd_ps)(a, b, c); }
static inline vf vmin(vf a, vf b)        { return SPARQ_X86(min_ps)(a, b); }
static inline vf vmax(vf a, vf b)        { return SPARQ_X86(max_ps)(a, b); }
#endif

#if defined(SPARQ_AVX512)

static inline vf iota()                        { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
static inline vf load(const f16   * p)         { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
static inline vf from_bf16(__m256i x)          { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
static inline vf load(const bf16  * p)         { return from_bf16(_mm256_loadu_si256((const __m256i *) p)); }
static inline vf load_n(const float * p, int n) { return _mm512_maskz_loadu_ps((1u << n) - 1, p); }
static inline vf load_n(const f16   * p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((1u << n) - 1, p)); }
static inline vf load_n(const bf16  * p, int n) { return from_bf16(_mm256_maskz_loadu_epi16((1u << n) - 1, p)); }
static inline void store_n(float * p, vf x, int n) { _mm512_mask_storeu_ps(p, (1u << n) - 1, x); }

static inline vf vabs(vf x)              { return _mm512_abs_ps(x); }
static inline vf round_even(vf x)        { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf mul_2n(vf x, vf n)      { return _mm512_scalef_ps(x, n); } // of any n, its floor
static inline vf split_2n(vf y, vf & f) {
    f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return y;
}

static inline vm lt(vf a, vf b)          { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline vm ge(vf a, vf b)          { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline vm eq(vf a, vf b)          { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline vf select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
static inline vf min_where(vf a, vm m, vf x) { return _mm512_mask_min_ps(a, m, x, a); }
static inline vf max_where(vf a, vm m, vf x) { return _mm512_mask_max_ps(a, m, x, a); }
static inline uint32_t bits(vm m)        { return m; }

static inline float reduce_add(vf x)     { return _mm512_reduce_add_ps(x); }
static inline float reduce_max(vf x)     { return _mm512_reduce_max_ps(x); }

static inline vf sum_rows(const vf * x) {
    // halve the number of vectors four times: by 32, 64, 128 and 256 bits
    vf a[8], b[4];
    for (int i = 0; i < 8; ++i) {
        a[i] = add(_mm512_unpacklo_ps(x[2*i], x[2*i + 1]), _mm512_unpackhi_ps(x[2*i], x[2*i + 1]));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(a[2*i]), _mm512_castps_pd(a[2*i + 1]));
        const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(a[2*i]), _mm512_castps_pd(a[2*i + 1]));
        b[i] = add(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
    }
    const vf c0 = add(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xDD));
    const vf c1 = add(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xDD));
    return add(_mm512_shuffle_f32x4(c0, c1, 0x88), _mm512_shuffle_f32x4(c0, c1, 0xDD));
}

#elif defined(SPARQ_AVX2)

static inline vf iota()                        { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
static inline vf load(const f16   * p)         { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
static inline vf load(const bf16  * p)         {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) p)), 16));
}

static inline vf vabs(vf x)              { return _mm256_andnot_ps(set1(-0.0f), x); }
static inline vf round_even(vf x)        { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf floor(vf x)             { return _mm256_floor_ps(x); }

static inline vf pow2(vf n) { // n in [-126, 127]
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

static inline vm lt(vf a, vf b)          { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline vm ge(vf a, vf b)          { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
static inline vm eq(vf a, vf b)          { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
static inline vf select(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
static inline uint32_t bits(vm m)        { return (uint32_t) _mm256_movemask_ps(m); }

static inline float reduce_add(vf x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float reduce_max(vf x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

static inline vf sum_rows(const vf * x) {
    const vf a0 = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const vf a1 = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return add(_mm256_permute2f128_ps(a0, a1, 0x20), _mm256_permute2f128_ps(a0, a1, 0x31));
}

#elif defined(SPARQ_NEON)

constexpr int W = 4;
typedef float32x4_t vf;
typedef uint32x4_t  vm;

static inline vf set1(float x)                 { return vdupq_n_f32(x); }
static inline vf iota()                        { const float i[4] = { 0, 1, 2, 3 }; return vld1q_f32(i); }
static inline vf load(const float * p)         { return vld1q_f32(p); }
static inline vf load(const f16   * p)         { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *) p))); }
static inline vf load(const bf16  * p)         { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *) p), 16)); }
static inline void store(float * p, vf x)      { vst1q_f32(p, x); }

static inline vf add(vf a, vf b)         { return vaddq_f32(a, b); }
static inline vf sub(vf a, vf b)         { return vsubq_f32(a, b); }
static inline vf mul(vf a, vf b)         { return vmulq_f32(a, b); }
static inline vf div(vf a, vf b)         { return vdivq_f32(a, b); }
static inline vf vsqrt(vf a)             { return vsqrtq_f32(a); }
static inline vf fma(vf a, vf b, vf c)   { return vfmaq_f32(c, a, b); }
static inline vf vabs(vf x)              { return vabsq_f32(x); }
static inline vf round_even(vf x)        { return vrndnq_f32(x); }
static inline vf floor(vf x)             { return vrndmq_f32(x); }

static inline vf pow2(vf n) { // n in [-126, 127]
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}

static inline vm lt(vf a, vf b)          { return vcltq_f32(a, b); }
static inline vm ge(vf a, vf b)          { return vcgeq_f32(a, b); }
static inline vm eq(vf a, vf b)          { return vceqq_f32(a, b); }
static inline vf select(vm m, vf a, vf b) { return vbslq_f32(m, a, b); }
static inline vf vmin(vf a, vf b)        { return select(lt(a, b), a, b); }
static inline vf vmax(vf a, vf b)        { return select(lt(b, a), a, b); }
static inline uint32_t bits(vm m) {
    const uint32_t lane[4] = { 1, 2, 4, 8 };
    return vaddvq_u32(vandq_u32(m, vld1q_u32(lane)));
}

static inline float reduce_add(vf x)     { return vaddvq_f32(x); }
static inline float reduce_max(vf x)     { return vmaxvq_f32(x); }

static inline vf sum_rows(const vf * x)  { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }

#else

constexpr int W = 1;
typedef float vf;
typedef bool  vm;

static inline vf set1(float x)           { return x; }
static inline vf iota()                  { return 0.0f; }
template <typename T>
static inline vf load(const T * p)       { return to_f32(*p); }
static inline void store(float * p, vf x) { *p = x; }

static inline vf add(vf a, vf b)         { return a + b; }
static inline vf sub(vf a, vf b)         { return a - b; }
static inline vf mul(vf a, vf b)         { return a*b; }
static inline vf div(vf a, vf b)         { return a/b; }
static inline vf vsqrt(vf a)             { return sqrtf(a); }
static inline vf fma(vf a, vf b, vf c)   { return a*b + c; }
static inline vf vmin(vf a, vf b)        { return a < b ? a : b; }
static inline vf vmax(vf a, vf b)        { return a > b ? a : b; }
static inline vf vabs(vf x)              { return fabsf(x); }
static inline vf round_even(vf x)        { return nearbyintf(x); }
static inline vf floor(vf x)             { return floorf(x); }
static inline vf pow2(vf n)              { return ldexpf(1.0f, (int) n); }

static inline vm lt(vf a, vf b)          { return a < b; }
static inline vm ge(vf a, vf b)          { return a >= b; }
static inline vm eq(vf a, vf b)          { return a == b; }
static inline vf select(vm m, vf a, vf b) { return m ? a : b; }
static inline uint32_t bits(vm m)        { return m; }

static inline float reduce_add(vf x)     { return x; }
static inline float reduce_max(vf x)     { return x; }

static inline vf sum_rows(const vf * x)  { return x[0]; }

#endif

// ---- common to all ----

#if defined(SPARQ_AVX2)
constexpr int N_ACC = 8;    // accumulators that fit the registers beside the operands
#else
constexpr int N_ACC = 16;
#endif

#if !defined(SPARQ_AVX512)

template <typename T>
static inline vf load_n(const T * p, int n) {
    T buf[W] = {};
    for (int i = 0; i < n; ++i) {
        buf[i] = p[i];
    }
    return load(buf);
}

static inline void store_n(float * p, vf x, int n) {
    float buf[W];
    store(buf, x);
    memcpy(p, buf, n*sizeof(float));
}

static inline vf mul_2n(vf x, vf n) {
    // in two steps: neither power overflows, and results below FLT_MIN are rounded only once
    const vf n0 = round_even(mul(n, set1(0.5f)));
    return mul(mul(x, pow2(n0)), pow2(sub(n, n0)));
}

static inline vf min_where(vf a, vm m, vf x) { return vmin(select(m, x, a), a); }
static inline vf max_where(vf a, vm m, vf x) { return vmax(select(m, x, a), a); }

static inline vf split_2n(vf y, vf & f) {
    y = vmax(set1(-150.0f), y); // a NaN stays
    const vf n = floor(y);
    f = sub(y, n);
    return n;
}

#endif

// Keeps a loaded vector that is used often in a register. Compilers would read it from memory at every use, and the loads would be the limit
static inline vf in_register(vf x) {
#if defined(SPARQ_AVX512) && (defined(__GNUC__) || defined(__clang__))
    asm("" : "+v"(x));
#endif
    return x;
}

static inline int popcount(uint32_t x) {
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_popcount(x);
#else
    int n = 0;
    for (; x; x &= x - 1) {
        ++n;
    }
    return n;
#endif
}

// The append functions write the lanes where m is set to dst, one after another, and return how many there were. dst must have room for W.

// appends lanes of x
static inline int append_f32(float * dst, vf x, vm m) {
#if defined(SPARQ_AVX512)
    _mm512_storeu_ps(dst, _mm512_maskz_compress_ps(m, x)); // compressed in a register, because compressing to memory is slow on some CPUs
    return popcount(bits(m));
#else
    float lane[W];
    store(lane, x);
    int n = 0;
    const uint32_t b = bits(m);
    for (int i = 0; i < W; ++i) {
        dst[n] = lane[i];
        n += (b >> i) & 1;
    }
    return n;
#endif
}

// appends of the W whole numbers at src, which may overlap dst as long as dst is not behind it
static inline int append_i32(int32_t * dst, const int32_t * src, vm m) {
#if defined(SPARQ_AVX512)
    _mm512_storeu_si512(dst, _mm512_maskz_compress_epi32(m, _mm512_loadu_si512(src)));
    return popcount(bits(m));
#else
    int n = 0;
    const uint32_t b = bits(m);
    for (int i = 0; i < W; ++i) {
        dst[n] = src[i];
        n += (b >> i) & 1;
    }
    return n;
#endif
}

// appends of the numbers first, first + 1, ..
static inline int append_iota(int32_t * dst, int32_t first, vm m) {
#if defined(SPARQ_AVX512)
    const __m512i i = _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    _mm512_storeu_si512(dst, _mm512_maskz_compress_epi32(m, i));
    return popcount(bits(m));
#else
    int n = 0;
    const uint32_t b = bits(m);
    for (int i = 0; i < W; ++i) {
        dst[n] = first + i;
        n += (b >> i) & 1;
    }
    return n;
#endif
}

// x[i[0]], x[i[1]], .. x[i[n - 1]], with zeros behind
static inline vf gather_n(const float * x, const int32_t * i, int n) {
#if defined(SPARQ_AVX512)
    const vm m = n < W ? (1u << n) - 1 : 0xffff;
    return _mm512_mask_i32gather_ps(set1(0.0f), m, _mm512_maskz_loadu_epi32(m, i), x, sizeof(float));
#else
    float lane[W] = {};
    for (int j = 0; j < n && j < W; ++j) {
        lane[j] = x[i[j]];
    }
    return load(lane);
#endif
}

// The prefetch functions fetch the cache line of p, into the second level of the cache or into the first
static inline void prefetch(const void * p) {
#if (defined(SPARQ_AVX512) || defined(SPARQ_AVX2)) && (defined(__GNUC__) || defined(__clang__))
    asm volatile("prefetcht1 %0" : : "m"(*(const char *) p)); // gcc drops functions whose only effect is the builtin, inlined or not
#elif defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(p, 0, 2);
#else
    (void) p;
#endif
}
static inline void prefetch_first(const void * p) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(p, 0, 3);
#else
    (void) p;
#endif
}

static inline vf fourth_root(vf x) { return vsqrt(vsqrt(x)); }

// e^x, within 2 ulp: 0 below -104 (so exp(-inf) = 0), +inf above 89, NaN for NaN
static inline vf exp(vf x) {
    x = vmin(set1(89.0f), vmax(set1(-104.0f), x)); // a NaN stays, being the second operand

    // x = n*ln(2) + r, |r| <= ln(2)/2. ln(2) is taken in two parts, so that n times the first is exact
    const vf n = round_even(mul(x, set1(1.44269504f)));
    const vf r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));

    // e^r = 1 + r + r^2*p(r) (coefficients: Cephes expf)
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));

    return mul_2n(p, n); // e^-104 rounds to 0
}

// tanh(x), with a relative error below 1e-6
static inline vf tanh(vf x) {
    // |x| < 0.625: an odd polynomial, because 1 - 2/(e^2x + 1) would cancel there (coefficients: Cephes tanhf)
    const vf x2 = mul(x, x);
    vf p = set1(-5.70498872745e-3f);
    p = fma(p, x2, set1( 2.06390887954e-2f));
    p = fma(p, x2, set1(-5.37397155531e-2f));
    p = fma(p, x2, set1( 1.33314422036e-1f));
    p = fma(p, x2, set1(-3.33332819422e-1f));
    p = fma(mul(p, x2), x, x);

    const vf y = sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
    return select(lt(vabs(x), set1(0.625f)), p, y);
}

static inline vf soft_cap(vf x, float cap) {
    return mul(set1(cap), tanh(div(x, set1(cap))));
}

} // namespace sparse
