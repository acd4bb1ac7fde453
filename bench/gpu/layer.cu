// Times the kernel of a layer by itself (ggml_ops/cuda/sparse-layer.cuh): microseconds per layer in a CUDA graph of many layers with data of their own,
// by size of cluster, and the cycles of its phases, which SPARQ_MARK numbers. Whether results are right the tests tell; here all data is random.
//
//   nvcc -std=c++17 -use_fast_math -extended-lambda -O3 -arch=sm_90 -Itests/cuda/host -Iggml_ops -Iggml_ops/cuda -I$GGML/include -I$GGML/src bench/gpu/layer.cu -o layer
//   ./layer [name of a case]      GGML: the folder ggml of the pinned source

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

constexpr int N_MARK = 18;
__device__ long long * clocks; // [block][N_MARK]; 0: the phase was not there
#define SPARQ_MARK(i) \
    do { \
        if (clocks && threadIdx.x == 0) { \
            clocks[((size_t) blockIdx.y*gridDim.x + blockIdx.x)*N_MARK + (i)] = clock64(); \
        } \
    } while (0)

#include "common.cuh"
#include "sparse-layer.cuh"

using namespace sparse_cuda;

const ggml_cuda_device_info & ggml_cuda_info() {
    static ggml_cuda_device_info info;
    return info;
}

