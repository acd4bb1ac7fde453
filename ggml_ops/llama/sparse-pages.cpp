#include "sparse-pages.h"

#include "llama-impl.h"

#include "ggml-sparse.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#if defined(__linux__) && !defined(MADV_PAGEOUT)
#define MADV_PAGEOUT 21 // since Linux 5.4; older systems refuse it
#endif

void llama_sparse_huge_pages(char * at, size_t n) {
#if defined(__linux__)
    constexpr uintptr_t PAGE = GGML_SPARSE_HUGE_PAGE;
    const uintptr_t first = ((uintptr_t) at + PAGE - 1)/PAGE*PAGE, last = ((uintptr_t) at + n)/PAGE*PAGE;
    if (last >= first + 2*PAGE) {
        madvise((void *) first, last - first, MADV_HUGEPAGE); // a wish: where the kernel refuses, nothing is lost
    }
#else
    GGML_UNUSED(at);
    GGML_UNUSED(n);
#endif
}

size_t llama_sparse_pages::page_size() { return sysconf(_SC_PAGESIZE); }

//
// the pages
//

std::atomic<bool> llama_sparse_pages::any_left = false;

llama_sparse_pages::span llama_sparse_pages::part(const span & x, char * from, char * to) const {
    return { from, (size_t) (to - from), std::shared_ptr<use[]>(x.uses, x.uses.get() + (from - x.at)/page) };
}

bool llama_sparse_pages::map(char * at, size_t n, int fd, uint64_t offset) {
    GGML_ASSERT(n % page == 0);
    char * const end = at + n;
    const span fresh = { at, n, std::shared_ptr<use[]>(new use[n/page]) }; // what may throw comes before the system is asked
    if (spans.capacity() < spans.size() + 2) {
        spans.reserve(2*spans.size() + 2);
    }
    if (n == 0 || mmap(at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, (off_t) offset) == MAP_FAILED) {
        return false;
    }
    // the spans [first, last) lie there, of which the first and the last one may go beyond
    const auto ends_before = [](const span & x, const char * p) { return x.end() <= p; };
    auto first = std::lower_bound(spans.begin(), spans.end(), at, ends_before), last = first;
    for (; last != spans.end() && last->at < end; ++last) {
        const size_t lo = (std::max(last->at, at) - last->at)/page, hi = (std::min(last->end(), end) - last->at)/page;
        for (size_t i = lo; i < hi; ++i) {
            n_in -= last->uses[i].since != 0;
        }
    }
    span next[3];
    size_t n_next = 0;
    if (first != last && first->at < at) {
        next[n_next++] = part(*first, first->at, at);
    }
    next[n_next++] = fresh;
    if (first != last && (last - 1)->end() > end) {
        next[n_next++] = part(*(last - 1), end, (last - 1)->end());
    }
    spans.insert(spans.erase(first, last), next, next + n_next);
    madvise(at, n, advice());
    return true;
}

std::vector<llama_sparse_pages::span>::const_iterator llama_sparse_pages::span_of(const char * at) const {
    const auto it = std::upper_bound(spans.begin(), spans.end(), at, [](const char * p, const span & x) { return p < x.at; });
    return it == spans.begin() ? it : it - 1;
}

void llama_sparse_pages::unmap() {
    for (const span & x : spans) {
        if (mmap(x.at, x.n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1, 0) == MAP_FAILED) {
            memset(x.at, 0, x.n); // copies of the file's pages
            any_left = true;
        } else {
            llama_sparse_huge_pages(x.at, x.n);
        }
    }
    spans.clear();
    n_in = 0;
}

// by itself the system reads far ahead of a page, and drops others for it
int llama_sparse_pages::advice() const { return limit > 0 ? MADV_RANDOM : MADV_NORMAL; }

bool llama_sparse_pages::can_limit() {
#if defined(MADV_PAGEOUT)
    return true;
#else
    return false;
#endif
}

