#pragma once

// A PREFILL node: its sources, how its work is cut into units, and the memory that they take.

#include "sparse-prefill-choose.h"
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
    int     n_side;   // query heads whose queries lie side by side, token by token: those of a KV head, or one where positions are chosen
    int64_t n_query;  // their queries in a stream
    int64_t n_block_kv;
    int64_t n_stretch; // one where positions are chosen, since these lie anywhere
    bool    fast, chooses;
    int     n_probe;  // of a query head and a stream
    int     n_choice;
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
        chooses   = p.keep > 0.0f && p.keep < 1.0f && n_tok >= POOL;
        n_side    = chooses ? 1 : n_group_q;
        n_query   = n_tok*n_side;
        n_block_kv = ceil_div(n_kv, BLOCK_KV);
        n_stretch  = chooses ? 1 : ceil_div(n_kv, STRETCH);
        n_probe   = (int) ceil_div(n_tok, POOL)*N_PROBE;
        n_choice  = (int) ceil_div(n_tok, CHOICE);
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

    int64_t n_set() const { return n_head/n_side; }

    // of query r of a set
    int64_t head   (int64_t set, int64_t r) const { return set*n_side + r % n_side; }
    int64_t tok    (int64_t r)              const { return r/n_side; }
    int64_t head_kv(int64_t set)            const { return set*n_side/n_group_q; }
};

// What is shared by those who choose positions. A lane is a probe of any query head of a KV head. A part is what one query head chooses for the
// tokens of a choice, numbered [n_stream][n_head][n_choice]. The logits of a part take 96 bytes for each position, so only some parts, that lie
// side by side, are worked on at a time
#if !defined(SPARQ_PARTS_BYTES) // tests have less
#define SPARQ_PARTS_BYTES (48 << 20)
#endif
constexpr size_t PARTS_BYTES = SPARQ_PARTS_BYTES; // of their logits, for each thread; one part may take more

struct choice_work {
    int64_t    n_lane, n_lane_block; // of a KV head and a stream
    int64_t    n_kv;      // rounded up to whole blocks
    int64_t    n_part, n_part_at_once;
    int        n_part_probe;
    float    * q;         // [n_stream][n_head_kv][n_lane_block][d_k][BLOCK_Q]  the probes, times the scale
    float    * x;         // [n_part_at_once][n_part_probe][n_kv]  their logits; exponentials of them once choices are made
    float    * v_sum;     // [n_head_at_once][n_block_kv][d_v]  sums of V over blocks that somebody sees
    float    * v_all;     // [n_stream][n_head_kv][n_choice][d_v]  sums over the blocks that all tokens of a choice see
    uint8_t  * all_see;   // [n_stream][n_choice][n_block_kv]
    uint64_t * kept;      // [n_part][n_block_kv]
    float    * left;      // [n_part]
    int64_t  * n, * n_kept; // [n_part]

    choice_work() = default;
    choice_work(const prefill_src & a, bump & shared, int nth) {
        n_lane       = (int64_t) a.n_group_q*a.n_probe;
        n_lane_block = ceil_div(n_lane, BLOCK_Q);
        n_kv         = a.n_block_kv*BLOCK_KV;
        n_part       = a.n_stream*a.n_head*a.n_choice;
        n_part_probe = std::min(MAX_PROBE, a.n_probe);
        n_part_at_once = std::clamp<int64_t>(nth*PARTS_BYTES/(n_part_probe*n_kv*sizeof(float)), 1, n_part);
        const int64_t n_head_part    = (int64_t) a.n_group_q*a.n_choice; // parts of a KV head
        const int64_t n_head_at_once = std::min(a.n_stream*a.n_head_kv, (n_part_at_once - 1)/n_head_part + 2);
        q       = shared.take<float>(a.n_stream*a.n_head_kv*n_lane_block*a.d_k*BLOCK_Q);
        x       = shared.take<float>(n_part_at_once*n_part_probe*n_kv);
        v_sum   = shared.take<float>(n_head_at_once*a.n_block_kv*a.d_v);
        v_all   = shared.take<float>(a.n_stream*a.n_head_kv*a.n_choice*a.d_v);
        all_see = shared.take<uint8_t>(a.n_stream*a.n_choice*a.n_block_kv);
        kept    = shared.take<uint64_t>(n_part*a.n_block_kv);
        left    = shared.take<float>(n_part);
        n       = shared.take<int64_t>(n_part);
        n_kept  = shared.take<int64_t>(n_part);
    }
};

