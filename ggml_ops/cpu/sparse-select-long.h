#pragma once

// Step 2 of a long head, by one thread: what select_topk selects, bit for bit, without a place for the logits of all positions.
//
// These would leave the cache before they are ranked, and come back. So each tile is ranked while it is in the cache, and of its positions only
// candidates are kept. That takes estimates of what is known at the end: the sums of the heads' softmax, and the cut. They come from a sample
// of groups all over the head. When all is known, a bound tells whether a position that was left out may be among the k largest. Then the head
// is scanned once more, with the true sums, and with a cut that at least k positions reach.

#include "sparse-rows.h"
#include "sparse-select.h"

namespace sparse {

// Logits from which on a head is long. They are 4 MiB, where tokens take as long either way; with 7 MiB they take a sixth less
constexpr int64_t N_LONG = 1 << 20;

// the sample: groups with the sinks and with the newest positions, which are unlike the others, and groups between at equal distances
constexpr int64_t N_SINKS = 1, N_NEWEST = 16, N_BETWEEN = 112;
constexpr int64_t N_SAMPLE = N_SINKS + N_NEWEST + N_BETWEEN;

static inline bool is_long(int64_t n, int n_head) { return n*n_head >= N_LONG && n >= 2*N_SAMPLE*GROUP; }

// So many candidates are aimed at for one that is selected. Of 7,560 heads of real text after 32,000 and 129,000 positions two were scanned
// again with 1.15, and none with 1.5
constexpr float N_CAND_PER_K = 1.25f;

// how far rounding may move a key, as long as it is no smaller than the latter
constexpr float KEY_ROUNDING = 1.0001f, KEY_LEAST = 1e-30f;

// scratch of a thread, beside that of select_scratch
struct long_scratch {
    float   * scores; // [n_head][max(tile, N_SAMPLE*GROUP) + 2*W] of the sample, and then of one tile after another
    float   * key;    // [tile + 2*W] of a tile
    int32_t * forced; // [n_forced] the forced cells, ascending
    float   * top;    // [n_head] estimates: the largest logit ..
    float   * all;    // [n_head] .. and the sum of exp(logit - top)
    float   * kept;   // [n_head*(n + (n_tile + 1)*W)] what finish_tile left of candidates: of tile i [n_head][ld(i)] from n_head*begin[i] on
    int32_t * cell;   // [n + (n_tile + 1)*W] and which cells of the tile they are, from begin[i] on
    int32_t * begin;  // [n_tile]
    int32_t * n_cand; // [n_tile]
    int32_t * number; // [n_tile + 1] candidates are numbered by their cells: the number of the tile's first

    int64_t ld(int64_t i) const { return (n_cand[i] + W - 1)/W*W; }
};

// l.forced, the same for all heads of a token
static inline void sort_forced(const long_scratch & l, const select_args & a, int64_t n) {
    for (int i = 0; i < a.n_forced; ++i) {
        l.forced[i] = a.is_forced(i, n) ? a.forced[i] : -1;
    }
    std::sort(l.forced, l.forced + a.n_forced);
}

struct long_head {
    const select_scratch & w;
    const long_scratch   & l;
    const head_scores    & s; // without x
    const select_args    & a;
    int32_t                n_kept = 0; // in l.cell

    int64_t n_group() const { return (s.n + GROUP - 1)/GROUP; }

    // the i-th group of the sample: the sinks, between, the newest
    int64_t sample_group(int64_t i) const {
        if (i < N_SINKS) {
            return i;
        }
        i -= N_SINKS;
        return i < N_BETWEEN ? N_SINKS + i*(n_group() - N_SINKS - N_NEWEST)/N_BETWEEN : n_group() - N_NEWEST + i - N_BETWEEN;
    }

    tile_scores tile_at(int64_t i) const {
        return { l.scores, std::max(s.tile, N_SAMPLE*GROUP) + 2*W, s.size(i), s.n_head, s.max + i*s.n_head, s.sum + i*s.n_head };
    }

