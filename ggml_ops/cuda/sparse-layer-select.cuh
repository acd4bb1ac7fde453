#pragma once

// A layer in one launch: what is ranked, where its cut is, and the list of selected positions.

#include "sparse-layer-block.cuh"

namespace sparse_cuda {

// a number of each block, added up over the cluster; before: over the blocks before this one. Calls take turns with slot[2]
struct cluster_counter {
    int * slot;
    int n_block, rank, turn = 0;

    __device__ __forceinline__ int sum(int x, int * n_warp, int * before) {
        const int all = block_sum<N_THREAD>(x, n_warp);
        if (threadIdx.x == 0) {
            slot[turn] = all;
        }
        cluster_arrive<SPARQ_FENCE != 0>();
        cluster_wait();
        const int r = threadIdx.x % 32, y = r < n_block ? *cluster_at(&slot[turn], r) : 0;
        *before = warp_sum(r < rank ? y : 0);
        turn ^= 1;
        return warp_sum(y);
    }
};

// own position t: its number among them, -1 for another block's
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ int layer_block<N_BIT, GB, TYPE>::own_place(int t) const {
    const int g = t/GROUP;
    if (shared_rows && (m.rows[g/32] >> g % 32 & 1)) {
        if (t % GROUP/n_per != rank) {
            return -1;
        }
        int place = 0;
#pragma unroll 1
        while (m.tail[place] != g) {
            ++place;
        }
        return n_chunk*LAYER_CHUNK + place*n_per + t % n_per;
    }
    return t >= run0*RUN && t < run1*RUN ? t - run0*RUN : -1;
}

// a bit for each own forced cell; after a barrier they are there
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::mark_forced() {
#pragma unroll 1
    for (int j = tid; j < a.n_forced; j += N_THREAD) {
        const int t = next_forced, i = t >= 0 && t < n_kv ? own_place(t) : -1;
        next_forced = forced_at(j + N_THREAD);
        if (i >= 0) {
            atomicOr(&m.marks[i/32], 1u << i % 32);
        }
    }
}

// the first of a lane's 4 positions of chunk c; -1: they are no own ones
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ int layer_block<N_BIT, GB, TYPE>::place4(int c) const {
    const int i = c*LAYER_CHUNK + lane*4, j = i - n_chunk*LAYER_CHUNK, t = run0*RUN + i;
    if (c >= n_chunk) {
        return j < n_item ? row_at(m.tail, j, row0, n_per) : -1; // 4 rows beside each other
    }
    return shared_rows && (m.rows[t/GROUP/32] >> t/GROUP % 32 & 1) ? -1 : t;
}

// f(c, t, keys of t .. t + 3) for the chunks c of the warp: +inf where they are forced, -inf where they are hidden. Keys are read a chunk ahead
template <int N_BIT, int GB, int TYPE>
template <typename F>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::for_keys(const F & f) const {
    const auto load = [&](int t, int c) {
        return t >= 0 ? *(const float4 *) &keys[key_at(t, c*LAYER_CHUNK + lane*4)] : make_float4(neg_inf(), neg_inf(), neg_inf(), neg_inf());
    };
    const int n = n_chunks();
    int next_t = warp < n ? place4(warp) : -1;
    float4 next = load(next_t, warp);
#pragma unroll 1
    for (int c = warp; c < n; c += N_WARP) {
        const int t = next_t, i = c*LAYER_CHUNK + lane*4;
        float y[4] = { next.x, next.y, next.z, next.w };
        if (c + N_WARP < n) {
            next_t = place4(c + N_WARP);
            next   = load(next_t, c + N_WARP);
        }
        const unsigned marks = m.marks[i/32] >> i % 32 & 0xF;
        if (marks) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                y[l] = marks >> l & 1 && y[l] > neg_inf() ? INFINITY : y[l];
            }
        }
        f(c, t, y);
    }
}

