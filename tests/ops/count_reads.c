// Counts the bytes that every thread reads or writes, for tests/ops/partition.py. Code compiled with -fsanitize=thread calls these
// functions at each access; here they are in place of that sanitizer.

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define N_THREAD 128
#define N_REGION 8

static struct { uintptr_t first, last; } regions[N_REGION];
static int n_region;

static long counts[N_THREAD][2]; // in the regions; anywhere
static atomic_int n_thread, run = 1;

static _Thread_local int slot, slot_run;

static void count(const void * p, size_t n) {
    if (slot_run != run) {
        slot_run = run;
        slot = atomic_fetch_add(&n_thread, 1) % N_THREAD;
    }
    counts[slot][1] += n;
    for (int i = 0; i < n_region; ++i) {
        if ((uintptr_t) p >= regions[i].first && (uintptr_t) p < regions[i].last) {
            counts[slot][0] += n;
        }
    }
}

// memory to count by itself: K, V and what is made of them
void count_watch(const void * p, size_t n) {
    regions[n_region % N_REGION].first = (uintptr_t) p;
    regions[n_region++ % N_REGION].last = (uintptr_t) p + n;
}

// the counts [N_THREAD][2] since the last call, in no particular order of the threads; forgets the regions if `forget`
void count_take(long * out, int forget) {
    for (int i = 0; i < 2*N_THREAD; ++i) {
        out[i] = counts[i/2][i%2];
        counts[i/2][i%2] = 0;
    }
    n_thread = 0;
    run++;
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
