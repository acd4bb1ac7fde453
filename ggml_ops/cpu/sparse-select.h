#pragma once

// Step 2: the top k positions of one KV head of one token, and the mass of the others.
//
// Each tile of logits is made ready by the thread that has just written it. Then positions have keys: the largest keys win, ties go to the
// lower cell. With one query head the key is the logit, with several the sum over them of their softmax.

#include "ggml-sparse.h"
#include "sparse-kth.h"

#include <algorithm>

namespace sparse {

// the logits of a tile of one KV head of one token
struct tile_scores {
    float * x;      // [n_head][ld] logits. With several heads, a finished tile holds exp(logit - max), but the first head keeps -inf
    int64_t ld;     // >= n + W
    int64_t n;      // positions
    int     n_head;
    float * max;    // [n_head] the largest logit, -inf if nothing is visible
    float * sum;    // [n_head] the sum of exp(logit - max), NaN if there is a NaN
};

// the logits of one KV head of one token, tile by tile
struct head_scores {
    float * x;      // [n_head][ld]
    float * max;    // [n_tile][n_head]
    float * sum;    // [n_tile][n_head]
    int64_t ld;     // >= n + W
    int64_t n;      // positions
    int64_t tile;   // positions per tile
    int     n_head;

    int64_t n_tile()             const { return (n + tile - 1)/tile; }
    int64_t begin(int64_t i)     const { return i*tile; }
    int64_t size(int64_t i)      const { return n - begin(i) < tile ? n - begin(i) : tile; }
    tile_scores tile_at(int64_t i) const { return { x + begin(i), ld, size(i), n_head, max + i*n_head, sum + i*n_head }; }
};

// What memory is read next. It is prefetched while positions are ranked, when memory would have nothing to do. These are rows of `size` bytes,
// one after another
struct line_stream {
    const char    * base     = nullptr; // row i begins at base + comp[i]*nb_comp
    size_t          nb_comp  = 0;
    size_t          size     = 0;
    const int32_t * comp     = nullptr; // that of the next row
    const int32_t * comp_end = nullptr;
    const char    * p        = nullptr; // in the current row
    const char    * end      = nullptr;

    // called at each vector of positions: one cache line per n positions
    void pass(int64_t t, int n) {
        if (t % n == 0) {
            prefetch_line();
        }
    }

    void prefetch_line() {
        if (p >= end) {
            if (comp == comp_end) {
                return;
            }
            p   = base + *comp++*nb_comp;
            end = p + size;
        }
        prefetch(p);
        p += 64;
    }
};

// How many positions pass per prefetched line. Where they come from the first level of the cache, memory delivers a line in the time of 16.
// Where they come from the second, fewer lines are better, since loads from there wait behind lines from memory.
constexpr int LINE_EVERY_NEAR = 16;
constexpr int LINE_EVERY_FAR  = 32;

// scratch of a thread
struct select_scratch {
    float   * key;      // [n + 2*W] the keys, with several heads
    float   * cand;     // [n + (n_tile + 2)*W] the keys of candidates, which are near or above the cut ..
    int32_t * cell;     // [n + (n_tile + 2)*W] .. and their cells
    float   * weight;   // [n + 2*W] with top_p
    float   * saved;    // [n_forced + W] the own keys of forced cells, NaN: the cell does not count as one
    float   * top;      // [n_head] the largest logit ..
    float   * all;      // [n_head] .. and the sum of exp(logit - top)
    float   * factor;   // [n_tile][n_head] brings exp(logit - max) of a tile to exp(logit - top)
    float   * guess;    // [1] candidates have at least this key ..
    int32_t * n_wanted; // [1] .. so many are wanted ..
    int32_t * n_cand;   // [n_tile] .. and each tile has so many, those of tile i from i*(tile + W) on
};

// what is to be selected
struct select_args {
    const int32_t * forced;     // [n_forced] forced cells: the first n_local of n_local_max local positions, and then sinks
    int             n_forced, n_local, n_local_max;
    int             k, topk_max;
    bool            want_rest;
    float           top_p;