// what is ranked, with several query heads: the sum of their softmaxes, -inf where hidden
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::make_keys() {
#pragma unroll 1
    for (int c = warp; c < n_chunks(); c += N_WARP) {
        const int t = place4(c);
        if (t < 0) {
            continue;
        }
        float y[4] = {}, first[4];
#pragma unroll 4
        for (int h = 0; h < n_group_q; ++h) {
            const float4 z = *(const float4 *) &logits[h*a.ld + t];
            const float x[4] = { z.x, z.y, z.z, z.w }, top = m.top[h], inv = m.inv[h];
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                first[l] = h == 0 ? x[l] : first[l];
                y[l] += expf(finite_top(x[l]) - top)*inv;
            }
        }
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            y[l] = first[l] == neg_inf() ? neg_inf() : fmaxf(y[l], neg_inf()); // NaN is hidden
        }
        *(float4 *) &keys[key_at(t, c*LAYER_CHUNK + lane*4)] = make_float4(y[0], y[1], y[2], y[3]);
    }
    __syncwarp(); // a warp reads the keys that it made itself
}

// the histogram of own keys, once more
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::count_keys() {
    for_keys([&](int, int, const float (&y)[4]) {
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            count_key(y[l], 0);
        }
    });
}

// after all keys of the block were counted
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::sum_bins() {
    __syncthreads();
#pragma unroll 2
    for (int j = warp; j < LAYER_BINS/32; j += N_WARP) {
        const int n = warp_sum((int) m.hist[j*32 + lane]);
        if (lane == 0) {
            m.coarse[j] = (unsigned) n;
        }
    }
}

// where the cut is, from the histograms of all blocks; the work of a warp. m.cut -1: the bins hold fewer than k
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::find_bin() {
    static_assert(LAYER_BINS/32 == 64, "a lane has two groups of bins, the highest first");
    const int hi = 63 - 2*lane, k_wanted = min(kl[0], a.topk_max);
    int n1 = 0, n0 = 0, before1 = 0, before0 = 0, n_in = 0; // before: of the blocks before this one
#pragma unroll 8
    for (int r = 0; r < n_block; ++r) {
        const uint2 x = *(const uint2 *) cluster_at(&m.coarse[hi - 1], r);
        n_in += (int) *cluster_at(&m.hist[LAYER_BINS - 1], r);
        n1 += (int) x.y;
        n0 += (int) x.x;
        before1 += r < rank ? (int) x.y : 0;
        before0 += r < rank ? (int) x.x : 0;
    }
    const int p = warp_prefix(n1 + n0), pb = warp_prefix(before1 + before0), n_all = __shfl_sync(ALL, p, 31), n_all_before = __shfl_sync(ALL, pb, 31);
    const int early = FORCED_EARLY ? warp_sum(lane < n_block ? min(*cluster_at(&m.n_early, lane), LAYER_LIST) : 0) : 0;
    const int k = max(k_wanted - early, n_in);
    int cut = -1, need = 0, n_cand = 0, at_sel = n_all_before, at_cand = 0; // all
    if (k < n_all) {
        const int l = __ffs((int) __ballot_sync(ALL, p >= k)) - 1; // k <= 0: the first
        const int above = __shfl_sync(ALL, p - n1 - n0, l), above_before = __shfl_sync(ALL, pb - before1 - before0, l);
        const int m1 = __shfl_sync(ALL, n1, l), m1_before = __shfl_sync(ALL, before1, l);
        const bool upper = above + m1 >= k;
        const int group = upper ? 63 - 2*l : 62 - 2*l;
        const int from = upper ? above : above + m1, from_before = upper ? above_before : above_before + m1_before;
        int n = 0, before = 0;
#pragma unroll 8
        for (int r = 0; r < n_block; ++r) {
            const int x = (int) *cluster_at(&m.hist[group*32 + 31 - lane], r);
            n      += x;
            before += r < rank ? x : 0;
        }
        const int q = warp_prefix(n), qb = warp_prefix(before), f = __ffs((int) __ballot_sync(ALL, from + q >= k)) - 1;
        cut     = group*32 + 31 - f;
        n_cand  = __shfl_sync(ALL, n, f);
        at_cand = __shfl_sync(ALL, before, f);
        need    = k - from - __shfl_sync(ALL, q - n, f);
        at_sel  = from_before + __shfl_sync(ALL, qb - before, f);
        if (need == n_cand) { // the bin is in, whole
            cut--;
            at_sel += at_cand;
            need = n_cand = at_cand = 0;
        }
    }
    if (lane == 0) {
        m.k       = k;
        m.n_sel   = min(k, n_all);
        m.is_few  = k > n_all;
        m.cut     = cut;
        m.n_need  = need;
        m.n_cand  = n_cand;
        m.at_sel  = at_sel;
        m.at_cand = at_cand;
        m.n_pushed = 0;
        m.all_early = early;
    }
}

