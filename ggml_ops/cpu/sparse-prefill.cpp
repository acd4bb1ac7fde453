// PREFILL: units of some blocks of queries, which share what is made of a block of K and V.
//
// With p.keep, tokens first choose the positions that they read. The queries of a KV head then lie head by head in blocks, else token by token.

#include "sparse-prefill-work.h"
#include "sparse-visible.h"

namespace {

// x.q[c] = q[c]*scale in the lane of each query
void load_queries(const prefill_src & a, const query_block & x, const prefill_unit & u, int64_t j) {
    std::fill(x.q, x.q + a.d_k*BLOCK_Q, 0.0f);
    for (int64_t r = u.begin(j); r < u.end(j); ++r) {
        const float * q = at<const float>(a.q, a.head(u.set, r), a.tok(r), u.s);
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
        const float slope = head_slope((int) a.head(u.set, r), a.n_head, a.p.max_bias);
        for (int i = 0; i < n; ++i) {
            bias[i*BLOCK_Q + r - u.begin(j)] = slope*to_f32(mask[i]);
        }
    }
}

// res[c] = acc[c]/(l + exp(sink - m)), of each query; the sink is optional
void end_block(const prefill_src & a, const query_block & x, const prefill_unit & u, int64_t j, ggml_tensor * dst) {
    for (int64_t r = u.begin(j); r < u.end(j); ++r) {
        const int64_t i = r - u.begin(j), head = a.head(u.set, r);
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

// the same from w.k and w.v
bool make_bytes(const prefill_src & a, const prefill_work & w) {
    return make_k_bytes<float>((const char *) w.k, a.d_k*sizeof(float), a.d_k, w.kv) &&
            make_v_pairs<float>((const char *) w.v, a.d_v*sizeof(float), a.d_v, w.kv, w.v);
}

// Adds the block of positions in w.kv, which begins at t, to the attention of the queries that see all of it. Without kind all do, and the next block is
// not the next in memory
void prefill_fast(const prefill_src & a, prefill_work & w, const prefill_unit & u, int64_t t, const uint8_t * kind) {
    const int64_t h = a.head_kv(u.set), next = t + BLOCK_KV, n_step = ceil_div(BLOCK_KV, u.n_block()*rows_ahead::n_asked(a.d_v));
    rows_ahead ahead = {
        at(a.k, h, t, u.s) + BLOCK_KV*a.k->nb[2], at(a.v, h, t, u.s) + BLOCK_KV*a.v->nb[2], a.k->nb[2], a.v->nb[2],
        (size_t) row_size(a.k), (size_t) row_size(a.v),
        kind ? (int) std::clamp<int64_t>(a.n_kv - next, 0, BLOCK_KV) : 0, (int) n_step,
    };
    int64_t n = 0;
    for (int64_t j = 0; j < u.n_block(); ++j) {
        float hides[BLOCK_Q] = {};
        int64_t n_sees = 0;
        for (int64_t r = u.begin(j); r < u.end(j); ++r) {
            const bool sees = !kind || kind[a.tok(r)] == MASK_ZERO;
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
bool make_bytes(const prefill_src &, const prefill_work &) { return false; }
void prefill_fast(const prefill_src &, prefill_work &, const prefill_unit &, int64_t, const uint8_t *) {}
#endif

// does the mask do x to all the tokens [lo, hi)? kind: of the block of positions
bool all_are(const uint8_t * kind, int64_t lo, int64_t hi, mask_kind x) {
    return std::all_of(kind + lo, kind + hi, [&](uint8_t y) { return y == x; });
}
// and to all the queries [r0, r1)? Without kind all see all
bool all_are(const prefill_src & a, const uint8_t * kind, int64_t r0, int64_t r1, mask_kind x) {
    return kind ? all_are(kind, a.tok(r0), ceil_div(r1, a.n_side), x) : x == MASK_ZERO;
}

void load_position(const prefill_src & a, const prefill_work & w, int64_t h, int64_t s, int64_t t, int i) {
    a.load_k(w.k + i*a.d_k, at(a.k, h, t, s), 0, 1, a.d_k, 0);
    a.load_v(w.v + i*a.d_v, at(a.v, h, t, s), 0, 1, a.d_v, 0);
}

void prefetch_position(const prefill_src & a, int64_t h, int64_t s, int64_t t) {
    prefetch_bytes(at(a.k, h, t, s), row_size(a.k));
    prefetch_bytes(at(a.v, h, t, s), row_size(a.v));
}

// w.k, w.v = n positions of K and V of a head from t on, as f32; those of the next block are prefetched
void load_block(const prefill_src & a, const prefill_work & w, int64_t h, int64_t s, int64_t t, int n) {
    for (int i = 0; i < n; ++i) {
        prefetch_position(a, h, s, std::min(t + i + BLOCK_KV, a.n_kv - 1));
        load_position(a, w, h, s, t + i, i);
    }
}

// ---- which positions are read ----

// the tokens of choice c
int64_t choice_begin(int64_t c) { return c*CHOICE; }
int64_t choice_end(const prefill_src & a, int64_t c) { return std::min(a.n_tok, (c + 1)*CHOICE); }

// the tokens [lo, hi) of a probe. It sees what lo sees: of a prompt, the first token of a pool sees what all of them see
struct probe_tokens {
    int64_t lo, hi;

    probe_tokens(const prefill_src & a, int64_t probe) {
        const int64_t t0 = probe/N_PROBE*POOL;
        const int i = (int) (probe % N_PROBE), n = (int) std::min<int64_t>(POOL, a.n_tok - t0);
        lo = i == 0 ? t0 : t0 + sampled(n, i);
        hi = i == 0 ? t0 + n : lo + 1;
    }
};

// the probes of a KV head
void make_probes(const prefill_src & a, const prefill_work & w, int64_t s, int64_t h) {
    float * q = w.choice.q + (s*a.n_head_kv + h)*w.choice.n_lane_block*a.d_k*BLOCK_Q;
    std::fill(q, q + w.choice.n_lane_block*a.d_k*BLOCK_Q, 0.0f);
    for (int64_t lane = 0; lane < w.choice.n_lane; ++lane) {
        const int64_t head = h*a.n_group_q + lane/a.n_probe;
        const probe_tokens toks(a, lane % a.n_probe);
        float * to = q + lane/BLOCK_Q*a.d_k*BLOCK_Q + lane % BLOCK_Q;
        for (int64_t t = toks.lo; t < toks.hi; ++t) {
            const float * x = at<const float>(a.q, head, t, s);
            for (int c = 0; c < a.d_k; ++c) {
                to[c*BLOCK_Q] += x[c]*(a.p.scale/(float) (toks.hi - toks.lo));
            }
        }
    }
}

// the logits at block b of positions of those probes of KV head sh that belong to some parts, the sum of V over it, and who sees all of it
void score_probes(const prefill_src & a, const prefill_work & w, const choice_parts & parts, int64_t sh, int64_t b) {
    const choice_work & c = w.choice;
    const int64_t s = sh/a.n_head_kv, h = sh % a.n_head_kv, t = b*BLOCK_KV;
    const int n = (int) std::min<int64_t>(BLOCK_KV, a.n_kv - t);
    const uint8_t * kind = w.kinds(a, s, b);
    for (int64_t i = 0; i < a.n_choice && h == 0; ++i) {
        c.all_see[(s*a.n_choice + i)*a.n_block_kv + b] = n == BLOCK_KV && all_are(kind, choice_begin(i), choice_end(a, i), MASK_ZERO);
    }
    const bool hidden = all_are(kind, 0, a.n_tok, MASK_HIDES_ALL);
    if (!hidden) {
        float * sum = c.v_sum + ((sh - parts.first_head)*a.n_block_kv + b)*a.d_v;
        load_block(a, w, h, s, t, n);
        std::fill(sum, sum + a.d_v, 0.0f);
        for (int i = 0; i < n; ++i) {
            for (int d = 0; d < a.d_v; ++d) {
                sum[d] += w.v[i*a.d_v + d];
            }
        }
    }
    int64_t scored = -1; // the block of lanes whose products are in w.s
    for (int64_t lane = 0; lane < c.n_lane; ++lane) {
        const int64_t head = h*a.n_group_q + lane/a.n_probe, probe = lane % a.n_probe;
        const int64_t part = (s*a.n_head + head)*a.n_choice + probe/MAX_PROBE;
        if (part < parts.begin || part >= parts.end) {
            continue;
        }
        if (!hidden && lane/BLOCK_Q != scored) {
            scored = lane/BLOCK_Q;
            const float * q = c.q + (sh*c.n_lane_block + scored)*a.d_k*BLOCK_Q;
            dot_products(w.s, (int) ceil_div(std::min<int64_t>(c.n_lane - scored*BLOCK_Q, BLOCK_Q), W), q, w.k, a.d_k, n);
        }
        const int64_t tok = probe_tokens(a, probe).lo;
        float * x = c.x + ((part - parts.begin)*c.n_part_probe + probe % MAX_PROBE)*c.n_kv + t;
        const mask_kind sees = (mask_kind) kind[tok];
        const f16 * mask = at<const f16>(a.mask, tok, 0, s) + t;
        for (int i = 0; i < BLOCK_KV; ++i) {
            x[i] = w.s[i*BLOCK_Q + lane % BLOCK_Q];
        }
        for (int i = 0; i < n && a.p.softcap > 0.0f; ++i) {
            x[i] = a.p.softcap*tanhf(x[i]/a.p.softcap);
        }
        for (int i = 0; i < n && sees != MASK_ZERO; ++i) {
            const bool hides = sees == MASK_HIDES_ALL || mask[i].bits == F16_NEG_INF;
            x[i] = hides ? -INFINITY : x[i] + head_slope((int) head, a.n_head, a.p.max_bias)*to_f32(mask[i]);
        }
        std::fill(x + n, x + BLOCK_KV, -INFINITY);
    }
}

// what one query head chooses for the tokens of a choice
void choose_positions(const prefill_src & a, const prefill_work & w, const choice_parts & parts, int64_t part) {
    const choice_work & c = w.choice;
    const int64_t i = part % a.n_choice, s = part/a.n_choice/a.n_head;
    const choice_args args = {
        c.n_kv, std::min(MAX_PROBE, a.n_probe - (int) i*MAX_PROBE), c.x + (part - parts.begin)*c.n_part_probe*c.n_kv,
        c.all_see + (s*a.n_choice + i)*a.n_block_kv, a.p.keep,
    };
    choice res = { c.kept + part*a.n_block_kv, 0.0f, 0, 0 };
    choose(args, w.key, w.weight, res);
    c.left[part]   = res.left;
    c.n[part]      = res.n;
    c.n_kept[part] = res.n_kept;
}

// the sum of V of KV head sh over the blocks that all tokens of choice i see
void sum_values(const prefill_src & a, const prefill_work & w, const choice_parts & parts, int64_t sh, int64_t i) {
    const choice_work & c = w.choice;
    const uint8_t * all_see = c.all_see + (sh/a.n_head_kv*a.n_choice + i)*a.n_block_kv;
    const float   * v_sum   = c.v_sum + (sh - parts.first_head)*a.n_block_kv*a.d_v;
    float         * res     = c.v_all + (sh*a.n_choice + i)*a.d_v;
    std::fill(res, res + a.d_v, 0.0f);
    for (int64_t b = 0; b < a.n_block_kv; ++b) {
        for (int d = 0; d < a.d_v && all_see[b]; ++d) {
            res[d] += v_sum[b*a.d_v + d];
        }
    }
}

// all choices; every thread calls it
void choose_all(const prefill_src & a, const prefill_work & w, const ggml_compute_params * params) {
    for (int64_t x = params->ith; x < a.n_stream*a.n_head_kv; x += params->nth) {
        make_probes(a, w, x/a.n_head_kv, x % a.n_head_kv);
    }
    ggml_barrier(params->threadpool);
    for (int64_t begin = 0; begin < w.choice.n_part; begin += w.choice.n_part_at_once) {
        const choice_parts parts(a, w.choice, begin);
        const int64_t n = parts.n_head()*a.n_block_kv;
        for (int64_t x = n*params->ith/params->nth; x < n*(params->ith + 1)/params->nth; ++x) {
            score_probes(a, w, parts, parts.first_head + x/a.n_block_kv, x % a.n_block_kv);
        }
        ggml_barrier(params->threadpool);
        for (int64_t part = begin + params->ith; part < parts.end; part += params->nth) {
            choose_positions(a, w, parts, part);
        }
        for (int64_t x = params->ith; x < parts.n_head()*a.n_choice; x += params->nth) {
            sum_values(a, w, parts, parts.first_head + x/a.n_choice, x % a.n_choice);
        }
        ggml_barrier(params->threadpool);
    }
}

// ---- attention ----

// Adds the n positions from t on to the attention of the queries of a unit. fast: they are in w.kv. Else, and for queries that do not see all of them,
// load() puts them into w.k and w.v. kind: of the block of positions; nullptr: all queries see all of these positions, which may lie anywhere
template <typename F>
void attend_positions(const prefill_src & a, prefill_work & w, const prefill_unit & u, int64_t t, int n, const uint8_t * kind, bool fast, const F & load) {
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
            load();
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

// the positions that the unit's choice keeps; w.mean is the mean of V over the others
void prefill_chosen(const prefill_src & a, prefill_work & w, const prefill_unit & u) {
    const choice_work & c = w.choice;
    const int64_t i = u.r0/CHOICE, at = (u.s*a.n_head + u.set)*a.n_choice + i, h = a.head_kv(u.set);
    const uint64_t * kept = c.kept + at*a.n_block_kv;
    const float    * v_all = c.v_all + ((u.s*a.n_head_kv + h)*a.n_choice + i)*a.d_v;
    const int64_t n_left = c.n[at] - c.n_kept[at];

    std::fill(w.mean, w.mean + a.d_v, 0.0f);
    for (int d = 0; d < a.d_v && n_left > 0; ++d) {
        w.mean[d] = v_all[d];
    }
    int64_t list[BLOCK_KV];
    int n = 0;
    const auto attend = [&]() {
        for (int j = 0; j < n; ++j) {
            load_position(a, w, h, u.s, list[j], j);
            for (int d = 0; d < a.d_v; ++d) {
                w.mean[d] -= w.v[j*a.d_v + d];
            }
        }
        const bool fast = a.fast && n == BLOCK_KV && make_bytes(a, w);
        attend_positions(a, w, u, 0, n, nullptr, fast, [] {});
        n = 0;
    };
    for (int64_t b = 0; b < a.n_block_kv; ++b) {
        for (uint64_t word = kept[b]; word != 0; word &= word - 1) {
            list[n] = b*BLOCK_KV + __builtin_ctzll(word);
            prefetch_position(a, h, u.s, list[n]);
            if (++n == BLOCK_KV) {
                attend();
            }
        }
    }
    if (n > 0) {
        attend();
    }
    for (int d = 0; d < a.d_v && n_left > 0; ++d) {
        w.mean[d] /= (float) n_left;
    }
}

// the positions [t0, t1), but for blocks of which some were chosen
void prefill_seen(const prefill_src & a, prefill_work & w, const prefill_unit & u, int64_t t0, int64_t t1, const uint8_t * is_done) {
    for (int64_t t = t0; t < t1; t += BLOCK_KV) {
        const int n = (int) std::min<int64_t>(BLOCK_KV, a.n_kv - t);
        const uint8_t * kind = w.kinds(a, u.s, t/BLOCK_KV);
        if ((is_done && is_done[t/BLOCK_KV]) || all_are(a, kind, u.r0, u.r1, MASK_HIDES_ALL)) {
            continue;
        }
        const bool fast = a.fast && n == BLOCK_KV && make_bytes(a, w, a.head_kv(u.set), u.s, t);
        attend_positions(a, w, u, t, n, kind, fast, [&] { load_block(a, w, a.head_kv(u.set), u.s, t, n); });
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
    const int64_t size = a.chooses ? a.n_kv : STRETCH;
    for (int64_t t = u.t0; t < u.t1; t += size) {
        for (int64_t j = 0; j < u.n_block(); ++j) {
            begin_block(a, w.block[j]);
        }
        const uint8_t * is_done = nullptr;
        if (a.chooses) {
            prefill_chosen(a, w, u);
            is_done = w.choice.all_see + (u.s*a.n_choice + u.r0/CHOICE)*a.n_block_kv;
        }
        prefill_seen(a, w, u, t, std::min(t + size, u.t1), is_done);
        for (int64_t j = 0; j < u.n_block(); ++j) {
            if (a.chooses) {
                add_rest(w.block[j], w.mean, a.d_v, w.choice.left[(u.s*a.n_head + u.set)*a.n_choice + u.r0/CHOICE]);
            }
            if (adds_up) {
                merge(w.total[j], w.block[j], a.d_v);
            }
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
    for (int64_t x = 0; x < a.n_stream*a.n_head*a.n_choice && a.chooses; ++x) {
        const int64_t n = choice_end(a, x % a.n_choice) - choice_begin(x % a.n_choice);
        add_stat(a.stats, GGML_SPARSE_STAT_PREFILL_VISIBLE, n*w.choice.n[x]);
        add_stat(a.stats, GGML_SPARSE_STAT_PREFILL_READ,    n*w.choice.n_kept[x]);
    }
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
    if (a.chooses) {
        choose_all(a, w, params);
    }
    unit_queue::open(params);
    ggml_barrier(params->threadpool);
    unit_queue queue(params, a.n_stream*a.n_set()*w.n_apart*w.n_span*w.n_unit);
    for (int64_t x; (x = queue.take()) >= 0; ) {
        digits d { x };
        const int64_t unit = d.next(w.n_unit), span = d.next(w.n_span), stretch = d.next(w.n_apart), set = d.next(a.n_set());
        const int64_t r0 = span*w.n_span_query + unit*w.n_block*BLOCK_Q, end = std::min(a.n_query, (span + 1)*w.n_span_query);
        const int64_t t1 = w.n_apart > 1 ? std::min(a.n_kv, (stretch + 1)*STRETCH) : a.n_kv;
        if (r0 < end) {
            prefill(a, w, { set, d.rest, r0, std::min(end, r0 + w.n_block*BLOCK_Q), stretch*STRETCH, t1 }, dst);
        }
    }
    if (w.n_apart > 1) {
        ggml_barrier(params->threadpool);
        for (int64_t x = params->ith; x < a.n_stream*a.n_set()*w.n_set_block; x += params->nth) {
            digits d { x };
            const int64_t r0 = d.next(w.n_set_block)*BLOCK_Q, set = d.next(a.n_set());
            merge_stretches(a, w, { set, d.rest, r0, std::min(a.n_query, r0 + BLOCK_Q), 0, a.n_kv }, dst);
        }
    }
    if (a.stats && params->ith == 0) {
        prefill_stats(a, w);
    }
}

size_t sparse::prefill_work_size(const ggml_tensor * dst, int n_threads) { return prefill_work(prefill_src(dst), nullptr, 0, n_threads).size; }
