#pragma once

// The order of the codes in a quantised k_t (8 or 4 bits): for the CPU ops, the CUDA ops and the check of the shadow.
//
//   Codes lie in lines of 64 bytes: 64 positions of 8 bits, or 128 of 4 bits, the first 64 in the low halves of the bytes. Inside a line
//   position 16*j + 4*i + l has byte 16*i + 4*j + l, so that zipping four channels within 128 bits, which is what every CPU can do,
//   leaves consecutive positions in a register.

#if defined(__CUDACC__)
#define GGML_SPARSE_CODES static __host__ __device__ inline
#else
#define GGML_SPARSE_CODES static inline
#endif

#define GGML_SPARSE_LINE 64 // bytes

// positions in a line
GGML_SPARSE_CODES int ggml_sparse_line_pos(int n_bit) { return GGML_SPARSE_LINE*8/n_bit; }

// the byte in a line of position t of its 64
GGML_SPARSE_CODES int ggml_sparse_line_byte(int t) { return t/4%4*16 + t/16*4 + t%4; }

// the byte in a channel's row of position i, and the lowest bit of its code in that byte
GGML_SPARSE_CODES int ggml_sparse_code_byte(int i, int n_bit) {
    return i/ggml_sparse_line_pos(n_bit)*GGML_SPARSE_LINE + ggml_sparse_line_byte(i % GGML_SPARSE_LINE);
}
GGML_SPARSE_CODES int ggml_sparse_code_shift(int i, int n_bit) { return n_bit == 4 && i % 128 >= 64 ? 4 : 0; }
