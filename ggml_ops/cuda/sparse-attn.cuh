#pragma once

// GGML_OP_SPARSE_ATTN on CUDA: what the hook in ggml-cuda calls. The operations and their rules: ../ggml-sparse.h; what runs where: docs/cuda.md.

#include "common.cuh"

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)

// ggml-hip and ggml-musa compile the hooked file too, without our kernels: nothing is supported there
inline void ggml_cuda_op_sparse_attn(ggml_backend_cuda_context &, ggml_tensor *) { GGML_ABORT("sparse_attn: no kernels for this device"); }
inline int  ggml_cuda_fuse_sparse_attn(ggml_backend_cuda_context &, const ggml_cgraph *, int) { return 0; }
inline bool ggml_cuda_sparse_attn_supported(const ggml_tensor *, int) { return false; }

#else

// runs a node for which the function below says true; no synchronisation, grids that follow from the shapes and the device, scratch from ctx.pool()
void ggml_cuda_op_sparse_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// runs node i of the graph, which is one of ours, together with those behind it, if it is the first of nodes that one launch can do. Returns how many
// are done besides it
int ggml_cuda_fuse_sparse_attn(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i);

// can this node run on a device of compute capability cc (ggml's number: 750, 860, ..)? Sources without a buffer are taken to be on the device
bool ggml_cuda_sparse_attn_supported(const ggml_tensor * dst, int cc);

#endif
