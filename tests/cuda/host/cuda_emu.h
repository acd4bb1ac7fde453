#pragma once

// CUDA kernels on one CPU thread: what our kernels use of the language and its intrinsics, so that g++ compiles them as they are.
//
//   Every thread of a block is a fiber. A fiber runs until it waits (at a barrier of its cluster, its block or its warp) or ends; then the first one
//   that can runs. Clusters, which as a rule are one block, run one after another. `backwards` runs threads and blocks from the last to the first: the results
//   must not differ.
//   A barrier that not every thread reaches, a warp operation that lanes reach at different places, and what races.cpp finds, abort.
//   Not emulated: time, weak memory order, the exact bits of the fast exp and division, what lies in shared memory at the start.

#include <algorithm>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <functional>
#include <sys/mman.h>
#include <vector>
#include <ucontext.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static // of kernels without clusters
#define SPARQ_DYNAMIC_SHARED(type, name) type & name = *(type *) emu::dynamic_shared()

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8)  int2   { int x, y; };
struct alignas(8)  uint2  { unsigned x, y; };
struct alignas(8)  float2 { float x, y; };
struct alignas(16) uint4  { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static inline int2   make_int2(int x, int y) { return { x, y }; }
static inline float2 make_float2(float x, float y) { return { x, y }; }
static inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
static inline uint4  make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return { x, y, z, w }; }

