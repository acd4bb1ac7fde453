// Runs nodes of our CUDA op for tests/cuda: on the emulator, or on a GPU when nvcc compiles it. One shared library with sparse-attn.cu.

#include "sparse-attn.cuh"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include "ggml-backend.h"

// ---- what little of ggml the op calls ----

extern "C" {
void ggml_abort(const char * file, int line, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, fmt, args);
    abort();
}
size_t ggml_row_size(enum ggml_type type, int64_t ne) {
    switch (type) {
        case GGML_TYPE_Q8_0: return ne/32*34;
        case GGML_TYPE_Q4_0: return ne/32*18;
        case GGML_TYPE_F32:  return ne*4;
        default:             return ne*2;
    }
}
bool ggml_backend_buffer_is_host(ggml_backend_buffer_t) { return false; }
}

static ggml_cuda_device_info info;
const ggml_cuda_device_info & ggml_cuda_info() { return info; }

#ifdef __CUDACC__
#define CHECK(call) do { const cudaError_t err = (call); if (err != cudaSuccess) { \
    fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(err)); abort(); } } while (0)
static void * device_alloc(size_t size)            { void * p; CHECK(cudaMalloc(&p, size)); return p; }
static void   device_free (void * p)               { CHECK(cudaFree(p)); }
static void   device_fill (void * p, size_t size)  { CHECK(cudaMemset(p, 0xAB, size)); }
#else
static void * device_alloc(size_t size)            { return aligned_alloc(256, size); }
static void   device_free (void * p)               { free(p); }
static void   device_fill (void * p, size_t size)  { memset(p, 0xAB, size); }
#endif

// every piece of scratch is filled with a pattern first, and what lies behind it must still hold the pattern at the end. As in ggml, the
// last piece taken must be the first given back
struct test_pool : ggml_cuda_pool {
    static constexpr size_t GUARD = 256;
    size_t used = 0, most = 0;

    void * alloc(size_t size, size_t * actual) override {
        *actual = (size + 255)/256*256 + GUARD;
        void * p = device_alloc(*actual);
        device_fill(p, *actual);
        sizes[p] = size;
        taken.push_back(p);
        used += size;
        most = std::max(most, used);
        return p;
    }
    void free(void * p, size_t actual) override {
        if (taken.back() != p) {
            fprintf(stderr, "scratch given back out of turn\n");
            abort();
        }
        taken.pop_back();
        std::vector<unsigned char> tail(actual - sizes[p]);
#ifdef __CUDACC__
        CHECK(cudaMemcpy(tail.data(), (char *) p + sizes[p], tail.size(), cudaMemcpyDeviceToHost));
#else
        memcpy(tail.data(), (char *) p + sizes[p], tail.size());
#endif
        for (unsigned char x : tail) {
            if (x != 0xAB) {
                fprintf(stderr, "a kernel wrote behind its scratch\n");
                abort();
            }
        }
        used -= sizes[p];
        sizes.erase(p);
        device_free(p);
    }
    std::map<void *, size_t> sizes;
    std::vector<void *> taken;
};

// Node i of the graph, or it and those behind it that one launch does where fuse is set. Returns how many it has done; 0: it is not supported
//   n_sm: multiprocessors to plan for, 0: those there are; backwards: the order of the emulator's threads; scratch: the most bytes of it at a time;
//   buffers [n]: {address, bytes} of all memory that the tensors lie in (on a GPU: copied there and back)
extern "C" int sparq_cuda_compute(ggml_cgraph * graph, int i, int fuse, int cc, int n_sm, int backwards, size_t * scratch, const uint64_t (*buffers)[2], int n) {
    test_pool pool;
    ggml_backend_cuda_context ctx;
    ctx.the_pool = &pool;
    info.devices[0].nsm = n_sm > 0 ? n_sm : 4;
    info.devices[0].cc  = cc;
#ifdef __CUDACC__
    int nsm = 0;
    CHECK(cudaDeviceGetAttribute(&nsm, cudaDevAttrMultiProcessorCount, 0));
    info.devices[0].nsm = n_sm > 0 ? n_sm : nsm;
    (void) backwards;
    std::vector<char *> device(n);
    for (int j = 0; j < n; ++j) { // at the same distance from a multiple of 256
        const size_t shift = buffers[j][0] % 256;
        device[j] = (char *) device_alloc(buffers[j][1] + 256) + shift;
        CHECK(cudaMemcpy(device[j], (void *) buffers[j][0], buffers[j][1], cudaMemcpyHostToDevice));
    }
    std::map<ggml_tensor *, void *> before;
    const auto move = [&](ggml_tensor * t) {
        for (int j = 0; t && t->data && !before.count(t) && j < n; ++j) {
            const uint64_t o = (uint64_t) t->data - buffers[j][0];
            if (o < buffers[j][1]) {
                before[t] = t->data;
                t->data   = device[j] + o;
            }
        }
    };
    for (int j = i; j < graph->n_nodes; ++j) {
        move(graph->nodes[j]);
        for (ggml_tensor * src : graph->nodes[j]->src) {
            move(src);
        }
    }
#else
    (void) buffers;
    (void) n;
    emu::m().backwards = backwards;
    emu::m().n_sm = info.devices[0].nsm;
#endif
    int n_done = ggml_cuda_sparse_attn_supported(graph->nodes[i], cc);
    if (n_done > 0) {
        const int more = fuse ? ggml_cuda_fuse_sparse_attn(ctx, graph, i) : 0;
        n_done += more;
        if (more == 0) {
            ggml_cuda_op_sparse_attn(ctx, graph->nodes[i]);
        }
    }
#ifdef __CUDACC__
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    for (const auto & [t, data] : before) {
        t->data = data;
    }
    for (int j = 0; j < n; ++j) {
        CHECK(cudaMemcpy((void *) buffers[j][0], device[j], buffers[j][1], cudaMemcpyDeviceToHost));
        device_free(device[j] - buffers[j][0] % 256);
    }
#endif
    *scratch = pool.most;
    return n_done;
}
