#pragma once

// A layer in one launch: the mean of V, attention over the selected positions, and the result.

#include "sparse-layer-block.cuh"

namespace sparse_cuda {

// 8 elements of a row as they are read; K and V in f16 are kept packed until they are used
template <int TYPE> struct raw_span {
    float x[8];
    __device__ __forceinline__ void load(int type, const char * row, int c, int d) { load8(x, type, row, c, d); }
    __device__ __forceinline__ void unpack(float (&y)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            y[i] = x[i];
        }
    }
};
template <> struct raw_span<GGML_TYPE_F16> { // rows begin at multiples of 16 bytes, and have a multiple of 8 elements
    uint4 x;
    __device__ __forceinline__ void load(int, const char * row, int c, int) { x = *(const uint4 *) (row + c*2); }
    __device__ __forceinline__ void unpack(float (&y)[8]) const { unpack_f16(y, x); }
};

// attention of GB heads over the rows that a lane has seen; o: its 8 columns of V
template <int GB>
struct row_state {
    float top[GB], l[GB], root[GB], o[GB][8];
    float mass[GB], mass_root[GB]; // of the approximate logits of what the thread has listed

    __device__ __forceinline__ row_state() {
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            top[h] = neg_inf();
            l[h] = root[h] = mass[h] = mass_root[h] = 0.0f;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                o[h][c] = 0.0f;
            }
        }
    }

    // N rows by their logits, -inf for none, and what the lane has read of V
    template <int N, typename V>
    __device__ __forceinline__ void add(float (&y)[N][GB], const V (&v)[N], bool roots) {
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            float most = top[h];
#pragma unroll
            for (int r = 0; r < N; ++r) {
                most = fmaxf(most, y[r][h]);
            }
            const float ref = most > neg_inf() ? most : 0.0f, f = expf(top[h] - ref), f4 = expf(0.25f*(top[h] - ref));
            top[h]   = most;
            l[h]    *= f;
            root[h] *= f4;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                o[h][c] *= f;
            }
#pragma unroll
            for (int r = 0; r < N; ++r) {
                root[h] += roots ? expf(0.25f*(y[r][h] - ref)) : 0.0f;
                y[r][h]  = expf(y[r][h] - ref);
                l[h]    += y[r][h];
            }
        }
#pragma unroll
        for (int r = 0; r < N; ++r) {
            float x[8];
            v[r].unpack(x);
#pragma unroll
            for (int h = 0; h < GB; ++h) {
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    o[h][c] += y[r][h]*x[c];
                }
            }
        }
    }

    // together with the lane at this distance
    __device__ __forceinline__ void join(int distance) {
        const auto sum = [&](float x) { return x + __shfl_xor_sync(ALL, x, distance); };
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            const float all = fmaxf(top[h], __shfl_xor_sync(ALL, top[h], distance)), ref = all > neg_inf() ? all : 0.0f;
            const float f = expf(top[h] - ref), f4 = expf(0.25f*(top[h] - ref));
            top[h]  = all;
            l[h]    = sum(l[h]*f);
            root[h] = sum(root[h]*f4);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                o[h][c] = sum(o[h][c]*f);
            }
        }
    }
};

// sums of V of groups that are sealed and wholly seen, 8 columns from `col` on; the block has n_place of them at a time
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::add_sums(float (&sum)[8], int col, int place, int n_place) {
    const auto whole_of = [&](int b) { return m.whole[b*SUM/32] >> b*SUM % 32 & SUM_BITS; };
    const auto add = [&](int64_t r) { add8(sum, GGML_TYPE_F32, (const char *) (ta.v_sum.at<const float>(r, s) + h_kv*ta.d_v), col, ta.d_v); };
    const int n_sum = (n_grp + SUM - 1)/SUM, b0 = n_sum*rank/n_block, b1 = n_sum*(rank + 1)/n_block;
#pragma unroll 1
    for (int b = b0 + place; b < b1; b += n_place) { // sums of which all groups count
        if (whole_of(b) == SUM_BITS) {
            add(ggml_sparse_total_row((int64_t) b*SUM));
        }
    }
#pragma unroll 1
    for (int b = b0; b < b1; ++b) { // the others, group by group
        if (whole_of(b) != SUM_BITS && whole_of(b) != 0) {
#pragma unroll 1
            for (int j = place; j < SUM; j += n_place) {
                if (whole_of(b) >> j & 1) {
                    add(ggml_sparse_sum_row((int64_t) b*SUM + j));
                }
            }
        }
    }
}

