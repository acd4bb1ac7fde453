#pragma once

// What the glue of the steps shares: tensors to pointers, types to functions, work buffers, units of work.
//
// The glue of a step is its .cpp file. It reads the node, plans the work and shares it among the threads; the header of the same name has
// the arithmetic.
//
//   types    q is f32; K and V are f16, bf16, f32, q8_0 or q4_0; the shadow is f16 or codes of 8 or 4 bits; the mask is f16. ggml-sparse.h has
//            the rest, and the constructors check it
//   threads  Work is cut into units whose size depends on shapes and on what the token selected only, and partial results are merged in the
//            order of the units. So the result has the same bits for any number of threads, whoever takes which unit, and whatever other tokens
//            read. Every thread reaches every barrier
//   memory   Scratch comes from params->wdata. Its layout is written once, in the *_work of a step, and serves ggml_sparse_attn_work_size too
//   stats    Thread 0 adds them, but for those that threads count as they go, which are added atomically. The numbers follow from shapes,
//            visible, sealed and n_sel

#include "ggml-sparse-nodes.h"
#include "sparse-attn.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "sparse-rows.h"

#include <algorithm>

namespace sparse {

// ---- the steps: run a node; bytes of work buffer that it needs ----

void   forward_seal          (const ggml_compute_params * params, ggml_tensor * dst);
void   forward_visible       (const ggml_compute_params * params, ggml_tensor * dst);
void   forward_score         (const ggml_compute_params * params, ggml_tensor * dst);
void   forward_select        (const ggml_compute_params * params, ggml_tensor * dst);
void   forward_score_select  (const ggml_compute_params * params, ggml_tensor * dst);
void   forward_attend        (const ggml_compute_params * params, ggml_tensor * dst);
void   forward_prefill       (const ggml_compute_params * params, ggml_tensor * dst);
size_t seal_work_size        (const ggml_tensor * dst, int n_threads);
size_t score_work_size       (const ggml_tensor * dst, int n_threads);
size_t select_work_size      (const ggml_tensor * dst, int n_threads);
size_t score_select_work_size(const ggml_tensor * dst, int n_threads);
size_t attend_work_size      (const ggml_tensor * dst, int n_threads);
size_t prefill_work_size     (const ggml_tensor * dst, int n_threads);

// ---- tensors ----

template <typename T = char>
T * at(const ggml_tensor * t, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    return (T *) ((char *) t->data + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3]);
}

// bytes of one head of one position of K or V
inline int64_t row_size(const ggml_tensor * x) { return ggml_row_size(x->type, x->ne[0]); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1)/b; }

// calls f with a null pointer to the element type of K or V
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

// cells of a group that lie below n_kv
inline int group_size(int64_t g, int64_t n_kv) { return (int) std::min<int64_t>(GROUP, n_kv - g*GROUP); }

inline void add_stat(const ggml_tensor * stats, ggml_sparse_stat i, int64_t n) { ((int64_t *) stats->data)[i] += n; }

// ---- memory ----

// Hands out pieces of the work buffer, each in cache lines of its own. Without a buffer it only counts
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

// Every thread has pieces of its own behind those that all share: take(own) takes those of one thread, and is called last for thread ith.
// Returns the bytes of all
template <typename F>
size_t take_per_thread(const bump & shared, int ith, int nth, F take) {
    bump   own(shared.end());
    size_t size = 0;
    for (int i = 0; i <= ith; ++i) {
        take(own);
        size = i == 0 ? own.used : size;
    }
    return shared.used + nth*size + bump::ALIGN;
}

// ---- units of work ----

// takes the number of a unit apart, the index that varies fastest first; `rest` is the last index
struct digits {
    int64_t rest;

    int64_t next(int64_t n) {
        const int64_t i = rest % n;
        rest /= n;
        return i;
    }
};

// Hands out the units 0 .. n - 1. Each thread has a part of them that are neighbours in memory. The second half of every part is open to all,
// in blocks, since the threads of one core, of unlike cores or of a busy machine are not equally fast.
// With NUMA nodes nothing is open. If threads are a multiple of the n_piece pieces (heads), thread i then works on piece i % n_piece, and so
// does SEAL, which touches the shadow's pages first. Threads lie on nodes in turns, so all who read a head are on the node that holds it, as
// long as the nodes divide the heads (with 48 threads for 32 heads, say, some read from elsewhere).
struct unit_queue {
    struct units { int64_t begin = 0, end = 0; };

    const ggml_compute_params * params;
    int64_t n, align; // units, and how many neighbours stay together, as a piece
    int64_t n_piece;
    int64_t block;    // pieces that a thread takes at once of what is open, 0: nothing is open
    units   mine;     // this thread's current units
    int64_t u;        // the one of them that comes next
    units   stolen;   // the block that comes after them, if it is known already: of any thread's part

    // Called before a barrier, after which the threads make their queues. There can be one queue at a time, because the count is the pool's
    static void open(const ggml_compute_params * params) {
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, 0);
        }
    }

    // align: units that stay together, as long as each thread finds some then
    unit_queue(const ggml_compute_params * params, int64_t n, int64_t align = 1) : params(params), n(n), align(align) {
        const int64_t nth = params->nth;
        n_piece = ceil_div(n, align);
        block   = ceil_div(n_piece, 16*nth);
        if (ggml_is_numa() || n_piece < 4*nth) {
            block = 0;
            mine  = fixed(params->ith);
        } else {
            mine = { part(params->ith)*align, std::min(n, open_from(params->ith)*align) };
        }
        u = mine.begin;
    }

    // where nothing is open: the units of thread i, and the thread that has unit x
    units fixed(int64_t i) const {
        const int64_t nth = params->nth;
        if (ggml_is_numa() && nth % n_piece == 0) {
            const int64_t at = i % n_piece*align, size = std::min(align, n - at), m = i/n_piece, n_share = nth/n_piece;
            return { at + size*m/n_share, at + size*(m + 1)/n_share };
        }
        return { n*i/nth, n*(i + 1)/nth };
    }
    int owner(int64_t x) const {
        int   i = -1;
        units has;
        do {
            has = fixed(++i);
        } while (x < has.begin || x >= has.end);
        return i;
    }

    // the first piece of thread i's part, and of the half of it that is open
    int64_t part(int64_t i)      const { return n_piece*i/params->nth; }
    int64_t open_from(int64_t i) const { return (part(i) + part(i + 1) + 1)/2; }

    // the unit that comes next, -1 if none is left
    int64_t peek() {
        if (u < mine.end) {
            return u;
        }
        while (stolen.begin >= stolen.end && block > 0) {
            const int64_t b = ggml_threadpool_chunk_add(params->threadpool, 1), i = b % params->nth;
            const int64_t p0 = open_from(i) + b/params->nth*block, p1 = std::min(p0 + block, part(i + 1)); // pieces
            stolen = { p0*align, std::min(n, p1*align) };
            block  = b/params->nth*block < ceil_div(n_piece, params->nth) ? block : 0; // 0: all are taken
        }
        return stolen.begin < stolen.end ? stolen.begin : -1;
    }

    // takes it
    int64_t take() {
        const int64_t res = peek();
        if (u >= mine.end && res >= 0) {
            u      = stolen.begin;
            mine   = stolen;
            stolen = {};
        }
        u += res >= 0;
        return res;
    }
};

} // namespace sparse

using namespace sparse;
