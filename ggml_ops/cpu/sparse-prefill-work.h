#pragma once

// A PREFILL node: its sources, how its work is cut into units, and the memory that they take.

#include "sparse-prefill-fast.h"
#include "sparse-work.h"

namespace sparse {

// What a query gets is found for each STRETCH positions apart and added up in their order, so that threads may share the positions of few queries
// and the bits remain those of one thread
#if !defined(SPARQ_STRETCH) // tests have fewer
#define SPARQ_STRETCH 4096
#endif
constexpr int64_t STRETCH = SPARQ_STRETCH;
static_assert(STRETCH % BLOCK_KV == 0, "a block of positions is of one stretch");

struct prefill_src : ggml_sparse_src {
    ggml_sparse_prefill_params p;
    int64_t n_kv, n_head_kv, n_tok, n_stream;
    int     n_head, n_group_q, d_k, d_v;
    int64_t n_query;  // of a KV head in a stream, token by token
    int64_t n_block_kv;
    int64_t n_stretch;
    bool    fast;
    decltype(&load_rows<float>) load_k, load_v;
#if defined(SPARQ_PREFILL_FAST)
    decltype(&make_k_bytes<float>) make_k;
    decltype(&make_v_pairs<float>) make_v;
#endif

    explicit prefill_src(const ggml_tensor * dst) :
        ggml_sparse_src(ggml_sparse_src_of(dst)), p(ggml_sparse_params_of<ggml_sparse_prefill_params>(dst)) {
        n_kv      = k->ne[2];
        n_head_kv = k->ne[1];
        n_tok     = q->ne[2];
        n_stream  = q->ne[3];
        n_head    = (int) q->ne[1];
        n_group_q = (int) (n_head/n_head_kv);
        d_k       = (int) k->ne[0];
        d_v       = (int) v->ne[0];
        n_query   = n_tok*n_group_q;
        n_block_kv = ceil_div(n_kv, BLOCK_KV);
        n_stretch  = ceil_div(n_kv, STRETCH);
#if defined(SPARQ_PREFILL_FAST)
        fast = p.fast != 0;
        with_kv_type(k->type, [&](auto * t) { make_k = make_k_bytes<std::decay_t<decltype(*t)>>; });
        with_kv_type(v->type, [&](auto * t) { make_v = make_v_pairs<std::decay_t<decltype(*t)>>; });
#else
        fast = false;
#endif
        with_kv_type(k->type, [&](auto * t) { load_k = load_rows<std::decay_t<decltype(*t)>>; });
        with_kv_type(v->type, [&](auto * t) { load_v = load_rows<std::decay_t<decltype(*t)>>; });
    }

    // of query r of KV head h
    int64_t head(int64_t h, int64_t r) const { return h*n_group_q + r % n_group_q; }
    int64_t tok (int64_t r)            const { return r/n_group_q; }
};

// the queries [r0, r1) of a KV head and a stream, at the positions [t0, t1)
struct prefill_unit {
    int64_t h, s, r0, r1, t0, t1;

    int64_t n_block() const { return ceil_div(r1 - r0, BLOCK_Q); }

    // the queries of block j
    int64_t begin(int64_t j) const { return r0 + j*BLOCK_Q; }
    int64_t end  (int64_t j) const { return std::min(r1, begin(j) + BLOCK_Q); }

    // vectors that they fill
    int n_vector(int64_t j) const {
        const int n = (int) ceil_div(end(j) - begin(j), W);
        return n <= 2 ? n : NQ;
    }
};

// A unit is some blocks of queries of a KV head, and all positions or a stretch of them. Which it is may depend on the number of
// threads, since no query's result does. Memory is planned for more threads than may run, and fewer threads need no more of it.
constexpr int64_t STATE_BYTES = 4 << 20; // of what stretches leave, for each thread
constexpr int64_t MOST_BLOCKS = 512/BLOCK_Q; // of queries, in a unit

struct prefill_work {
    int64_t n_head_block;    // blocks of queries of a KV head and a stream
    int64_t n_block, n_unit; // of these, per unit; units
    int64_t n_apart;         // units that the positions of a block of queries are cut into: one, or a stretch each

    float * state; // [n_stream][n_head_kv][n_head_block][n_apart][d_v + 2][BLOCK_Q]  what the stretches leave, if they are units

