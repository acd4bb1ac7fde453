#pragma once

// What the glue of the steps shares: tensors to pointers, types, work buffers, units of work.
//
//   types    q f32; K, V f16 | bf16 | f32 | q8_0 | q4_0; k_t f16 or codes of 8 or 4 bits; mask f16; everything else as in ggml-sparse.h (asserted by the constructors)
//   threads  work is cut into units whose size depends on shapes only, and partial results are merged in the order of the units:
//            the result has the same bits for any number of threads, whoever takes which unit. Every thread reaches every barrier.
//   memory   scratch comes from params->wdata; its layout is written once, in *_work, and serves ggml_sparse_attn_work_size too
//   stats    thread 0 adds; the numbers follow from shapes, visible, sealed and n_sel

// gcc 12 takes the "undefined" operands inside its own AVX-512 header for mistakes (GCC bug 105593)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "ggml-sparse-nodes.h"
#include "sparse-attn.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "sparse-rows.h"

#include <algorithm>

namespace sparse {

// by sub-operation: run it; bytes of work buffer it needs
void   forward_score         (const ggml_compute_params * params, ggml_tensor * dst);
void   forward_select        (const ggml_compute_params * params, ggml_tensor * dst);
void   forward_score_select  (const ggml_compute_params * params, ggml_tensor * dst);
void   forward_attend        (const ggml_compute_params * params, ggml_tensor * dst);
void   forward_prefill       (const ggml_compute_params * params, ggml_tensor * dst);
size_t score_work_size       (const ggml_tensor * dst, int n_threads);
size_t select_work_size      (const ggml_tensor * dst, int n_threads);
size_t score_select_work_size(const ggml_tensor * dst, int n_threads);
size_t attend_work_size      (const ggml_tensor * dst, int n_threads);
size_t prefill_work_size     (const ggml_tensor * dst, int n_threads);

template <typename T = char>
T * at(const ggml_tensor * t, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    return (T *) ((char *) t->data + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3]);
}

// bytes of one head of one position of K or V
inline int64_t row_size(const ggml_tensor * x) { return ggml_row_size(x->type, x->ne[0]); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1)/b; }

// calls f with a pointer of the element type of K or V
template <typename F>
void with_kv_type(ggml_type type, F f) {
    switch (type) {
#define X(name, element, n) case GGML_TYPE_##name: f((const element *) nullptr); break;
        GGML_SPARSE_KV_TYPES(X)
#undef X
        default: GGML_ABORT("sparse_attn: type %s of K or V is not supported", ggml_type_name(type));
    }
}

// ALiBi; the same slopes as ggml's softmax
inline float head_slope(int h, int n_head, float max_bias) {
    if (max_bias <= 0.0f) {
        return 1.0f;
    }
    const int   n_log2 = 1 << (int) floorf(log2f((float) n_head));
    const float m0     = powf(2.0f, -max_bias/n_log2);
    const float m1     = powf(2.0f, -max_bias/2.0f/n_log2);
    return h < n_log2 ? powf(m0, h + 1) : powf(m1, 2*(h - n_log2) + 1);
}

// hands out pieces of the work buffer, in cache lines of their own; with a NULL buffer it only counts
struct bump {
    static constexpr size_t ALIGN = 128; // lines are fetched in pairs

    uintptr_t base;
    size_t    used = 0;

    explicit bump(const void * buf) : base(((uintptr_t) buf + ALIGN - 1)/ALIGN*ALIGN) {}

    template <typename T>
    T * take(size_t n) {
        T * res = (T *) (base + used);
        used += (n*sizeof(T) + ALIGN - 1)/ALIGN*ALIGN;
        return res;
    }

    const void * end() const { return (const void *) (base + used); }
};

// cells of a group that lie below n_kv
inline int group_size(int64_t g, int64_t n_kv) { return (int) std::min<int64_t>(GROUP, n_kv - g*GROUP); }

inline void add_stat(const ggml_tensor * stats, ggml_sparse_stat i, int64_t n) { ((int64_t *) stats->data)[i] += n; }

// Hands out the units 0 .. n - 1. Each thread has a part of them, neighbours in memory; the second half of every part is open to all, in
// blocks: threads of one core, of unlike cores or of a busy machine are not equally fast. Not so where memory has NUMA nodes: there, what a
// thread has is its own; and where threads are a multiple of the `n_whole` pieces (heads), thread i works on piece i % n_whole, as SEAL does,
// which touches the shadow's pages first. Threads lie on nodes in turns, so all who read a head are on the node that holds it, as long as nodes
// divide heads (with 48 threads for 32 heads, say, some read from elsewhere)
struct unit_queue {
    const ggml_compute_params * params;
    int64_t n, align; // units; neighbours that stay together
    int64_t n_whole;  // n in pieces of `align` units
    int64_t size;     // a block likewise, 0: none is open
    int64_t u0, u1;   // the units at hand: [u0, u1)
    int64_t u;        // of it, the unit that comes next
    int64_t v0 = 0, v1 = 0; // the block after it, where it is known already

    // before a barrier, after which queues are made. One at a time: the count is the pool's
    static void open(const ggml_compute_params * params) {
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, 0);
        }
    }

    // align: units that stay together, as long as each thread finds some
    unit_queue(const ggml_compute_params * params, int64_t n, int64_t align = 1) : params(params), n(n), align(align) {
        const int64_t nth = params->nth;
        n_whole = ceil_div(n, align);
        size   = ceil_div(n_whole, 16*nth);
        if (ggml_is_numa() || n_whole < 4*nth) {
            size = 0;
            fixed(params->ith, u0, u1);
        } else {
            u0 = part(params->ith)*align;
            u1 = std::min(n, open_from(params->ith)*align);
        }
        u = u0;
    }

    // where nothing is open: what thread i has, and who has unit x
    void fixed(int64_t i, int64_t & x0, int64_t & x1) const {
        const int64_t nth = params->nth;
        if (ggml_is_numa() && nth % n_whole == 0) {
            const int64_t at = i % n_whole*align, size = std::min(align, n - at), m = i/n_whole, n_share = nth/n_whole;
            x0 = at + size*m/n_share;
            x1 = at + size*(m + 1)/n_share;
        } else {
            x0 = n*i/nth;
            x1 = n*(i + 1)/nth;
        }
    }
    int owner(int64_t x) const {
        int64_t x0, x1;
        int i = -1;
        do {
            fixed(++i, x0, x1);
        } while (x < x0 || x >= x1);
        return i;
    }

    // the part of thread i, and the second half of it, in pieces
    int64_t part(int64_t i)      const { return n_whole*i/params->nth; }
    int64_t open_from(int64_t i) const { return (part(i) + part(i + 1) + 1)/2; }

    // the unit that comes next, -1: none is left
    int64_t peek() {
        if (u < u1) {
            return u;
        }
        while (v0 >= v1 && size > 0) {
            const int64_t b = ggml_threadpool_chunk_add(params->threadpool, 1), i = b % params->nth;
            v0 = open_from(i) + b/params->nth*size;
            v1 = std::min(v0 + size, part(i + 1));
            v0 *= align;
            v1 = std::min(n, v1*align);
            size = b/params->nth*size < ceil_div(n_whole, params->nth) ? size : 0; // 0: all are taken
        }
        return v0 < v1 ? v0 : -1;
    }

    // takes it
    int64_t take() {
        const int64_t res = peek();
        if (u >= u1 && res >= 0) {
            u  = u0 = v0;
            u1 = v1;
            v0 = v1 = 0;
        }
        u += res >= 0;
        return res;
    }
};

} // namespace sparse

using namespace sparse;