// the parts [begin, end), and the KV heads that they belong to, which are counted over all streams
struct choice_parts {
    int64_t begin, end, first_head, last_head;

    choice_parts(const prefill_src & a, const choice_work & c, int64_t begin) : begin(begin), end(std::min(begin + c.n_part_at_once, c.n_part)) {
        const int64_t n_head_part = (int64_t) a.n_group_q*a.n_choice;
        first_head = begin/n_head_part;
        last_head  = (end - 1)/n_head_part;
    }
    int64_t n_head() const { return last_head + 1 - first_head; }
};

// the queries [r0, r1) of a set of heads that lie side by side, and of a stream, at the positions [t0, t1)
struct prefill_unit {
    int64_t set, s, r0, r1, t0, t1;

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

// A unit is some blocks of queries, of heads that lie side by side, and all positions or a stretch of them. Which it is may depend on the number of
// threads, since no query's result does. Memory is planned for more threads than may run, and fewer threads need no more of it.
constexpr int64_t STATE_BYTES = 4 << 20; // of what stretches leave, for each thread

struct prefill_work {
    int64_t n_span, n_span_query; // parts of the queries that no unit goes beyond: choices, or all of them
    int64_t n_block, n_unit;      // blocks of queries per unit; units of a part
    int64_t n_set_block;          // blocks of queries of a set of heads and a stream
    int64_t n_apart;              // units that the positions of a block of queries are cut into: one, or a stretch each

    float * state; // [n_stream][n_set][n_set_block][n_apart][d_v + 2][BLOCK_Q]  what the stretches leave, if they are units

    // [n_stream][n_block_kv][n_tok] of mask_kind. Found before the units begin, because the mask of a block of positions lies in as many rows
    // as there are tokens
    uint8_t * kind;

    choice_work choice;

    // this thread's
    query_block block[CHOICE/BLOCK_Q];
    query_block total[CHOICE/BLOCK_Q]; // of the stretches so far
    float * k, * v;  // [BLOCK_KV][d_k], [BLOCK_KV][d_v]
    float * s;       // [BLOCK_KV][BLOCK_Q]
    float * bias;    // [BLOCK_KV][BLOCK_Q]
    query_bytes bytes[CHOICE/BLOCK_Q]; // of the blocks, with p.fast
    kv_bytes kv;
    uint32_t * p;    // [BLOCK_KV/2][BLOCK_Q]
    float * key, * weight; // [n_kv, rounded up], where positions are chosen, and ..
    float * mean;    // .. [d_v]
    size_t size;     // of all threads

    prefill_work(const prefill_src & a, const void * wdata, int ith, int nth) {
        n_span       = a.chooses ? a.n_choice : 1;
        n_span_query = a.chooses ? CHOICE : a.n_query;
        n_set_block  = ceil_div(a.n_query, BLOCK_Q);
        const int64_t n_all = std::min(n_set_block, ceil_div(n_span_query, BLOCK_Q)), n_set = a.n_set()*a.n_stream;
        const int64_t n_most = std::min<int64_t>(n_all, std::size(block)), n_state = state_size(a)*n_set_block*n_set*a.n_stretch;
        const bool stay = n_all == n_most; // each unit makes bytes of K and V anew, so few blocks stay together where that keeps all threads busy
        const bool even = stay && n_span*n_set % nth == 0, may = stay && a.n_stretch > 1 && n_state*(int64_t) sizeof(float) <= nth*STATE_BYTES;
        n_apart = may && !even ? a.n_stretch : 1;
        n_block = even ? n_most : std::clamp<int64_t>(n_all*n_span*n_set*n_apart/(2*nth), 1, n_most);
        n_unit  = ceil_div(n_all, n_block);

        bump shared(wdata);
        kind = shared.take<uint8_t>(a.n_stream*a.n_block_kv*a.n_tok);
        state = shared.take<float>(may ? n_state : 0);
        if (a.chooses) {
            choice = choice_work(a, shared, nth);
        }
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
            if (a.chooses) {
                key    = own.take<float>(a.n_block_kv*BLOCK_KV);
                weight = own.take<float>(a.n_block_kv*BLOCK_KV);
                mean   = own.take<float>(a.d_v);
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
        const int64_t block = (u.s*a.n_set() + u.set)*n_set_block + u.r0/BLOCK_Q + j;
        return state + (block*n_apart + stretch)*state_size(a);
    }

    const uint8_t * kinds(const prefill_src & a, int64_t s, int64_t b) const { return kind + (s*a.n_block_kv + b)*a.n_tok; }
};

} // namespace sparse