// rows of V of the other groups
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::add_rows(float (&sum)[8], int col, int place, int n_place) {
    const bool in = col < ta.d_v;
    const bool shared_v = n_block > 1 && n_ragged <= LAYER_ROWS; // as with the rows of K
    const int  r0 = shared_v ? GROUP/n_block*rank : 0, n_each = shared_v ? GROUP/n_block : GROUP;
#pragma unroll 1
    for (int batch = 0; n_ragged > 0; ++batch) {
        const int g0 = shared_v ? 0 : min(run0*(RUN/GROUP), n_grp), g1 = shared_v ? n_grp : min(run1*(RUN/GROUP), n_grp);
        const int n = list_groups(m.tail_v, &m.n_list_v, m.ragged, g0, g1, batch)*n_each;
#pragma unroll 2
        for (int i = place; i < n; i += n_place) {
            const int t = row_at(m.tail_v, i, r0, n_each);
            if (t < n_kv && mask[t] != F16_NEG_INF && in) {
                add8(sum, TYPE == ANY ? ta.v.type : TYPE, ta.v.at(h_kv, t, s), col, ta.d_v);
            }
        }
        if (n < LAYER_ROWS*n_each || shared_v) {
            break;
        }
        __syncthreads(); // the list was read
    }
}

// this block's part of the sum of V over what is seen
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::sum_v() {
    const int n_lane = a.n_lane, col = lane % n_lane*8, place = tid/n_lane, n_place = N_THREAD/n_lane; // rows of the block at a time
    float sum[8] = {};
    if (col < ta.d_v) {
        add_sums(sum, col, place, n_place);
    }
    add_rows(sum, col, place, n_place);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        m.mean[tid][c] = sum[c];
    }
    __syncthreads();
    if (tid < ta.d_v) {
        float x = 0.0f;
#pragma unroll 4
        for (int j = 0; j < n_place; ++j) {
            x += m.mean[j*n_lane + tid/8][tid % 8];
        }
        mean_at(rank)[tid] = x;
    }
}

// n rows from number `first` of what is selected on, or of all positions -> m.list; their approximate mass
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::list_rows(row_state<GB> & st, int first, int n, int h0, int n_head) {
#pragma unroll 1
    for (int i = tid; i < n; i += N_THREAD) {
        const int j = first + i, t = every ? j : j < n_above ? selected(j) : m.chosen[j - n_above];
        const uint16_t mt = mask[t];
        m.list[i]      = mt == F16_NEG_INF ? -1 : t;
        m.list_bias[i] = f16_value(mt);
#pragma unroll
        for (int h = 0; h < GB; ++h) {
            if (mean_v && h < n_head && !OWN_MASS) {
                const float x = finite_top(__ldcg(&logits[(h0 + h)*a.ld + t])) - m.top[h0 + h];
                st.mass[h]      += expf(x);
                st.mass_root[h] += expf(0.25f*x); // not the root of the former, which is 0 below -104
            }
        }
    }
}

