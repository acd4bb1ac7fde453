#pragma once

// What two machines tell each other before they share a model over ggml-rpc.
//
// A worker is sent ops by their number and runs what it is sent; llama.cpp's own would read the number of SPARSE_ATTN as something else. So a
// worker of ours greets with a byte that llama.cpp leaves at zero, and no other is sent the op.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

typedef struct ggml_backend * ggml_backend_t;

// The byte: 1 to 255, from sparse-layout.h. Builds that differ in their layout do not share the op, but for one pair in 255 that has the same byte.
// 0: one of the worker's backends is not a CPU, whose kernels are the only ones that run all of the op.
uint8_t ggml_sparse_rpc_version(const std::vector<ggml_backend_t> & backends);

// Keeps what the worker at host:port greeted with, and says whether it runs SPARSE_ATTN as we build it. Any thread
void ggml_sparse_rpc_greeted(const std::string & endpoint, uint8_t version);
bool ggml_sparse_rpc_runs(const std::string & endpoint);

// the byte of this library itself, for programs that greet by themselves
extern "C" uint8_t ggml_sparse_rpc_own_version(void);

// A machine that is switched off, or whose cable is cut, says nothing; the call to it would wait for ever. With this it fails after about
// 20 seconds. A worker that computes for longer keeps its connection: its system answers.
extern "C" void ggml_sparse_rpc_keep_alive(int socket);

// As send(): the bytes that were taken, or below 0. A worker that computes reads nothing meanwhile, and its system lets no more be sent; the sender's
// system would take 20 seconds of that for a machine that is gone, although it answers. So that limit is off while all that was sent has arrived. A
// machine that vanishes just then is missed when Linux gives up by itself, by its defaults after about a quarter of an hour.
extern "C" int64_t ggml_sparse_rpc_send(int socket, const char * data, size_t size);
