// Lets the n-th allocation of C++ fail, or all buffers of ggml, for test_no_memory.py: loaded before the C++ library (LD_PRELOAD).

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

static std::atomic<long> left(-1), n_failed(0);

// of the next call to operator new on, the n-th fails, and none after it; < 0: none. Returns how many have failed since the last call
extern "C" long fail_new(long n) {
    left = n;
    return n_failed.exchange(0);
}

static std::atomic<bool> no_buffers(false);

extern "C" void fail_buffers(bool fail) { no_buffers = fail; }

extern "C" int posix_memalign(void ** p, size_t alignment, size_t n) noexcept {
    *p = no_buffers ? nullptr : aligned_alloc(alignment, (n + alignment - 1)/alignment*alignment);
    return *p ? 0 : ENOMEM;
}

void * operator new(size_t n) {
    if (left >= 0 && left-- == 0) {
        ++n_failed;
        throw std::bad_alloc();
    }
    if (void * p = malloc(n)) {
        return p;
    }
    throw std::bad_alloc();
}

void operator delete(void * p) noexcept { free(p); }
void operator delete(void * p, size_t) noexcept { free(p); }
