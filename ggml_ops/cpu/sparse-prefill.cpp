// PREFILL: units of some blocks of queries, which share what is made of a block of K and V.

#include "sparse-prefill-fast.h"
#include "sparse-visible.h"
#include "sparse-work.h"

namespace {

struct prefill_src : ggml_sparse_src {
    ggml_sparse_prefill_params p;
    int64_t n_kv, n_head_kv, n_tok, n_stream;
    int     n_head, n_group_q, d_k, d_v;
    int64_t n_query; // queries of a KV head and a stream: those of its query heads, token by token
    int64_t n_block_kv;
    bool    fast;
    decltype(&load_rows<float>) load_k, load_v;

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
#if defined(SPARQ_PREFILL_FAST)
        fast = p.fast != 0;
#else
        fast = false;
#endif
        with_kv_type(k->type, [&](auto * t) { load_k = load_rows<std::decay_t<decltype(*t)>>; });
        with_kv_type(v->type, [&](auto * t) { load_v = load_rows<std::decay_t<decltype(*t)>>; });
    }
};

// A unit is some blocks of queries of one KV head. How many may depend on the number of threads, since no query's result depends on it. The
// memory must not depend on it: it is planned for more threads than may run, and fewer threads have larger units.
struct prefill_work {
    int64_t n_block, n_unit; // blocks of queries per unit; units of a KV head and a stream

    // [n_stream][n_block_kv][n_tok] of mask_kind. Found before the units begin, because the mask of a block of positions lies in as many rows
    // as there are tokens
    uint8_t * kind;

    // this thread's
    query_block block[512/BLOCK_Q];
    float * k, * v;  // [BLOCK_KV][d_k], [BLOCK_KV][d_v]
    float * s;       // [BLOCK_KV][BLOCK_Q]
    float * bias;    // [BLOCK_KV][BLOCK_Q]
    query_bytes bytes[512/BLOCK_Q]; // of the blocks, with p.fast
    kv_bytes kv;
    uint32_t * p;    // [BLOCK_KV/2][BLOCK_Q]
    size_t size;     // of all threads

