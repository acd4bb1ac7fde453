#include "sparse-pages.h"

#include "sparse-system.h"

#include <algorithm>
#include <cstring>

std::atomic<bool> llama_sparse_pages::unmap_failed = false;

bool llama_sparse_pages::map(char * at, size_t n, int fd, uint64_t offset) {
    size_t & mapped = spans[at]; // what may throw comes before the system is asked
    if (n == 0 || !llama_sparse_map_file(at, n, fd, offset)) {
        return false;
    }
    mapped = std::max(mapped, n);
    return true;
}

void llama_sparse_pages::unmap() {
    for (const auto & [at, n] : spans) {
        if (n > 0 && !llama_sparse_map_empty(at, n)) {
            memset(at, 0, n); // copies of the file's pages
            unmap_failed = true;
        } else {
            llama_sparse_huge_pages(at, n);
        }
    }
    spans.clear();
}