namespace emu {

struct fiber {
    ucontext_t ctx;
    jmp_buf    at;
    bool       started = false;
    unsigned   n_warp = 0, n_block = 0, n_arrived = 0, n_waited = 0; // operations so far
    unsigned   n_released = 0, n_acquired = 0; // of barriers of the cluster, those that order global memory, too
    bool       has_begun = false; // has waited for the kernel in front
    dim3       thread;
};

constexpr int N_MAX = 4096, STACK = 64*1024, C_MAX = 16, SHARED = 232448;

struct machine {
    fiber    f[N_MAX];
    char     state[N_MAX] = {}; // 0 ends, 1 runs, 2 waits for its warp, 3 for its block, 4 for its cluster
    char   * stacks = nullptr;
    jmp_buf  home;
    char   * shared = nullptr; // [C_MAX][SHARED]
    int      self = 0, n = 0, n_cluster = 1, n_sm = 4;
    bool     backwards = false;
    dim3     grid, block, index; // index: of the first block of the cluster
    uint64_t lane_value[2][N_MAX]; // by the parity of the operation
    int      lane_op[2][N_MAX];
    int      arrived[N_MAX/32];
    int      n_block_arrived[C_MAX], n_cluster_arrived = 0;
    unsigned n_phase = 0; // barriers of the cluster that are done
    int      block_value[2][N_MAX];
    std::function<void()> kernel;
    const void * functor = nullptr; // the arguments of the kernel
    size_t   n_functor = 0;
    std::vector<std::pair<const void *, size_t>> memory; // all that a kernel may read or write but for shared memory, and its bytes
    std::vector<std::pair<const void *, size_t>> early;  // of it, what may be read before begin_kernel()
    bool     runs = false;          // a fiber, not the host
    unsigned n_cluster_run = 0, n_cluster_before = 0; // since the beginning; before this launch
};

inline machine * const the_machine = new machine;
__attribute__((always_inline)) inline machine & m() { return *the_machine; }

[[noreturn]] inline void fail(const char * what) {
    m().runs = false;
    fprintf(stderr, "cuda_emu: %s (block %u %u %u, thread %d)\n", what, m().index.x, m().index.y, m().index.z, m().self);
    abort();
}

inline void wait() { // back to the loop of run_cluster
    if (_setjmp(m().f[m().self].at) == 0) {
        _longjmp(m().home, 1);
    }
}

inline void body() {
    for (;;) {
        m().kernel();
        m().state[m().self] = 0;
        wait();
    }
}

inline void run_fiber(int i) {
    m().self = i;
    if (_setjmp(m().home) == 0) {
        fiber & f = m().f[i];
        m().runs = true;
        if (f.started) {
            _longjmp(f.at, 1);
        }
        f.started = true;
        getcontext(&f.ctx);
        f.ctx.uc_stack.ss_sp   = m().stacks + (size_t) i*STACK;
        f.ctx.uc_stack.ss_size = STACK;
        f.ctx.uc_link = nullptr;
        makecontext(&f.ctx, body, 0);
        setcontext(&f.ctx);
    }
    m().runs = false;
}

inline int of_block() { return m().self/(int) m().block.x; } // of the cluster

inline char * dynamic_shared() { return m().shared + (size_t) of_block()*SHARED; }

inline dim3 block_index() { return dim3(m().index.x + of_block(), m().index.y, m().index.z); }

inline void run_cluster() {
    machine & x = m();
    memset(x.arrived, 0, sizeof(x.arrived));
    memset(x.n_block_arrived, 0, sizeof(x.n_block_arrived));
    x.n_cluster_arrived = 0;
    x.n_phase = 0;
    ++x.n_cluster_run;
    for (int i = 0; i < x.n; ++i) {
        x.state[i]  = 1;
        x.f[i].n_warp = x.f[i].n_block = x.f[i].n_arrived = x.f[i].n_waited = x.f[i].n_released = x.f[i].n_acquired = 0;
        x.f[i].has_begun = false;
        x.f[i].thread = dim3(i % x.block.x);
    }
    for (;;) { // always the first that can run, so that blocks and warps get as far ahead of the others as barriers let them
        const void * first = x.backwards ? memrchr(x.state, 1, x.n) : memchr(x.state, 1, x.n);
        if (!first) {
            break;
        }
        run_fiber((int) ((const char *) first - x.state));
    }
    if (std::any_of(x.state, x.state + x.n, [](char state) { return state != 0; })) {
        fail("threads wait for others that ended, or that wait elsewhere");
    }
}

template <typename F>
void launch(dim3 grid, dim3 block, const F & kernel, int n_cluster = 1, size_t n_shared = 0) {
    machine & x = m();
    if (!x.stacks) {
        const auto map = [](size_t n) { return (char *) mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); };
        x.stacks = map((size_t) N_MAX*STACK);
        x.shared = map((size_t) C_MAX*SHARED);
    }
    if (n_cluster < 1 || n_cluster > C_MAX || grid.x % n_cluster != 0 || n_cluster*block.x > N_MAX || n_shared > SHARED || block.x > 1024 ||
            block.y != 1 || block.z != 1 || block.x % 32 != 0 || block.x > N_MAX || grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.y > 65535 || grid.z > 65535) {
        fail("a launch that CUDA would refuse, or that is not emulated");
    }
    x.grid   = grid;
    x.block  = block;
    x.n      = n_cluster*(int) block.x;
    x.kernel = std::cref(kernel);
    x.functor   = &kernel;
    x.n_functor = sizeof(kernel);
    x.n_cluster = n_cluster;
    x.n_cluster_before = x.n_cluster_run;
    const uint64_t n_x = grid.x/n_cluster, n = n_x*grid.y*grid.z;
    for (uint64_t j = 0; j < n; ++j) {
        const uint64_t i = x.backwards ? n - 1 - j : j;
        x.index = dim3(i % n_x*n_cluster, i/n_x % grid.y, i/n_x/grid.y);
        for (int b = 0; b < n_cluster; ++b) {
            memset(x.shared + (size_t) b*SHARED, 0xFF, n_shared); // NaN
        }
        run_cluster();
    }
}

// every lane leaves a value and waits for the others; returns where the values of its warp are
inline const uint64_t * exchange(uint64_t value, int op) {
    machine & x = m();
    const int i = x.self, w = i/32, parity = x.f[i].n_warp++ % 2;
    x.lane_value[parity][i] = value;
    x.lane_op[parity][i]    = op;
    if (++x.arrived[w] < 32) {
        x.state[i] = 2;
        wait();
    } else {
        x.arrived[w] = 0;
        for (int j = w*32; j < w*32 + 32; ++j) {
            if (x.lane_op[parity][j] != op) {
                fail("the lanes of a warp are at different operations");
            }
            x.state[j] = 1;
        }
    }
    return x.lane_value[parity] + w*32;
}