extern "C" void ggml_abort(const char * file, int line, const char *, ...) {
    fprintf(stderr, "%s:%d: %s\n", file, line, cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

struct tensors {
    std::vector<void *> taken;

    template <typename T>
    T * get(size_t n) {
        T * p;
        CUDA_CHECK(cudaMalloc(&p, n*sizeof(T)));
        taken.push_back(p);
        return p;
    }
    template <typename T>
    T * get(const std::vector<T> & x) {
        T * p = get<T>(x.size());
        CUDA_CHECK(cudaMemcpy(p, x.data(), x.size()*sizeof(T), cudaMemcpyHostToDevice));
        return p;
    }
    ~tensors() {
        for (void * p : taken) {
            cudaFree(p);
        }
    }
};

__device__ unsigned random_bits(size_t i, unsigned seed) {
    unsigned x = (unsigned) i*2654435761u + seed;
    x = (x ^ x >> 16)*0x85ebca6bu;
    x = (x ^ x >> 13)*0xc2b2ae35u;
    return x ^ x >> 16;
}

template <typename T>
__global__ void fill(T * p, size_t n, unsigned seed, float lo, float hi, int stride) {
    for (size_t i = blockIdx.x*(size_t) blockDim.x + threadIdx.x; i < n; i += (size_t) gridDim.x*blockDim.x) {
        p[i*stride] = (T) (lo + (hi - lo)*((random_bits(i, seed) & 0xFFFF)/65536.0f));
    }
}

struct shape {
    const char * name;
    int n_head_kv, n_group_q, n_kv, rank, topk, n_batch, n_tail; // n_tail: groups that are not sealed
};

constexpr int D = 128;

template <int GB>
void measure(const shape & x) {
    tensors on;
    const int n_grp = (x.n_kv + GROUP - 1)/GROUP, n_run = (x.n_kv + RUN - 1)/RUN, n_sum = (int) ggml_sparse_n_sum_rows(n_grp), n_head = x.n_head_kv*x.n_group_q;
    const size_t n_elem = (size_t) x.n_batch*x.n_kv*x.n_head_kv*D, n_code = n_elem/2, n_range = (size_t) x.n_batch*n_run*x.n_head_kv*D;
    const int n_layer = (int) std::clamp<size_t>((size_t) 30e9/(4*n_elem + n_code), 2, 32), n_local = x.topk/4, n_sinks = 4, n_wanted = 2 + n_local + n_sinks;

    layer_args a = {};
    score_args  & s = a.score;
    attend_args & t = a.attend;
    const auto make = [](void * p, int64_t nb1, int64_t nb2, int64_t nb3, int type) { return view { (char *) p, nb1, nb2, nb3, type }; };
    float * q = on.get<float>((size_t) x.n_batch*n_head*D);
    fill<<<64, 256>>>(q, (size_t) x.n_batch*n_head*D, 5, -2.0f, 2.0f, 1);
    s.q = t.q = make(q, D*4, (int64_t) D*4*n_head, (int64_t) D*4*n_head, GGML_TYPE_F32);
    uint16_t * mask = on.get<uint16_t>((size_t) x.n_batch*x.n_kv);
    CUDA_CHECK(cudaMemset(mask, 0, (size_t) x.n_batch*x.n_kv*2));
    s.mask = t.mask = make(mask, x.n_kv*2, x.n_kv*2, x.n_kv*2, GGML_TYPE_F16);

    std::vector<int> sealed, wanted;
    for (int b = 0; b < x.n_batch; ++b) {
        for (int g = 0; g < n_grp; ++g) {
            sealed.push_back(g < n_grp - x.n_tail);
        }
        wanted.push_back(x.topk);
        wanted.push_back(n_local);
        for (int j = 0; j < n_local + n_sinks; ++j) {
            wanted.push_back(j < n_local ? x.n_kv - 1 - j : j - n_local);
        }
    }
    t.visible = make(on.get(std::vector<int>((size_t) x.n_batch*n_grp, GROUP)), n_grp*4, n_grp*4, n_grp*4, GGML_TYPE_I32);
    s.kl      = make(on.get(wanted), n_wanted*4, n_wanted*4, n_wanted*4, GGML_TYPE_I32);
    a.forced  = s.kl;
    a.forced.data += 2*sizeof(int);
    s.sealed  = t.sealed = on.get(sealed);
    s.stats   = t.stats = on.get(std::vector<unsigned long long>(16));
    s.n_kv    = t.n_kv = x.n_kv;
    s.n_grp   = t.n_grp = n_grp;
    s.n_run   = n_run;
    s.n_head  = t.n_head = s.n_log2 = t.n_log2 = n_head;
    s.n_head_kv = t.n_head_kv = x.n_head_kv;
    s.n_group_q = t.n_group_q = x.n_group_q;
    s.n_tok   = t.n_tok = 1;
    s.d       = t.d_k = t.d_v = D;
    s.rank    = x.rank;
    s.row_bytes = t.row_k = t.row_v = 2*D;
    s.scale   = t.scale = 0.0884f;
    t.n_row   = x.n_batch;
    t.mean_v  = 1;
    t.ld_res  = n_head*D;
    t.res     = on.get<float>((size_t) x.n_batch*n_head*D);
    a.n_forced    = n_local + n_sinks;
    a.n_local_max = n_local;
    a.topk_max    = x.topk;
    a.n_lane      = 16;
    a.ld      = (int64_t) n_run*RUN;
    s.logits  = on.get<float>((size_t) x.n_batch*n_head*a.ld);
    a.key     = on.get<float>((size_t) x.n_batch*x.n_head_kv*a.ld);
    a.sel     = on.get<int32_t>((size_t) x.n_batch*x.n_head_kv*x.topk);
    a.cand    = on.get<int2>((size_t) x.n_batch*x.n_head_kv*LAYER_CAND);
    a.state   = on.get<float>((size_t) x.n_batch*n_head*LAYER_BLOCKS*(D + LAYER_STATE));
    a.mean    = on.get<float>((size_t) x.n_batch*x.n_head_kv*LAYER_BLOCKS*D);

    std::vector<layer_args> layers(n_layer, a);
    for (int l = 0; l < n_layer; ++l) {
        auto * k_t = on.get<uint8_t>(n_code);
        auto * range = on.get<float>(2*n_range), * v_sum = on.get<float>((size_t) x.n_batch*n_sum*x.n_head_kv*D);
        half * k = on.get<half>(n_elem), * v = on.get<half>(n_elem);
        fill<<<1024, 256>>>(k_t, n_code, l, 0.0f, 256.0f, 1);
        fill<<<1024, 256>>>(k, n_elem, 7*l + 1, -2.0f, 2.0f, 1);
        fill<<<1024, 256>>>(v, n_elem, 11*l + 3, -2.0f, 2.0f, 1);
        fill<<<256, 256>>>(range, n_range, l, 0.15f, 0.35f, 2);
        fill<<<256, 256>>>(range + 1, n_range, l + 9, -2.6f, -1.4f, 2);
        fill<<<256, 256>>>(v_sum, (size_t) x.n_batch*n_sum*x.n_head_kv*D, l, -8.0f, 8.0f, 1);
        auto & y = layers[l];
        const int64_t row = x.n_head_kv*D;
        y.score.k_t     = make(k_t, x.n_kv/2, row*x.n_kv/2, row*x.n_kv/2, GGML_TYPE_I8);
        y.score.k_t.nb2 = y.score.k_t.nb3;
        y.score.k_range = make(range, 8, 8*row, 8*row*n_run, GGML_TYPE_F32);
        y.score.k = y.attend.k = make(k, D*2, 2*row, 2*row*x.n_kv, GGML_TYPE_F16);
        y.attend.v     = make(v, D*2, 2*row, 2*row*x.n_kv, GGML_TYPE_F16);
        y.attend.v_sum = make(v_sum, 4*row, 4*row*n_sum, 0, GGML_TYPE_F32);
    }

    const auto kernel = layer<4, GB, GGML_TYPE_F16>;
    constexpr size_t N_SHARED = sizeof(layer_shared<4, GB>);
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    for (int n_block = LAYER_BLOCKS; n_block >= 1 && ceil((double) n_run/n_block)*RUN <= LAYER_OWN; n_block /= 2) {
        const int n_cluster = n_block <= n_run ? max_clusters(kernel, n_block, N_SHARED) : 0;
        if (n_cluster == 0 || (n_cluster < x.n_head_kv*x.n_batch && n_block > 2)) {
            continue;
        }
        const auto launch = [&](layer_args & y) {
            y.n_block = n_block;
            launch_cluster(kernel, dim3(n_block*x.n_head_kv, x.n_batch), dim3(N_THREAD), n_block, N_SHARED, stream, y);
        };
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        std::for_each(layers.begin(), layers.end(), launch);
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
        cudaEvent_t from, to;
        CUDA_CHECK(cudaEventCreate(&from));
        CUDA_CHECK(cudaEventCreate(&to));
        std::vector<float> us;
        for (int turn = -3; turn < 9; ++turn) {
            float ms;
            CUDA_CHECK(cudaEventRecord(from, stream));
            CUDA_CHECK(cudaGraphLaunch(exec, stream));
            CUDA_CHECK(cudaEventRecord(to, stream));
            CUDA_CHECK(cudaStreamSynchronize(stream));
            CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
            if (turn >= 0) {
                us.push_back(ms*1e3f/n_layer);
            }
        }
        std::sort(us.begin(), us.end());
        printf("%-20s %2d blocks: %6.1f us (%.1f-%.1f), thousands of cycles", x.name, n_block, us[4], us[0], us[8]);

        const size_t n_all = (size_t) n_block*x.n_head_kv*x.n_batch; // one layer alone, whose data no cache holds
        long long * at = on.get(std::vector<long long>(n_all*N_MARK)), * none = nullptr;
        std::vector<long long> found(n_all*N_MARK);
        CUDA_CHECK(cudaMemcpyToSymbol(clocks, &at, sizeof(at)));
        launch(layers[n_layer/2]);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        CUDA_CHECK(cudaMemcpyToSymbol(clocks, &none, sizeof(none)));
        CUDA_CHECK(cudaMemcpy(found.data(), at, found.size()*sizeof(long long), cudaMemcpyDeviceToHost));
        for (int i = 1, last = 0; i < N_MARK; ++i) {
            double sum = 0;
            for (size_t b = 0; b < n_all && found[i] != 0; ++b) {
                sum += found[b*N_MARK + i] - found[b*N_MARK + last];
            }
            if (found[i] != 0) {
                printf(" %d:%.1f", i, sum/n_all/1e3);
                last = i;
            }
        }
        printf("\n");
        fflush(stdout);
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
    }
}

int main(int argc, char ** argv) {
    const shape shapes[] = {
        { "mha 4k r32 k128",     32, 1,   4096, 32,  128,  1, 0 },
        { "mha 8k 1/8",          32, 1,   8192, 64,  512,  1, 0 },
        { "mha 8k 1/8 tail",     32, 1,   8192, 64,  512,  1, 7 },
        { "mha 16k 1/8",         32, 1,  16384, 64, 1024,  1, 0 },
        { "mha 32k 1/8",         32, 1,  32768, 64, 2048,  1, 0 },
        { "mha 32k r32 k128",    32, 1,  32768, 32,  128,  1, 0 },
        { "mha 45k 1/8",         32, 1,  46080, 64, 2880,  1, 0 },
        { "mha 128k r32 k128",   32, 1, 131072, 32,  128,  1, 0 },
        { "gqa 32k r32 k128",     8, 4,  32768, 32,  128,  1, 0 },
        { "gqa 32k 1/8",          8, 4,  32768, 64, 2048,  1, 0 },
        { "gqa 128k r32 k128",    8, 4, 131072, 32,  128,  1, 0 },
        { "gqa 128k 1/8",         8, 4, 131072, 64, 8192,  1, 0 },
        { "batch 64 4k r32 k128", 32, 1,  4096, 32,  128, 64, 0 },
    };
    for (const shape & x : shapes) {
        if (argc < 2 || strcmp(argv[1], x.name) == 0) {
            x.n_group_q == 1 ? measure<1>(x) : measure<4>(x);
        }
    }
}