// the rows of m.list, by the warps from WARP0 on; n_lane lanes share one
template <int N_BIT, int GB, int TYPE>
template <int WARP0>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::read_rows(row_state<GB> & st, int n) {
    constexpr int AT_A_TIME = TYPE != GGML_TYPE_F16 ? 1 : GB == 1 ? 4 : 2, N_WARP = sparse_cuda::N_WARP - WARP0;
    const int  n_lane = a.n_lane, col = lane % n_lane*8, sub = lane/n_lane, n_sub = 32/n_lane, n_span = (ta.d_k + 7)/8;
    const bool has_k = col < ta.d_k, has_v = col < ta.d_v;
    const char * k_base = ta.k.at(h_kv, 0, s), * v_base = ta.v.at(h_kv, 0, s);
    raw_span<TYPE> k[AT_A_TIME], v[AT_A_TIME];
    int t[AT_A_TIME];
    const auto list = [&](int i0) {
#pragma unroll
        for (int r = 0; r < AT_A_TIME; ++r) {
            const int i = i0 + r*N_WARP*n_sub;
            t[r] = i < n ? m.list[i] : -1;
        }
    };
    const auto load = [&](bool reads_k, bool reads_v) {
#pragma unroll
        for (int r = 0; r < AT_A_TIME; ++r) {
            if (reads_k) {
                k[r] = {};
            }
            if (reads_v) {
                v[r] = {};
            }
            if (reads_k && t[r] >= 0 && has_k) {
                k[r].load(ta.k.type, k_base + t[r]*ta.k.nb2, col, ta.d_k);
            }
            if (reads_v && t[r] >= 0 && has_v) {
                v[r].load(ta.v.type, v_base + t[r]*ta.v.nb2, col, ta.d_v);
            }
        }
    };
    if (SPARQ_PIPE_ROWS) {
        list((warp - WARP0)*n_sub + sub);
        load(true, true);
    }
#pragma unroll 1
    for (int i0 = (warp - WARP0)*n_sub + sub; i0 - sub < n; i0 += N_WARP*n_sub*AT_A_TIME) {
        if (!SPARQ_PIPE_ROWS) {
            list(i0);
            load(true, true);
        }
        float y[AT_A_TIME][GB];
        bool  in[AT_A_TIME];
#pragma unroll
        for (int r = 0; r < AT_A_TIME; ++r) {
            in[r] = t[r] >= 0;
            float x[8];
            k[r].unpack(x);
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                y[r][h] = 0.0f;
            }
            if (has_k) {
                dot_span<GB>(y[r], m.q, col/8, n_span, x);
            }
        }
        if (SPARQ_PIPE_ROWS) {
            list(i0 + N_WARP*n_sub*AT_A_TIME);
            load(true, false);
        }
#pragma unroll 1
        for (int o = n_lane/2; o > 0; o /= 2) {
#pragma unroll
            for (int r = 0; r < AT_A_TIME*GB; ++r) {
                y[r/GB][r % GB] += __shfl_xor_sync(ALL, y[r/GB][r % GB], o);
            }
        }
#pragma unroll
        for (int r = 0; r < AT_A_TIME; ++r) {
            const float bias = in[r] ? m.list_bias[i0 + r*N_WARP*n_sub] : 0.0f;
#pragma unroll
            for (int h = 0; h < GB; ++h) {
                y[r][h] *= ta.scale;
                if (ta.softcap > 0.0f) {
                    y[r][h] = soft_cap(y[r][h], ta.softcap);
                }
                y[r][h] = in[r] ? y[r][h] + m.slope[h]*bias : neg_inf();
            }
        }
        st.add(y, v, mean_v);
        if (SPARQ_PIPE_ROWS) {
            load(false, true);
        }
    }
}

// the states of all lanes -> a.state
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::write_states(row_state<GB> & st, int h0, int n_head) {
    const int d_v = ta.d_v, ld = d_v + LAYER_STATE, col = lane % a.n_lane*8;
#pragma unroll 1
    for (int o = a.n_lane; o < 32; o *= 2) {
        st.join(o);
    }
#pragma unroll
    for (int h = 0; h < GB; ++h) {
        float * p = m.part[warp][h];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            if (lane < a.n_lane && col + c < d_v) {
                p[col + c] = st.o[h][c];
            }
        }
        const float mass = lane_sum<32>(st.mass[h]), mass_root = lane_sum<32>(st.mass_root[h]);
        if (lane == 0) {
            p[d_v]     = st.top[h];
            p[d_v + 1] = st.l[h];
            p[d_v + 2] = st.root[h];
            p[d_v + 3] = mass;
            p[d_v + 4] = mass_root;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < n_head*ld; i += N_THREAD) {
        const int h = i/ld, c = i - h*ld;
        float most = neg_inf(), x = 0.0f;
#pragma unroll
        for (int j = 0; j < N_WARP; ++j) {
            most = fmaxf(most, m.part[j][h][d_v]);
        }
        const float ref = most > neg_inf() ? most : 0.0f, part = c == d_v + 2 ? 0.25f : c > d_v + 2 ? 0.0f : 1.0f; // exp((top - ref)*part)
#pragma unroll
        for (int j = 0; j < N_WARP; ++j) {
            x += m.part[j][h][c]*expf(part == 0.0f ? 0.0f : part*(m.part[j][h][d_v] - ref));
        }
        state_at(h0 + h, rank, ld)[c] = c == d_v ? most : x;
    }
}

// own forced cells -> m.list, their keys -> m.chosen, as far as there is room: they are not ranked any more
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::list_early() {
    load_queries<GB>(m.q, ta.q, (int) h_kv, 1, i_tok, s, ta.d_k);
    __syncthreads(); // the keys are there
#pragma unroll 1
    for (int j = tid; j < n_chunks()*4; j += N_THREAD) {
        const unsigned marks = m.marks[j];
#pragma unroll 1
        for (unsigned bits = marks; bits; bits &= bits - 1) {
            const int i = j*32 + __ffs((int) bits) - 1, o = i - n_chunk*LAYER_CHUNK, t = o < 0 ? run0*RUN + i : row_at(m.tail, o, row0, n_per);
            float & key = keys[key_at(t, i)];
            const int e = key > neg_inf() ? atomicAdd(&m.n_early, 1) : LAYER_LIST;
            if (e < LAYER_LIST) {
                m.list[e]      = t;
                m.list_bias[e] = f16_value(mask[t]);
                m.chosen[e]    = __float_as_int(key);
                atomicAdd(&m.hist[LAYER_BINS - 1], ALL);
                key = neg_inf();
            }
        }
    }
}

