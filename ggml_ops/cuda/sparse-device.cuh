#pragma once

// What the kernels share: rows of any type as floats, the order of floats, sums over lanes, logits.
//
// The kernels are plain CUDA. tests/cuda compiles the same files for the host, with an emulation of what they use of the language.
// They stay right under -use_fast_math, which ggml-cuda is compiled with: what must be exact is an intrinsic, or in whole numbers.

#include "common.cuh"
#include "ggml-sparse.h"
#include "sparse-switches.cuh"

#include <cfloat>
#include <cstdint>

#ifndef SPARQ_LAUNCH // the emulation of tests/cuda has its own
#include <map>
#include <mutex>
#include <tuple>

// a kernel may begin before the one in front of it has ended: each begins with begin_kernel()
#define SPARQ_LAUNCH(kernel, grid, block, stream, ...) ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(grid, block, 0, stream), __VA_ARGS__)
#define SPARQ_DYNAMIC_SHARED(type, name) \
    extern __shared__ __align__(16) char sparq_shared[]; \
    type & name = *(type *) sparq_shared

// The barrier of a cluster, in two halves: what a thread wrote before it arrives, all threads of the cluster see after they waited. SHARED: but for
// what it wrote to global memory or to that of another block, for which it does not wait then
template <bool SHARED = false>
static __device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (SHARED) {
        asm volatile("fence.release.sync_restrict::shared::cta.cluster; barrier.cluster.arrive.relaxed;" ::: "memory");
    } else {
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    }
#endif
}
static __device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// where another block of the cluster has what this one has at p, in shared memory
template <typename T>
static __device__ __forceinline__ T * cluster_at(T * p, int block) {
    T * res = p;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mapa.u64 %0, %1, %2;" : "=l"(res) : "l"(p), "r"(block));
#endif
    return res;
}

struct cluster_launch {
    cudaLaunchAttribute attrs[2];
    cudaLaunchConfig_t  cfg = {};

    // overlaps: the kernel may begin before the one in front of it has ended
    cluster_launch(dim3 grid, dim3 block, int n_cluster, size_t n_shared, cudaStream_t stream, bool overlaps) {
        attrs[0].id = cudaLaunchAttributeClusterDimension;
        attrs[0].val.clusterDim.x = n_cluster;
        attrs[0].val.clusterDim.y = attrs[0].val.clusterDim.z = 1;
        attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attrs[1].val.programmaticStreamSerializationAllowed = 1;
        cfg.gridDim          = grid;
        cfg.blockDim         = block;
        cfg.dynamicSmemBytes = n_shared;
        cfg.stream           = stream;
        cfg.attrs            = attrs;
        cfg.numAttrs         = overlaps ? 2 : 1;
    }
    cluster_launch(const cluster_launch &) = delete;
};

// How many clusters of this kernel run at once on the current device; 0: none, as without code for Hopper. n_most: the most shared memory of any launch
template <typename K>
int max_clusters(K kernel, int n_cluster, size_t n_shared, size_t n_most) {
    static std::mutex mutex;
    static std::map<std::tuple<int, const void *, int, size_t>, int> known;
    std::lock_guard<std::mutex> lock(mutex);
    const auto key = std::make_tuple(ggml_cuda_get_device(), (const void *) kernel, n_cluster, n_shared);
    const auto it = known.find(key);
    if (it != known.end()) {
        return it->second;
    }
    int n = 0;
    cudaFuncAttributes attr = {};
    if (cudaFuncGetAttributes(&attr, (const void *) kernel) == cudaSuccess && attr.ptxVersion >= 90) {
        const cluster_launch launch(dim3(n_cluster), dim3(256), n_cluster, n_shared, nullptr, false);
        const bool ok = cudaFuncSetAttribute((const void *) kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) n_most) == cudaSuccess &&
                cudaFuncSetAttribute((const void *) kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                cudaOccupancyMaxActiveClusters(&n, (const void *) kernel, &launch.cfg) == cudaSuccess;
        n = ok ? n : 0;
    }
    (void) cudaGetLastError(); // a size that the device does not have
    return known[key] = n;
}

