// SELECT: which thread ranks which tiles, and what threads do together where heads are few.

#include "sparse-score-select.h"

sparse::select_src::select_src(const ggml_tensor * dst) :
    ggml_sparse_src(ggml_sparse_src_of(dst)),
    tile_grid(logits ? logits->ne[0] : k->ne[2], dst->ne[1], (logits ? logits : q)->ne[1], dst->ne[2], dst->ne[3]),
    p(ggml_sparse_select_params_of(dst)), n_forced((int) wanted->ne[0] - p.i_forced) {}

namespace {

// Logits wait in slots, each for one head. Of consecutive units a thread has whole heads, which it ranks one after another in a slot that stays
// in its cache. Where heads are few, it may also have a part of a head at either end; that head has a slot of the thread that owns it, which is
// the one that has its first tile.
struct select_work : select_scratch {
    char  * slots;
    size_t  slot_size;
    int64_t n_slot;
    size_t  size;   // of all threads

    select_work(const select_src & a, const void * wdata, int ith, int nth) {
        n_slot    = std::min<int64_t>(2*nth, a.n_all);
        slot_size = slot(a, nullptr, nullptr).used;

        bump shared(wdata);
        slots = shared.take<char>(n_slot*slot_size);
        size  = take_per_thread(shared, ith, nth, [&](bump & own) {
            key      = own.take<float>(a.n_group_q > 1 ? a.n_kv + 2*W : 0);
            cand     = own.take<float>(a.n_kv + (a.n_tile + 2)*W);
            cell     = own.take<int32_t>(a.n_kv + (a.n_tile + 2)*W);
            weight   = own.take<float>(is_top_p(a.p.top_p) ? a.n_kv + 2*W : 0);
            saved    = own.take<float>(a.n_forced + W);
            top      = own.take<float>(a.n_group_q);
            all      = own.take<float>(a.n_group_q);
            factor   = own.take<float>(a.n_group_q*a.n_tile);
            guess    = own.take<float>(1);
            n_wanted = own.take<int32_t>(1);
            n_cand   = own.take<int32_t>(a.n_tile);
        });
    }

    static bump slot(const select_src & a, const void * base, head_scores * scores) {
        bump b(base);
        const int64_t ld = ceil_div(a.n_kv, W)*W + (a.n_tile + 2)*W; // room behind each tile
        float * x   = b.take<float>(a.n_group_q*ld);
        float * max = b.take<float>(a.n_group_q*a.n_tile);
        float * sum = b.take<float>(a.n_group_q*a.n_tile);
        if (scores) {
            *scores = { x, max, sum, ld, a.n_kv, a.tile, a.n_group_q };
        }
        return b;
    }

    // of head u. whole: all its tiles are the owner's
    head_scores scores(const select_src & a, int64_t u, int owner, bool whole, int nth) const {
        head_scores res;
        slot(a, slots + (n_slot == a.n_all ? u : whole ? owner : nth + owner)*slot_size, &res);
        return res;
    }
};

// Threads per head, and positions, from which on threads share the ranking of a head and not only its tiles. One thread takes 5 us to rank 16k
// positions of four query heads, and three more barriers are not free either, least of all on a busy machine
constexpr int     MANY_SHARE = 4;
constexpr int64_t LONG_SHARE = 32768;

// one thread's share of SELECT
struct select_pass {
    const ggml_compute_params * params;
    ggml_tensor        * dst;
    const select_src   & a;
    const void         * wdata;
    const logit_source & logits;

    const int         ith, nth;
    const select_work w;
    unit_queue        queue;
    const bool        shares;      // do threads have parts of heads? All threads agree on it

    // the tiles [i0, i1) of a head that this thread shares with others
    struct part {
        head_index head;
        int64_t    i0, i1;
        int        owner;
    };
    part parts[2];
    int  n_part = 0;

    select_pass(const ggml_compute_params * params, ggml_tensor * dst, const select_src & a, const void * wdata, const logit_source & logits) :
        params(params), dst(dst), a(a), wdata(wdata), logits(logits), ith(params->ith), nth(params->nth),
        w(a, wdata, ith, nth), queue(params, a.n_all*a.n_tile, a.n_tile),
        shares(queue.block == 0 && a.n_all % nth != 0 && a.n_tile > 1) {
        find_parts();
    }

    int32_t * result(const head_index & head) const { return at<int32_t>(dst, head.h, head.i, head.s); }

    bool reads_all(const head_index & head) const { return a.args(head).k < 0; }

    // are all tiles of head u this thread's?
    bool is_whole(int64_t u) const { return u*a.n_tile >= queue.mine.begin && (u + 1)*a.n_tile <= queue.mine.end; }

