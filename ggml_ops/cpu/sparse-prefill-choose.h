#pragma once

// Which positions the tokens of a prompt read, and what stands for the others.
//
// The choice is made for up to CHOICE tokens of a query head at once, from the positions that all of them see, and position by position. For each
// POOL neighbouring tokens three probes are scored against all of K, for 3/POOL of the products: the mean of their queries, and two of the queries.
// The means say in which order positions matter, the samples how many of them it takes until a share p of the attention is there. Where tokens ask
// alike these are few; where a head looks for what only one token wants, the order is poor, the samples tell, and nearly all is read. For the mass
// that is left out stands the mean of V over those positions, as in step 3 of SparQ (docs/tried.md has what this was chosen from).

#include "sparse-kth.h"
#include "sparse-prefill.h"

namespace sparse {

constexpr int POOL      = 64;  // neighbouring tokens
constexpr int N_PROBE   = 3;   // of a pool: the mean query, and samples
constexpr int CHOICE    = 512; // tokens of a query head that read the same positions, a multiple of POOL and of BLOCK_Q
constexpr int MAX_PROBE = CHOICE/POOL*N_PROBE;

// of the n tokens of a pool, the one that sample i = 1 .. N_PROBE - 1 is
static inline int sampled(int n, int i) { return n*(2*i - 1)/(2*(N_PROBE - 1)); }

// what a choice is made from, and what is chosen
struct choice_args {
    int64_t         n_kv;      // rounded up to whole blocks
    int             n_probe;   // of the choice: those of a pool, the mean first, then those of the next
    float         * x;         // [n_probe][n_kv]  logits, -inf where hidden; overwritten
    const uint8_t * all_see;   // [n_kv/BLOCK_KV]  do all tokens see all of the block? Only there may positions be left out
    float           p;         // share of the mass
};
struct choice {
    uint64_t * kept;           // [n_kv/BLOCK_KV]  a bit for each position of a block that all see; 0 for the others
    float      left;           // the mass that is left out over all other mass
    int64_t    n, n_kept;      // positions in such blocks, and of those the kept ones
};

// x = exp(x - max), the sum of which is returned; 0 if all are -inf, NaN if one is NaN or inf
static inline float exp_all(float * x, int64_t n) {
    vf most = set1(-INFINITY);
    for (int64_t i = 0; i < n; i += W) {
        most = vmax(load(x + i), most);
    }
    const float m = reduce_max(most);
    long_sum sum;
    for (int64_t i = 0; i < n; i += W) {
        const vf y = exp(sub(load(x + i), set1(m == -INFINITY ? 0.0f : m)));
        store(x + i, y);
        sum += y;
    }
    return sum.total();
}

// key, weight [n_kv] are scratch. The first block is kept wholly, since its positions are sinks. Where a logit is not finite, all is kept
static inline void choose(const choice_args & a, float * key, float * weight, choice & res) {
    const int64_t n_block = a.n_kv/BLOCK_KV;
    float by[MAX_PROBE]; // a share of the softmax, for each exponential
    bool finite = true;
    int n_see = 0; // samples that see something
    for (int j = 0; j < a.n_probe; ++j) {
        const float sum = exp_all(a.x + j*a.n_kv, a.n_kv);
        finite = finite && sum - sum == 0.0f;
        n_see += j % N_PROBE > 0 && sum > 0.0f;
        by[j]  = sum > 0.0f ? 1.0f/sum : 0.0f;
    }
    float fixed = 0.0f, among = 0.0f; // what the samples find on what is read in any case, and on the others
    res.n = 0;
    for (int64_t b = 0; b < n_block; ++b) {
        const bool may = a.all_see[b] && b > 0;
        vf all = set1(0.0f);
        for (int i = 0; i < BLOCK_KV; i += W) {
            const float * x = a.x + b*BLOCK_KV + i;
            vf means = set1(0.0f), samples = set1(0.0f);
            for (int j = 0; j < a.n_probe; j += N_PROBE) {
                means = fma(load(x + j*a.n_kv), set1(by[j]), means);
                for (int l = j + 1; l < j + N_PROBE; ++l) {
                    samples = fma(load(x + l*a.n_kv), set1(by[l]), samples);
                }
            }
            all = add(all, samples);
            store(key    + b*BLOCK_KV + i, may ? means : set1(-INFINITY));
            store(weight + b*BLOCK_KV + i, samples);
        }
        res.n += a.all_see[b] ? BLOCK_KV : 0;
        (may ? among : fixed) += reduce_add(all);
    }
    const float want = a.p*(float) n_see - fixed;
    const bool all = !(finite && mass_from(key, weight, a.n_kv, -FLT_MAX) >= want);
    const float cut = all ? 0.0f : want > 0.0f ? key_at_mass(key, weight, a.n_kv, want) : INFINITY;
    res.n_kept = 0;
    for (int64_t b = 0; b < n_block; ++b) {
        uint64_t word = 0;
        for (int i = 0; i < BLOCK_KV; i += W) {
            word |= (uint64_t) bits(ge(load(key + b*BLOCK_KV + i), set1(cut))) << i;
        }
        res.kept[b] = !a.all_see[b] ? 0 : all || b == 0 ? ~0ull : word;
        res.n_kept += __builtin_popcountll(res.kept[b]);
    }
    const float out = all || n_see == 0 ? 0.0f : (among - mass_from(key, weight, a.n_kv, cut))/(float) n_see;
    res.left = out > 0.0f && out < 1.0f ? out/(1.0f - out) : 0.0f;
}

// adds the mass that is left out to the attention of a block of queries: `left` times what they have found, with the value mean [d_v]
static inline void add_rest(const query_block & x, const float * mean, int d_v, float left) {
    for (int v = 0; v < x.n; ++v) {
        const vf l = load(x.l + v*W), rest = mul(l, set1(left));
        store(x.l + v*W, add(l, rest));
        for (int c = 0; c < d_v; ++c) {
            float * acc = x.acc + c*BLOCK_Q + v*W;
            store(acc, fma(rest, set1(mean[c]), load(acc)));
        }
    }
}

} // namespace sparse
