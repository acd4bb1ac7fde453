// Races of kernels on the emulator. -fsanitize=thread calls these functions before each access to memory; its own library is not linked.
//
//   Two accesses to a byte, one of them a write, must be parted by a barrier of a group that both threads belong to: of the warp (any operation of
//   it), the block, the cluster. Atomic operations need none among themselves; threads of different clusters have none.
//   What another block wrote to global memory in the same launch is read by __ldcg(), past the L1 cache; nothing global is touched before the
//   kernel has waited for the one in front of it.
//   Of a word the last write and the last read are known, so of several reads without a barrier one can hide another.

#include "ggml-impl.h"
#include "cuda_emu.h"

#include <unordered_map>

extern "C" {
extern char __ehdr_start __attribute__((visibility("hidden"))), _end __attribute__((visibility("hidden"))); // of this library
}

namespace emu {

struct trace {
    unsigned cluster, n_warp; // whose thread; its operations before
    uint16_t n_block, n_arrived, n_released, thread;
    uint8_t  bytes, kind;     // of the word, a bit each; see `by`
};

struct history {
    struct word { trace write, read; };
    struct page { uintptr_t at = 0; word words[1024] = {}; };
    std::unordered_map<uintptr_t, page> pages;
    page * recent[256] = {};

    word & at(uintptr_t p) {
        page *& known = recent[p/4096 % 256];
        if (!known || known->at != p/4096) {
            known = &pages[p/4096];
            known->at = p/4096;
        }
        return known->words[p % 4096/4];
    }
};

inline bool is_in(uintptr_t p, const void * begin, size_t n) { return p - (uintptr_t) begin < n; }

static bool is_watched(uintptr_t p) {
    return the_machine && m().runs && !is_in(p, m().stacks, (size_t) N_MAX*STACK) && !is_in(p, &m(), sizeof(machine)) && !is_in(p, m().functor, m().n_functor);
}

static void check(uintptr_t p, size_t n, bool writes, by kind) {
    static history known;
    static size_t  last = 0; // the range that had the last address
    const machine & x = m();
    const bool is_shared = is_in(p, x.shared, (size_t) C_MAX*SHARED) || is_in(p, &__ehdr_start, &_end - &__ehdr_start);
    const fiber & f = x.f[x.self];
    const auto has = [&](const auto & range) { return is_in(p, range.first, range.second) && n <= range.second - (p - (uintptr_t) range.first); };
    if (!is_shared && !(last < x.memory.size() && has(x.memory[last]))) {
        last = std::find_if(x.memory.begin(), x.memory.end(), has) - x.memory.begin();
        if (last == x.memory.size()) {
            fail("memory outside of all tensors and scratch");
        }
    }
    if (!is_shared && !f.has_begun && (writes || std::none_of(x.early.begin(), x.early.end(), has))) {
        fail("memory is touched before begin_kernel()");
    }
    const int nt = (int) x.block.x;
    const auto is_ordered = [&](const trace & t) { // behind what this thread does now?
        if (t.cluster <= x.n_cluster_before || (is_shared && t.cluster != x.n_cluster_run)) {
            return true;
        }
        return t.cluster == x.n_cluster_run && (t.thread == x.self || (t.thread / 32 == x.self / 32 && t.n_warp < f.n_warp) || (t.thread / nt == x.self / nt && t.n_block < f.n_block) ||
            (is_shared ? t.n_arrived < f.n_waited : t.n_released < f.n_acquired));
    };
    for (const uintptr_t end = p + n; p < end; ) {
        const unsigned size = std::min<uintptr_t>(end - p, 4 - p % 4);
        const trace now = { x.n_cluster_run, f.n_warp, (uint16_t) f.n_block, (uint16_t) f.n_arrived, (uint16_t) f.n_released, (uint16_t) x.self,
            (uint8_t) (((1u << size) - 1) << p % 4), (uint8_t) kind };
        history::word & w = known.at(p);
        const auto is_race = [&](const trace & t) {
            return (t.bytes & now.bytes) && !(kind == by::ATOMIC && t.kind == (uint8_t) by::ATOMIC) && !is_ordered(t);
        };
        if (is_race(w.write) || (writes && is_race(w.read))) {
            fprintf(stderr, "cuda_emu: thread %d before, ", is_race(w.write) ? w.write.thread : w.read.thread);
            fail(is_shared ? "a race in shared memory" : "a race in global memory");
        }
        const trace & t = w.write;
        if (!writes && !is_shared && kind == by::PLAIN && (t.bytes & now.bytes) && t.cluster == x.n_cluster_run && t.thread/nt != x.self/nt) {
            fail("what another block wrote is read through the L1 cache");
        }
        (writes ? w.write : w.read) = now;
        p += size;
    }
}

void touch(const void * p, size_t n, bool writes, by kind) {
    if (is_watched((uintptr_t) p)) {
        check((uintptr_t) p, n, writes, kind);
    }
}

} // namespace emu

extern "C" {
#define SPARQ_ACCESS(name, n, writes) void __tsan_##name##n(void * p) { emu::touch(p, n, writes); }
#define SPARQ_TOUCH(n) SPARQ_ACCESS(read, n, false) SPARQ_ACCESS(write, n, true) SPARQ_ACCESS(unaligned_read, n, false) SPARQ_ACCESS(unaligned_write, n, true)
SPARQ_TOUCH(1) SPARQ_TOUCH(2) SPARQ_TOUCH(4) SPARQ_TOUCH(8) SPARQ_TOUCH(16)
void __tsan_read_range(void * p, long n) { emu::touch(p, n, false); }
void __tsan_write_range(void * p, long n) { emu::touch(p, n, true); }
void __tsan_vptr_update(void *, void *) {}
void __tsan_vptr_read(void *) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void *) {}
void __tsan_init() {}
}