// a kernel for which max_clusters() was asked
template <typename K, typename A>
void launch_cluster(K kernel, dim3 grid, dim3 block, int n_cluster, size_t n_shared, cudaStream_t stream, const A & args) {
#ifdef GGML_CUDA_USE_PDL // else begin_kernel() waits for nothing
    static const bool overlaps = [] {
        const char * env = getenv("GGML_CUDA_PDL"); // as upstream's kernels
        return !env || atoi(env) != 0;
    }();
#else
    const bool overlaps = false;
#endif
    cluster_launch launch(grid, block, n_cluster, n_shared, stream, overlaps);
    CUDA_CHECK(cudaLaunchKernelEx(&launch.cfg, kernel, args));
}
#endif

namespace sparse_cuda {

constexpr int GROUP = GGML_SPARSE_GROUP;
constexpr int RUN   = 512; // positions that are the work of a warp
constexpr unsigned SUM_BITS = (1u << GGML_SPARSE_SUM) - 1; // of a word of bits by group: a sum block
constexpr int SUM   = GGML_SPARSE_SUM;

constexpr int      N_THREAD = 256; // of a block, where nothing else is said
constexpr int      N_WARP   = N_THREAD/32;
constexpr int      D_MAX    = 256; // head size
constexpr unsigned ALL      = 0xFFFFFFFFu;

constexpr uint16_t F16_NEG_INF = 0xFC00;

// a tensor as a kernel sees it; strides in bytes
struct view {
    char  * data;
    int64_t nb1, nb2, nb3;
    int     type;