inline const int * sync_block(int value) {
    machine & x = m();
    const int i = x.self, parity = x.f[i].n_block++ % 2, b = of_block(), nt = (int) x.block.x;
    x.block_value[parity][i] = value;
    if (++x.n_block_arrived[b] < nt) {
        x.state[i] = 3;
        wait();
    } else {
        x.n_block_arrived[b] = 0;
        for (int j = b*nt; j < (b + 1)*nt; ++j) {
            x.state[j] = 1;
        }
    }
    return x.block_value[parity] + b*nt;
}

inline void arrive_cluster(bool is_shared) {
    machine & x = m();
    x.f[x.self].n_released += !is_shared;
    if (++x.f[x.self].n_arrived != x.n_phase + 1) {
        fail("a thread arrives twice at a barrier of the cluster, or does not wait");
    }
    if (++x.n_cluster_arrived == x.n) {
        x.n_cluster_arrived = 0;
        ++x.n_phase;
        for (int j = 0; j < x.n; ++j) {
            x.state[j] = x.state[j] == 4 ? 1 : x.state[j];
        }
    }
}

inline void wait_cluster() {
    machine & x = m();
    if (x.f[x.self].n_arrived > x.n_phase) {
        x.state[x.self] = 4;
        wait();
    }
    x.f[x.self].n_waited   = x.f[x.self].n_arrived;
    x.f[x.self].n_acquired = x.f[x.self].n_released;
}

template <typename T> inline uint64_t to_bits(T v) { uint64_t b = 0; memcpy(&b, &v, sizeof(v)); return b; }
template <typename T> inline T from_bits(uint64_t b) { T v; memcpy(&v, &b, sizeof(v)); return v; }

inline void check_mask(unsigned mask) { if (mask != 0xFFFFFFFFu) { fail("a mask of less than the whole warp is not emulated"); } }

// how a kernel reads or writes; CACHED: by __ldcg()
enum class by { PLAIN, CACHED, ATOMIC };
void touch(const void * p, size_t n, bool writes, by kind = by::PLAIN); // races.cpp
#define SPARQ_UNSEEN __attribute__((no_sanitize("thread"))) static

} // namespace emu

#define threadIdx (emu::m().f[emu::m().self].thread)
#define blockIdx  (emu::block_index())
#define gridDim   (emu::m().grid)

static inline void __syncthreads() { emu::sync_block(0); }
static inline int __syncthreads_count(int p) {
    const int * v = emu::sync_block(p != 0);
    int res = 0;
    for (unsigned i = 0; i < emu::m().block.x; ++i) { res += v[i]; }
    return res;
}
static inline int __syncthreads_or(int p) { return __syncthreads_count(p) > 0; }

template <typename T> static inline T __shfl_sync(unsigned mask, T v, int lane) {
    emu::check_mask(mask);
    return emu::from_bits<T>(emu::exchange(emu::to_bits(v), 2)[lane & 31]);
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T v, int x) {
    emu::check_mask(mask);
    const int lane = emu::m().self % 32;
    return emu::from_bits<T>(emu::exchange(emu::to_bits(v), 3)[lane ^ x]);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T v, int n) {
    emu::check_mask(mask);
    const int lane = emu::m().self % 32;
    return emu::from_bits<T>(emu::exchange(emu::to_bits(v), 4)[lane >= n ? lane - n : lane]);
}
static inline unsigned __ballot_sync(unsigned mask, int p) {
    emu::check_mask(mask);
    const uint64_t * v = emu::exchange(p != 0, 5);
    unsigned res = 0;
    for (int i = 0; i < 32; ++i) { res |= (unsigned) v[i] << i; }
    return res;
}

static inline void __syncwarp() { __ballot_sync(0xFFFFFFFFu, 0); }

