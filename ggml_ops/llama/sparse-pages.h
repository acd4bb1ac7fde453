#pragma once

// The pages of documents that lie in the memory of K and V.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>

// The pages of a cache that are a file's: a page comes into memory when a row in it is read, and goes when memory is short
struct llama_sparse_pages {
    // The pages of the file take the place of those at `at`, which begin where one does. Private ones: what is written there later stays in memory.
    // False: the system refuses
    bool map(char * at, size_t n, int fd, uint64_t offset);
    void unmap(); // empty memory instead, which is what the cache has before it is first written

    // before the memory goes back to its allocator, which may take its pages for empty ones, or give them to other code: a cache has this behind its buffers
    ~llama_sparse_pages() { unmap(); }

    // Did the system refuse that anywhere? Then pages of files, overwritten with zeros, are still there, and would be read anew if they were given back
    static bool has_unmap_failed() { return unmap_failed; }

private:
    std::map<char *, size_t> spans; // bytes that were mapped from here on, at most: a document may lie where others did
    static std::atomic<bool> unmap_failed;
};
