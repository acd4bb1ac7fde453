#pragma once

// Rows of K and V: dot products with them, weighted sums of them, softmax in between. Exact scores and step 3 are made of these.
// On plain pointers and strides: no ggml tensors, no threads. Contracts in ggml-sparse.h; the same step, one float at a time, in ref/.
// Strides called nb_* are in bytes, ld_* in elements.

#include "sparse-seal.h"

#include <algorithm>

namespace sparse {

// rows handled together by the gather: a multiple of every W
constexpr int ROW_BLOCK = 16;

// how many rows before their use K and V are asked for: a block of rows is too short for the hardware to run ahead
constexpr int AHEAD = 2*ROW_BLOCK;

// the same in bytes, where all positions are read in the order of memory
constexpr int64_t AHEAD_BYTES = 32*1024;

// asks for `size` bytes from p on. Inlined, as its callers that do nothing else must be: gcc drops calls of a function that only prefetches
static SPARQ_INLINE void prefetch_bytes(const char * p, size_t size) {
    for (size_t o = 0; o < size; o += 64) {
        prefetch(p + o);
    }
}

// ---- exact scores: dot products with gathered rows ----

// Rows are given by their addresses: x [n], readable up to a multiple of ROW_BLOCK (the last one again), each row at x[i] + o

// how many rows some heads use together: they share the loads of q and of the sums. One head is better off with a row after another: lines of
// rows in turn are read more slowly (MHA at 1/8 by one thread, with the order of asking: 8 to 13 %)
constexpr int rows_together(int n_head) { return n_head == 1 ? 1 : N_ACC/4 < W ? N_ACC/4 : W; }

// What is asked for on the way, a part with each span of columns of the N rows that are used:

// as many other rows. Each whole at once (with its lines evenly a loop with these kernels, GQA-4 at 1/8, takes 13 to 19 % longer)
struct ask_rows {
    const char * const * x; // may be null

    ask_rows from(int i, int64_t) const { return { x ? x + i : x }; }

    template <int N, int D, typename T>
    SPARQ_INLINE void part(int c, int d) const {
        constexpr int N_STEP = D > 0 ? D/span<T>::SIZE : 1;
        SPARQ_UNROLL
        for (int i = 0; i < N; ++i) {
            if (i*N_STEP/N == c/span<T>::SIZE) {
                prefetch_bytes(x[i], row_bytes<T>(d));
            }
        }
    }
};

// as many bytes in the order of memory, evenly (rows at once: dense GQA-4 takes 5 % longer)
struct ask_run {
    const char * x; // may be null

    ask_run from(int i, int64_t size) const { return { x ? x + i*size : x }; }