// The bin of the cut, narrowed until its cells can be ranked. Begins behind barrier B of the first histogram
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::find_cut(row_state<GB> & early) {
    bool is_complete = false;
#pragma unroll 1
    for (int round = 0; ; ++round) {
        if (warp == 0) {
            find_bin();
        } else if (FORCED_EARLY && round == 0) {
            const int n = min(m.n_early, LAYER_LIST);
#pragma unroll 1
            for (int i = tid - 32; mean_v && i < n; i += N_THREAD - 32) {
                add_mass(__int_as_float(m.chosen[i]));
            }
            read_rows<1>(early, n);
        }
        __syncthreads();
        // too few are in the bins, or too many where the last bin has all that is above it: then all that is seen. Else the bin of the cut by itself
        const bool is_open = !is_complete && (m.is_few || (m.n_cand > LAYER_CAND && m.cut >= LAYER_BINS - 2));
        if (!is_open && (m.n_cand <= LAYER_CAND || round == 3)) {
            if (tid == 0) {
                m.n_pass = round;
            }
            break;
        }
        arrive<true>();
        wait(); // the histograms were read
        if (is_open) {
            bin.complete(m.least, m.top[0]);
            is_complete = true;
        } else {
            bin.narrow(m.cut);
        }
        for (int j = tid; j < LAYER_BINS; j += N_THREAD) {
            m.hist[j] = 0;
        }
        __syncthreads();
        count_keys();
        sum_bins();
        arrive<true>();
        wait();
    }
}

// Own cells above the cut -> m.marks, those of its bin -> cand. Returns where their list begins. has_ties: no histogram parts them
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ int layer_block<N_BIT, GB, TYPE>::mark_selected(bool has_ties) {
    // ties: an order, and of those equal to it the cells below a bound are in
    const bool ranks = m.n_need > 0;
    cluster_counter counter = { m.slot, n_block, rank };
    int64_t least = (int64_t) ORDER_HIDDEN + 1, most = ORDER_FORCED; // the largest order that k reach
    int  t0 = 0, t1 = n_kv; // the first bound below which there are enough
    int2 * cand = SPARQ_SMEM_KEYS ? own_cand() : a.cand + u*LAYER_CAND + m.at_cand;
    int at_sel = m.at_sel;
#pragma unroll 1
    for (bool last = !has_ties; ; ) {
        const int64_t mid = least < most ? least + (most - least + 1)/2 : least + 1; // above mid - 1
        const int cut = has_ties ? (int) (mid - 1) : m.cut, bound = least < most ? 0 : t0 < t1 ? t0 + (t1 - t0)/2 : t0;
        int n = 0; // of the lane, above the cut
        for_keys([&](int c, int t, const float (&y)[4]) {
            unsigned above[4]; // a bit per lane
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                const int x = has_ties ? y[l] == INFINITY ? ORDER_FORCED : order_of(y[l]) : bin.at(y[l]);
                const bool in = x > cut || (has_ties && x == cut && t + l < bound);
                n += in;
                above[l] = __ballot_sync(ALL, in);
                if (x == cut && ranks && !has_ties) {
                    cand[atomicAdd(&m.n_pushed, 1)] = make_int2(t + l, order_of(y[l]));
                }
            }
            if (last && lane == 0) { // in place of the marks, which are not needed any more
                *(uint4 *) &m.marks[c*4] = make_uint4(above[0], above[1], above[2], above[3]);
            }
        });
        if (last) {
            break;
        }
        if (tid == 0) {
            ++m.n_pass;
        }
        int before;
        const int all = counter.sum(n, m.n_warp, &before);
        if (least < most) {
            least = all >= m.k ? mid : least;
            most  = all >= m.k ? most : mid - 1;
        } else if (t0 < t1) {
            t1 = all >= m.k ? bound : t1;
            t0 = all >= m.k ? t0 : bound + 1;
        } else {
            at_sel = before;
            last   = true;
        }
    }
    return at_sel;
}

// the approximate mass of what is selected, with one query head, see OWN_MASS
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::add_mass(float key) {
    mass      += expf(key - m.top[0]);
    mass_root += expf(0.25f*(key - m.top[0]));
}

