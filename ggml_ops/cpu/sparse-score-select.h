#pragma once

// What the glue of SCORE, of SELECT and of SCORE_SELECT shares: the units of work, and the parts of SCORE and SELECT that SCORE_SELECT is made
// of.

#include "sparse-attend.h"
#include "sparse-codes.h"
#include "sparse-select.h"
#include "sparse-work.h"

namespace sparse {

// ---- units of work ----
//
// A "head" here is one KV head h of one token i of one stream s. Its positions are cut into tiles, and a tile of a head is a unit of work. The
// units are numbered tile by tile, head by head.

struct head_index {
    int64_t u; // the number of the head
    int64_t h, i, s;
};

struct tile_unit {
    head_index head;
    int64_t    i_tile, t0, t1; // the positions [t0, t1)
    bool       exists;         // false: there is no such unit
};

struct tile_grid {
    int64_t n_kv, n_head_kv, n_tok, n_stream;
    int64_t n_all;     // heads
    int64_t tile;      // positions of a tile
    int64_t n_tile;    // tiles of a head
    int     n_group_q; // query heads of a head

    // a tile has long runs of each component, and its scores for all query heads fit the first level of the cache
    static constexpr int64_t MAX_TILE = 4096;

    tile_grid(int64_t n_kv, int64_t n_head_kv, int64_t n_head, int64_t n_tok, int64_t n_stream) :
        n_kv(n_kv), n_head_kv(n_head_kv), n_tok(n_tok), n_stream(n_stream), n_all(n_head_kv*n_tok*n_stream) {
        n_group_q = (int) (n_head/n_head_kv);
        tile      = n_group_q <= 2 ? MAX_TILE : n_group_q <= 4 ? MAX_TILE/2 : MAX_TILE/4;
        n_tile    = ceil_div(n_kv, tile);
    }

    head_index head(int64_t u) const {
        digits d { u };
        const int64_t h = d.next(n_head_kv), i = d.next(n_tok);
        return { u, h, i, d.rest };
    }

    // x: the number of the unit; < 0: none
    tile_unit unit(int64_t x) const {
        if (x < 0) {
            return {};
        }
        digits d { x };
        const int64_t i_tile = d.next(n_tile), t0 = i_tile*tile;
        return { head(d.rest), i_tile, t0, std::min(t0 + tile, n_kv), true };
    }
};

// ---- SCORE ----

// its sources, in either node
struct score_src : ggml_sparse_src, tile_grid { // SCORE_SELECT has no `visible`, since it counts by itself, and SCORE no `wanted`
    ggml_sparse_score_params p;
    int     i_k;                 // where k stands in `wanted`
    int64_t n_grp;
    int     n_head, d_k, rank;   // rank: the largest of a token; 0: exact scores
    row_ops ops_k;

    explicit score_src(const ggml_tensor * dst);

    // a token that reads everything is not scored
    bool skips(int64_t i, int64_t s) const { return wanted && at<const int32_t>(wanted, i, 0, s)[i_k] < 0; }

    // of the token
    int rank_of(int64_t i, int64_t s) const { return p.i_rank > 0 ? std::clamp(at<const int32_t>(wanted, i, 0, s)[p.i_rank], 1, rank) : rank; }

    // may token i read group g from k_t?
    bool in_shadow(int64_t g, int64_t i, int64_t s) const { return ggml_sparse_is_sealed(at<const int32_t>(sealed, s)[g], i); }
};

struct score_work {
    int32_t * n_comp;  // [n_all]
    int32_t * comp;    // [n_all][rank]
    float   * coef;    // [n_all][n_group_q][rank]
    int32_t * visible; // [n_stream][n_tok][n_grp]     where it is not given
    uint8_t * flags;   // [n_stream][n_tok][n_tile]    of tiles, see tile_flag
    float   * q;       // [n_group_q][d_k]             this thread's: q rotated back, or its kept components only
    float   * x;       // [n_group_q][GROUP]           products with rows of K
    float   * exact;   // [n_head][EXACT_CHUNK]
    float   * sum;     // [d_k]
    float   * spread;  // [d_k]                        of the components of K
    uint8_t * code;    // what the scan of codes needs
    size_t    size;    // of all threads

    score_work(const score_src & a, const void * wdata, int ith, int nth);

    const int32_t * visible_of(const score_src & a, int64_t i, int64_t s) const {
        return a.visible ? at<const int32_t>(a.visible, i, 0, s) : visible + (s*a.n_tok + i)*a.n_grp;
    }
    uint8_t & flags_of(const score_src & a, int64_t i_tile, int64_t i, int64_t s) const { return flags[(s*a.n_tok + i)*a.n_tile + i_tile]; }
};

// Before the scan: the components of every head, the visible positions where they are not given, the flags of the tiles. Opens the queue and
// ends at a barrier
void score_prepare(const ggml_compute_params * params, const score_src & a, const score_work & w);

// logits of a tile, at out + j*ld + position; next: the unit that this thread has then
void score_tile(const score_src & a, const score_work & w, const tile_unit & u, float * out, int64_t ld, const tile_unit & next);

// what score_tile reads for a unit, if all of it is in k_t
line_stream tile_lines(const score_src & a, const score_work & w, const tile_unit & u);

void score_stats(const score_src & a, const score_work & w);

// ---- SELECT ----

// its sources, in either node
struct select_src : ggml_sparse_src, tile_grid {
    ggml_sparse_select_params p;
    int n_forced; // forced cells, if they count: the local window, then sinks

    explicit select_src(const ggml_tensor * dst);

    select_args args(const head_index & head) const {
        const int32_t * row = at<const int32_t>(wanted, head.i, 0, head.s);
        return { row + p.i_forced, n_forced, row[p.i_k + 1], p.n_local_max, row[p.i_k], p.topk_max, p.rest != 0, p.top_p };
    }
};

// where the logits come from that SELECT ranks
struct logit_source {
    // writes those of a tile at out + j*ld + position; next: the unit that this thread has then
    virtual void write(const tile_unit & u, float * out, int64_t ld, const tile_unit & next) const = 0;

    // what it will read from memory for a unit, if that is known
    virtual line_stream lines(const tile_unit &) const { return {}; }
};

// all of SELECT, after unit_queue::open and a barrier; work: a buffer of select_work_size
void select_heads(const ggml_compute_params * params, ggml_tensor * dst, const select_src & a, const void * work, const logit_source & logits);

} // namespace sparse