    template <typename T = char>
    __device__ __forceinline__ T * at(int64_t i1, int64_t i2 = 0, int64_t i3 = 0) const {
        return (T *) (data + i1*nb1 + i2*nb2 + i3*nb3);
    }
};

// waits for the kernels in front of this one, and lets the next one begin
__device__ __forceinline__ void begin_kernel() {
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();
}

__device__ __forceinline__ float neg_inf() { return __int_as_float((int) 0xFF800000); }

__device__ __forceinline__ float f16_value(uint16_t bits) {
    half h;
    *(uint16_t *) &h = bits;
    return __half2float(h);
}

__device__ __forceinline__ float2 f16_pair(unsigned bits) {
    half2 h;
    *(unsigned *) &h = bits;
    return __half22float2(h);
}

// ---- rows ----

constexpr int ANY = -1; // a type that is known at run time only

// 16 bytes of f16
__device__ __forceinline__ void unpack_f16(float (&x)[8], uint4 raw) {
    const float2 a = f16_pair(raw.x), b = f16_pair(raw.y), c = f16_pair(raw.z), d = f16_pair(raw.w);
    x[0] = a.x; x[1] = a.y; x[2] = b.x; x[3] = b.y;
    x[4] = c.x; x[5] = c.y; x[6] = d.x; x[7] = d.y;
}

// elements c .. c + 7 of a row of d elements of K or V as floats, zeros from d on; c is a multiple of 8
//   the only place that knows the types. Blocks have 32 elements: q8_0 a f16 scale and 32 codes, q4_0 a scale and 16 bytes, element i < 16 in
//   the low half of byte i, the others in the high halves; value = scale*(code - 8)
__device__ __forceinline__ void load8(float (&x)[8], int type, const char * row, int c, int d) {
    if (type == GGML_TYPE_F16) {
        const char * p = row + c*2;
        if (c + 8 <= d && ((uintptr_t) p & 15) == 0) {
            unpack_f16(x, *(const uint4 *) p);
            return;
        }
        for (int j = 0; j < 8; ++j) {
            x[j] = c + j < d ? f16_value(((const uint16_t *) p)[j]) : 0.0f;
        }
    } else if (type == GGML_TYPE_BF16) {
        const char * p = row + c*2;
        if (c + 8 <= d && ((uintptr_t) p & 15) == 0) {
            const uint4 raw = *(const uint4 *) p;
            const unsigned w[4] = { raw.x, raw.y, raw.z, raw.w };
            for (int j = 0; j < 4; ++j) {
                x[2*j]     = __uint_as_float(w[j] << 16);
                x[2*j + 1] = __uint_as_float(w[j] & 0xFFFF0000u);
            }
            return;
        }
        for (int j = 0; j < 8; ++j) {
            x[j] = c + j < d ? __uint_as_float((unsigned) ((const uint16_t *) p)[j] << 16) : 0.0f;
        }
    } else if (type == GGML_TYPE_F32) {
        const float * p = (const float *) row + c;
        if (c + 8 <= d && ((uintptr_t) p & 15) == 0) {
            const float4 a = ((const float4 *) p)[0], b = ((const float4 *) p)[1];
            x[0] = a.x; x[1] = a.y; x[2] = a.z; x[3] = a.w;
            x[4] = b.x; x[5] = b.y; x[6] = b.z; x[7] = b.w;
            return;
        }
        for (int j = 0; j < 8; ++j) {
            x[j] = c + j < d ? p[j] : 0.0f;
        }
    } else if (type == GGML_TYPE_Q8_0) {
        const uint16_t * block = (const uint16_t *) (row + c/32*34); // only this aligned
        const float scale = f16_value(block[0]);
        for (int j = 0; j < 4; ++j) {
            const unsigned w = block[1 + c % 32/2 + j];
            x[2*j]     = scale*(float) (int8_t) (w & 255);
            x[2*j + 1] = scale*(float) (int8_t) (w >> 8);
        }
    } else { // Q4_0
        const uint16_t * block = (const uint16_t *) (row + c/32*18);
        const float scale = f16_value(block[0]);
        const int   shift = c % 32 < 16 ? 0 : 4;
        for (int j = 0; j < 4; ++j) {
            const unsigned w = block[1 + c % 16/2 + j] >> shift;
            x[2*j]     = scale*(float) ((int) (w & 15) - 8);
            x[2*j + 1] = scale*(float) ((int) (w >> 8 & 15) - 8);
        }
    }
}

// TYPE: a ggml_type, or ANY: then `type`
template <int TYPE>
__device__ __forceinline__ void load_span(float (&x)[8], int type, const char * row, int c, int d) {
    load8(x, TYPE == ANY ? type : TYPE, row, c, d);
}

// sum += the same
__device__ __forceinline__ void add8(float (&sum)[8], int type, const char * row, int c, int d) {
    float x[8];
    load8(x, type, row, c, d);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        sum[j] += x[j];
    }
}

// ---- the order of floats ----

constexpr int ORDER_HIDDEN = (int) 0x80000000; // below every number
constexpr int ORDER_MAX    = 0x7F7FFFFF;       // of FLT_MAX
constexpr int ORDER_FORCED = 0x7FFFFFFF;       // above every number

// whole numbers in the order of floats; +-0 are alike, -inf and NaN are hidden, +inf counts as FLT_MAX
__device__ __forceinline__ int order_of(float x) {
    const int b = __float_as_int(x), a = b & 0x7FFFFFFF;
    return b == (int) 0xFF800000 || a > 0x7F800000 ? ORDER_HIDDEN : b < 0 ? -a : min(a, ORDER_MAX);
}

// the number with this order, which is neither ORDER_HIDDEN nor ORDER_FORCED
__device__ __forceinline__ float order_value(int o) { return __int_as_float(o >= 0 ? o : (int) 0x80000000 | -o); }

// a smaller share of the mass counts as nothing, since it may be rounding
constexpr float MIN_LEFT = 0x1p-18f;

__device__ __forceinline__ float fourth_root(float x) { return __fsqrt_rn(__fsqrt_rn(x)); }