// own cells that have a bit in m.marks -> sel
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::write_list(int at) {
    const int n_word = n_chunks()*4, per = (n_word + N_WARP - 1)/N_WARP, w0 = min(warp*per, n_word), w1 = min(w0 + per, n_word);
    int n = 0;
#pragma unroll 1
    for (int j = w0 + lane; j < w1; j += 32) {
        n += __popc(m.marks[j]);
        if (OWN_MASS && mean_v) {
#pragma unroll 1
            for (unsigned bits = m.marks[j]; bits; bits &= bits - 1) {
                add_mass(keys[j/4*LAYER_CHUNK + (__ffs((int) bits) - 1)*4 + j % 4]);
            }
        }
    }
    n = warp_sum(n);
    if (lane == 0) {
        m.n_warp[warp] = n;
    }
    if (SPARQ_SMEM_KEYS && tid == 0) {
        m.at_list = at;
    }
    __syncthreads();
    int32_t * to = (SPARQ_SMEM_KEYS ? (int32_t *) keys : a.sel + u*a.topk_max + at) + warp_sum(lane < warp ? m.n_warp[lane] : 0); // keys were read
#pragma unroll 1
    for (int j0 = w0; j0 < w1; j0 += 32) {
        const unsigned mine = j0 + lane < w1 ? m.marks[j0 + lane] : 0;
#pragma unroll 1
        for (unsigned words = __ballot_sync(ALL, mine != 0); words; words &= words - 1) {
            const int      j    = __ffs((int) words) - 1;
            const unsigned bits = __shfl_sync(ALL, mine, j);
            if (bits >> lane & 1) {
                const int i = (j0 + j)/4*LAYER_CHUNK + lane*4 + (j0 + j) % 4, o = i - n_chunk*LAYER_CHUNK;
                to[__popc(bits & ((1u << lane) - 1))] = o < 0 ? run0*RUN + i : row_at(m.tail, o, row0, n_per);
            }
            to += __popc(bits);
        }
    }
}

// number j of what is selected, but for the candidates; number i of these
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ int layer_block<N_BIT, GB, TYPE>::selected(int j) const {
    if (!SPARQ_SMEM_KEYS) {
        return __ldcg(&a.sel[u*a.topk_max + j]);
    }
    const int r = owner_of(j, m.at_lists);
    return *cluster_at((const int *) keys + j - m.at_lists[r], r);
}

template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ int2 layer_block<N_BIT, GB, TYPE>::candidate(int i) const {
    if (!SPARQ_SMEM_KEYS) {
        return __ldcg(&a.cand[u*LAYER_CAND + i]);
    }
    const int r = owner_of(i, m.at_cands);
    return *cluster_at(own_cand() + i - m.at_cands[r], r);
}

// the best of the n_cand candidates of all blocks -> m.chosen
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::choose(int n_cand) {
    for (int i = tid; i < n_cand; i += N_THREAD) {
        m.cand[i] = candidate(i);
    }
    __syncthreads();
    for (int i = tid; i < n_cand; i += N_THREAD) {
        const int2 x = m.cand[i];
        int better = 0;
#pragma unroll 4
        for (int j = 0; j < n_cand; ++j) {
            const int2 y = m.cand[j];
            better += y.y > x.y || (y.y == x.y && y.x < x.x);
        }
        if (better < m.n_need) {
            m.chosen[better] = x.x;
            if (OWN_MASS && mean_v && i % n_block == rank) {
                add_mass(order_value(x.y));
            }
        }
    }
}

// The cut; then own cells above it -> sel, and those of its bin that are in -> m.chosen
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::select(row_state<GB> & early) {
    find_cut(early);
    const bool has_ties = m.n_cand > LAYER_CAND;
    n_sel = m.n_sel;
    const int at_sel = mark_selected(has_ties);
    __syncthreads();
    write_list(at_sel);
    n_above = has_ties ? n_sel : n_sel - m.n_need;
    n_sel += FORCED_EARLY ? m.all_early : 0;
    arrive<OWN_MASS>();
    wait(); // C
    if (SPARQ_SMEM_KEYS) {
        if (tid < n_block) {
            m.at_lists[tid] = *cluster_at(&m.at_list, tid);
            m.at_cands[tid] = *cluster_at(&m.at_cand, tid);
        }
        __syncthreads();
    }
    choose(has_ties ? 0 : m.n_cand);
}

} // namespace sparse_cuda