    // does forced[i] count, of n positions?
    bool is_forced(int i, int64_t n) const { return (i < n_local || i >= n_local_max) && forced[i] >= 0 && forced[i] < n; }
};

// a smaller share of the mass counts as nothing, since it may be rounding
constexpr float MIN_LEFT = 0x1p-18f;

// the fourth root of what exp_rank takes for 0: where all selected cells are so far below, next to everything is left out
constexpr float MIN_ROOT = 0x1p-38f;

// e^x for x <= 0, and 0 below -104. It is cheaper than exp(), and its relative error grows with |x|: 3 ulp near 0, |x| ulp far from it
// NUMERICS: it weighs positions against each other (ranking, rest), where those far from 0 count little. Attention itself uses exp()
static inline vf exp_rank(vf x) {
    vf f;
    const vf n = split_2n(fma(x, set1(1.44269504f), set1(0.5f)), f);
    vf p = set1(1.327647199e-3f); // 2^(f - 1/2) on [0, 1]
    p = fma(p, f, set1(6.356423336e-3f));
    p = fma(p, f, set1(3.947516806e-2f));
    p = fma(p, f, set1(1.698142511e-1f));
    p = fma(p, f, set1(4.901332385e-1f));
    p = fma(p, f, set1(7.071067282e-1f));
    return mul_2n(p, n);
}

// the largest of n floats, rounded up to whole vectors; NaN is not counted
static inline float largest(const float * x, int64_t n) {
    constexpr int N = 4; // accumulators that take turns, because each waits for its own last result
    const vf none = set1(-INFINITY);
    vf top[N] = { none, none, none, none };
    int64_t t = 0;
    for (; t + N*W <= n; t += N*W) {
        for (int i = 0; i < N; ++i) {
            top[i] = vmax(load(x + t + i*W), top[i]);
        }
    }
    for (; t < n; t += W) {
        top[0] = vmax(load(x + t), top[0]);
    }
    return reduce_max(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
}

// ---- tiles ----

// max[h] = max_t x[h, t], sum[h] = sum_t exp(x[h, t] - max[h]), over the positions of a tile; the sums with several heads, or where wanted.
// Leaves keys (one head) or the exponentials (several)
static inline void finish_tile(const tile_scores & s, bool want_softmax, line_stream & next) {
    const vf inf = set1(-INFINITY);
    const int64_t n = s.n;
    for (int h = 0; h < s.n_head; ++h) {
        float * x = s.x + h*s.ld;
        for (int64_t t = n; t % W != 0; ++t) {
            x[t] = -INFINITY; // behind the last position
        }
        float max = largest(x, n);
        if (max == INFINITY) { // +inf is reserved for forced cells, and exp(inf - inf) would be NaN
            max = FLT_MAX;
            for (int64_t t = 0; t < n; t += W) {
                store(x + t, vmin(set1(max), load(x + t))); // NaN stays
            }
        }
        const vf    ref = set1(max == -INFINITY ? 0.0f : max);
        long_sum sum;
        for (int64_t t = 0; t < n && (s.n_head > 1 || want_softmax); t += W) {
            const vf y = load(x + t);
            const vf e = exp_rank(sub(y, ref));
            sum += e;
            if (s.n_head > 1) {
                store(x + t, h == 0 ? select(eq(y, inf), inf, e) : e); // the first head tells what is hidden
            }
            next.pass(t, LINE_EVERY_NEAR);
        }
        const float total  = sum.total();
        if (s.n_head == 1 && !(want_softmax && total == total)) {
            // the key is the logit itself, but NaN counts as hidden
            for (int64_t t = 0; t < n; t += W) {
                const vf y = load(x + t);
                store(x + t, select(lt(inf, y), y, inf));
            }
        }
        s.max[h] = max;
        s.sum[h] = total;
    }
}

// top[h] = max_i max[i, h], factor[i, h] = exp(max[i, h] - top[h]), all[h] = sum_i sum[i, h]*factor[i, h], over the tiles i
static inline void sum_tiles(const select_scratch & w, const head_scores & s) {
    for (int h = 0; h < s.n_head; ++h) {
        float top = -INFINITY;
        for (int64_t i = 0; i < s.n_tile(); ++i) {
            top = std::fmax(top, s.max[i*s.n_head + h]);
        }
        w.top[h] = top == -INFINITY ? 0.0f : top;
        w.all[h] = 0.0f;
        for (int64_t i = 0; i < s.n_tile(); ++i) {
            const float max = s.max[i*s.n_head + h], f = max == -INFINITY ? 0.0f : expf(max - w.top[h]);
            w.factor[i*s.n_head + h] = f;
            w.all[h] += s.sum[i*s.n_head + h]*f;
        }
    }
}

// key[t] = the sum over the heads of their softmax at t in the tiles [i0, i1), with several heads: -inf or NaN where hidden, and behind the last
// position of a tile
static inline void rank_keys(float * key, const select_scratch & w, const head_scores & s, int64_t i0, int64_t i1, line_stream & next) {
    constexpr int NH = 4; // heads of a pass
    for (int64_t i = i0; i < i1; ++i) {
        float       * to = key + s.begin(i);
        const float * x  = s.x + s.begin(i);
        for (int h0 = 0; h0 < s.n_head; h0 += NH) {
            vf f[NH];
            const float * e[NH];
            for (int h = 0; h < NH; ++h) {
                const bool in = h0 + h < s.n_head;
                f[h] = set1(in && w.all[h0 + h] > 0.0f ? w.factor[i*s.n_head + h0 + h]/w.all[h0 + h] : 0.0f);
                e[h] = x + (in ? h0 + h : h0)*s.ld;
            }
            for (int64_t t = 0; t < s.size(i); t += W) {
                vf p = h0 == 0 ? set1(0.0f) : load(to + t);
                for (int h = 0; h < NH; ++h) {
                    p = fma(load(e[h] + t), f[h], p);
                }
                next.pass(t, LINE_EVERY_FAR);
                store(to + t, p);
            }
        }
    }
}

// ---- the largest keys ----

// Gives the forced cells the key +inf, each cell once, and keeps their own keys in w.saved. Returns their number
static inline int raise_forced(const select_scratch & w, float * key, int64_t n, const select_args & a) {
    int n_in = 0;
    for (int i = 0; i < a.n_forced; ++i) {
        const float own = a.is_forced(i, n) && n_in < a.topk_max ? key[a.forced[i]] : NAN;
        w.saved[i] = own > -INFINITY && own < INFINITY ? own : NAN;
        if (w.saved[i] == w.saved[i]) {
            key[a.forced[i]] = INFINITY;
            ++n_in;
        }
    }
    return n_in;
}

// Guesses the k-th largest key from a sample, so low that almost always k candidates reach it, and lower the larger `wide` is; -FLT_MAX means
// that all are candidates. What is selected does not depend on it
static inline float guess_cut(const select_scratch & w, const float * key, int64_t n, int k, float wide) {
    constexpr int N_SAMPLE = 512, N_PLACE = 128, N = N_SAMPLE/N_PLACE; // many places, because neighbours are alike
    const float   want = (float) k*N_SAMPLE/n*wide;
    const int64_t rank = (int64_t) (want + 3.0f*sqrtf(want) + 2.0f);
    if (n <= 2*N_SAMPLE || rank >= N_SAMPLE/2) {
        return -FLT_MAX;
    }
    for (int i = 0; i < N_PLACE; ++i) {
        memcpy(w.cand + i*N, key + i*(n/N_PLACE), N*sizeof(float));
    }
    return kth_largest(w.cand, N_SAMPLE, rank, -FLT_MAX, rank/8);
}

// cell, cand: the cells in [t0, t1) whose keys reach `guess`, and those keys; returns their number. Keys behind the last position are -inf or NaN
static inline int take_candidates(float * cand, int32_t * cell, const float * key, int64_t t0, int64_t t1, float guess, line_stream & next) {
    const vf g = set1(guess);
    int n = 0;
    for (int64_t t = t0; t < t1; t += W) {
        const vf x = load(key + t);
        const vm m = ge(x, g);
        append_f32(cand + n, x, m);
        n += append_iota(cell + n, (int32_t) t, m);
        next.pass(t, LINE_EVERY_FAR);
    }
    return n;
}

// res: of the candidates in w.cand and w.cell, those with the k largest keys, ascending, ties to the lower one. Returns their number, which is k
// if there are so many. Leaves their keys in w.cand
static inline int take_largest(int32_t * res, const select_scratch & w, int n_cand, int k, float guess) {
    float   * cand = w.cand;
    int32_t * cell = w.cell;
    if (n_cand <= k) {
        memcpy(res, cell, n_cand*sizeof(int32_t));
        return n_cand;
    }

    const float cut = kth_largest(cand, n_cand, k, guess);

    int n_tie = k; // how many candidates equal to the cut still fit
    int n_eq  = 0;
    for (int i = 0; i < n_cand; ++i) {
        n_tie -= cand[i] > cut;
        n_eq  += cand[i] == cut;
    }
    int n_res = 0;
    if (n_eq <= n_tie) { // all of them fit
        store(cand + n_cand, set1(-INFINITY));
        for (int i = 0; i < n_cand; i += W) {
            const vf x = load(cand + i);
            const vm m = ge(x, set1(cut));
            append_f32(cand + n_res, x, m); // writes nothing that is still to be read
            n_res += append_i32(cell + n_res, cell + i, m);
        }
        memcpy(res, cell, n_res*sizeof(int32_t));
        return n_res;
    }
    for (int i = 0; n_res < k; ++i) { // without a branch on the data
        const int tie = (cand[i] == cut) & (n_tie > 0);
        const int in  = (cand[i] > cut) | tie;
        res[n_res]  = cell[i];
        cand[n_res] = cand[i];
        n_res += in;
        n_tie -= tie;
    }
    return n_res;
}

// ---- top_p: fewer than k ----

static inline bool is_top_p(float p) { return p > 0.0f && p < 1.0f; }

// Of n candidates keeps those with the key -inf, and of the others those with the largest keys until their weights add up to `want`; ties go to the
// lower cell. Returns how many are left, in the order they had
//   key, weight [n + W]: from n on, keys are -inf
static inline int cut_at_mass(int32_t * res, float * key, const float * weight, int n, float want) {
    if (!(mass_from(key, weight, n, -FLT_MAX) >= want)) {
        return n; // not even all of them carry it, or there is a NaN
    }
    const float cut = key_at_mass(key, weight, n, want);

    float mass  = mass_from(key, weight, n, from_order(to_order(cut) + 1));
    int   n_res = 0;
    for (int i = 0; i < n; ++i) {
        const bool tie = key[i] == cut && mass < want;
        mass += tie ? weight[i] : 0.0f;
        const bool in  = key[i] == -INFINITY || key[i] > cut || tie;
        res[n_res] = res[i];
        key[n_res] = key[i];
        n_res += in;
    }
    return n_res;
}

// Of the selected candidates, whose keys are in w.cand, keeps those that top_p keeps. Forced ones have the key +inf, and their own keys are in
// w.saved. Leaves the keys of what is kept in w.cand, -inf for those
static inline int keep_top_p(int32_t * res, int n_sel, const select_scratch & w, const head_scores & s, int n_forced, float top_p) {
    // a position weighs what the heads softmax it to: that is its key, or with a single head exp(key - top)
    float all = 0.0f;
    for (int h = 0; h < s.n_head; ++h) {
        all += s.n_head == 1 ? w.all[h] : w.all[h] > 0.0f;
    }
    if (!(all > 0.0f)) { // no head has a softmax
        return n_sel;
    }
    const auto weigh = [&](float * x, int n) { // into w.weight, which may be x
        for (int i = n; i % W != 0; ++i) {
            x[i] = -INFINITY;
        }
        for (int i = 0; i < n; i += W) {
            const vf y = load(x + i);
            store(w.weight + i, s.n_head == 1 ? exp_rank(sub(y, set1(w.top[0]))) : y);
        }
    };
    int n_in = 0;
    for (int i = 0; i < n_forced; ++i) {
        w.weight[n_in] = w.saved[i];
        n_in += w.saved[i] == w.saved[i];
    }
    weigh(w.weight, n_in);
    const float forced = mass_from(w.weight, w.weight, n_in, -FLT_MAX);

    for (int i = 0; i < n_sel; ++i) {
        w.cand[i] = w.cand[i] == INFINITY ? -INFINITY : w.cand[i];
    }
    weigh(w.cand, n_sel);
    return cut_at_mass(res, w.cand, w.weight, n_sel, top_p*all - forced);
}

// ---- what is left out ----

// the mass of some cells of a head, as sums over them of p = exp(logit - the head's largest) and of the fourth root of p
struct cell_mass {
    float sum, root;
};

static inline void operator+=(cell_mass & a, const cell_mass & b) {
    a.sum  += b.sum;
    a.root += b.root;
}

// of the logits x, without what is inf or NaN; x has room for W more
static inline cell_mass mass_of_logits(float * x, int n, float top) {
    store(x + n, set1(-INFINITY));
    long_sum sum, root;
    for (int i = 0; i < n; i += W) {
        const vf y = load(x + i);
        const vf p = exp_rank(sub(select(lt(y, set1(INFINITY)), y, set1(-INFINITY)), set1(top)));
        sum  += p;
        root += fourth_root(p);
    }
    return { sum.total(), root.total() };
}

// of head h at the selected cells, from exponentials
static inline cell_mass mass_of_cells(const int32_t * sel, int n, const select_scratch & w, const head_scores & s, int h) {
    cell_mass res = { 0.0f, 0.0f };
    int end = 0;
    for (int64_t tile = 0; tile < s.n_tile(); ++tile) {
        const int i = end;
        end = (int) (std::lower_bound(sel + i, sel + n, s.begin(tile + 1)) - sel);
        if (i == end) {
            continue;
        }
        long_sum sum, root;
        for (int c = i; c < end; c += W) {
            const vf p = gather_n(s.x + h*s.ld, sel + c, std::min(W, end - c));
            sum  += p;
            root += fourth_root(p);
        }
        const float max = s.max[tile*s.n_head + h] - w.top[h];
        res += { sum.total()*w.factor[tile*s.n_head + h], max > -INFINITY ? root.total()*expf(0.25f*max) : 0.0f };
    }
    return res;
}

// What head h leaves out, as ggml-sparse.h defines it. w.cand: the keys of the selected
static inline float head_rest(const int32_t * sel, int n, const select_scratch & w, const head_scores & s, const select_args & a, int h) {
    cell_mass kept = s.n_head == 1 ? mass_of_logits(w.cand, n, w.top[0]) : mass_of_cells(sel, n, w, s, h);
    if (s.n_head == 1) {
        kept += mass_of_logits(w.saved, a.n_forced, w.top[0]);
    }
    const float left = w.all[h] - kept.sum;
    const float root = n > 0 ? std::max(kept.root, MIN_ROOT) : 0.0f; // NaN stays
    return root > 0.0f && left > MIN_LEFT*w.all[h] ? logf(left) - 4.0f*logf(root) : -INFINITY;
}

// ---- one head ----

// how many cells are selected, if n_in of them are forced
static inline int n_wanted(const select_args & a, int n_in) { return std::max(std::min(a.k, a.topk_max), n_in); }

static inline float * keys(const select_scratch & w, const head_scores & s) { return s.n_head == 1 ? s.x : w.key; }

// does step 2 need more of the softmax than the order?
static inline bool wants_softmax(const select_args & a) { return a.want_rest || is_top_p(a.top_p); }

// res = n_sel, rest [n_head], the selected cells, -1 ..: of the n_cand candidates in w.cand, of which forced cells have the key +inf
static inline void finish_select(int32_t * res, const select_scratch & w, const head_scores & s, const select_args & a, int n_cand, int k, float guess) {
    int32_t * sel = res + 1 + s.n_head;
    int n_sel = take_largest(sel, w, n_cand, k, guess);
    if (is_top_p(a.top_p)) {
        n_sel = keep_top_p(sel, n_sel, w, s, a.n_forced, a.top_p);
    }
    res[0] = n_sel;
    std::fill(sel + n_sel, sel + a.topk_max, -1);
    for (int h = 0; h < s.n_head; ++h) {
        const float rest = a.want_rest ? head_rest(sel, n_sel, w, s, a, h) : -INFINITY;
        memcpy(res + 1 + h, &rest, sizeof(rest));
    }
}

// the result of a token that reads all it sees
static inline void select_all(int32_t * res, int n_head, int topk_max) {
    const float rest = -INFINITY;
    res[0] = GGML_SPARSE_SELECT_ALL;
    for (int h = 0; h < n_head; ++h) {
        memcpy(res + 1 + h, &rest, sizeof(rest));
    }
    std::fill_n(res + 1 + n_head, topk_max, -1);
}

// ---- the steps, once the tiles are finished: by one thread, or shared by those that have some of the tiles ----
//
// One of them owns the head: o is its scratch. Where threads share, there is a barrier in front of each step.

// every thread: the keys of its tiles [i0, i1), with scratch of its own
static inline void make_keys(const select_scratch & o, const select_scratch & w, const head_scores & s, int64_t i0, int64_t i1, line_stream & next) {
    if (s.n_head > 1) {
        sum_tiles(w, s);
        rank_keys(o.key, w, s, i0, i1, next);
    }
}

// the owner
static inline void guess_candidates(const select_scratch & o, const head_scores & s, const select_args & a) {
    float * key = keys(o, s);
    *o.n_wanted = n_wanted(a, raise_forced(o, key, s.n, a));
    *o.guess    = guess_cut(o, key, s.n, *o.n_wanted, 1.0f);
}

// every thread
static inline void find_candidates(const select_scratch & o, const head_scores & s, int64_t i0, int64_t i1, line_stream & next) {
    for (int64_t i = i0; i < i1; ++i) {
        const int64_t t0 = s.begin(i), at = i*(s.tile + W);
        o.n_cand[i] = take_candidates(o.cand + at, o.cell + at, keys(o, s), t0, t0 + s.size(i), *o.guess, next);
    }
}

// the owner. shared: it may have had another head in between
static inline void select_candidates(int32_t * res, const select_scratch & o, const head_scores & s, const select_args & a, line_stream & next,
        bool shared) {
    if (s.n_head == 1 ? wants_softmax(a) : shared) {
        sum_tiles(o, s);
    }
    int n = o.n_cand[0];
    for (int64_t i = 1; i < s.n_tile(); ++i) {
        memmove(o.cand + n, o.cand + i*(s.tile + W), o.n_cand[i]*sizeof(float));
        memmove(o.cell + n, o.cell + i*(s.tile + W), o.n_cand[i]*sizeof(int32_t));
        n += o.n_cand[i];
    }
    for (float wide = 4.0f; n < *o.n_wanted && *o.guess != -FLT_MAX; wide *= 4.0f) { // the guess was bad
        *o.guess = guess_cut(o, keys(o, s), s.n, *o.n_wanted, wide);
        n = take_candidates(o.cand, o.cell, keys(o, s), 0, s.n, *o.guess, next);
    }
    finish_select(res, o, s, a, n, *o.n_wanted, *o.guess);
}

// one thread
static inline void select_topk(int32_t * res, const select_scratch & w, const head_scores & s, const select_args & a, line_stream & next) {
    make_keys(w, w, s, 0, s.n_tile(), next);
    guess_candidates(w, s, a);
    find_candidates(w, s, 0, s.n_tile(), next);
    select_candidates(res, w, s, a, next, false);
}

} // namespace sparse
