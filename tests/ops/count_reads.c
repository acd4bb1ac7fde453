// Counts the bytes that every thread reads or writes, for tests/ops/test_partition.py. Code compiled with -fsanitize=thread calls these
// functions at each access; here they are in place of that sanitizer.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define N_THREAD 128
#define N_REGION 8

static struct { uintptr_t first, last; } regions[N_REGION];
static int n_region;

static long counts[N_THREAD][N_REGION + 1]; // in each region; anywhere

extern _Thread_local int isa_thread;

static void count(const void * p, size_t n) {
    long * c = counts[isa_thread];
    c[N_REGION] += n;
    for (int i = 0; i < n_region; ++i) {
        if ((uintptr_t) p >= regions[i].first && (uintptr_t) p < regions[i].last) {
            c[i] += n;
        }
    }
}

// memory to count by itself
void count_watch(const void * p, size_t n) {
    regions[n_region].first = (uintptr_t) p;
    regions[n_region++].last = (uintptr_t) p + n;
}

// the counts [N_THREAD][N_REGION + 1] since the last call; forgets the regions if `forget`
void count_take(long * out, int forget) {
    memcpy(out, counts, sizeof(counts));
    memset(counts, 0, sizeof(counts));
    n_region = forget ? 0 : n_region;
}

#define ACCESS(name, n) void __tsan_##name(void * p) { count(p, n); }
#define ACCESSES(n) ACCESS(read##n, n) ACCESS(write##n, n) ACCESS(unaligned_read##n, n) ACCESS(unaligned_write##n, n)

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range (void * p, size_t n) { count(p, n); }
void __tsan_write_range(void * p, size_t n) { count(p, n); }
void __tsan_init(void) {}
void __tsan_func_entry(void * p) { (void) p; }
void __tsan_func_exit(void) {}
void __tsan_vptr_update(void ** p, void * q) { (void) p; (void) q; }