template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::attend(const row_state<GB> & early) {
    const int n_list = every ? n_kv : FORCED_EARLY ? m.n_sel : n_sel;
    const int first = (int) ((int64_t) n_list*rank/n_block), n_own = (int) ((int64_t) n_list*(rank + 1)/n_block) - first;
#pragma unroll 1
    for (int h0 = 0; h0 < n_group_q; h0 += GB) {
        const int n_head = min(GB, n_group_q - h0);
        if (!FORCED_EARLY || every) {
            load_queries<GB>(m.q, ta.q, (int) h_kv*n_group_q + h0, n_head, i_tok, s, ta.d_k);
        }
        if (tid < GB) {
            m.slope[tid] = head_slope((int) h_kv*n_group_q + h0 + tid, ta.n_log2, ta.max_bias);
        }
        row_state<GB> st = early;
        if (OWN_MASS || FORCED_EARLY) {
            st.mass[0]      = mass;
            st.mass_root[0] = mass_root;
        }
#pragma unroll 1
        for (int i = 0; i < n_own; i += LAYER_LIST) {
            const int n = min(LAYER_LIST, n_own - i);
            __syncthreads(); // the candidates are chosen; the list was read
            list_rows(st, first + i, n, h0, n_head);
            __syncthreads();
            read_rows<0>(st, n);
        }
        __syncthreads(); // what lies where the parts go was read
        write_states(st, h0, n_head);
    }
}

// the states together, the sink, eq. 10: this block's part of the result, a thread per state and element
template <int N_BIT, int GB, int TYPE>
__device__ __forceinline__ void layer_block<N_BIT, GB, TYPE>::finish() {
    const int d_v = ta.d_v, ld = d_v + LAYER_STATE, r = tid % n_block, e1 = n_group_q*d_v*(rank + 1)/n_block;
#pragma unroll 1
    for (int e0 = n_group_q*d_v*rank/n_block; e0 < e1; e0 += N_THREAD/n_block) {
        const int e = min(e0 + tid/n_block, e1 - 1), h = e/d_v, c = e - h*d_v;
        const float * st = state_at(h, r, ld);
        const float top = of_block(&st[d_v]), sink = ta.sink_logits ? ta.sink_logits[h_kv*n_group_q + h] : neg_inf();
        float x[6] = { of_block(&st[c]), of_block(&st[d_v + 1]), of_block(&st[d_v + 2]), of_block(&st[d_v + 3]), of_block(&st[d_v + 4]),
            mean_v ? of_block(&mean_at(r)[c]) : 0.0f };
        float ref = fmaxf(top, sink);
#pragma unroll 1
        for (int o = 1; o < n_block; o *= 2) {
            ref = fmaxf(ref, __shfl_xor_sync(ALL, ref, o));
        }
        ref = ref > neg_inf() ? ref : 0.0f;
        const float f = expf(top - ref), f4 = expf(0.25f*(top - ref));
        x[0] *= f;
        x[1] *= f;
        x[2] *= f4;
#pragma unroll 1
        for (int o = 1; o < n_block; o *= 2) {
#pragma unroll
            for (int j = 0; j < 6; ++j) {
                x[j] += __shfl_xor_sync(ALL, x[j], o);
            }
        }
        const float all = x[1] + (ta.sink_logits ? expf(sink - ref) : 0.0f);
        float o = all > 0.0f ? __fdiv_rn(x[0], all) : 0.0f;
        if (mean_v) {
            const float sum = m.sum[h], left = n_sel == n_vis ? 0.0f : sum - x[3]; // nothing, where all are selected
            float alpha = 1.0f;
            if (x[4] > 0.0f && left > MIN_LEFT*sum && x[2] > 0.0f) { // not where a head has a NaN
                alpha = __fsqrt_rn(__fdiv_rn(all, all + expf(logf(left) + 4.0f*(logf(x[2]) - logf(x[4])))));
            }
            o = alpha*o + (1.0f - alpha)*(n_vis > 0 ? __fdiv_rn(x[5], (float) n_vis) : 0.0f);
        }
        if (r == 0 && e0 + tid/n_block < e1) {
            ta.res[row*ta.ld_res + (h_kv*n_group_q + h)*d_v + c] = o;
        }
    }
}

} // namespace sparse_cuda