    template <int N, int D, typename T>
    SPARQ_INLINE void part(int c, int) const {
        const int64_t o0 = N*row_bytes<T>(c), o1 = o0 + N*row_bytes<T>(span<T>::SIZE);
        for (int64_t o = (o0 + 63)/64*64; o < o1; o += 64) {
            prefetch(x + o);
        }
    }
};

// s[h][i] = q[h] . row i for HB heads and up to W rows; some share each load of q. D: d, and the distance of the heads of q, where it is
// known, without a loop then: what is left for each iteration waits behind the rows that are still on their way (ATTEND at 1/8 takes 10 % longer)
template <int HB, int D, typename T, typename A>
static SPARQ_NOINLINE void dot_block( // inlined, its pointers no longer fit the registers (2x slower)
        float * s, int64_t ld_s, const float * q, int64_t any_ld_q, const char * const * x, int64_t o, int n, int any_d, A next) {
    const int     d    = D > 0 ? D : any_d;
    const int64_t ld_q = D > 0 ? D : any_ld_q;
    constexpr int NW = rows_together(HB);
    constexpr int NC = span<T>::SIZE;
    constexpr bool AT_ONCE = HB*NW == W; // the sums of all accumulators fill one vector
    vf part[HB][W];
    for (int j = 0; j < W && j < n; j += NW) {
        const char * row[NW];
        SPARQ_UNROLL
        for (int i = 0; i < NW; ++i) {
            row[i] = x[j + i] + o;
        }
        vf a[HB*NW];
        SPARQ_UNROLL
        for (int i = 0; i < HB*NW; ++i) {
            a[i] = set1(0.0f);
        }
        const auto step = [&](int c) {
            if (next.x) {
                next.from(j, row_bytes<T>(d)).template part<NW, D, T>(c, d);
            }
            span<T> y[NW];
            SPARQ_UNROLL
            for (int i = 0; i < NW; ++i) {
                y[i] = span<T>(row[i], c);
            }
            SPARQ_UNROLL
            for (int v = 0; v < NC/W; ++v) {
                vf kx[NW];
                SPARQ_UNROLL
                for (int i = 0; i < NW; ++i) {
                    kx[i] = y[i].vec(v);
                }
                SPARQ_UNROLL
                for (int h = 0; h < HB; ++h) {
                    const vf qx = in_register(load(q + h*ld_q + c + v*W));
                    SPARQ_UNROLL
                    for (int i = 0; i < NW; ++i) {
                        a[h*NW + i] = fma(qx, kx[i], a[h*NW + i]);
                    }
                }
            }
        };
        int c = 0;
        if (D > 0) {
            SPARQ_UNROLL
            for (; c + NC <= D; c += NC) {
                step(c);
            }
        } else {
            for (; c + NC <= d; c += NC) {
                step(c);
            }
        }
        if (c < d) {
            SPARQ_UNROLL
            for (int h = 0; h < HB; ++h) {
                const vf qx = load_n(q + h*ld_q + c, d - c);
                SPARQ_UNROLL
                for (int i = 0; i < NW; ++i) {
                    a[h*NW + i] = fma(qx, span<T>::tail(row[i], c, d - c), a[h*NW + i]);
                }
            }
        }
        if (AT_ONCE) {
            float sum[W];
            store(sum, sum_rows(a));
            SPARQ_UNROLL
            for (int h = 0; h < HB; ++h) {
                if (j + NW <= n) {
                    memcpy(s + h*ld_s + j, sum + h*NW, NW*sizeof(float));
                } else {
                    std::copy_n(sum + h*NW, n - j, s + h*ld_s + j);
                }
            }
        } else {
            SPARQ_UNROLL
            for (int i = 0; i < HB*NW; ++i) {
                part[i/NW][j + i % NW] = a[i];
            }
        }
    }
    for (int h = 0; h < HB && !AT_ONCE; ++h) {
        store_n(s + h*ld_s, sum_rows(part[h]), n);
    }
}

// the same for any number of heads and rows; each row is loaded once for all heads (once per 4 heads from L1)
template <int D, typename T, typename A>
static SPARQ_INLINE void dot_rows_of(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * const * x, int64_t o, int n,
        int d, A next) {
    const A none = {};
    for (int i = 0; i < n; i += W) {
        const int ni = n - i < W ? n - i : W;
        const A   ne = next.from(i, row_bytes<T>(d));
        int h = 0;
        for (; h + 4 <= n_head; h += 4) {
            dot_block<4, D, T>(s + h*ld_s + i, ld_s, q + h*ld_q, ld_q, x + i, o, ni, d, h == 0 ? ne : none);
        }
        for (; h + 2 <= n_head; h += 2) {
            dot_block<2, D, T>(s + h*ld_s + i, ld_s, q + h*ld_q, ld_q, x + i, o, ni, d, h == 0 ? ne : none);
        }
        for (; h < n_head; ++h) {
            dot_block<1, D, T>(s + h*ld_s + i, ld_s, q + h*ld_q, ld_q, x + i, o, ni, d, h == 0 ? ne : none);
        }
    }
}

template <typename T>
static void dot_rows(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * const * x, int64_t o, int n, int d,
        const char * const * next) {
    const int  known = ld_q == d ? d : 0;
    const auto dot   = known == 128 ? dot_rows_of<128, T, ask_rows> : known == 64 ? dot_rows_of<64, T, ask_rows> : dot_rows_of<0, T, ask_rows>;
    dot(s, ld_s, q, ld_q, n_head, x, o, n, d, { next });
}

// One position of all heads, each with a query head of its own: rows that lie one after another, nb bytes apart. To read whole positions is
// to read in the order of memory: with 32 heads, 16 rows of one head after another come at 22 GB/s, whole positions at 28 to 30 (one thread;
// two: 31 and 34). next: as many other rows, asked for on the way; without, the whole takes twice as long

// s[h*ld_s] = q[h] . row h
template <int D, typename T>
static SPARQ_NOINLINE void dot_position(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * x, int64_t nb, int any_d,
        const char * next) {
    const int     d  = D > 0 ? D : any_d;
    constexpr int NC = span<T>::SIZE;
    for (int h0 = 0; h0 < n_head; h0 += W) {
        const int n = n_head - h0 < W ? n_head - h0 : W;
        vf part[W];
        for (int h = 0; h < n; ++h) { // one after another: out of their order, they are not read ahead
            vf  a = set1(0.0f);
            int c = 0;
            SPARQ_UNROLL
            for (; c + NC <= d; c += NC) {
                if (row_bytes<T>(c) % 64 < row_bytes<T>(NC)) {
                    prefetch_bytes(next + row_bytes<T>(c), row_bytes<T>(NC));
                }
                const span<T> y(x, c);
                SPARQ_UNROLL
                for (int v = 0; v < NC/W; ++v) {
                    a = fma(load(q + c + v*W), y.vec(v), a);
                }
            }
            if (c < d) {
                a = fma(load_n(q + c, d - c), span<T>::tail(x, c, d - c), a);
            }
            part[h] = a;
            q    += ld_q;
            x    += nb;
            next += nb;
        }
        for (int h = n; h < W; ++h) {
            part[h] = set1(0.0f);
        }
        float sum[W];
        store(sum, sum_rows(part));
        for (int h = 0; h < n; ++h) {
            s[(h0 + h)*ld_s] = sum[h];
        }
    }
}

// Positions of all heads, in the order of memory: x [n], readable up to a multiple of POS_BLOCK, heads nb bytes apart, n_group query heads
// each. next: where as many bytes lie that are asked for on the way

// positions whose rows are used head by head. With 16 of them (8 heads of 128, f16) a loop that only reads gets 36 GB/s, with 4 45, with 1 54;
// arithmetic wants 4
constexpr int POS_BLOCK = 4;

template <int D, typename T>
static void dot_positions_of(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, int n_group, const char * const * x, int64_t nb,
        int n, int d, const char * next) {
    const int64_t size = row_bytes<T>(d);
    for (int i = 0; i < n && n_group == 1; ++i, next += n_head*size) {
        dot_position<D, T>(s + i, ld_s, q, ld_q, n_head, x[i], nb, d, next);
    }
    for (int i = 0; i < n && n_group > 1; i += POS_BLOCK) {
        const int ni = n - i < POS_BLOCK ? n - i : POS_BLOCK;
        for (int h = 0; h*n_group < n_head; ++h, next += POS_BLOCK*size) {
            dot_rows_of<D, T>(s + h*n_group*ld_s + i, ld_s, q + h*n_group*ld_q, ld_q, n_group, x + i, h*nb, ni, d, ask_run { next });
        }
    }
}

template <typename T>
static void dot_positions(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, int n_group, const char * const * x, int64_t nb,
        int n, int d, const char * next) {
    const int  known = ld_q == d ? d : 0;
    const auto dot   = known == 128 ? dot_positions_of<128, T> : known == 64 ? dot_positions_of<64, T> : dot_positions_of<0, T>;
    dot(s, ld_s, q, ld_q, n_head, n_group, x, nb, n, d, next);
}

// ---- step 3: attention over rows ----

// the partial result of one query head over some positions: acc [d_v], max logit m, sum of exp(logit - m)
struct attn_state {
    float * x;
    int     d;

