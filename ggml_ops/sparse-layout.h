#pragma once

// One number for all that two builds must agree on before one of them reads what the other wrote: where the sources and parameters of a node lie, and
// what the bytes of a shadow mean. Machines that share a model compare it (rpc/), and documents keep it beside their shadow (llama/). It is made from
// the definitions themselves, when this is compiled, so that changing one of them changes it and a comment does not.

#include "ggml-sparse-nodes.h"
#include "sparse-codes.h"

#include <cstdint>
#include <type_traits>

// Raise it where a tensor comes to mean something else and nothing below says so: the order of `wanted`, say
#define GGML_SPARSE_LAYOUT_EDITION 2

// FNV-1a
struct ggml_sparse_layout_hash {
    uint64_t value = 0xcbf29ce484222325u;

    constexpr void number(int64_t x) {
        for (int i = 0; i < 8; ++i) {
            value = (value ^ ((uint64_t) x >> 8*i & 0xff))*0x100000001b3u;
        }
    }
    constexpr void text(const char * s) {
        for (; *s; ++s) {
            number(*s);
        }
    }
};

constexpr uint32_t ggml_sparse_layout() {
    ggml_sparse_layout_hash h;
    h.number(GGML_SPARSE_LAYOUT_EDITION);

    // nodes
#define SLOT(tensor, slot) h.text(#tensor); h.number(slot);
#define FIELD(type, field) h.text(#field); h.number(sizeof(type)); h.number(std::is_integral<type>::value);
#define X(step) h.text(#step); h.number(GGML_SPARSE_ATTN_##step); GGML_SPARSE_SRC_##step(SLOT) GGML_SPARSE_PARAMS_##step(FIELD)
    GGML_SPARSE_STEPS(X)
#undef X
#undef FIELD
#undef SLOT
#define X(name) h.text(#name); h.number(GGML_SPARSE_STAT_##name);
    GGML_SPARSE_STATS(X)
#undef X
    h.number(GGML_SPARSE_SELECT_ALL);

    // the shadow: its parts, the order of its codes, the rows of the sums
    h.number(GGML_SPARSE_GROUP);
    h.number(GGML_SPARSE_SUM);
    h.number(GGML_SPARSE_LINE);
#define X(bits, name) \
    h.number(bits); \
    h.text(name); \
    h.number(ggml_sparse_shadow_bytes(GGML_SPARSE_GROUP, bits)); \
    h.number(ggml_sparse_range_bytes(bits)); \
    for (int i = 0; i < 2*ggml_sparse_line_pos(bits) && ggml_sparse_has_codes(bits); ++i) { \
        h.number(ggml_sparse_code_byte(i, bits)); \
        h.number(ggml_sparse_code_shift(i, bits)); \
    }
    GGML_SPARSE_SHADOWS(X)
#undef X
    for (int64_t group = 0; group < 2*GGML_SPARSE_SUM; ++group) {
        h.number(ggml_sparse_sum_row(group));
        h.number(ggml_sparse_total_row(group));
    }
    return (uint32_t) (h.value ^ h.value >> 32);
}
