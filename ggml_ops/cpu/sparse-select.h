#pragma once

// Step 2: the top k positions, and alpha.
// On plain pointers and strides: no ggml tensors, no threads. Contracts in ggml-sparse.h; the same step, one float at a time, in ref/.
// Strides called nb_* are in bytes, ld_* in elements.

#include "sparse-score.h"

namespace sparse {

// ---- step 2: the top k positions ----

// scratch of select_topk; key, cand, cell: n_kv + 2*W each
struct select_scratch {
    float   * key;      // what is ranked: > -inf where visible
    float   * cand;     // keys near or above the cut ..
    int32_t * cell;     // .. and their cells
    float   * e;        // [n_head][n_kv + 2*W] exp(logit - ref), if there is more than one head
    float   * ref;      // [n_head] about the largest logit
    float   * sum;      // [n_head] sum of exp(logit - ref) ..
    float   * inv;      // .. and its inverse
};

// W logits of a row with n left; -inf behind its end
static inline vf load_row(const float * x, int64_t n) {
    return n >= W ? load(x) : select(lt(iota(), set1((float) n)), load_n(x, (int) n), set1(-INFINITY));
}

// sum of exp(x - ref) over a row, where ref is at most a little below the largest x: the largest of a sample, so that the row need not
// be read twice; of all, in the rare case that the sample misses it by far or saw nothing. e, if given, gets the terms, and -inf where x is
static inline float sum_exp(float * ref, const float * x, int64_t n, float * e) {
    constexpr float FAR = 60.0f; // e^60 times the length of a row is within f32
    const vf inf = set1(-INFINITY);

    vf top = inf;
    for (int64_t t = 0; t < n; t += 16*W) {
        top = vmax(load_row(x + t, n - t), top);
    }
    while (true) {
        const float m = reduce_max(top);
        *ref = m == -INFINITY ? 0.0f : m < FLT_MAX ? m : FLT_MAX;

        const vf r = set1(*ref);
        vf sum = set1(0.0f);
        for (int64_t t = 0; t < n; t += W) {
            prefetch(x + t + 1024); // two pages: exp leaves the processor little room to run ahead
            const vf y = load_row(x + t, n - t);
            const vf z = exp(sub(y, r));
            top = vmax(y, top);
            sum = add(sum, z);
            if (e) {
                store(e + t, select(eq(y, inf), inf, z));
            }
        }
        const float max = reduce_max(top);
        const bool  low = m == -INFINITY && max > -INFINITY; // all of the sample was hidden: ref says nothing
        if ((max - *ref <= FAR && !low) || *ref == FLT_MAX) {
            return reduce_add(sum);
        }
    }
}

// key[t] = sum_h softmax(logits[h])[t], or the logit itself with one head; -inf where hidden (or NaN), and behind n
//   w.ref and w.sum are filled with want_softmax or several heads
static inline void rank_keys(const select_scratch & w, const float * logits, int64_t ld, int n_head, int64_t n, bool want_softmax) {
    const vf inf = set1(-INFINITY);
    const int64_t ld_e = n + 2*W;

    for (int h = 0; h < n_head && (want_softmax || n_head > 1); ++h) {
        w.sum[h] = sum_exp(w.ref + h, logits + h*ld, n, n_head > 1 ? w.e + h*ld_e : nullptr);
        w.inv[h] = w.sum[h] > 0.0f ? 1.0f/w.sum[h] : 0.0f;
    }
    for (int64_t t = 0; t < n; t += W) {
        vf p;
        if (n_head == 1) {
            p = load_row(logits + t, n - t);
        } else {
            p = set1(0.0f);
            for (int h = 0; h < n_head; ++h) {
                p = fma(load(w.e + h*ld_e + t), set1(w.inv[h]), p);
            }
        }
        store(w.key + t, select(lt(inf, p), vmin(p, set1(FLT_MAX)), inf)); // +inf is left for the forced cells
    }
}

// the cells with the k largest keys, ascending, ties to the lower cell; returns their number, fewer than k if fewer are visible
static inline int take_largest(int32_t * res, const select_scratch & w, int64_t n, int k) {
    // a guess of the cut from a sample, low enough to leave at least k candidates almost always; the result does not depend on it
    constexpr int N_SAMPLE = 256;
    float guess = -FLT_MAX;
    if (n > 8*N_SAMPLE) {
        float sample[N_SAMPLE];
        const int64_t step = n/N_SAMPLE;
        for (int i = 0; i < N_SAMPLE; ++i) {
            sample[i] = w.key[i*step + i % step];
        }
        const float want = (float) k*N_SAMPLE/n;
        guess = kth_largest(sample, N_SAMPLE, (int64_t) (want + 3.0f*sqrtf(want) + 2.0f), -FLT_MAX, INFINITY);
    }

    int n_cand = 0;
    while (true) {
        n_cand = 0;
        const vf g = set1(guess);
        for (int64_t t = 0; t < n; t += W) { // keys behind n are -inf
            const vf x = load(w.key + t);
            const vm m = ge(x, g);
            append(w.cand + n_cand, x, m);
            n_cand += append_index(w.cell + n_cand, (int32_t) t, m);
        }
        if (n_cand >= k || guess == -FLT_MAX) {
            break;
        }
        guess = -FLT_MAX;
    }

    const float cut = n_cand > k ? kth_largest(w.cand, n_cand, k, guess, INFINITY) : -FLT_MAX;

    int n_tie = n_cand > k ? k : n_cand; // candidates equal to the cut that still fit
    for (int i = 0; i < n_cand; ++i) {
        n_tie -= w.cand[i] > cut;
    }
    int n_res = 0;
    for (int i = 0; i < n_cand; ++i) {
        const bool tie  = w.cand[i] == cut && n_tie > 0;
        const bool take = w.cand[i] > cut || tie;
        n_tie -= tie;
        if (take) {
            res[n_res++] = w.cell[i];
        }
    }
    return n_res;
}

// one KV head of one token: res = n_sel, alpha [n_head], cells, -1 ..
//   forced: the first n_local, then those from n_local_max on; sinks [n_head] or NULL
static inline void select_topk(int32_t * res, int topk_max, const select_scratch & w, const float * logits, int64_t ld, int n_head, int64_t n,
        const int32_t * forced, int n_forced, int n_local, int n_local_max, int k, const float * sinks, bool want_alpha) {
    rank_keys(w, logits, ld, n_head, n, want_alpha);

    int n_in = 0; // forced cells, each counted once
    for (int i = 0; i < n_forced && n_in < topk_max; ++i) {
        const int32_t cell = forced[i];
        if ((i >= n_local && i < n_local_max) || cell < 0 || cell >= n || !(w.key[cell] > -INFINITY && w.key[cell] < INFINITY)) {
            continue;
        }
        w.key[cell] = INFINITY;
        ++n_in;
    }

    k = k < topk_max ? k : topk_max;
    k = k > n_in     ? k : n_in;

    int32_t * cells = res + 1 + n_head;
    const int n_sel = k > 0 ? take_largest(cells, w, n, k) : 0;
    res[0] = n_sel;
    for (int i = n_sel; i < topk_max; ++i) {
        cells[i] = -1;
    }

    for (int h = 0; h < n_head; ++h) {
        float alpha = 1.0f;
        if (want_alpha) {
            float part = 0.0f;
            for (int i = 0; i < n_sel; i += W) {
                float x[W];
                for (int j = 0; j < W; ++j) {
                    x[j] = i + j < n_sel ? logits[h*ld + cells[i + j]] - w.ref[h] : -INFINITY;
                }
                part += reduce_add(exp(load(x)));
            }
            // the sink takes mass but carries no value: its share stays with the selection
            const float sink = sinks ? expf(sinks[h] - w.ref[h]) : 0.0f;
            const float all  = w.sum[h] + sink;
            alpha = all > 0.0f ? std::fmin((part + sink)/all, 1.0f) : 1.0f;
        }
        memcpy(res + 1 + h, &alpha, sizeof(alpha));
    }
}

} // namespace sparse