    // l.top, l.all and the cut, which about N_CAND_PER_K*k positions reach; -FLT_MAX: all positions are candidates
    //   write(t0, t1, x, ld, next): the logits of some positions of a tile, at x + h*ld; next: which positions come then
    template <typename F>
    float estimate(F write) const {
        const tile_scores t = { l.scores, tile_at(0).ld, N_SAMPLE*GROUP, s.n_head, l.top, l.all };
        for (int64_t i = 0; i < N_SAMPLE; ++i) {
            const int64_t t0 = sample_group(i)*GROUP, t1 = std::min(t0 + GROUP, s.n);
            write(t0, t1, t.x + i*GROUP, t.ld, i + 1 < N_SAMPLE ? sample_group(i + 1)*GROUP : 0);
            for (int h = 0; h < s.n_head; ++h) {
                std::fill(t.x + h*t.ld + i*GROUP + (t1 - t0), t.x + h*t.ld + (i + 1)*GROUP, -INFINITY);
            }
        }
        line_stream none;
        finish_tile(t, false, none);
        for (int h = 0; h < s.n_head && s.n_head > 1; ++h) {
            l.top[h] = l.top[h] == -INFINITY ? 0.0f : l.top[h];
            l.all[h] = estimate_sum(t.x + h*t.ld);
        }

        constexpr int64_t n = N_BETWEEN*GROUP;
        const float * x = t.x + N_SINKS*GROUP;
        if (s.n_head == 1) {
            memcpy(w.cand, x, n*sizeof(float));
        } else {
            rank_keys(w.cand, x, t.ld, n, s.n_head, [&](int h) { return head_weight(1.0f, l.all[h]); }, none);
        }
        const float   want = (float) n_wanted(a, 0)*n/(s.n - (N_SINKS + N_NEWEST)*GROUP)*N_CAND_PER_K;
        const int64_t rank = (int64_t) (want + 3.0f*sqrtf(want) + 2.0f);
        return rank >= n/2 ? -FLT_MAX : kth_largest(w.cand, n, rank, -FLT_MAX, rank/8);
    }

    // of a head, from the exponentials of the sample
    float estimate_sum(const float * x) const {
        float ends = 0.0f, between = 0.0f, most = 0.0f;
        for (int64_t i = 0; i < N_SAMPLE; ++i) {
            vf sum = set1(0.0f);
            for (int64_t t = i*GROUP; t < (i + 1)*GROUP; t += W) {
                sum = add(sum, vmax(load(x + t), set1(0.0f))); // the first head has -inf
            }
            const bool  at_end = i < N_SINKS || i >= N_SINKS + N_BETWEEN;
            const float group  = reduce_add(sum);
            (at_end ? ends : between) += group;
            most = at_end ? most : std::fmax(most, group);
        }
        // the group that has the most may be a find, and no sample of the others
        const int64_t n_others = n_group() - N_SINKS - N_NEWEST - 1;
        return ends + most + (between - most)*n_others/(N_BETWEEN - 1);
    }

    // Keeps of tile i what reaches the cut, and forced cells. top, all: of the heads' softmax
    void keep(int64_t i, const tile_scores & t, const float * top, const float * all, float cut, line_stream & next) {
        const int64_t t0 = s.begin(i);
        float * key = t.x;
        if (s.n_head > 1) {
            const auto weight = [&](int h) {
                const float x = head_weight(t.max[h] == -INFINITY ? 0.0f : expf(t.max[h] - top[h]), all[h]);
                return std::fmin(x, FLT_MAX); // 0 times it is 0
            };
            rank_keys(l.key, t.x, t.ld, t.n, t.n_head, weight, next);
            key = l.key;
        }
        const int32_t * f0 = std::lower_bound(l.forced, l.forced + a.n_forced, t0);
        const int32_t * f1 = std::lower_bound(l.forced, l.forced + a.n_forced, t0 + t.n);
        if (f0 < f1 && s.n_head == 1) {
            key = l.key;
            memcpy(key, t.x, (t.n + W - 1)/W*W*sizeof(float));
        }
        for (const int32_t * f = f0; f < f1; ++f) {
            key[*f - t0] = key[*f - t0] > -INFINITY ? INFINITY : key[*f - t0];
        }

        int32_t * cell = l.cell + n_kept;
        const int n = take_candidates(w.cand, cell, key, 0, t.n, cut, next);
        l.begin [i] = n_kept;
        l.n_cand[i] = n;
        const int64_t ld = l.ld(i);
        for (int h = 0; h < s.n_head; ++h) {
            float       * to   = l.kept + (int64_t) n_kept*s.n_head + h*ld;
            const float * from = t.x + h*t.ld;
            for (int c = 0; c < n; ++c) { // gathers are slower on some CPUs
                to[c] = from[cell[c]];
            }
            std::fill(to + n, to + ld, 0.0f);
        }
        n_kept += (int32_t) ld;
    }