// +inf counts as FLT_MAX, and NaN stays
__device__ __forceinline__ float finite_top(float x) { return x > FLT_MAX ? FLT_MAX : x; }

// ---- over lanes ----

// the sum over N neighbouring lanes, in all of them
template <int N, typename T>
__device__ __forceinline__ T lane_sum(T x) {
#pragma unroll
    for (int i = N/2; i > 0; i /= 2) {
        x += __shfl_xor_sync(ALL, x, i);
    }
    return x;
}

// the sum of x over the block, in all threads; buf [NT/32]
template <int NT, typename T>
__device__ __forceinline__ T block_sum(T x, T * buf) {
    x = lane_sum<32>(x);
    __syncthreads(); // the last one was read
    if (threadIdx.x % 32 == 0) {
        buf[threadIdx.x/32] = x;
    }
    __syncthreads();
    return lane_sum<32>(threadIdx.x % 32 < NT/32 ? buf[threadIdx.x % 32] : (T) 0);
}

// the sum over a warp, in one instruction where there is one
__device__ __forceinline__ int warp_sum(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_add_sync(ALL, x);
#else
    return lane_sum<32>(x);
#endif
}

__device__ __forceinline__ int warp_max(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, x);
#else
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        x = max(x, __shfl_xor_sync(ALL, x, i));
    }
    return x;
#endif
}

template <int N>
__device__ __forceinline__ float lane_max(float x) {
#pragma unroll
    for (int i = N/2; i > 0; i /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL, x, i));
    }
    return x;
}
__device__ __forceinline__ float warp_max(float x) { return lane_max<32>(x); }

// the sum over the lanes up to this one
template <typename T>
__device__ __forceinline__ T warp_prefix(T x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const T y = __shfl_up_sync(ALL, x, i);
        x += lane >= i ? y : 0;
    }
    return x;
}

// blockIdx.y and .z stand for two numbers each; as a rule the second one is 0, and a division takes long
__device__ __forceinline__ int2 split_index(unsigned i, unsigned n) {
    return n == 1 ? make_int2((int) i, 0) : make_int2((int) (i/n), (int) (i % n));
}

// ---- logits ----

// not inline, since few models have it and most kernels would hold many copies
static __device__ __noinline__ float soft_cap(float x, float cap) {
    // cap*tanh(x/cap); tanhf is a rough one under -use_fast_math, and small x must not cancel. NaN stays
    const float y = __fdiv_rn(2.0f*x, cap), e = expm1f(y > 80.0f ? 80.0f : y);
    return cap*__fdiv_rn(e, e + 2.0f);
}

// ALiBi; the same slopes as ggml's softmax. n_log2: the largest power of two up to the number of heads
__device__ __forceinline__ float head_slope(int h, int n_log2, float max_bias) {
    if (max_bias <= 0.0f) {
        return 1.0f;
    }
    const float steps = h < n_log2 ? h + 1 : h - n_log2 + 0.5f;
    return exp2f(__fdiv_rn(-max_bias*steps, (float) n_log2));
}

// the logit of a product; -inf where hidden, whatever x is
__device__ __forceinline__ float make_logit(float x, uint16_t mask, float scale, float softcap, float slope) {
    if (mask == F16_NEG_INF) {
        return neg_inf();
    }
    x *= scale;
    if (softcap > 0.0f) {
        x = soft_cap(x, softcap);
    }
    return x + slope*f16_value(mask);
}

// where component c of a row of d is kept in shared memory: lanes that read spans of 8 side by side then read 16 bytes side by side
__device__ __forceinline__ int q_place(int c, int d) { return c % 8/4*((d + 7)/8*4) + c/8*4 + c % 4; }

// n_head queries of a token from number `head` on -> q, in the order of q_place(), zeros behind d and behind the last one; a thread per component
template <int GB>
__device__ __forceinline__ void load_queries(float (*q)[D_MAX], const view & from, int head, int n_head, int64_t i, int64_t s, int d) {
    const int c = threadIdx.x;
#pragma unroll
    for (int h = 0; h < GB; ++h) {
        if (c < (d + 7)/8*8) {
            q[h][q_place(c, d)] = h < n_head && c < d ? from.at<const float>(head + h, i, s)[c] : 0.0f;
        }
    }
}

