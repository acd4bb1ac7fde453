// SELECT: which thread ranks which tiles.

#include "sparse-score-select.h"

sparse::select_src::select_src(const ggml_tensor * dst) :
    ggml_sparse_src(ggml_sparse_src_of(dst)),
    tile_grid(logits ? logits->ne[0] : k->ne[2], dst->ne[1], (logits ? logits : q)->ne[1], dst->ne[2], dst->ne[3]),
    p(ggml_sparse_select_params_of(dst)), n_forced((int) wanted->ne[0] - p.i_forced) {}

namespace {

// Logits wait in slots, each for one head. Of consecutive units a thread has whole heads, which it ranks one after another in a slot that stays
// in its cache. Where heads are few, it may also have a part of a head at either end. Such a head has a slot of the thread that has its first
// tile, which owns it and ranks it when all its tiles are there.
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
            cand     = own.take<float>(a.n_kv + 2*W);
            cell     = own.take<int32_t>(a.n_kv + 2*W);
            weight   = own.take<float>(is_top_p(a.p.top_p) ? a.n_kv + 2*W : 0);
            saved    = own.take<float>(a.n_forced + W);
            top      = own.take<float>(a.n_group_q);
            all      = own.take<float>(a.n_group_q);
            factor   = own.take<float>(a.n_group_q*a.n_tile);
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

// one thread's share of SELECT
struct select_pass {
    const ggml_compute_params * params;
    ggml_tensor        * dst;
    const select_src   & a;
    const logit_source & logits;

    const int         ith, nth;
    const select_work w;
    unit_queue        queue;
    const bool        shares;      // do threads have parts of heads? All threads agree on it
    const int         first_owner; // of the head that this thread's first tile is of

    select_pass(const ggml_compute_params * params, ggml_tensor * dst, const select_src & a, const void * wdata, const logit_source & logits) :
        params(params), dst(dst), a(a), logits(logits), ith(params->ith), nth(params->nth), w(a, wdata, ith, nth),
        queue(params, a.n_all*a.n_tile, a.n_tile), shares(queue.block == 0 && a.n_all % nth != 0 && a.n_tile > 1),
        first_owner(shares && has_tiles() ? queue.owner(queue.mine.begin/a.n_tile*a.n_tile) : ith) {}

    bool has_tiles() const { return queue.mine.begin < queue.mine.end; }

    int32_t * result(const head_index & head) const { return at<int32_t>(dst, head.h, head.i, head.s); }

    bool reads_all(const head_index & head) const { return a.args(head).k < 0; }

    // are all tiles of head u this thread's?
    bool is_whole(int64_t u) const { return u*a.n_tile >= queue.mine.begin && (u + 1)*a.n_tile <= queue.mine.end; }

    // the thread that has the first tile of head u, of which this thread has some
    int owner(int64_t u) const { return u*a.n_tile < queue.mine.begin ? first_owner : ith; }

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
            const head_scores scores = w.scores(a, u.head.u, owner(u.head.u), whole, nth);
            const tile_unit   next   = a.unit(queue.peek());
            logits.write(u, scores.x, scores.ld, next);
            lines = logits.lines(next);
            finish_tile(scores.tile_at(u.i_tile), wants_softmax(a.args(u.head)), lines);
            if (whole && u.i_tile == a.n_tile - 1) {
                select_topk(result(u.head), w, scores, a.args(u.head), lines);
            }
        }
    }

    // phase 3, after a barrier: the head that begins among this thread's tiles and ends among those of others
    void rank_shared() const {
        const head_index head = a.head((queue.mine.end - 1)/a.n_tile);
        if (has_tiles() && !is_whole(head.u) && owner(head.u) == ith && !reads_all(head)) {
            line_stream none;
            select_topk(result(head), w, w.scores(a, head.u, ith, false, nth), a.args(head), none);
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

    line_stream lines(const tile_unit &) const override { return {}; }
};

} // namespace

void sparse::select_heads(const ggml_compute_params * params, ggml_tensor * dst, const select_src & a, const void * work,
        const logit_source & logits) {
    select_pass pass(params, dst, a, work, logits);
    pass.write_unranked();
    pass.rank_tiles();
    if (pass.shares) {
        ggml_barrier(params->threadpool);
        pass.rank_shared();
    }
}

void sparse::forward_select(const ggml_compute_params * params, ggml_tensor * dst) {
    const select_src a(dst);
    unit_queue::open(params);
    ggml_barrier(params->threadpool);
    select_heads(params, dst, a, params->wdata, score_result(a));
}

size_t sparse::select_work_size(const ggml_tensor * dst, int n_threads) { return select_work(select_src(dst), nullptr, 0, n_threads).size; }