    const float * kept_row(int h, int64_t tile) const { return l.kept + (int64_t) l.begin[tile]*s.n_head + h*l.ld(tile); }

    // for mass_of_cells
    int64_t       end(int64_t tile)        const { return l.number[tile + 1]; }
    const float * row(int h, int64_t tile) const { return kept_row(h, tile) - l.number[tile]; }

    // w.cand, w.cell: the keys of candidates by the true sums, and their numbers; returns how many there are
    int32_t rank_kept() const {
        line_stream none;
        int32_t n = 0;
        for (int64_t i = 0; i < s.n_tile(); ++i) {
            l.number[i] = n;
            if (s.n_head == 1) {
                memcpy(w.cand + n, kept_row(0, i), l.n_cand[i]*sizeof(float));
            } else {
                const auto weight = [&](int h) { return head_weight(w.factor[i*s.n_head + h], w.all[h]); };
                rank_keys(w.cand + n, kept_row(0, i), l.ld(i), l.n_cand[i], s.n_head, weight, none);
            }
            n += l.n_cand[i];
        }
        l.number[s.n_tile()] = n;
        for (int32_t i = 0; i < n; ++i) {
            w.cell[i] = i;
        }
        return n;
    }

    // Where the key of a cell is, nullptr if it is no candidate. last: where the cell before was, since many follow each other downwards
    float * key_of(int32_t cell, const int32_t *& last) const {
        const int64_t tile = cell/s.tile;
        const int32_t i    = (int32_t) (cell - s.begin(tile));
        const int32_t * from = l.cell + l.begin[tile], * to = from + l.n_cand[tile];
        last = last > from && last <= to && last[-1] == i ? last - 1 : std::lower_bound(from, to, i);
        return last < to && *last == i ? w.cand + l.number[tile] + (last - from) : nullptr;
    }

    // no position that was left out has a key above it, by the true sums
    float bound_of_rest(float cut) const {
        if (s.n_head == 1 || cut == -FLT_MAX) {
            return cut;
        }
        float most = 0.0f; // by how much the weight of a head was estimated too low
        for (int h = 0; h < s.n_head; ++h) {
            if (w.all[h] > 0.0f) {
                most = std::fmax(most, l.all[h] > 0.0f ? l.all[h]/w.all[h]*expf(l.top[h] - w.top[h]) : INFINITY);
            }
        }
        return std::fmax(cut*most*KEY_ROUNDING, KEY_LEAST);
    }

    // write: see estimate. score(i, tile): makes and finishes the logits of tile i; returns what memory is read next
    template <typename F, typename G>
    void select(int32_t * res, F write, G score) {
        float   cut = estimate(write);
        int32_t n;
        int     k;
        for (bool known = false; ; known = true) { // the sums, and a cut that is low enough
            n_kept = 0;
            for (int64_t i = 0; i < s.n_tile(); ++i) {
                const tile_scores t = tile_at(i);
                line_stream next = score(i, t);
                keep(i, t, known ? w.top : l.top, known ? w.all : l.all, cut, next);
            }
            if (s.n_head > 1 || wants_softmax(a)) {
                sum_tiles(w, s);
            }
            n = rank_kept();
            const int32_t * last = nullptr;
            k = n_wanted(a, raise_forced(w, s.n, a, [&](int32_t cell) { return key_of(cell, last); }));
            const float kth  = k > 0 ? kth_largest(w.cand, n, k, -FLT_MAX) : INFINITY;
            const bool  done = known || kth >= bound_of_rest(cut);
            cut = kth;
            if (done) {
                break;
            }
        }
        finish_select(res, w, s, *this, a, k > 0 ? n : 0, k, cut);

        int32_t * cells = res + 1 + s.n_head;
        int64_t tile = 0;
        for (int i = 0; i < res[0]; ++i) {
            while (cells[i] >= l.number[tile + 1]) {
                ++tile;
            }
            cells[i] = (int32_t) s.begin(tile) + l.cell[l.begin[tile] + cells[i] - l.number[tile]];
        }
    }
};

} // namespace sparse
