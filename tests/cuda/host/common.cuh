#pragma once

// Stands in for ggml-cuda's common.cuh where our kernels are compiled alone: by a C++ compiler on the emulator beside this file, or by nvcc.

#include "ggml.h"
#include "ggml-impl.h"

#include <vector>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define CUDA_CHECK(call) do { if ((call) != cudaSuccess) { GGML_ABORT("%s", #call); } } while (0)
inline int ggml_cuda_get_device() { return 0; }
struct ggml_cuda_kernel_launch_params {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    ggml_cuda_kernel_launch_params(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) : grid(grid), block(block), shared(shared), stream(stream) {}
};
template <typename K, typename... A>
void ggml_cuda_kernel_launch(K kernel, const ggml_cuda_kernel_launch_params & p, A &&... args) {
    kernel<<<p.grid, p.block, p.shared, p.stream>>>(std::forward<A>(args)...);
}
#define GGML_CUDA_USE_PDL
static __device__ __forceinline__ void ggml_cuda_pdl_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}
static __device__ __forceinline__ void ggml_cuda_pdl_lc() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}
#else
#include "cuda_emu.h"
#endif

struct ggml_cuda_pool {
    virtual ~ggml_cuda_pool() = default;
    virtual void * alloc(size_t size, size_t * actual_size) = 0;
    virtual void free(void * ptr, size_t size) = 0;
};

template <typename T>
struct ggml_cuda_pool_alloc {
    ggml_cuda_pool * pool;
    T * ptr = nullptr;
    size_t actual_size = 0;

    explicit ggml_cuda_pool_alloc(ggml_cuda_pool & pool) : pool(&pool) {}
    ggml_cuda_pool_alloc(ggml_cuda_pool & pool, size_t size) : pool(&pool) { alloc(size); }
    ~ggml_cuda_pool_alloc() { if (ptr) { pool->free(ptr, actual_size); } }
    T * alloc(size_t size) { return ptr = (T *) pool->alloc(size*sizeof(T), &actual_size); }
    T * get() { return ptr; }
    ggml_cuda_pool_alloc(const ggml_cuda_pool_alloc &) = delete;
};

struct ggml_backend_cuda_context {
    int device = 0;
    ggml_cuda_pool * the_pool = nullptr;
    cudaStream_t the_stream = {};

    cudaStream_t stream() { return the_stream; }
    ggml_cuda_pool & pool() { return *the_pool; }
};

struct ggml_cuda_device_info {
    struct device { int cc = 900, nsm = 4; } devices[16];
};
const ggml_cuda_device_info & ggml_cuda_info();