// res[h] += span s of n_span of query h times x
template <int GB>
__device__ __forceinline__ void dot_span(float (&res)[GB], const float (*q)[D_MAX], int s, int n_span, const float (&x)[8]) {
#pragma unroll
    for (int h = 0; h < GB; ++h) {
        const float4 a = *(const float4 *) &q[h][s*4], b = *(const float4 *) &q[h][n_span*4 + s*4];
        res[h] += a.x*x[0] + a.y*x[1] + a.z*x[2] + a.w*x[3] + b.x*x[4] + b.y*x[5] + b.z*x[6] + b.w*x[7];
    }
}

// res[h] += this lane's share, of 8 neighbouring ones, of the products of GB queries with one row
//   q [GB][D_MAX] in the order of q_place(), zeros up to a multiple of 8; row NULL: nothing
template <int TYPE, int GB>
__device__ __forceinline__ void dot_row(float (&res)[GB], const float (*q)[D_MAX], int type, const char * row, int d) {
    const int n_span = (d + 7)/8;
#pragma unroll 2
    for (int s = threadIdx.x % 8; row && s < n_span; s += 8) {
        float x[8];
        load_span<TYPE>(x, type, row, s*8, d);
        dot_span<GB>(res, q, s, n_span, x);
    }
}

// s[h][r] = the sums of x[h] over 8 neighbouring lanes
template <int GB, int N>
__device__ __forceinline__ void store_products(float (*s)[N], const float (&x)[GB], int r) {
#pragma unroll
    for (int h = 0; h < GB; ++h) {
        const float sum = lane_sum<8>(x[h]);
        if (threadIdx.x % 8 == 0) {
            s[h][r] = sum;
        }
    }
}

// x, component threadIdx.x of a vector of zeros behind d, times the Hadamard matrix in blocks of n_rot, scaled so that it is its own inverse
//   all threads of the block take part, of which there are at least as many as components; buf [D_MAX] in shared memory, left free to be written
__device__ __forceinline__ float hadamard(float x, int n_rot, float * buf) {
    const int c = threadIdx.x;
    for (int s = 1; s < n_rot; s *= 2) {
        float y;
        if (s < 32) {
            y = __shfl_xor_sync(ALL, x, s);
        } else {
            buf[c] = x;
            __syncthreads();
            y = buf[c ^ s];
            __syncthreads();
        }
        x = c & s ? y - x : x + y;
    }
    return n_rot > 0 ? __fdiv_rn(x, __fsqrt_rn((float) n_rot)) : x;
}

// the same for rows [n][d] in shared memory; all threads of the block take part, of which there are N_THREAD. Ends at a barrier
__device__ inline void hadamard_rows(float (*x)[D_MAX], int n, int d, int n_rot) {
    for (int step = 1; step < n_rot; step *= 2) {
        for (int u = threadIdx.x; u < n*d/2; u += N_THREAD) {
            const int r = u/(d/2), i = u % (d/2), c = i/step*2*step + i % step;
            const float a = x[r][c], b = x[r][c + step];
            x[r][c]        = a + b;
            x[r][c + step] = a - b;
        }
        __syncthreads();
    }
    if (n_rot > 0) {
        const float root = __fsqrt_rn((float) n_rot);
        for (int u = threadIdx.x; u < n*d; u += N_THREAD) {
            x[u/d][u % d] = __fdiv_rn(x[u/d][u % d], root);
        }
        __syncthreads();
    }
}

__device__ __forceinline__ void add_stat(unsigned long long * stats, ggml_sparse_stat i, int64_t n) {
    if (stats) {
        atomicAdd(&stats[i], (unsigned long long) n);
    }
}

} // namespace sparse_cuda
