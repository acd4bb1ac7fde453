#pragma once

// Step 2 of one head, shared by several threads.
//
// Each of them has some of the tiles, and one of them owns the head. With a barrier in front of each: share_keys by all, share_guess by the
// owner, share_candidates by all, share_finish by the owner. o is the owner's scratch.

#include "sparse-select.h"

namespace sparse {

// w: this thread's own scratch; the tiles [i0, i1)
static inline void share_keys(const select_scratch & o, const select_scratch & w, const head_scores & s, int64_t i0, int64_t i1) {
    line_stream none;
    if (s.n_head > 1) {
        sum_tiles(w, s);
        rank_keys(o.key, w, s, i0, i1, none);
    }
}

static inline void share_guess(const select_scratch & o, const head_scores & s, const select_args & a) {
    float * key = keys(o, s);
    *o.n_wanted = n_wanted(a, raise_forced(o, key, s.n, a));
    *o.guess    = guess_cut(o, key, s.n, *o.n_wanted, 1.0f);
}

static inline void share_candidates(const select_scratch & o, const head_scores & s, int64_t i0, int64_t i1) {
    line_stream none;
    for (int64_t i = i0; i < i1; ++i) {
        const int64_t t0 = i*s.tile, at = i*(s.tile + W);
        o.n_cand[i] = take_candidates(o.cand + at, o.cell + at, keys(o, s), t0, std::min(t0 + s.tile, s.n), *o.guess, none);
    }
}

static inline void share_finish(int32_t * res, const select_scratch & o, const head_scores & s, const select_args & a) {
    if (wants_softmax(a) || s.n_head > 1) {
        sum_tiles(o, s); // again, since the owner may have had another head in between
    }
    int n = o.n_cand[0];
    for (int64_t i = 1; i < s.n_tile(); ++i) {
        memmove(o.cand + n, o.cand + i*(s.tile + W), o.n_cand[i]*sizeof(float));
        memmove(o.cell + n, o.cell + i*(s.tile + W), o.n_cand[i]*sizeof(int32_t));
        n += o.n_cand[i];
    }
    float guess = *o.guess;
    if (n < *o.n_wanted && guess != -FLT_MAX) { // the guess was bad
        line_stream none;
        guess = -FLT_MAX;
        n = take_candidates(o.cand, o.cell, keys(o, s), 0, s.n, guess, none);
    }
    finish_select(res, o, s, a, n, *o.n_wanted, guess);
}

} // namespace sparse
