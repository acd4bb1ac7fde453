#pragma once

// Steps 2 and 3: attention over some positions, in units whose partial results are merged. The dot products are in sparse-rows.h; here are the
// softmax within a unit, the weighted sum of rows of V, and the merge.

#include "sparse-rows.h"

namespace sparse {

// the partial result of one query head over some positions: acc [d_v], the largest logit m, and the sums of p = exp(logit - m): l, and root, of
// the fourth root of p, which is there if it is asked for
struct attn_state {
    float * x;
    int     d;

    static int size(int d) { return (d + 3 + 15)/16*16; } // floats, up to a whole cache line

    float * acc() const  { return x; }
    float & m()   const  { return x[d]; }
    float & l()   const  { return x[d + 1]; }
    float & root() const { return x[d + 2]; }
};

// s[i] = exp(logit[i] - max_i logit[i]), logit[i] = softcap(s[i]*scale) + slope*bias[i]: of one query head over n rows, in place. Fills the
// state but acc, and root only if want_root. s and bias are readable up to a multiple of W, and bias is -inf there
static inline void softmax_unit(const attn_state & state, float * s, const float * bias, int n, float scale, float softcap, float slope,
        bool want_root) {
    const vf inf = set1(-INFINITY);
    vf m = inf;
    for (int i = 0; i < n; i += W) {
        vf x = mul(load(s + i), set1(scale));
        if (softcap > 0.0f) {
            x = soft_cap(x, softcap);
        }
        const vf b = load(bias + i);
        x = select(eq(b, inf), inf, fma(b, set1(slope), x));
        store(s + i, x);
        m = vmax(x, m);
    }
    state.m() = reduce_max(m);

    const vf m0 = set1(state.m() == -INFINITY ? 0.0f : state.m());
    vf l = set1(0.0f), root = set1(0.0f);
    for (int i = 0; i < n; i += W) {
        const vf p = exp(sub(load(s + i), m0));
        store(s + i, p);
        l = add(l, p);
    }
    state.l() = reduce_add(l);
    for (int i = 0; want_root && i < n; i += W) {
        root = add(root, fourth_root(load(s + i)));
    }
    state.root() = reduce_add(root);
}

// ---- weighted sums of gathered rows: acc[h, c] += sum_i p[h, i]*x[i, c] ----
//
// As with the dot products, add_rows_block takes HB heads and N rows, add_rows_d any number of either, and add_rows chooses D.

template <int HB, int N, int D, typename T, typename P>
static SPARQ_NOINLINE void add_rows_block(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, const char * const * x, int64_t o, int any_d,
        P ahead) {
    const int d = D > 0 ? D : any_d;
    vf ph[HB][N];
    const char * row[N];
    SPARQ_UNROLL
    for (int i = 0; i < N; ++i) {
        row[i] = x[i] + o;
        SPARQ_UNROLL
        for (int h = 0; h < HB; ++h) {
            ph[h][i] = in_register(set1(p[h*ld_p + i]));
        }
    }
    const int end = for_each_span<D, T>(d, [&](int c) {
        if (ahead.x) {
            ahead.template part<N, D, T>(c, d);
        }
        for_vectors<N, T>(row, c, [&](int cv, const vf * y) {
            SPARQ_UNROLL
            for (int h = 0; h < HB; ++h) {
                float * sum = acc + h*ld_acc + cv;
                vf a = load(sum);
                SPARQ_UNROLL
                for (int i = 0; i < N; ++i) {
                    a = fma(ph[h][i], y[i], a);
                }
                store(sum, a);
            }
        });
    });
    if (end < d) {
        for (int h = 0; h < HB; ++h) {
            vf a = load_n(acc + h*ld_acc + end, d - end);
            for (int i = 0; i < N; ++i) {
                a = fma(ph[h][i], span<T>::tail(row[i], end, d - end), a);
            }
            store_n(acc + h*ld_acc + end, a, d - end);
        }
    }
}

// one head, whose sums stay in registers while all n rows pass
template <int D, typename T, typename P>
static SPARQ_NOINLINE void add_rows_one_head(float * acc, const float * p, const char * const * x, int64_t o, int n, P ahead) {
    constexpr int NV = D/W < 8 ? D/W : span<T>::SIZE/W < 8 ? 8 : span<T>::SIZE/W; // vectors at a time
    constexpr int NS = span<T>::SIZE/W;
    for (int c = 0; c < D; c += NV*W) {
        vf a[NV];
        SPARQ_UNROLL
        for (int j = 0; j < NV; ++j) {
            a[j] = load(acc + c + j*W);
        }
        for (int i = 0; i < n; ++i) {
            const char * row = x[i] + o;
            if (ahead.x && c == 0) {
                ahead.from(i, row_bytes<T>(D)).template part<1, 0, T>(0, D);
            }
            const vf pi = set1(p[i]);
            SPARQ_UNROLL
            for (int j = 0; j < NV; j += NS) {
                const span<T> y(row, c + j*W);
                SPARQ_UNROLL
                for (int l = 0; l < NS; ++l) {
                    a[j + l] = fma(pi, y.vec(l), a[j + l]);
                }
            }
        }
        SPARQ_UNROLL
        for (int j = 0; j < NV; ++j) {
            store(acc + c + j*W, a[j]);
        }
    }
}

template <int D, typename T, typename P>
static SPARQ_INLINE void add_rows_d(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, const char * const * x, int64_t o,
        int n, int d, P ahead) {
    // where a row is used more than once, it should still be in the first level of the cache
    const int block = n_head == 1 && d <= 8*W ? n : ROW_BLOCK;
    for (int i0 = 0; i0 < n; i0 += block) {
        const int end = std::min(i0 + block, n);
        for_blocks<4>(n_head, [&](auto HB, int h) {
            const P pi = h == 0 ? ahead.from(i0, row_bytes<T>(d)) : P {};
            if constexpr (HB() == 1 && D > 0) {
                add_rows_one_head<D, T>(acc + h*ld_acc, p + h*ld_p + i0, x + i0, o, end - i0, pi);
            } else {
                constexpr int N = rows_together(HB());
                int i = i0;
                for (; i + N <= end; i += N) {
                    add_rows_block<HB(), N, D, T>(acc + h*ld_acc, ld_acc, p + h*ld_p + i, ld_p, x + i, o, d, pi.from(i - i0, row_bytes<T>(d)));
                }
                for (; i < end; ++i) {
                    add_rows_block<HB(), 1, D, T>(acc + h*ld_acc, ld_acc, p + h*ld_p + i, ld_p, x + i, o, d, pi.from(i - i0, row_bytes<T>(d)));
                }
            }
        });
    }
}

template <typename T>
static void add_rows(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, const char * const * x, int64_t o, int n, int d,
        const char * const * ahead) {
    with_known_size(d, [&](auto D) { add_rows_d<D(), T>(acc, ld_acc, p, ld_p, n_head, x, o, n, d, prefetch_rows { ahead }); });
}

// ---- weighted sums of whole positions: acc[h, c] += sum_t p[h, t]*x[t, h/n_group, c] ----
//
// As with the dot products of whole positions: in the order of memory, with as many bytes prefetched from `ahead`.

// one position, and one query head per KV head
template <int D, typename T>
static SPARQ_NOINLINE void add_position_d(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, const char * x, int64_t nb,
        int any_d, const char * ahead) {
    const int     d = D > 0 ? D : any_d;
    constexpr int N = span<T>::SIZE;
    for (int h = 0; h < n_head; ++h) {
        const char * row = x + h*nb, * row_ahead = ahead + h*nb;
        float * a = acc + h*ld_acc;
        const vf ph = set1(p[h*ld_p]);
        int c = 0;
        SPARQ_UNROLL
        for (; c + N <= d; c += N) {
            if (row_bytes<T>(c) % 64 < row_bytes<T>(N)) {
                prefetch_bytes(row_ahead + row_bytes<T>(c), row_bytes<T>(N));
            }
            const span<T> y(row, c);
            SPARQ_UNROLL
            for (int v = 0; v < N/W; ++v) {
                store(a + c + v*W, fma(ph, y.vec(v), load(a + c + v*W)));
            }
        }
        if (c < d) {
            store_n(a + c, fma(ph, span<T>::tail(row, c, d - c), load_n(a + c, d - c)), d - c);
        }
    }
}

template <int D, typename T>
static void add_positions_d(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, int n_group, const char * const * x,
        int64_t nb, int n, int d, const char * ahead) {
    const int64_t size = row_bytes<T>(d);
    for (int i = 0; i < n && n_group == 1; ++i, ahead += n_head*size) {
        add_position_d<D, T>(acc, ld_acc, p + i, ld_p, n_head, x[i], nb, d, ahead);
    }
    for (int i = 0; i < n && n_group > 1; i += POS_BLOCK) {
        const int ni = n - i < POS_BLOCK ? n - i : POS_BLOCK;
        for (int h = 0; h*n_group < n_head; ++h, ahead += POS_BLOCK*size) {
            add_rows_d<D, T>(acc + h*n_group*ld_acc, ld_acc, p + h*n_group*ld_p + i, ld_p, n_group, x + i, h*nb, ni, d, prefetch_stream { ahead });
        }
    }
}

template <typename T>
static void add_positions(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, int n_group, const char * const * x, int64_t nb,
        int n, int d, const char * ahead) {
    with_known_size(d, [&](auto D) { add_positions_d<D(), T>(acc, ld_acc, p, ld_p, n_head, n_group, x, nb, n, d, ahead); });
}

// ---- the merge ----

// the largest logit, and the sum of exp(logit - max)
struct softmax_sum {
    float max, sum;
};

// res[c] = sum_i f[i]*acc[i, c] / (sum_i f[i]*l[i] + exp(sink - m)), f[i] = exp(m[i] - m), m the largest of all: over the states at x, x + ld,
// .. of one query head, in their order. The sink is optional. Where nothing was seen the result is zero. Returns m and the denominator
static inline softmax_sum merge_states(float * res, const float * x, int64_t ld, int n_state, int d, const float * sink) {
    float m = sink ? *sink : -INFINITY;
    for (int i = 0; i < n_state; ++i) {
        const float mi = x[i*ld + d];
        m = mi > m ? mi : m;
    }
    const float m0 = m == -INFINITY ? 0.0f : m;

    for (int c = 0; c < d; ++c) {
        res[c] = 0.0f;
    }
    float l = 0.0f;
    for (int i = 0; i < n_state; ++i) {
        const float * xi = x + i*ld;
        const float   f  = expf(xi[d] - m0);
        l += xi[d + 1]*f;
        for (int c = 0; c < d; ++c) {
            res[c] += xi[c]*f;
        }
    }
    if (sink) {
        l += expf(*sink - m0);
    }
    const float inv = l != 0.0f ? 1.0f/l : 0.0f;
    for (int c = 0; c < d; ++c) {
        res[c] *= inv;
    }
    return { m0, l };
}

// alpha (ggml-sparse.h, ATTEND) from the states at x, x + ld, .. and what merge_states returned
static inline float kept_share(const float * x, int64_t ld, int n_state, int d, softmax_sum all, float rest) {
    float root = 0.0f;
    for (int i = 0; i < n_state; ++i) {
        const float * xi = x + i*ld;
        root += xi[d] > -INFINITY ? xi[d + 2]*expf(0.25f*(xi[d] - all.max)) : 0.0f;
    }
    return root > 0.0f ? sqrtf(all.sum/(all.sum + expf(rest + 4.0f*logf(root)))) : 1.0f;
}

// ---- by the type of K or V ----

struct row_ops {
    decltype(&dot_rows<float>)      dot_rows;
    decltype(&dot_positions<float>) dot_positions;
    decltype(&add_rows<float>)      add_rows;
    decltype(&add_positions<float>) add_positions;
    decltype(&sum_positions<float>) sum_positions;
};

row_ops ops_of(ggml_type type);

} // namespace sparse
