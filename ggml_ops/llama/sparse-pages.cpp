#include "sparse-pages.h"

#include "ggml-sparse.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

void llama_sparse_huge_pages(char * at, size_t n) {
#if defined(__linux__)
    constexpr uintptr_t PAGE = GGML_SPARSE_HUGE_PAGE;
    const uintptr_t first = ((uintptr_t) at + PAGE - 1)/PAGE*PAGE, last = ((uintptr_t) at + n)/PAGE*PAGE;
    if (last >= first + 2*PAGE) {
        madvise((void *) first, last - first, MADV_HUGEPAGE); // a wish: where the kernel refuses, nothing is lost
    }
#else
    (void) at;
    (void) n;
#endif
}

std::atomic<bool> llama_sparse_pages::unmap_failed = false;

bool llama_sparse_pages::map(char * at, size_t n, int fd, uint64_t offset) {
    size_t & mapped = spans[at]; // what may throw comes before the system is asked
    if (n == 0 || mmap(at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, (off_t) offset) == MAP_FAILED) {
        return false;
    }
    mapped = std::max(mapped, n);
    return true;
}

void llama_sparse_pages::unmap() {
    for (const auto & [at, n] : spans) {
        if (n > 0 && mmap(at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1, 0) == MAP_FAILED) {
            memset(at, 0, n); // copies of the file's pages
            unmap_failed = true;
        } else {
            llama_sparse_huge_pages(at, n);
        }
    }
    spans.clear();
}