    // [n_stream][n_block_kv][n_tok] of mask_kind. Found before the units begin, because the mask of a block of positions lies in as many rows
    // as there are tokens
    uint8_t * kind;

    // this thread's
    query_block block[MOST_BLOCKS];
    query_block total[MOST_BLOCKS]; // of the stretches so far
    float * k, * v;  // [BLOCK_KV][d_k], [BLOCK_KV][d_v]
    float * s;       // [BLOCK_KV][BLOCK_Q]
    float * bias;    // [BLOCK_KV][BLOCK_Q]
    query_bytes bytes[MOST_BLOCKS]; // of the blocks, with p.fast
    kv_bytes kv;
    uint32_t * p;    // [BLOCK_KV/2][BLOCK_Q]
    size_t size;     // of all threads

    prefill_work(const prefill_src & a, const void * wdata, int ith, int nth) {
        n_head_block = ceil_div(a.n_query, BLOCK_Q);
        const int64_t n_head = a.n_head_kv*a.n_stream, n_most = std::min(n_head_block, MOST_BLOCKS);
        const int64_t n_state = state_size(a)*n_head_block*n_head*a.n_stretch;
        const bool stay = n_head_block == n_most; // each unit makes bytes of K and V anew, so few blocks stay together where that keeps all threads busy
        const bool even = stay && n_head % nth == 0, may = stay && a.n_stretch > 1 && n_state*(int64_t) sizeof(float) <= nth*STATE_BYTES;
        n_apart = may && !even ? a.n_stretch : 1;
        n_block = even ? n_most : std::clamp<int64_t>(n_head_block*n_head*n_apart/(2*nth), 1, n_most);
        n_unit  = ceil_div(n_head_block, n_block);

        bump shared(wdata);
        kind = shared.take<uint8_t>(a.n_stream*a.n_block_kv*a.n_tok);
        state = shared.take<float>(may ? n_state : 0);
        size = take_per_thread(shared, ith, nth, [&](bump & own) {
            for (int64_t j = 0; j < n_most; ++j) {
                block[j].q = own.take<float>(a.d_k*BLOCK_Q);
                set_state(a, block[j], own.take<float>(state_size(a)));
                if (a.n_stretch > 1) {
                    set_state(a, total[j], own.take<float>(state_size(a)));
                }
            }
            k    = own.take<float>(BLOCK_KV*a.d_k);
            v    = own.take<float>(BLOCK_KV*a.d_v);
            s    = own.take<float>(BLOCK_KV*BLOCK_Q);
            bias = own.take<float>(BLOCK_KV*BLOCK_Q);
            if (a.fast) {
                for (int64_t j = 0; j < n_most; ++j) {
                    bytes[j].q     = own.take<uint8_t>(padded(a.d_k)*BLOCK_Q);
                    bytes[j].scale = own.take<float>(BLOCK_Q);
                }
                kv.k     = own.take<int8_t>(BLOCK_KV*padded(a.d_k));
                kv.scale = own.take<float>(BLOCK_KV);
                kv.start = own.take<int32_t>(BLOCK_KV);
                kv.mean  = own.take<float>(a.d_k);
                kv.v     = own.take<uint32_t>(BLOCK_KV/2*a.d_v);
                p        = own.take<uint32_t>(BLOCK_KV/2*BLOCK_Q);
            }
        });
    }

    // floats of what is known of a block of queries, and where they are
    static int64_t state_size(const prefill_src & a) { return (a.d_v + 2)*BLOCK_Q; }
    static void set_state(const prefill_src & a, query_block & x, float * state) {
        x.acc = state;
        x.m   = state + a.d_v*BLOCK_Q;
        x.l   = x.m + BLOCK_Q;
    }

    // what a stretch leaves of block j of a unit
    float * state_of(const prefill_src & a, const prefill_unit & u, int64_t j, int64_t stretch) const {
        const int64_t block = (u.s*a.n_head_kv + u.h)*n_head_block + u.r0/BLOCK_Q + j;
        return state + (block*n_apart + stretch)*state_size(a);
    }

    const uint8_t * kinds(const prefill_src & a, int64_t s, int64_t b) const { return kind + (s*a.n_block_kv + b)*a.n_tok; }
};

} // namespace sparse
