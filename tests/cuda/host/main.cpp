// Runs nodes of our CUDA op for tests/cuda, on the emulator. One shared library with sparse-attn.cu.

#include "sparse-attn.cuh"
#include "sparse-switches.cuh"

static ggml_cuda_device_info info;
const ggml_cuda_device_info & ggml_cuda_info() { return info; }

// every piece of scratch is filled with a pattern first. As in ggml, the last piece taken must be the first given back
struct test_pool : ggml_cuda_pool {
    size_t used = 0, most = 0;
    std::vector<std::pair<const void *, size_t>> & memory = emu::m().memory;

    void * alloc(size_t size, size_t * actual) override {
        *actual = (size + 255)/256*256;
        void * p = aligned_alloc(256, *actual);
        memset(p, 0xAB, *actual);
        memory.emplace_back(p, size);
        used += size;
        most = std::max(most, used);
        return p;
    }
    void free(void * p, size_t) override {
        if (memory.back().first != p) {
            fprintf(stderr, "scratch given back out of turn\n");
            abort();
        }
        used -= memory.back().second;
        memory.pop_back();
        ::free(p);
    }
};

// Node i of the graph, or it and those behind it that one launch does where fuse is set. Returns how many it has done; 0: it is not supported
//   n_sm: multiprocessors to plan for, 0: four; backwards: the order of the emulator's threads; scratch: the most bytes of it at a time
extern "C" int sparq_cuda_compute(ggml_cgraph * graph, int i, int fuse, int cc, int n_sm, int backwards, size_t * scratch) {
    auto & machine = emu::m();
    machine.backwards = backwards;
    machine.n_sm = info.devices[0].nsm = n_sm > 0 ? n_sm : 4;
    info.devices[0].cc = cc;
    machine.memory.clear();
    const auto add = [&](const ggml_tensor * t) {
        if (t && t->data) {
            machine.memory.emplace_back(t->data, ggml_nbytes(t));
        }
    };
    for (int j = i; j < graph->n_nodes; ++j) {
        add(graph->nodes[j]);
        std::for_each(std::begin(graph->nodes[j]->src), std::end(graph->nodes[j]->src), add);
    }
    const ggml_tensor * next = graph->nodes[std::min(i + 1, graph->n_nodes - 1)];
    machine.early.clear();
    for (const ggml_tensor * t : { graph->nodes[i]->src[5], graph->nodes[i]->src[8], next->src[9] }) { // sealed, wanted, visible
        if (t && SPARQ_EARLY) {
            machine.early.emplace_back(t->data, ggml_nbytes(t));
        }
    }
    test_pool pool;
    ggml_backend_cuda_context ctx;
    ctx.the_pool = &pool;
    int n_done = ggml_cuda_sparse_attn_supported(graph->nodes[i], cc);
    if (n_done > 0) {
        const int more = fuse ? ggml_cuda_fuse_sparse_attn(ctx, graph, i) : 0;
        n_done += more;
        if (more == 0) {
            ggml_cuda_op_sparse_attn(ctx, graph->nodes[i]);
        }
    }
    *scratch = pool.most;
    return n_done;
}
