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

// Rows are given by their addresses: x [n], readable up to a multiple of ROW_BLOCK (the last one again), each row at x[i] + o. next, if
// given, are as many other rows, asked for on the way, a line of each at a time: requests in bursts keep the loads waiting

// s[h][i] = q[h] . row i for HB heads and up to W rows; NR rows share each load of q. D: d where it is known, without a loop then: what is
// left for each iteration waits behind the rows that are still on their way (ATTEND at 1/8 takes 10 % longer)
template <int HB, int NR, int D, typename T>
static SPARQ_NOINLINE void dot_block( // inlined, its pointers no longer fit the registers (2x slower)
        float * s, int64_t ld_s, const float * q, int64_t ld_q, const char * const * x, int64_t o, int n, int any_d, const char * const * next) {
    const int     d  = D > 0 ? D : any_d;
    constexpr int NW = NR < W ? NR : W;
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
            if (next && row_bytes<T>(c) % 64 < row_bytes<T>(NC)) {
                for (int i = 0; i < NW; ++i) { // a line of each row: neighbours at once are slower (GQA-4, f16: 68 instead of 78 % of bandwidth)
                    prefetch_bytes(next[j + i] + row_bytes<T>(c), row_bytes<T>(NC));
                }
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
template <int D, typename T>
static void dot_rows_of(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * const * x, int64_t o, int n, int d,
        const char * const * next) {
    for (int i = 0; i < n; i += W) {
        const int    ni = n - i < W ? n - i : W;
        const char * const * ne = next ? next + i : nullptr;
        int h = 0;
        for (; h + 4 <= n_head; h += 4) {
            dot_block<4, N_ACC/4, D, T>(s + h*ld_s + i, ld_s, q + h*ld_q, ld_q, x + i, o, ni, d, h == 0 ? ne : nullptr);
        }
        for (; h + 2 <= n_head; h += 2) {
            dot_block<2, N_ACC/2, D, T>(s + h*ld_s + i, ld_s, q + h*ld_q, ld_q, x + i, o, ni, d, h == 0 ? ne : nullptr);
        }
        for (; h < n_head; ++h) {
            dot_block<1, 8, D, T>(s + h*ld_s + i, ld_s, q + h*ld_q, ld_q, x + i, o, ni, d, h == 0 ? ne : nullptr);
        }
    }
}

template <typename T>
static void dot_rows(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * const * x, int64_t o, int n, int d,
        const char * const * next) {
    const auto dot = d == 128 ? dot_rows_of<128, T> : d == 64 ? dot_rows_of<64, T> : dot_rows_of<0, T>;
    dot(s, ld_s, q, ld_q, n_head, x, o, n, d, next);
}

// One position of all heads, each with a query head of its own: rows that lie one after another, nb bytes apart. To read whole positions is
// to read in the order of memory: with 32 heads, 16 rows of one head after another come at 22 GB/s, whole positions at 28 to 30 (one thread;
// two: 31 and 34). next: as many other rows, asked for on the way; without, the whole takes twice as long

// s[h*ld_s] = q[h] . row h
template <int D, typename T>
static SPARQ_NOINLINE void dot_position_of(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * x, int64_t nb, int any_d,
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

template <typename T>
static void dot_position(float * s, int64_t ld_s, const float * q, int64_t ld_q, int n_head, const char * x, int64_t nb, int d, const char * next) {
    const auto dot = d == 128 ? dot_position_of<128, T> : d == 64 ? dot_position_of<64, T> : dot_position_of<0, T>;
    dot(s, ld_s, q, ld_q, n_head, x, nb, d, next);
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

// acc[h][c] += sum_i p[h][i]*row i[c] for HB heads and the NV vectors from column c on; of the rows of next the same part is asked for
template <int HB, int NV, typename T>
static SPARQ_NOINLINE void add_rows_block(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, const char * const * x, int64_t o, int n,
        int c, const char * const * next) {
    constexpr int NC = span<T>::SIZE/W; // vectors per span
    constexpr int NL = NC < NV ? NC : NV; // the strip of columns may be a part of a span
    vf a[HB][NV];
    SPARQ_UNROLL
    for (int h = 0; h < HB; ++h) {
        SPARQ_UNROLL
        for (int j = 0; j < NV; ++j) {
            a[h][j] = load(acc + h*ld_acc + c + j*W);
        }
    }
    const int     c0 = NC <= NV ? 0 : c % (NC*W); // first column within its span
    const int64_t oc = row_bytes<T>(c - c0);
    for (int i = 0; i < n; ++i) {
        const char * row = x[i] + (o + oc); // columns at fixed places from here: otherwise gcc keeps an address for each, in vector registers
        if (next) {
            prefetch_bytes(next[i] + oc, row_bytes<T>(NV*W));
        }
        vf v[NV];
        SPARQ_UNROLL
        for (int j = 0; j < NV; j += NL) {
            const span<T> y(row, j*W);
            SPARQ_UNROLL
            for (int l = 0; l < NL; ++l) {
                v[j + l] = y.vec(NC <= NV ? l : c0/W + l);
            }
        }
        SPARQ_UNROLL
        for (int h = 0; h < HB; ++h) {
            const vf ph = set1(p[h*ld_p + i]);
            SPARQ_UNROLL
            for (int j = 0; j < NV; ++j) {
                a[h][j] = fma(ph, v[j], a[h][j]);
            }
        }
    }
    SPARQ_UNROLL
    for (int h = 0; h < HB; ++h) {
        SPARQ_UNROLL
        for (int j = 0; j < NV; ++j) {
            store(acc + h*ld_acc + c + j*W, a[h][j]);
        }
    }
}

// the same for d columns
template <int HB, typename T>
static inline void add_rows_heads(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, const char * const * x, int64_t o, int n, int d,
        const char * const * next) {
    constexpr int NV = N_ACC/HB < 8 ? N_ACC/HB : 8;
    constexpr int NH = NV > 4 ? 4 : NV; // heads of 64: without it their rows would not be asked for
    int c = 0;
    for (; c + NV*W <= d; c += NV*W) {
        add_rows_block<HB, NV, T>(acc, ld_acc, p, ld_p, x, o, n, c, next);
    }
    for (; c + NH*W <= d; c += NH*W) {
        add_rows_block<HB, NH, T>(acc, ld_acc, p, ld_p, x, o, n, c, next);
    }
    for (; c + W <= d; c += W) {
        add_rows_block<HB, 1, T>(acc, ld_acc, p, ld_p, x, o, n, c, row_bytes<T>(c) % 64 == 0 ? next : nullptr);
    }
    if (c < d) {
        for (int h = 0; h < HB; ++h) {
            vf a = load_n(acc + h*ld_acc + c, d - c);
            for (int i = 0; i < n; ++i) {
                a = fma(set1(p[h*ld_p + i]), span<T>::tail(x[i] + o, c, d - c), a);
            }
            store_n(acc + h*ld_acc + c, a, d - c);
        }
    }
}

template <typename T>
static void add_rows(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, const char * const * x, int64_t o, int n, int d,
        const char * const * next) {
    // where a row is used more than once, it is to be in the first level still
    const int block = n_head == 1 && d <= 8*W ? n : ROW_BLOCK;
    for (int i = 0; i < n; i += block) {
        const int    ni = n - i < block ? n - i : block;
        const char * const * ne = next ? next + i : nullptr;
        int h = 0;
        for (; h + 4 <= n_head; h += 4) {
            add_rows_heads<4, T>(acc + h*ld_acc, ld_acc, p + h*ld_p + i, ld_p, x + i, o, ni, d, h == 0 ? ne : nullptr);
        }
        for (; h + 2 <= n_head; h += 2) {
            add_rows_heads<2, T>(acc + h*ld_acc, ld_acc, p + h*ld_p + i, ld_p, x + i, o, ni, d, h == 0 ? ne : nullptr);
        }
        for (; h < n_head; ++h) {
            add_rows_heads<1, T>(acc + h*ld_acc, ld_acc, p + h*ld_p + i, ld_p, x + i, o, ni, d, h == 0 ? ne : nullptr);
        }
    }
}

// acc[h] += p[h*ld_p]*row h of a position, see dot_position
template <int D, typename T>
static SPARQ_NOINLINE void add_position_of(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, const char * x, int64_t nb,
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

template <typename T>
static void add_position(float * acc, int64_t ld_acc, const float * p, int64_t ld_p, int n_head, const char * x, int64_t nb, int d,
        const char * next) {
    const auto add = d == 128 ? add_position_of<128, T> : d == 64 ? add_position_of<64, T> : add_position_of<0, T>;
    add(acc, ld_acc, p, ld_p, n_head, x, nb, d, next);
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
