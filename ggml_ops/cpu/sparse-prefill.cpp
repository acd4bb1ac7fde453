// PREFILL: units of some blocks of queries, which share what is made of a block of K and V.

#include "sparse-prefill-work.h"
#include "sparse-visible.h"

namespace {

// x.q[c] = q[c]*scale in the lane of each query
void load_queries(const prefill_src & a, const query_block & x, const prefill_unit & u, int64_t j) {
    std::fill(x.q, x.q + a.d_k*BLOCK_Q, 0.0f);
    for (int64_t r = u.begin(j); r < u.end(j); ++r) {
        const float * q = at<const float>(a.q, a.head(u.h, r), a.tok(r), u.s);
        for (int c = 0; c < a.d_k; ++c) {
            x.q[c*BLOCK_Q + r - u.begin(j)] = q[c]*a.p.scale;
        }
    }
}

// nothing seen yet
void begin_block(const prefill_src & a, const query_block & x) {
    std::fill(x.acc, x.acc + a.d_v*BLOCK_Q, 0.0f);
    std::fill(x.m,   x.m   + BLOCK_Q, -INFINITY);
    std::fill(x.l,   x.l   + BLOCK_Q, 0.0f);
}

// bias[i] = slope*mask[t + i], of n positions, in the lane of each query; -inf in the lanes of those that see all, unless they are wanted
void load_bias(const prefill_src & a, float * bias, const prefill_unit & u, int64_t j, int64_t t, int n, const uint8_t * kind, bool wanted) {
    std::fill(bias, bias + n*BLOCK_Q, 0.0f);
    for (int64_t r = u.begin(j); r < u.end(j); ++r) {
        if (!wanted && kind[a.tok(r)] == MASK_ZERO) {
            for (int i = 0; i < n; ++i) {
                bias[i*BLOCK_Q + r - u.begin(j)] = -INFINITY;
            }
            continue;
        }
        const f16 * mask  = at<const f16>(a.mask, a.tok(r), 0, u.s) + t;
        const float slope = head_slope((int) a.head(u.h, r), a.n_head, a.p.max_bias);
        for (int i = 0; i < n; ++i) {
            bias[i*BLOCK_Q + r - u.begin(j)] = slope*to_f32(mask[i]);
        }
    }
}

// res[c] = acc[c]/(l + exp(sink - m)), of each query; the sink is optional
void end_block(const prefill_src & a, const query_block & x, const prefill_unit & u, int64_t j, ggml_tensor * dst) {
    for (int64_t r = u.begin(j); r < u.end(j); ++r) {
        const int64_t i = r - u.begin(j), head = a.head(u.h, r);
        float l = x.l[i], f = 1.0f;
        if (a.sinks) {
            const float sink = ((const float *) a.sinks->data)[head], m = std::max(x.m[i], sink);
            f = expf(x.m[i] - m);
            l = l*f + expf(sink - m);
        }
        const float scale = l != 0.0f ? f/l : 0.0f;
        float * res = at<float>(dst, u.s*a.n_tok + a.tok(r)) + head*a.d_v;
        for (int c = 0; c < a.d_v; ++c) {
            res[c] = x.acc[c*BLOCK_Q + i]*scale;
        }
    }
}

#if defined(SPARQ_PREFILL_FAST)
// w.kv = the block of positions from t on; false: K or V is not finite
bool make_bytes(const prefill_src & a, const prefill_work & w, int64_t h, int64_t s, int64_t t) {
    return a.make_k(at(a.k, h, t, s), a.k->nb[2], a.d_k, w.kv) && a.make_v(at(a.v, h, t, s), a.v->nb[2], a.d_v, w.kv, w.v);
}

// Adds the block of positions in w.kv, which begins at t, to the attention of the queries that see all of it
void prefill_fast(const prefill_src & a, prefill_work & w, const prefill_unit & u, int64_t t, const uint8_t * kind) {
    const int64_t h = u.h, next = t + BLOCK_KV, n_step = ceil_div(BLOCK_KV, u.n_block()*rows_ahead::n_asked(a.d_v));
    rows_ahead ahead = {
        at(a.k, h, t, u.s) + BLOCK_KV*a.k->nb[2], at(a.v, h, t, u.s) + BLOCK_KV*a.v->nb[2], a.k->nb[2], a.v->nb[2],
        (size_t) row_size(a.k), (size_t) row_size(a.v),
        (int) std::clamp<int64_t>(a.n_kv - next, 0, BLOCK_KV), (int) n_step,
    };
    int64_t n = 0;
    for (int64_t j = 0; j < u.n_block(); ++j) {
        float hides[BLOCK_Q] = {};
        int64_t n_sees = 0;
        for (int64_t r = u.begin(j); r < u.end(j); ++r) {
            const bool sees = kind[a.tok(r)] == MASK_ZERO;
            hides[r - u.begin(j)] = sees ? 0.0f : -INFINITY;
            n_sees += sees;
        }
        if (n_sees > 0) {
            attend_bytes(w.block[j], w.bytes[j], w.kv, a.d_k, w.v, a.d_v, hides, a.p.softcap, w.s, w.p, ahead);
        }
        n += n_sees;
    }
    if (a.stats) {
        __atomic_fetch_add((int64_t *) a.stats->data + GGML_SPARSE_STAT_PREFILL_FAST, n, __ATOMIC_RELAXED); // other threads count too
    }
}
#else
bool make_bytes(const prefill_src &, const prefill_work &, int64_t, int64_t, int64_t) { return false; }
void prefill_fast(const prefill_src &, prefill_work &, const prefill_unit &, int64_t, const uint8_t *) {}
#endif

// does the mask do x to all the tokens [lo, hi)? kind: of the block of positions
bool all_are(const uint8_t * kind, int64_t lo, int64_t hi, mask_kind x) {
    return std::all_of(kind + lo, kind + hi, [&](uint8_t y) { return y == x; });
}
// and to all the queries [r0, r1)?
bool all_are(const prefill_src & a, const uint8_t * kind, int64_t r0, int64_t r1, mask_kind x) {
    return all_are(kind, a.tok(r0), ceil_div(r1, a.n_group_q), x);
}

// w.k, w.v = n positions of K and V of a head from t on, as f32; those of the next block are prefetched
void load_block(const prefill_src & a, const prefill_work & w, int64_t h, int64_t s, int64_t t, int n) {
    for (int i = 0; i < n; ++i) {
        const int64_t ahead = std::min(t + i + BLOCK_KV, a.n_kv - 1);
        prefetch_bytes(at(a.k, h, ahead, s), row_size(a.k));
        prefetch_bytes(at(a.v, h, ahead, s), row_size(a.v));
        a.load_k(w.k + i*a.d_k, at(a.k, h, t + i, s), 0, 1, a.d_k, 0);
        a.load_v(w.v + i*a.d_v, at(a.v, h, t + i, s), 0, 1, a.d_v, 0);
    }
}

// Adds the block of n positions from t on to the attention of the queries of a unit. kind: of the block
void attend_positions(const prefill_src & a, prefill_work & w, const prefill_unit & u, int64_t t, int n, const uint8_t * kind) {
    const bool fast = a.fast && n == BLOCK_KV && make_bytes(a, w, u.h, u.s, t);
    bool is_loaded = false, finite = false;
    for (int64_t j = 0; j < u.n_block(); ++j) {
        if (all_are(a, kind, u.begin(j), u.end(j), MASK_HIDES_ALL)) {
            continue;
        }
        const bool plain = all_are(a, kind, u.begin(j), u.end(j), MASK_ZERO);
        if (plain && fast) {
            continue;
        }
        if (!is_loaded) {
            is_loaded = true;
            load_block(a, w, u.h, u.s, t, n);
            finite = fast || all_are(a, kind, u.r0, u.r1, MASK_ZERO) || is_finite(w.v, n*a.d_v);
        }
        if (!plain) {
            load_bias(a, w.bias, u, j, t, n, kind, !fast);
        }
        attend_block(w.block[j], w.k, a.d_k, w.v, a.d_v, n, finite, plain ? nullptr : w.bias, a.p.softcap, w.s);
    }
    if (fast) {
        prefill_fast(a, w, u, t, kind);
    }
}

// A unit that is a stretch leaves w.state, any other the result
void prefill(const prefill_src & a, prefill_work & w, const prefill_unit & u, ggml_tensor * dst) {
    const bool alone = w.n_apart == 1, adds_up = alone && a.n_stretch > 1;
    for (int64_t j = 0; j < u.n_block(); ++j) {
        query_block & x = w.block[j], & sum = w.total[j];
        x.n = sum.n = u.n_vector(j);
        load_queries(a, x, u, j);
        if (adds_up) {
            begin_block(a, sum);
        } else if (!alone) {
            w.set_state(a, x, w.state_of(a, u, j, u.t0/STRETCH));
        }
#if defined(SPARQ_PREFILL_FAST)
        if (a.fast) {
            make_query_bytes(x, a.d_k, w.bytes[j]);
        }
#endif
    }
    for (int64_t t0 = u.t0; t0 < u.t1; t0 += STRETCH) {
        for (int64_t j = 0; j < u.n_block(); ++j) {
            begin_block(a, w.block[j]);
        }
        for (int64_t t = t0; t < std::min(t0 + STRETCH, u.t1); t += BLOCK_KV) {
            const uint8_t * kind = w.kinds(a, u.s, t/BLOCK_KV);
            if (!all_are(a, kind, u.r0, u.r1, MASK_HIDES_ALL)) {
                attend_positions(a, w, u, t, (int) std::min<int64_t>(BLOCK_KV, a.n_kv - t), kind);
            }
        }
        for (int64_t j = 0; j < u.n_block() && adds_up; ++j) {
            merge(w.total[j], w.block[j], a.d_v);
        }
    }
    for (int64_t j = 0; j < u.n_block() && alone; ++j) {
        end_block(a, adds_up ? w.total[j] : w.block[j], u, j, dst);
    }
}

// adds up what the stretches left of a block of queries, which are those of u
void merge_stretches(const prefill_src & a, prefill_work & w, const prefill_unit & u, ggml_tensor * dst) {
    query_block & sum = w.total[0], & x = w.block[0];
    x.n = sum.n = u.n_vector(0);
    begin_block(a, sum);
    for (int64_t i = 0; i < w.n_apart; ++i) {
        w.set_state(a, x, w.state_of(a, u, 0, i));
        merge(sum, x, a.d_v);
    }
    end_block(a, sum, u, 0, dst);
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
    unit_queue queue(params, a.n_stream*a.n_head_kv*w.n_apart*w.n_unit);
    for (int64_t x; (x = queue.take()) >= 0; ) {
        digits d { x };
        const int64_t unit = d.next(w.n_unit), stretch = d.next(w.n_apart), h = d.next(a.n_head_kv);
        const int64_t r0 = unit*w.n_block*BLOCK_Q, r1 = std::min(a.n_query, r0 + w.n_block*BLOCK_Q);
        const int64_t t1 = w.n_apart > 1 ? std::min(a.n_kv, (stretch + 1)*STRETCH) : a.n_kv;
        prefill(a, w, { h, d.rest, r0, r1, stretch*STRETCH, t1 }, dst);
    }
    if (w.n_apart > 1) {
        ggml_barrier(params->threadpool);
        for (int64_t x = params->ith; x < a.n_stream*a.n_head_kv*w.n_head_block; x += params->nth) {
            digits d { x };
            const int64_t r0 = d.next(w.n_head_block)*BLOCK_Q, h = d.next(a.n_head_kv);
            merge_stretches(a, w, { h, d.rest, r0, std::min(a.n_query, r0 + BLOCK_Q), 0, a.n_kv }, dst);
        }
    }
    if (a.stats && params->ith == 0) {
        prefill_stats(a, w);
    }
}

size_t sparse::prefill_work_size(const ggml_tensor * dst, int n_threads) { return prefill_work(prefill_src(dst), nullptr, 0, n_threads).size; }