// a cluster: its barrier in two halves; what another block has where this one has *p
template <bool SHARED = false> static inline void cluster_arrive() { emu::arrive_cluster(SHARED); }
static inline void cluster_wait()   { emu::wait_cluster(); }
template <typename T> static inline T * cluster_at(T * p, int block) {
    if (block < 0 || block >= emu::m().n_cluster || (char *) p - emu::dynamic_shared() < 0 || (char *) p - emu::dynamic_shared() >= emu::SHARED) {
        emu::fail("not in the shared memory of a cluster");
    }
    return (T *) ((char *) p + ((ptrdiff_t) block - emu::of_block())*emu::SHARED);
}
static inline void ggml_cuda_pdl_sync() { emu::m().f[emu::m().self].has_begun = true; }
static inline void ggml_cuda_pdl_lc() {}

static inline int      __popc(unsigned x)            { return __builtin_popcount(x); }
static inline int      __ffs(int x)                  { return __builtin_ffs(x); }
static inline int      __float_as_int(float x)       { int b; memcpy(&b, &x, 4); return b; }
static inline float    __int_as_float(int b)         { float x; memcpy(&x, &b, 4); return x; }
static inline float    __uint_as_float(unsigned b)   { float x; memcpy(&x, &b, 4); return x; }
static inline float    __fdiv_rn(float a, float b)   { return a/b; }
static inline float    __fdividef(float a, float b)  { return a/b; }
static inline int      __float2int_rd(float x)       { return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x <= -2147483648.0f ? -2147483647 - 1 : (int) floorf(x); }
static inline float    __fsqrt_rn(float a)           { return sqrtf(a); }
template <typename T> SPARQ_UNSEEN T __ldcg(const T * p) { emu::touch(p, sizeof(T), false, emu::by::CACHED); return *p; }
static inline int      min(int a, int b)             { return a < b ? a : b; }
static inline int      max(int a, int b)             { return a > b ? a : b; }
static inline int64_t  min(int64_t a, int64_t b)     { return a < b ? a : b; }
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) { c += (int) (int8_t) (a >> 8*i)*(int) (int8_t) (b >> 8*i); }
    return c;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    const uint64_t x = (uint64_t) b << 32 | a;
    unsigned res = 0;
    for (int i = 0; i < 4; ++i) { res |= (unsigned) (x >> 8*(s >> 4*i & 7) & 255) << 8*i; }
    return res;
}
template <typename T> SPARQ_UNSEEN T atomicAdd(T * p, T v) { emu::touch(p, sizeof(T), true, emu::by::ATOMIC); const T old = *p; *p += v; return old; }
SPARQ_UNSEEN unsigned atomicOr(unsigned * p, unsigned v) { emu::touch(p, sizeof(v), true, emu::by::ATOMIC); const unsigned old = *p; *p |= v; return old; }

// ---- cuda_fp16.h; conversions by ggml, included before ----

struct __half { uint16_t bits; };
typedef __half half;
struct __half2 { __half x, y; };
typedef __half2 half2;
static inline float  __half2float(__half h)       { return GGML_FP16_TO_FP32(h.bits); }
static inline __half __float2half_rn(float x)     { return { (uint16_t) GGML_FP32_TO_FP16(x) }; }
static inline float2 __half22float2(__half2 h)    { return { __half2float(h.x), __half2float(h.y) }; }

// ---- the runtime ----

typedef void * cudaStream_t;
#define SPARQ_LAUNCH(kernel, grid, block, stream, ...) ((void) (stream), emu::launch(grid, block, [=] { kernel(__VA_ARGS__); }))

// as in sparse-device.cuh
template <typename K, typename A>
void launch_cluster(K kernel, dim3 grid, dim3 block, int n_cluster, size_t n_shared, cudaStream_t, const A & args) {
    emu::launch(grid, block, [=] { kernel(args); }, n_cluster, n_shared);
}
template <typename K> int max_clusters(K, int n_cluster, size_t n_shared, size_t) { return n_shared > emu::SHARED ? 0 : 2*emu::m().n_sm/n_cluster; }