    static int size(int d) { return (d + 2 + 15)/16*16; } // floats; whole cache lines

    float * acc() const { return x; }
    float & m()   const { return x[d]; }
    float & l()   const { return x[d + 1]; }
};

// acc[h] += sum_i p[h][i]*row i for HB heads and N rows
template <int HB, int N, int D, typename T, typename A>
static SPARQ_NOINLINE void add_block(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, const char * const * x, int64_t o, int any_d,
        A next) {
    const int     d  = D > 0 ? D : any_d;
    constexpr int NC = span<T>::SIZE;
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
    const auto step = [&](int c) {
        if (next.x) {
            next.template part<N, D, T>(c, d);
        }
        span<T> y[N];
        SPARQ_UNROLL
        for (int i = 0; i < N; ++i) {
            y[i] = span<T>(row[i], c);
        }
        SPARQ_UNROLL
        for (int v = 0; v < NC/W; ++v) {
            vf vx[N];
            SPARQ_UNROLL
            for (int i = 0; i < N; ++i) {
                vx[i] = y[i].vec(v);
            }
            SPARQ_UNROLL
            for (int h = 0; h < HB; ++h) {
                float * sum = acc + h*ld_acc + c + v*W;
                vf a = load(sum);
                SPARQ_UNROLL
                for (int i = 0; i < N; ++i) {
                    a = fma(ph[h][i], vx[i], a);
                }
                store(sum, a);
            }
        }
    };
    int c = 0;
    if (D > 0) {
        SPARQ_UNROLL
        for (; c + NC <= D; c += NC) {
            step(c);
        }
    } else {
        for (; c + NC <= d; c += NC) {
            step(c);
        }
    }
    if (c < d) {
        for (int h = 0; h < HB; ++h) {
            vf a = load_n(acc + h*ld_acc + c, d - c);
            for (int i = 0; i < N; ++i) {
                a = fma(ph[h][i], span<T>::tail(row[i], c, d - c), a);
            }
            store_n(acc + h*ld_acc + c, a, d - c);
        }
    }
}

// acc += sum_i p[i]*row i: one head, whose sums stay in registers
template <int D, typename T, typename A>
static SPARQ_NOINLINE void add_block_1(float * acc, const float * p, const char * const * x, int64_t o, int n, A next) {
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
            if (next.x && c == 0) {
                next.from(i, row_bytes<T>(D)).template part<1, 0, T>(0, D);
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

// the same for n rows
template <int HB, int D, typename T, typename A>
static SPARQ_INLINE void add_rows_heads(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, const char * const * x, int64_t o, int n, int d,
        A next) {
    if (HB == 1 && D > 0) {
        add_block_1<(D > 0 ? D : W), T>(acc, p, x, o, n, next);
        return;
    }
    constexpr int N = rows_together(HB);
    int i = 0;
    for (; i + N <= n; i += N) {
        add_block<HB, N, D, T>(acc, ld_acc, p + i, ld_p, x + i, o, d, next.from(i, row_bytes<T>(d)));
    }
    for (; i < n; ++i) {
        add_block<HB, 1, D, T>(acc, ld_acc, p + i, ld_p, x + i, o, d, next.from(i, row_bytes<T>(d)));
    }
}

template <int D, typename T, typename A>
static SPARQ_INLINE void add_rows_of(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, const char * const * x, int64_t o,
        int n, int d, A next) {
    const A none = {};
    // where a row is used more than once, it is to be in the first level still
    const int block = n_head == 1 && d <= 8*W ? n : ROW_BLOCK;
    for (int i = 0; i < n; i += block) {
        const int ni = n - i < block ? n - i : block;
        const A   ne = next.from(i, row_bytes<T>(d));
        int h = 0;
        for (; h + 4 <= n_head; h += 4) {
            add_rows_heads<4, D, T>(acc + h*ld_acc, ld_acc, p + h*ld_p + i, ld_p, x + i, o, ni, d, h == 0 ? ne : none);
        }
        for (; h + 2 <= n_head; h += 2) {
            add_rows_heads<2, D, T>(acc + h*ld_acc, ld_acc, p + h*ld_p + i, ld_p, x + i, o, ni, d, h == 0 ? ne : none);
        }
        for (; h < n_head; ++h) {
            add_rows_heads<1, D, T>(acc + h*ld_acc, ld_acc, p + h*ld_p + i, ld_p, x + i, o, ni, d, h == 0 ? ne : none);
        }
    }
}

template <typename T>
static void add_rows(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, const char * const * x, int64_t o, int n, int d,
        const char * const * next) {
    const auto add = d == 128 ? add_rows_of<128, T, ask_rows> : d == 64 ? add_rows_of<64, T, ask_rows> : add_rows_of<0, T, ask_rows>;
    add(acc, ld_acc, p, ld_p, n_head, x, o, n, d, { next });
}

// acc[h] += p[h*ld_p]*row h of a position, see dot_position
template <int D, typename T>
static SPARQ_NOINLINE void add_position(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, const char * x, int64_t nb,
        int any_d, const char * next) {
    const int     d  = D > 0 ? D : any_d;
    constexpr int NC = span<T>::SIZE;
    for (int h = 0; h < n_head; ++h) {
        const char * row = x + h*nb, * ask = next + h*nb;
        float * a = acc + h*ld_acc;
        const vf ph = set1(p[h*ld_p]);
        int c = 0;
        SPARQ_UNROLL
        for (; c + NC <= d; c += NC) {
            if (row_bytes<T>(c) % 64 < row_bytes<T>(NC)) {
                prefetch_bytes(ask + row_bytes<T>(c), row_bytes<T>(NC));
            }
            const span<T> y(row, c);
            SPARQ_UNROLL
            for (int v = 0; v < NC/W; ++v) {
                store(a + c + v*W, fma(ph, y.vec(v), load(a + c + v*W)));
            }
        }
        if (c < d) {
            store_n(a + c, fma(ph, span<T>::tail(row, c, d - c), load_n(a + c, d - c)), d - c);
        }
    }
}

template <int D, typename T>
static void add_positions_of(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, int n_group, const char * const * x,
        int64_t nb, int n, int d, const char * next) {
    const int64_t size = row_bytes<T>(d);
    for (int i = 0; i < n && n_group == 1; ++i, next += n_head*size) {
        add_position<D, T>(acc, ld_acc, p + i, ld_p, n_head, x[i], nb, d, next);
    }
    for (int i = 0; i < n && n_group > 1; i += POS_BLOCK) {
        const int ni = n - i < POS_BLOCK ? n - i : POS_BLOCK;
        for (int h = 0; h*n_group < n_head; ++h, next += POS_BLOCK*size) {
            add_rows_of<D, T>(acc + h*n_group*ld_acc, ld_acc, p + h*n_group*ld_p + i, ld_p, n_group, x + i, h*nb, ni, d, ask_run { next });
        }
    }
}

template <typename T>
static void add_positions(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, int n_group, const char * const * x, int64_t nb,
        int n, int d, const char * next) {
    const auto add = d == 128 ? add_positions_of<128, T> : d == 64 ? add_positions_of<64, T> : add_positions_of<0, T>;
    add(acc, ld_acc, p, ld_p, n_head, n_group, x, nb, n, d, next);
}

// logits of one query head over n rows -> softmax numerators in place; fills m and l of the state
static inline void softmax_part(const attn_state & st, float * s, const float * bias, int n, float scale, float softcap, float slope) {
    const vf inf = set1(-INFINITY);
    vf m = inf;
    for (int i = 0; i < n; i += W) { // s and bias are readable up to a multiple of W; bias is -inf there
        vf x = mul(load(s + i), set1(scale));
        if (softcap > 0.0f) {
            x = soft_cap(x, softcap);
        }
        const vf b = load(bias + i);
        x = select(eq(b, inf), inf, fma(b, set1(slope), x));
        store(s + i, x);
        m = vmax(x, m);
    }
    st.m() = reduce_max(m);

    const vf m0 = set1(st.m() == -INFINITY ? 0.0f : st.m());
    vf l = set1(0.0f);
    for (int i = 0; i < n; i += W) {
        const vf p = exp(sub(load(s + i), m0));
        store(s + i, p);
        l = add(l, p);
    }
    st.l() = reduce_add(l);
}

// res [d] = sum over the states (x, x + ld, ..) of one query head, in order; then the sink, if any. Zeros if nothing was seen
static inline void merge(float * res, const float * x, int64_t ld, int n_state, int d, const float * sink) {
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
}

} // namespace sparse