    prefill_work(const prefill_src & a, const void * wdata, int ith, int nth) {
        const int64_t n_all = ceil_div(a.n_query, BLOCK_Q);
        n_block = std::clamp<int64_t>(n_all*a.n_head_kv*a.n_stream/(2*nth), 1, std::size(block));
        n_unit  = ceil_div(n_all, n_block);

        bump shared(wdata);
        kind = shared.take<uint8_t>(a.n_stream*a.n_block_kv*a.n_tok);
        size = take_per_thread(shared, ith, nth, [&](bump & own) {
            for (int64_t j = 0; j < std::min<int64_t>(n_all, std::size(block)); ++j) {
                block[j].q   = own.take<float>(a.d_k*BLOCK_Q);
                block[j].acc = own.take<float>(a.d_v*BLOCK_Q);
                block[j].m   = own.take<float>(BLOCK_Q);
                block[j].l   = own.take<float>(BLOCK_Q);
            }
            k    = own.take<float>(BLOCK_KV*a.d_k);
            v    = own.take<float>(BLOCK_KV*a.d_v);
            s    = own.take<float>(BLOCK_KV*BLOCK_Q);
            bias = own.take<float>(BLOCK_KV*BLOCK_Q);
            if (a.fast) {
                for (int64_t j = 0; j < std::min<int64_t>(n_all, std::size(block)); ++j) {
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
};

// the queries [r0, r1) of KV head h and stream s
struct prefill_unit {
    int64_t h, s, r0, r1;

    int64_t n_block() const { return ceil_div(r1 - r0, BLOCK_Q); }

    // the queries of block j
    int64_t begin(int64_t j) const { return r0 + j*BLOCK_Q; }
    int64_t end  (int64_t j) const { return std::min(r1, begin(j) + BLOCK_Q); }
};

// x.q[c] = q[c]*scale in the lane of each query, and nothing seen yet
void begin_block(const prefill_src & a, const query_block & x, const prefill_unit & u, int64_t j) {
    std::fill(x.q,   x.q   + a.d_k*BLOCK_Q, 0.0f);
    std::fill(x.acc, x.acc + a.d_v*BLOCK_Q, 0.0f);
    std::fill(x.m,   x.m   + BLOCK_Q, -INFINITY);
    std::fill(x.l,   x.l   + BLOCK_Q, 0.0f);
    for (int64_t r = u.begin(j); r < u.end(j); ++r) {
        const float * q = at<const float>(a.q, u.h*a.n_group_q + r % a.n_group_q, r/a.n_group_q, u.s);
        for (int c = 0; c < a.d_k; ++c) {
            x.q[c*BLOCK_Q + r - u.begin(j)] = q[c]*a.p.scale;
        }
    }
}

// bias[i] = slope*mask[t + i], of n positions, in the lane of each query; -inf in the lanes of those that see all, unless they are wanted
void load_bias(const prefill_src & a, float * bias, const prefill_unit & u, int64_t j, int64_t t, int n, const uint8_t * kind, bool wanted) {
    std::fill(bias, bias + n*BLOCK_Q, 0.0f);
    for (int64_t r = u.begin(j); r < u.end(j); ++r) {
        if (!wanted && kind[r/a.n_group_q] == MASK_ZERO) {
            for (int i = 0; i < n; ++i) {
                bias[i*BLOCK_Q + r - u.begin(j)] = -INFINITY;
            }
            continue;
        }
        const f16 * mask  = at<const f16>(a.mask, r/a.n_group_q, 0, u.s) + t;
        const float slope = head_slope((int) (u.h*a.n_group_q + r % a.n_group_q), a.n_head, a.p.max_bias);
        for (int i = 0; i < n; ++i) {
            bias[i*BLOCK_Q + r - u.begin(j)] = slope*to_f32(mask[i]);
        }
    }
}

// res[c] = acc[c]/(l + exp(sink - m)), of each query; the sink is optional
void end_block(const prefill_src & a, const query_block & x, const prefill_unit & u, int64_t j, ggml_tensor * dst) {
    for (int64_t r = u.begin(j); r < u.end(j); ++r) {
        const int64_t i = r - u.begin(j), head = u.h*a.n_group_q + r % a.n_group_q;
        float l = x.l[i], f = 1.0f;
        if (a.sinks) {
            const float sink = ((const float *) a.sinks->data)[head], m = std::max(x.m[i], sink);
            f = expf(x.m[i] - m);
            l = l*f + expf(sink - m);
        }
        const float scale = l != 0.0f ? f/l : 0.0f;
        float * res = at<float>(dst, u.s*a.n_tok + r/a.n_group_q) + head*a.d_v;
        for (int c = 0; c < a.d_v; ++c) {
            res[c] = x.acc[c*BLOCK_Q + i]*scale;
        }
    }
}

#if defined(SPARQ_PREFILL_FAST)
// adds a block of positions, whose K and V are finite, to the attention of the queries that see all of it; K is overwritten
void prefill_fast(const prefill_src & a, prefill_work & w, const prefill_unit & u, const uint8_t * kind) {
    int64_t n = 0;
    make_kv_bytes(w.k, a.d_k, w.v, a.d_v, w.kv);
    for (int64_t j = 0; j < u.n_block(); ++j) {
        float hides[BLOCK_Q] = {};
        int64_t n_sees = 0;
        for (int64_t r = u.begin(j); r < u.end(j); ++r) {
            const bool sees = kind[r/a.n_group_q] == MASK_ZERO;
            hides[r - u.begin(j)] = sees ? 0.0f : -INFINITY;
            n_sees += sees;
        }
        if (n_sees > 0) {
            attend_bytes(w.block[j], w.bytes[j], w.kv, a.d_k, a.d_v, hides, a.p.softcap, w.s, w.p);
        }
        n += n_sees;
    }
    if (a.stats) {
        __atomic_fetch_add((int64_t *) a.stats->data + GGML_SPARSE_STAT_PREFILL_FAST, n, __ATOMIC_RELAXED); // other threads count too
    }
}
#endif

// does the mask do x to all the queries [r0, r1)? kind: of the block of positions
bool all_are(const prefill_src & a, const uint8_t * kind, int64_t r0, int64_t r1, mask_kind x) {
    return std::all_of(kind + r0/a.n_group_q, kind + ceil_div(r1, a.n_group_q), [&](uint8_t y) { return y == x; });
}

// w.k, w.v = n positions of K and V from t on, as f32; those of the next block are prefetched
void load_block(const prefill_src & a, const prefill_work & w, const prefill_unit & u, int64_t t, int n) {
    const int64_t size_k = row_size(a.k), size_v = row_size(a.v);
    for (int i = 0; i < n; ++i) {
        const int64_t next = std::min(t + i + BLOCK_KV, a.n_kv - 1);
        prefetch_bytes(at(a.k, u.h, next, u.s), size_k);
        prefetch_bytes(at(a.v, u.h, next, u.s), size_v);
        a.load_k(w.k + i*a.d_k, at(a.k, u.h, t + i, u.s), 0, 1, a.d_k, 0);
        a.load_v(w.v + i*a.d_v, at(a.v, u.h, t + i, u.s), 0, 1, a.d_v, 0);
    }
}

void prefill(const prefill_src & a, prefill_work & w, const prefill_unit & u, ggml_tensor * dst) {
    for (int64_t j = 0; j < u.n_block(); ++j) {
        const int64_t n = ceil_div(u.end(j) - u.begin(j), W);
        w.block[j].n = n <= 2 ? (int) n : NQ;
        begin_block(a, w.block[j], u, j);
#if defined(SPARQ_PREFILL_FAST)
        if (a.fast) {
            make_query_bytes(w.block[j], a.d_k, w.bytes[j]);
        }
#endif
    }
    for (int64_t t = 0; t < a.n_kv; t += BLOCK_KV) {
        const int n = (int) std::min<int64_t>(BLOCK_KV, a.n_kv - t);
        const uint8_t * kind = w.kind + (u.s*a.n_block_kv + t/BLOCK_KV)*a.n_tok;
        if (all_are(a, kind, u.r0, u.r1, MASK_HIDES_ALL)) {
            continue;
        }
        load_block(a, w, u, t, n);
        const bool fast = a.fast && n == BLOCK_KV && is_finite(w.k, n*a.d_k) && is_finite(w.v, n*a.d_v);
        const bool finite = fast || all_are(a, kind, u.r0, u.r1, MASK_ZERO) || is_finite(w.v, n*a.d_v);
        for (int64_t j = 0; j < u.n_block(); ++j) {
            if (all_are(a, kind, u.begin(j), u.end(j), MASK_HIDES_ALL)) {
                continue;
            }
            const bool plain = all_are(a, kind, u.begin(j), u.end(j), MASK_ZERO);
            if (plain && fast) {
                continue;
            }
            if (!plain) {
                load_bias(a, w.bias, u, j, t, n, kind, !fast);
            }
            attend_block(w.block[j], w.k, a.d_k, w.v, a.d_v, n, finite, plain ? nullptr : w.bias, a.p.softcap, w.s);
        }
#if defined(SPARQ_PREFILL_FAST)
        if (fast) {
            prefill_fast(a, w, u, kind);
        }
#endif
    }
    for (int64_t j = 0; j < u.n_block(); ++j) {
        end_block(a, w.block[j], u, j, dst);
    }
}

void prefill_stats(const prefill_src & a, const prefill_work & w) {
    int64_t n_call = 0;
    for (int64_t x = 0; x < a.n_stream*a.n_tok; ++x) {
        const uint8_t * kind = w.kind + x/a.n_tok*a.n_block_kv*a.n_tok + x % a.n_tok;
        bool sees = false;
        for (int64_t j = 0; j < a.n_block_kv && !sees; ++j) {
            sees = kind[j*a.n_tok] != MASK_HIDES_ALL;
        }
        n_call += sees;
    }
    add_stat(a.stats, GGML_SPARSE_STAT_PREFILL, n_call);
}

} // namespace

void sparse::forward_prefill(const ggml_compute_params * params, ggml_tensor * dst) {
    const prefill_src a(dst);
    prefill_work w(a, params->wdata, params->ith, params->nth);

    for (int64_t x = params->ith; x < a.n_stream*a.n_tok; x += params->nth) {
        const int64_t i = x % a.n_tok, s = x/a.n_tok;
        for (int64_t j = 0; j < a.n_block_kv; ++j) {
            const int64_t t = j*BLOCK_KV;
            w.kind[(s*a.n_block_kv + j)*a.n_tok + i] = kind_of(at<const f16>(a.mask, i, 0, s) + t, (int) std::min<int64_t>(BLOCK_KV, a.n_kv - t));
        }
    }
    unit_queue::open(params);
    ggml_barrier(params->threadpool);
    unit_queue queue(params, a.n_stream*a.n_head_kv*w.n_unit);
    for (int64_t x; (x = queue.take()) >= 0; ) {
        digits d { x };
        const int64_t r0 = d.next(w.n_unit)*w.n_block*BLOCK_Q, h = d.next(a.n_head_kv);
        prefill(a, w, { h, d.rest, r0, std::min(a.n_query, r0 + w.n_block*BLOCK_Q) }, dst);
    }
    if (a.stats && params->ith == 0) {
        prefill_stats(a, w);
    }
}

size_t sparse::prefill_work_size(const ggml_tensor * dst, int n_threads) { return prefill_work(prefill_src(dst), nullptr, 0, n_threads).size; }
