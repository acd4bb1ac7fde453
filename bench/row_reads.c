// Reads memory in the orders of sparse attention, and does nothing else.
#include <stddef.h>
#include <stdint.h>

typedef uint64_t vec __attribute__((vector_size(64)));

static uint64_t sum(vec x) {
    uint64_t res = 0;
    for (int i = 0; i < 8; ++i) {
        res ^= x[i];
    }
    return res;
}

enum { ROW = 256 }; // bytes; without loops inside a row, whose loads and branches would wait behind the memory on its way

// XOR of n rows at x + at[i], one after another; each is asked for `ahead` rows early
uint64_t sparq_bench_rows(const char * x, const int64_t * at, size_t n, size_t ahead) {
    vec res = {0};
    for (size_t i = 0; i < n; ++i) {
        const char * next = x + at[i + ahead < n ? i + ahead : n - 1];
        const char * row  = x + at[i];
        #pragma GCC unroll 4
        for (size_t o = 0; o < ROW; o += sizeof(vec)) {
            __builtin_prefetch(next + o, 0, 2);
        }
        #pragma GCC unroll 4
        for (size_t o = 0; o < ROW; o += sizeof(vec)) {
            res ^= *(const vec *) (row + o);
        }
    }
    return sum(res);
}

// the same for runs of `size` bytes (a multiple of 64), `side` of them side by side (n: a multiple of it), a line of each in turn; `ahead` is in
// lines. Nothing is loaded between the lines but themselves: loops that look up each run's place again get 65 instead of 85 % of a sequential read
static inline __attribute__((always_inline)) uint64_t runs(const char * x, const int64_t * at, size_t n, size_t size, size_t ahead, const size_t side) {
    vec res = {0};
    for (size_t i = 0; i < n; i += side) {
        const char * run[32];
        for (size_t j = 0; j < side; ++j) {
            run[j] = x + at[i + j];
        }
        for (size_t o = 0; o < size; o += sizeof(vec)) {
            #pragma GCC unroll 32
            for (size_t j = 0; j < side; ++j) {
                __builtin_prefetch(run[j] + o + ahead*sizeof(vec), 0, 3);
            }
            #pragma GCC unroll 32
            for (size_t j = 0; j < side; ++j) {
                res ^= *(const vec *) (run[j] + o);
            }
        }
    }
    return sum(res);
}

uint64_t sparq_bench_runs16(const char * x, const int64_t * at, size_t n, size_t size, size_t ahead) { return runs(x, at, n, size, ahead, 16); }
uint64_t sparq_bench_runs32(const char * x, const int64_t * at, size_t n, size_t size, size_t ahead) { return runs(x, at, n, size, ahead, 32); }

// drops the pieces from the caches, but not the page tables that lead to them; 0: not on this CPU
int sparq_bench_drop(const char * x, const int64_t * at, size_t n, size_t size) {
#if defined(__x86_64__)
    for (size_t i = 0; i < n; ++i) {
        for (size_t o = 0; o < size; o += sizeof(vec)) {
            __builtin_ia32_clflush(x + at[i] + o);
        }
    }
    __builtin_ia32_mfence();
    return 1;
#else
    (void) x; (void) at; (void) n; (void) size;
    return 0;
#endif
}