void llama_sparse_pages::set_limit(size_t n_bytes) {
    limit  = n_bytes;
    n_vain = 0;
    for (const span & x : spans) {
        madvise(x.at, x.n, advice());
    }
}

llama_sparse_pages::counts llama_sparse_pages::read_counts() const {
    return { (int64_t) limit, n_in*(int64_t) page, n_wanted, n_read, (int64_t) page };
}

void llama_sparse_pages::reset_counts() { n_wanted = n_read = 0; }

//
// what stays in memory
//

void llama_sparse_pages::begin() {
    if (n_vain < MOST_VAIN && limit > 0 && (size_t) n_in > limit/page) {
        try {
            make_room();
        } catch (const std::bad_alloc &) {
            // a node of a graph can not fail: the next one tries again
        }
    }
    now++;
}

// in nodes of attention: a token has one per layer. After so many a reading counts half, once the page has not been read for a while
static constexpr float HALF = 1024.0f, WHILE = 512.0f;

uint64_t llama_sparse_pages::worth(const use & x) const {
    const float idle = (float) (now - x.last), heat = x.heat - std::max(idle - WHILE, 0.0f)/HALF;
    const auto  often = (uint64_t) (std::max(heat + 64.0f, 0.0f)*4.0f); // in steps, so that most of what every token reads is alike
    return often << 32 | (UINT32_MAX - x.since);
}

// a sixteenth more than is needed goes, so that the next nodes find room
void llama_sparse_pages::make_room() {
    std::vector<uint64_t> worths;
    for (const span & x : spans) {
        for (size_t i = 0; i < x.n/page; ++i) {
            if (x.uses[i].since != 0) {
                worths.push_back(worth(x.uses[i]));
            }
        }
    }
    const size_t keep = limit/page*15/16;
    size_t       n    = worths.size() > keep ? worths.size() - keep : 0;
    if (n == 0) {
        return;
    }
    std::nth_element(worths.begin(), worths.begin() + (n - 1), worths.end());
    const uint64_t most = worths[n - 1];
    size_t n_gone = 0;
    for (const span & x : spans) {
        size_t begin = 0, end = 0; // those to drop, side by side
        for (size_t i = 0; i < x.n/page && n > 0; ++i) {
            const use & y = x.uses[i];
            if (y.since == 0 || worth(y) > most) {
                continue;
            }
            --n;
            if (i != end) {
                n_gone += drop(x, begin, end);
                begin   = i;
            }
            end = i + 1;
        }
        n_gone += drop(x, begin, end);
    }
    n_vain = n_gone == 0 ? n_vain + 1 : 0;
    if (n_vain == MOST_VAIN) {
        LLAMA_LOG_WARN("%s: the system can not drop pages of a document, so it decides what stays in memory\n", __func__);
    }
}

// The pages [begin, end) of a span; returns how many are gone. The system keeps those that have only just come in, and what was written there
size_t llama_sparse_pages::drop(const span & x, size_t begin, size_t end) {
    size_t n_gone = 0;
#if defined(MADV_PAGEOUT)
    if (begin < end && madvise(x.at + begin*page, (end - begin)*page, MADV_PAGEOUT) == 0) {
        std::vector<unsigned char> is_in(end - begin, 1);
        mincore(x.at + begin*page, (end - begin)*page, is_in.data());
        for (size_t i = begin; i < end; ++i) {
            if (!(is_in[i - begin] & 1)) {
                x.uses[i].since = 0;
                ++n_gone;
            }
        }
        n_in -= (int64_t) n_gone;
    }
#else
    GGML_UNUSED_VARS(x, begin, end);
#endif
    return n_gone;
}

