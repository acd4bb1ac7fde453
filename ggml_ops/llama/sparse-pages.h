#pragma once

// The pages of documents that lie where K and V do, and which of them stay in memory.
//
// Without a limit the system decides: a page comes in when a row in it is read, and goes when memory is short. With a limit we do. Every node of
// attention first says which rows it reads. Pages that are not in memory are asked for all at once, so that the disk works on many; a thread that
// waits for one page after another takes six times as long. When more pages are in memory than the limit allows, those go that are read the
// least often, and of equals those that came in last. A token reads layer after layer, so that what was read the longest ago is what comes next:
// where a token reads more than there is room for, a part that stays serves better than what is newest.

#include "ggml.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

struct llama_context;

// Rows of K and V, gathered, lie in a page each: without huge pages address translation takes longer than the bytes
void llama_sparse_huge_pages(char * at, size_t n);

struct llama_sparse_pages {
    // The pages of the file take the place of those at `at`, which begin where one does. Private ones: what is written there later stays in memory.
    // False: the system refuses
    bool map(char * at, size_t n, int fd, uint64_t offset);
    void unmap(); // empty memory instead, which is what the cache has before it is first written

    // Did the system refuse that anywhere? Then pages of files, overwritten with zeros, are still there, and would be read anew if they were given back
    static bool is_any_left() { return any_left; }

    // so many bytes at most, 0: the system decides. A node of attention may read more than that, and its pages go when the next one begins
    void set_limit(size_t n_bytes);
    static bool can_limit(); // can the system drop pages?
    bool is_limited() const { return limit > 0 && !spans.empty(); }

    struct counts {
        int64_t limit;  // bytes
        int64_t held;   // bytes that are in memory, as far as we know
        int64_t wanted; // pages that nodes have read, each once for a node ..
        int64_t read;   // .. and those of them that were not in memory
        int64_t page;   // bytes of a page
    };
    counts read_counts() const;
    void   reset_counts();

    // A node of attention begins: makes room. By one thread, while no other is in want()
    void begin();

    // It will read these bytes, of which some may be no document's. By any thread
    void want(const char * at, size_t n);

private:
    struct use {
        std::atomic<uint32_t> last = 0; // the node that read the page last, 0: none
        uint32_t since = 0;             // the node for which it came in, 0: it is not in memory
        float    heat  = 0.0f;          // log2 of how many nodes have read it, where those of long ago count less
    };

    struct span {
        char * at;
        size_t n; // bytes of whole pages
        std::shared_ptr<use[]> uses; // of its pages; where a document took a part of others', the rest of them goes on with their uses

        char * end() const { return at + n; }
    };

    std::vector<span>::const_iterator span_of(const char * at) const; // the last one that begins there or before; else the first
    uint64_t                          worth  (const use & x)   const; // pages go in this order
    span                              part   (const span & x, char * from, char * to) const; // its pages [from, to)

    int    advice() const; // how the system should read the pages
    void   make_room();
    size_t drop(const span & x, size_t begin, size_t end);

    const size_t page = page_size();
    static size_t page_size();

    std::vector<span> spans; // in the order of their addresses
    uint32_t          now = 1; // the number of the node
    std::atomic<int64_t>  n_in = 0;  // pages in memory
    std::atomic<int64_t>  n_wanted = 0, n_read = 0;
    size_t limit = 0;
    int    n_vain = 0; // so many times in a row the system has dropped none of the pages; after MOST_VAIN we leave it to it
    static constexpr int MOST_VAIN = 1000;
    static std::atomic<bool> any_left;
};

// of a context
llama_sparse_pages::counts llama_sparse_pages_of(llama_context & ctx);

// What a node of attention reads of documents. It must live as long as the graph
struct llama_sparse_reads {
    std::shared_ptr<llama_sparse_pages> pages;
    ggml_tensor * k, * v; // views of the cache; v may be NULL
    int64_t       n_group_q;
};

// t itself, once the pages are asked for that its reader needs. t: a selection, of which the cells are read, or q: all of K and V
ggml_tensor * llama_sparse_build_reads(ggml_context * ctx, ggml_tensor * t, llama_sparse_reads & reads);
