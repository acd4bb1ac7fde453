// Counts the allocations of a process, for test_memory.py: loaded before the C library (LD_PRELOAD; glibc).

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

void * __libc_malloc(size_t n);
void * __libc_calloc(size_t n, size_t size);
void * __libc_realloc(void * p, size_t n);
void * __libc_memalign(size_t align, size_t n);

static atomic_long calls, largest;

static void count(size_t n) {
    atomic_fetch_add(&calls, 1);
    long seen = atomic_load(&largest);
    while ((long) n > seen && !atomic_compare_exchange_weak(&largest, &seen, (long) n)) {
    }
}

void * malloc(size_t n)                       { count(n);      return __libc_malloc(n); }
void * calloc(size_t n, size_t size)          { count(n*size); return __libc_calloc(n, size); }
void * realloc(void * p, size_t n)            { count(n);      return __libc_realloc(p, n); }
void * aligned_alloc(size_t align, size_t n)  { count(n);      return __libc_memalign(align, n); }
void * memalign(size_t align, size_t n)       { count(n);      return __libc_memalign(align, n); }
int posix_memalign(void ** p, size_t align, size_t n) {
    count(n);
    *p = __libc_memalign(align, n);
    return *p ? 0 : ENOMEM;
}

// since the last call: how many, and the largest in bytes
void allocations(long * n, long * n_largest) {
    *n = atomic_exchange(&calls, 0);
    *n_largest = atomic_exchange(&largest, 0);
}