void llama_sparse_pages::want(const char * at, size_t n) {
    for (auto it = span_of(at); it != spans.end() && it->at < at + n; ++it) {
        const size_t lo = at > it->at ? (at - it->at)/page : 0, hi = (std::min<size_t>(at + n - it->at, it->n) + page - 1)/page; // pages of it
        size_t begin = lo; // from here on they are asked for together
        for (size_t i = lo; i < hi; ++i) {
            use & x = it->uses[i];
            const uint32_t last = x.last.load(std::memory_order_relaxed) == now ? now : x.last.exchange(now, std::memory_order_relaxed);
            bool comes = false;
            if (last != now) { // no other thread has it then
                comes  = x.since == 0;
                x.heat = last == 0 ? 0.0f : log2f(1.0f + exp2f(x.heat - (float) (now - last)/HALF));
                x.since = comes ? now : x.since;
                n_wanted++;
                n_read += comes;
                n_in   += comes;
            }
            if (!comes) {
                if (i > begin) {
                    madvise(it->at + begin*page, (i - begin)*page, MADV_WILLNEED);
                }
                begin = i + 1;
            }
        }
        if (hi > begin) {
            madvise(it->at + begin*page, (hi - begin)*page, MADV_WILLNEED);
        }
    }
}

//
// in the graph
//

static void want_all(llama_sparse_pages & pages, const ggml_tensor * x, int ith, int nth) {
    constexpr int64_t STEP = 64; // rows of all KV heads
    for (int64_t s = 0; s < x->ne[3]; ++s) {
        for (int64_t t = ith*STEP; t < x->ne[2]; t += nth*STEP) {
            pages.want((const char *) x->data + s*x->nb[3] + t*x->nb[2], std::min(STEP, x->ne[2] - t)*x->nb[2]);
        }
    }
}

// the selected cells of KV head h of stream s
static void want_cells(llama_sparse_pages & pages, const ggml_tensor * x, const int32_t * cells, int64_t n, int64_t h, int64_t s) {
    const size_t n_row = ggml_row_size(x->type, x->ne[0]);
    for (int64_t i = 0; i < n; ++i) {
        pages.want((const char *) x->data + h*x->nb[1] + cells[i]*x->nb[2] + s*x->nb[3], n_row);
    }
}

// A node of its own, so that no page is dropped which another thread wants already. ggml calls it in every thread
static void begin_reads(ggml_tensor *, const ggml_tensor *, int ith, int, void * data) {
    if (ith == 0) {
        ((const llama_sparse_reads *) data)->pages->begin();
    }
}

// t: a selection, [1 + n_group_q + topk_max, n_head_kv, n_tok, n_stream], or q
static void want_reads(ggml_tensor * t, const ggml_tensor *, int ith, int nth, void * data) {
    const auto & reads = *(const llama_sparse_reads *) data;
    auto & pages = *reads.pages;
    const int64_t n_unit = t->ne[1]*t->ne[2]*t->ne[3]; // KV heads of tokens
    const auto unit = [&](int64_t u) { return (const int32_t *) t->data + u*t->ne[0]; };
    bool all = t->type != GGML_TYPE_I32;
    for (int64_t u = 0; !all && u < n_unit; ++u) {
        all = unit(u)[0] == GGML_SPARSE_SELECT_ALL;
    }
    for (const ggml_tensor * x : { reads.k, reads.v }) {
        if (!x) {
            continue;
        }
        if (all) {
            want_all(pages, x, ith, nth);
            continue;
        }
        for (int64_t u = ith; u < n_unit; u += nth) {
            want_cells(pages, x, unit(u) + 1 + reads.n_group_q, unit(u)[0], u % t->ne[1], u/(t->ne[1]*t->ne[2]));
        }
    }
}

ggml_tensor * llama_sparse_build_reads(ggml_context * ctx, ggml_tensor * t, llama_sparse_reads & reads) {
    t = ggml_map_custom1_inplace(ctx, t, begin_reads, 1, &reads);
    return ggml_map_custom1_inplace(ctx, t, want_reads, GGML_N_TASKS_MAX, &reads);
}
