#pragma once

// One number for all that two builds must agree on before one of them reads what the other wrote: where the sources and parameters of a node lie, and
// what the bytes of a shadow mean. Machines that share a model compare it (rpc/), and documents keep it beside their shadow (llama/). It is made from
// the definitions themselves, when this is compiled, so that changing one of them changes it and a comment does not.

#include "ggml-sparse-nodes.h"
#include "sparse-codes.h"

#include <cstddef>
#include <cstdint>
#include <type_traits>

// Raise it where a tensor comes to mean something else and nothing below says so: the order of `wanted`, say
#define GGML_SPARSE_LAYOUT_EDITION 1

// T(type, F(field)...): the parameters of a step, which are sent as bytes. A step without its line, or a line without a field, stops the build
#define GGML_SPARSE_PARAMS_SEAL(T, F)         T(ggml_sparse_seal_params,         F(n_bit) F(n_rot))
#define GGML_SPARSE_PARAMS_VISIBLE(T, F)      // none
#define GGML_SPARSE_PARAMS_SCORE(T, F)        T(ggml_sparse_score_params,        F(rank) F(scale) F(max_bias) F(softcap) F(n_bit) F(n_rot) F(i_rank))
#define GGML_SPARSE_PARAMS_SELECT(T, F)       T(ggml_sparse_select_params,       F(topk_max) F(n_head_kv) F(n_local_max) F(rest) F(top_p) F(i_k) F(i_forced))
#define GGML_SPARSE_PARAMS_SCORE_SELECT(T, F) T(ggml_sparse_score_select_params, F(score) F(select))
#define GGML_SPARSE_PARAMS_ATTEND(T, F)       T(ggml_sparse_attend_params,       F(scale) F(max_bias) F(softcap) F(mean_v))
#define GGML_SPARSE_PARAMS_PREFILL(T, F)      T(ggml_sparse_prefill_params,      F(scale) F(max_bias) F(softcap) F(fast) F(keep))

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
#define X(step) h.text(#step); h.number(GGML_SPARSE_ATTN_##step); GGML_SPARSE_SRC_##step(SLOT)
    GGML_SPARSE_STEPS(X)
#undef X
#undef SLOT
#define SIZE(field) + sizeof(P::field)
#define FIELD(field) \
    h.text(#field); \
    h.number(offsetof(P, field)); \
    h.number(sizeof(P::field)); \
    h.number(std::is_integral<decltype(P::field)>::value);
#define CHECK(type, sizes) \
    { \
        using P = type; \
        static_assert(0 sizes == sizeof(P), "sparse-layout.h names every field of " #type); \
    }
#define HASH(type, fields) \
    { \
        using P = type; \
        h.text(#type); \
        fields \
    }
#define X(step) GGML_SPARSE_PARAMS_##step(CHECK, SIZE) GGML_SPARSE_PARAMS_##step(HASH, FIELD)
    GGML_SPARSE_STEPS(X)
#undef X
#undef HASH
#undef CHECK
#undef FIELD
#undef SIZE
#define X(name) h.text(#name); h.number(GGML_SPARSE_STAT_##name);
    GGML_SPARSE_STATS(X)
#undef X
    h.number(GGML_SPARSE_SELECT_ALL);

    // the shadow: its parts, the order of its codes, the rows of the sums
    h.number(GGML_SPARSE_GROUP);
    h.number(GGML_SPARSE_RUN);
    h.number(GGML_SPARSE_SUM);
    h.number(GGML_SPARSE_LINE);
#define X(bits, name) \
    h.number(bits); \
    h.text(name); \
    h.number(ggml_sparse_seal_span(bits)); \
    h.number(ggml_sparse_shadow_bytes(GGML_SPARSE_RUN, bits)); \
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
