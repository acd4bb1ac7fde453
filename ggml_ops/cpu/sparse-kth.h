#pragma once

// The k-th largest of some floats, by passes that count, and the least of those that carry a mass. Step 1 uses it on the components of q, step 2
// on the keys of positions, and PREFILL on their shares of the attention.

#include "sparse-vec.h"

#include <cfloat>

namespace sparse {

// floats as integers of the same order, and back
static inline int64_t to_order(float x) {
    int32_t b;
    memcpy(&b, &x, sizeof(b));
    return b >= 0 ? b : INT32_MIN - (int64_t) b;
}
static inline float from_order(int64_t o) {
    const int32_t b = (int32_t) (o >= 0 ? o : INT32_MIN - o);
    float res;
    memcpy(&res, &b, sizeof(res));
    return res;
}

// How some values lie about two limits. NaN is not counted
struct split {
    int64_t n;       // how many reach the lower limit ..
    float   min;     // .. and the smallest of them, +inf if there is none
    float   max;     // the largest of those below the upper limit, -inf if there is none ..
    int64_t n_above; // .. and how many reach the upper limit
};

static inline split split_at(const float * x, int64_t n, float lower, float upper) {
    constexpr int N = 2; // accumulators that take turns, because each waits for its own last result
    const vf l = set1(lower), u = set1(upper), inf = set1(INFINITY), none = set1(-INFINITY);
    vf min[N] = { inf, inf }, max[N] = { none, none };
    split res = { 0, INFINITY, -INFINITY, 0 };
    int64_t i = 0;
    for (; i + N*W <= n; i += N*W) {
        for (int j = 0; j < N; ++j) {
            const vf v = load(x + i + j*W);
            const vm m = ge(v, l);
            res.n       += popcount(bits(m));
            res.n_above += popcount(bits(ge(v, u)));
            min[j] = min_where(min[j], m, v);
            max[j] = max_where(max[j], lt(v, u), v);
        }
    }
    for (; i < n; ++i) {
        const float v = x[i];
        res.n       += v >= lower;
        res.n_above += v >= upper;
        res.min = v >= lower && v < res.min ? v : res.min;
        res.max = v < upper  && v > res.max ? v : res.max;
    }
    res.min = std::fmin(-reduce_max(sub(set1(0.0f), vmin(min[0], min[1]))), res.min);
    res.max = std::fmax(reduce_max(vmax(max[0], max[1])), res.max);
    return res;
}

// copies the values in [a, b] to res, and -inf behind them up to a whole vector; returns the number with those
static inline int64_t copy_between(float * res, const float * x, int64_t n, float a, float b) {
    int n_res = 0;
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const vf v = load(x + i);
        n_res += append_f32(res + n_res, v, ge(select(ge(set1(b), v), v, set1(-INFINITY)), set1(a)));
    }
    for (; i < n; ++i) {
        if (x[i] >= a && x[i] <= b) {
            res[n_res++] = x[i];
        }
    }
    store(res + n_res, set1(-INFINITY));
    return (n_res + W - 1)/W*W;
}

// The k-th largest of the n values, or with a slack any one from the k-th to the (k + slack)-th; lo if fewer than k reach lo. NaN is not
// counted.
// The values that may be the k-th lie in [a, b], and each pass splits them. Where it splits is guessed from the ranks, or the middle, and
// every fourth time the middle in the order of all floats: that decides how many passes there are (about 7, at most 4*32), not the result.
// Once few values are left, they are copied and the passes go over the copy
static inline float kth_largest(const float * x, int64_t n, int64_t k, float lo, int64_t slack = 0) {
    const split all = split_at(x, n, lo, INFINITY);
    if (all.n < k) {
        return lo;
    }
    if (all.n_above >= k) {
        return INFINITY;
    }
    constexpr int FEW = 256; // a multiple of every W
    float few[FEW + W];
    float   a   = all.min, b   = all.max;
    int64_t n_a = all.n,   n_b = all.n_above; // n_a >= k values reach a, n_b < k are above b
    for (int i_pass = 0; n_a > k + slack && a < b; ++i_pass) {
        if (n > FEW && n_a - n_b <= FEW) {
            n    = copy_between(few, x, n, a, b);
            x    = few;
            k   -= n_b;
            n_a -= n_b;
            n_b  = 0;
        }
        const int64_t oa = to_order(a), ob = to_order(b);
        float m = from_order(oa + (ob - oa + 1)/2);
        if (i_pass % 4 < 3) {
            m = a + (b - a)*(i_pass % 2 ? 0.5f : (float) (n_a - k)/(float) (n_a - n_b));
            m = m > a ? std::fmin(m, b) : from_order(oa + 1);
        }
        const split part = split_at(x, n, m, m);
        if (part.n >= k) {
            a   = part.min;
            n_a = part.n;
        } else {
            b   = part.max;
            n_b = part.n;
        }
    }
    return a;
}

// A sum of many terms. With few lanes, thousands of terms would be added to one number; there, sums of blocks are added instead
struct long_sum {
    vf  all = set1(0.0f), block = set1(0.0f);
    int n = 0;

    void operator+=(vf x) {
        block = add(block, x);
        if (W < 8 && ++n % 64 == 0) {
            all   = add(all, block);
            block = set1(0.0f);
        }
    }

    float total() const { return reduce_add(W < 8 ? add(all, block) : block); }
};

// sum_i weight[i], over i with key[i] >= least. It never grows with `least`: adding a term instead of 0 rounds in order
static inline float mass_from(const float * key, const float * weight, int64_t n, float least) {
    const vf l = set1(least);
    long_sum sum;
    for (int64_t i = 0; i < n; i += W) {
        sum += select(ge(load(key + i), l), load(weight + i), set1(0.0f));
    }
    return sum.total();
}

// The largest key from which on the weights add up to `want`, by bisection of the floats in their order: all of them together must.
//   key, weight [n, rounded up to whole vectors]: -inf behind the keys
static inline float key_at_mass(const float * key, const float * weight, int64_t n, float want) {
    int64_t lo = to_order(-FLT_MAX), hi = to_order(INFINITY);
    while (hi - lo > 1) {
        const int64_t mid = lo + (hi - lo)/2;
        (mass_from(key, weight, n, from_order(mid)) >= want ? lo : hi) = mid;
    }
    return from_order(lo);
}

} // namespace sparse
