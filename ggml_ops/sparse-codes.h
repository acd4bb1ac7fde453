#pragma once

// The layout of the shadow: the types of k_t, and the order of its codes. It knows nothing of ggml, so that any program may include it.
//
//   A type is known by the bits of a value. 16 bits are the values themselves, in f16. Fewer are codes: the positions of a group of a component
//   share a scale and a zero, in f16.
//
//   A new type begins as a line in the list below, from which its shapes and bytes follow. Other codes than whole or half bytes need another order of
//   codes first. What knows the bits:
//     here       ggml_sparse_coef_max, ggml_sparse_line_pos, ggml_sparse_code_byte, ggml_sparse_code_shift
//     cpu/       sparse-seal.h: seal_group_codes (packing); sparse-score-codes.h: make_coef, and from score_lines on
//     cuda/      sparse-seal.cuh: seal_codes; op_seal of sparse-attn.cu; sparse-score.cuh: codes<>, make_coef, the address of a thread's codes in score
//     llama/     the comments of llama-sparse.h
//     texts      SEAL in ggml-sparse.h, the types at the top of cpu/sparse-work.h, docs/glossary.md, docs/numerics.md (11a)
//     pyorch/    attention/spec.py: SHADOWS; attention/cost.py
//     tests/     ops/test_quant.py: BITS, Shadow.code, the rounding that is allowed; e2e/nodes.py likewise; bench/gpu/kernels.py
//
//   Codes lie in lines of 64 bytes: 64 positions of 8 bits, or 128 of 4 bits, the first 64 in the low halves of the bytes. Inside a line
//   position 16*j + 4*i + l has byte 16*i + 4*j + l, so that zipping four components within 128 bits, which is what every CPU can do,
//   leaves consecutive positions in a register.

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sparse-params.h"

// ---- the types ----

// X(bits, name); the name is what follows shadow=
#define GGML_SPARSE_SHADOWS(X) \
    X(16, "f16") \
    X( 8, "q8")  \
    X( 4, "q4")

#define X(bits, name) \
    static_assert(bits == 16 || bits == 8 || bits == 4, "shadow=" name ": first write what the top of sparse-codes.h lists, then allow its bits");
GGML_SPARSE_SHADOWS(X)
#undef X

// NULL: there is no such type
static inline const char * ggml_sparse_shadow_name(int n_bit) {
#define X(bits, name) if (n_bit == bits) { return name; }
    GGML_SPARSE_SHADOWS(X)
#undef X
    return NULL;
}

// 0: there is no such type
static inline int ggml_sparse_shadow_bits(const char * name) {
#define X(bits, known) if (strcmp(name, known) == 0) { return bits; }
    GGML_SPARSE_SHADOWS(X)
#undef X
    return 0;
}

// k_t holds what is within +-this; what is beyond is clamped to it, since k_t only ranks
#define GGML_SPARSE_SHADOW_MAX 65504.0f // the largest f16

// Codes need k_range; without codes it is NULL. 0 bits: no k_t at all
GGML_SPARSE_INLINE bool ggml_sparse_has_codes(int n_bit) { return n_bit > 0 && n_bit < 16; }

// the largest code; the smallest is 0
GGML_SPARSE_INLINE int ggml_sparse_code_max(int n_bit) { return (1 << n_bit) - 1; }

// the scan rounds its coefficients to whole numbers up to this, either way. More would not fit its sums. Of 4 or 8 bits
GGML_SPARSE_INLINE int ggml_sparse_coef_max(int n_bit) { return n_bit == 4 ? 127 : 64*64; }

// May a token read a group from k_t? `sealed` of the group is 1 + the first token that may, 0: none
GGML_SPARSE_INLINE bool ggml_sparse_is_sealed(int32_t sealed, int64_t token) { return sealed > 0 && sealed <= token + 1; }

// bytes of n positions of a component in k_t
GGML_SPARSE_INLINE int64_t ggml_sparse_shadow_bytes(int64_t n, int n_bit) { return n*n_bit/8; }