    // they are at either end of what it has
    void find_parts() {
        if (!shares || queue.mine.begin == queue.mine.end) {
            return;
        }
        for (int64_t x : { queue.mine.begin, queue.mine.end - 1 }) {
            const int64_t u = x/a.n_tile, x0 = u*a.n_tile;
            if (!is_whole(u) && (n_part == 0 || parts[0].head.u != u)) {
                parts[n_part++] = { a.head(u), std::max(queue.mine.begin, x0) - x0, std::min(queue.mine.end, x0 + a.n_tile) - x0, queue.owner(x0) };
            }
        }
    }

    // phase 1: the results of heads for which nothing is ranked
    void write_unranked() const {
        for (int64_t u = ith; u < a.n_all; u += nth) {
            const head_index head = a.head(u);
            if (reads_all(head)) {
                select_all(result(head), a.n_group_q, a.p.topk_max);
            }
        }
    }

    // phase 2: this thread's tiles, and the heads of which it has all
    void rank_tiles() {
        line_stream lines;
        for (int64_t x; (x = queue.take()) >= 0; ) {
            const tile_unit u = a.unit(x);
            if (reads_all(u.head)) {
                continue;
            }
            const bool whole = is_whole(u.head.u);
            const int  owner = whole ? ith : parts[n_part > 1 && parts[1].head.u == u.head.u].owner;
            const head_scores scores = w.scores(a, u.head.u, owner, whole, nth);
            const tile_unit   next   = a.unit(queue.peek());
            logits.write(u, scores.x, scores.ld, next);
            lines = logits.lines(next);
            finish_tile(scores.tile_at(u.i_tile), wants_softmax(a.args(u.head)), lines);
            if (whole && u.i_tile == a.n_tile - 1) {
                select_topk(result(u.head), w, scores, a.args(u.head), lines);
            }
        }
    }

    // phase 3: the heads that it shares. Their owners rank them, or, where it pays, all who share them do
    void rank_parts() const {
        line_stream none;
        const bool all = nth >= MANY_SHARE*a.n_all && a.n_kv >= LONG_SHARE;
        if (!all) {
            each_part([&](const part & p, const head_scores & s, const select_work & o, bool owns) {
                if (owns) {
                    select_topk(result(p.head), o, s, a.args(p.head), none);
                }
            });
            return;
        }
        each_part([&](const part & p, const head_scores & s, const select_work & o, bool) { make_keys(o, w, s, p.i0, p.i1, none); });
        each_part([&](const part & p, const head_scores & s, const select_work & o, bool owns) {
            if (owns) {
                guess_candidates(o, s, a.args(p.head));
            }
        });
        each_part([&](const part & p, const head_scores & s, const select_work & o, bool) { find_candidates(o, s, p.i0, p.i1, none); });
        each_part([&](const part & p, const head_scores & s, const select_work & o, bool owns) {
            if (owns) {
                select_candidates(result(p.head), o, s, a.args(p.head), none, true);
            }
        });
    }

    // after a barrier, f(part, its scores, the owner's scratch, is that this thread?) for each of this thread's parts that is ranked
    template <typename F>
    void each_part(F f) const {
        ggml_barrier(params->threadpool);
        for (int i = 0; i < n_part; ++i) {
            const part & p = parts[i];
            if (!reads_all(p.head)) {
                f(p, w.scores(a, p.head.u, p.owner, false, nth), select_work(a, wdata, p.owner, nth), p.owner == ith);
            }
        }
    }
};

// the logits that SCORE has written
struct score_result : logit_source {
    const select_src & a;

    explicit score_result(const select_src & a) : a(a) {}

    void write(const tile_unit & u, float * out, int64_t ld, const tile_unit &) const override {
        for (int j = 0; j < a.n_group_q; ++j) {
            const float * x = at<const float>(a.logits, u.head.h*a.n_group_q + j, u.head.i, u.head.s);
            memcpy(out + j*ld + u.t0, x + u.t0, (u.t1 - u.t0)*sizeof(float));
        }
    }
};

} // namespace

void sparse::select_heads(const ggml_compute_params * params, ggml_tensor * dst, const select_src & a, const void * work,
        const logit_source & logits) {
    select_pass pass(params, dst, a, work, logits);
    pass.write_unranked();
    pass.rank_tiles();
    if (pass.shares) {
        pass.rank_parts();
    }
}

void sparse::forward_select(const ggml_compute_params * params, ggml_tensor * dst) {
    const select_src a(dst);
    unit_queue::open(params);
    ggml_barrier(params->threadpool);
    select_heads(params, dst, a, params->wdata, score_result(a));
}

size_t sparse::select_work_size(const ggml_tensor * dst, int n_threads) { return select_work(select_src(dst), nullptr, 0, n_threads).size; }
