#pragma once

// What the mask does to some positions: 0 shows a position, -inf hides it, anything else is a bias (ALiBi).

#include "sparse-vec.h"

namespace sparse {

// Is the mask zero everywhere? Then nothing is hidden, and nothing is added.
static inline bool is_zero(const f16 * mask, int64_t n) {
    uint32_t any = 0;
    for (int64_t t = 0; t < n; ++t) {
        any |= mask[t].bits;
    }
    return any == 0;
}

static inline int count_visible(const f16 * mask, int n) {
    int res = 0;
    for (int t = 0; t < n; ++t) {
        res += mask[t].bits != F16_NEG_INF;
    }
    return res;
}

enum mask_kind { MASK_ZERO, MASK_HIDES_ALL, MASK_MIXED };

static inline mask_kind kind_of(const f16 * mask, int n) {
    uint16_t any = 0, all = 0xFFFF;
    for (int i = 0; i < n; ++i) {
        any |= mask[i].bits;
        all &= mask[i].bits;
    }
    return any == 0 ? MASK_ZERO : any == F16_NEG_INF && all == F16_NEG_INF ? MASK_HIDES_ALL : MASK_MIXED;
}

} // namespace sparse