// bytes of scale and zero of a group of a component
GGML_SPARSE_INLINE int64_t ggml_sparse_range_bytes(int n_bit) { return ggml_sparse_has_codes(n_bit) ? 4 : 0; }

// bytes that SCORE reads for a group of a component
GGML_SPARSE_INLINE int64_t ggml_sparse_scan_bytes(int n_bit) {
    return ggml_sparse_shadow_bytes(GGML_SPARSE_GROUP, n_bit) + ggml_sparse_range_bytes(n_bit);
}

// ---- the spread of a component ----

// SCORE looks at the ranges of so many groups, to learn how far each component of K spreads. Few are enough: every token reads them anew
#define GGML_SPARSE_SPREAD_GROUPS 8

// what a range has to be divided by to give a standard deviation: 128 normal values span 5.2 of them
#define GGML_SPARSE_SPREAD_WIDTH 5.2f

// the j-th of them, where the first n_group are sealed
GGML_SPARSE_INLINE int64_t ggml_sparse_spread_group(int j, int64_t n_group) { return j*n_group/GGML_SPARSE_SPREAD_GROUPS; }

#if defined(__cplusplus)
// How many groups of a stream are sealed, where those that are come first; is_sealed(group). It is found by halving, so that it costs the same wherever
// the stream ends: the length of the cache will not do, because another stream may be longer, and a token reads the same whoever else is in its batch
template <typename I, typename F>
GGML_SPARSE_INLINE I ggml_sparse_sealed_groups(I n_kv, F is_sealed) {
    I n_group = 0;
    for (I end = n_kv/GGML_SPARSE_GROUP; n_group < end;) {
        const I mid = n_group + (end - n_group)/2;
        if (is_sealed(mid)) {
            n_group = mid + 1;
        } else {
            end = mid;
        }
    }
    return n_group;
}
#endif

// bytes of these ranges for a KV head with d components
GGML_SPARSE_INLINE int64_t ggml_sparse_spread_bytes(int64_t d, int64_t n_kv, int n_bit) {
    const int64_t n_group = n_kv/GGML_SPARSE_GROUP < GGML_SPARSE_SPREAD_GROUPS ? n_kv/GGML_SPARSE_GROUP : GGML_SPARSE_SPREAD_GROUPS;
    return ggml_sparse_range_bytes(n_bit)*n_group*d;
}

// ---- the order of codes ----

#define GGML_SPARSE_LINE 64 // bytes

// positions in a line
GGML_SPARSE_INLINE int ggml_sparse_line_pos(int n_bit) { return GGML_SPARSE_LINE*8/n_bit; }

#define X(bits, name) \
    static_assert(GGML_SPARSE_LINE*8 % bits == 0 && GGML_SPARSE_GROUP % (GGML_SPARSE_LINE*8/bits) == 0, \
            "shadow=" name ": a line holds a whole number of positions, and a group a whole number of lines");
GGML_SPARSE_SHADOWS(X)
#undef X

// the byte in a line of position t of its 64
GGML_SPARSE_INLINE int ggml_sparse_line_byte(int t) { return t/4%4*16 + t/16*4 + t%4; }

// the byte in a component's row of position i, and the lowest bit of its code in that byte
GGML_SPARSE_INLINE int ggml_sparse_code_byte(int i, int n_bit) {
    return i/ggml_sparse_line_pos(n_bit)*GGML_SPARSE_LINE + ggml_sparse_line_byte(i % GGML_SPARSE_LINE);
}
GGML_SPARSE_INLINE int ggml_sparse_code_shift(int i, int n_bit) { return i % ggml_sparse_line_pos(n_bit)/GGML_SPARSE_LINE*n_bit; }

#ifdef __cplusplus

#include <type_traits>

// calls f with the bits as a constant
template <typename F>
void ggml_sparse_with_bits(int n_bit, F f) {
    switch (n_bit) {
#define X(bits, name) case bits: f(std::integral_constant<int, bits>()); break;
        GGML_SPARSE_SHADOWS(X)
#undef X
        default: abort(); // the constructors let no other pass
    }
}

#endif
