#pragma once

// The scan of codes of 4 bits by groups, where there are more warps than runs: a warp has a line, which is a group of 128 positions.

#include "sparse-score.cuh"

namespace sparse_cuda {

template <int GB> constexpr bool USES_MMA = SPARQ_MMA && GB > 1;

// where the only span of a lane begins in the run
template <int GB>
__device__ __forceinline__ int line_position(int line, int lane) {
    return USES_MMA<GB> ? span_position<4>(line*8 + lane/4, lane % 4) : span_position<4>(line*8 + lane % 8, lane/8 % 2*2 + lane/16);
}

// As scan_codes(): the sums are the same whole numbers. Each quarter of the lanes has a quarter of the components
//   k_t: the KV head's first component at the group's line
template <int GB, int NT, typename F>
__device__ __forceinline__ void scan_line(
        float (&x)[GB][4], const score_shared<4, GB, NT> & m, const float (&step)[GB], const float (&base)[GB], int w, int n_comp, const char * k_t,
        int64_t nb_comp, const F & make) {
    constexpr int N = 8, HEADS = GB == 1 ? 1 : 2; // components, heads at a time: more heads would not fit into registers
    const int  lane = threadIdx.x % 32, per = (n_comp + COEF_PAD - 1)/COEF_PAD*(COEF_PAD/4), first = lane/8*per;
    const bool up8 = lane & 8, up16 = lane & 16;
    uint2 raw[N];
    const auto load = [&](int i0) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            raw[j] = *(const uint2 *) (k_t + m.comp[min(first + i0 + j, n_comp - 1)]*nb_comp + lane % 8*8);
        }
    };
    load(0);
    make();
#pragma unroll
    for (int h0 = 0; h0 < GB; h0 += HEADS) {
        int sum[HEADS][PER_LANE] = {};
#pragma unroll 1
        for (int i0 = 0; i0 < per; i0 += N) {
            if (h0 + i0 > 0) {
                load(i0);
            }
#pragma unroll
            for (int b = 0; b < N; b += 4) {
                const bool in = i0 + b < per;
                add_codes<4>(sum, raw + b, [&](int h) { return in ? *(const int *) &m.w0[w][0][h0 + h][first + i0 + b] : 0; }, [](int) { return 0; });
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            int half[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int give = up8 ? sum[h][i] : sum[h][8 + i], keep = up8 ? sum[h][8 + i] : sum[h][i];
                half[i] = keep + __shfl_xor_sync(ALL, give, 8);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int give = up16 ? half[i] : half[4 + i], keep = up16 ? half[4 + i] : half[i];
                x[h0 + h][i] = (float) (keep + __shfl_xor_sync(ALL, give, 16))*step[h0 + h] + base[h0 + h];
            }
        }
    }
}

// c += a*b, of 16 x 32 and 32 x 8 signed bytes. Lane 4*r + q has of a rows r, r + 8 at columns 4*q .., and again at 16 + 4*q ..; of b the same places of
// column r; of c columns 2*q, 2*q + 1 of row r, and of row r + 8 (PTX ISA, mma.m16n8k32)
__device__ __forceinline__ void mma_s8(int (&c)[4], const unsigned (&a)[4], const int (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 32; ++i) {
        const int q = i % 4, j = i/4 % 4, k = i/16;
        c[j] = __dp4a((int) __shfl_sync(ALL, a[2*k + j/2], lane/4*4 + q), __shfl_sync(ALL, b[k], (lane % 4*2 + j % 2)*4 + q), c[j]);
    }
#endif
}

// On tensor cores, of all heads at once. While it multiplies, a lane of the quad r has the line's 16 positions of number r, and eight of 32 components
template <int GB, int NT, typename F>
__device__ __forceinline__ void scan_line_mma(
        float (&x)[GB][4], const score_shared<4, GB, NT> & m, const float (&step)[GB], const float (&base)[GB], int w, int n_comp, const char * k_t,
        int64_t nb_comp, const F & make) {
    static_assert(GB == 4 || GB == 8);
    const int  lane = threadIdx.x % 32, r = lane/4, q = lane % 4, n_pad = (n_comp + COEF_PAD - 1)/COEF_PAD*COEF_PAD;
    const bool up1 = q & 1, up2 = q & 2;
    uint2 raw[8];
    const auto load = [&](int i0) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            raw[j] = *(const uint2 *) (k_t + m.comp[min(i0 + j/4*16 + q*4 + j % 4, n_comp - 1)]*nb_comp + r*8);
        }
    };
    load(0);
    make();
    int sum[8][4] = {}; // as in mma_s8(), of the positions i and i + 4 of either half
#pragma unroll 1
    for (int i0 = 0; i0 < n_comp; i0 += 32) {
        if (i0 > 0) {
            load(i0);
        }
        int b[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int i = i0 + 16*k + q*4;
            b[k] = r < GB && i < n_pad ? *(const int *) &m.w0[w][0][r][i] : 0;
        }
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            unsigned v[2][4];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const auto of = [&](int j) { return word == 0 ? raw[k*4 + j].x : raw[k*4 + j].y; };
                const unsigned from[4] = { of(0), of(1), of(2), of(3) };
                zip4(v[k], from);
            }
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                const unsigned a[4] = { v[0][l] & 0x0F0F0F0Fu, v[0][l] >> 4 & 0x0F0F0F0Fu, v[1][l] & 0x0F0F0F0Fu, v[1][l] >> 4 & 0x0F0F0F0Fu };
                mma_s8(sum[word*4 + l], a, b);
            }
        }
    }
    // the lanes of a quad exchange heads for positions: each keeps span q, first the half that has it, then the span
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int l = i/2, e = i % 2;
        int half[2][2]; // of heads 4*u + 2*(q % 2) + e, of the half's spans
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int lower = sum[l][j*2 + e], upper = sum[4 + l][j*2 + e], got = __shfl_xor_sync(ALL, up2 ? lower : upper, 2);
            half[0][j] = up2 ? got : lower;
            half[1][j] = up2 ? upper : got;
        }
#pragma unroll
        for (int u = 0; u < GB/4; ++u) {
            const int h = 4*u + e, got = __shfl_xor_sync(ALL, up1 ? half[u][0] : half[u][1], 1);
            x[h    ][l] = (float) (up1 ? got : half[u][0])*step[h]     + base[h];
            x[h + 2][l] = (float) (up1 ? half[u][1] : got)*step[h + 2] + base[h + 2];
        }
    }
}

} // namespace sparse_cuda
