// Runs one node of our CPU op in another process, for tests/ops/isa.py: the other process may be an emulated CPU.
//
//   isa_main FILE NODE     FILE: raw bytes to be mapped at ARENA, tensors, buffers and all; NODE: address of the ggml_tensor
//
// Also holds the few functions of ggml that the op calls, so that nothing of ggml has to be compiled.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "ggml.h"
#include "sparse-attn.h"

#define ARENA ((char *) 0x200000000000)

struct ggml_compute_params { // of ggml-cpu-impl.h
    int ith, nth;
    size_t wsize;
    void * wdata;
    struct ggml_threadpool * threadpool;
    bool use_ref;
};

void ggml_barrier(struct ggml_threadpool * tp);
void ggml_barrier(struct ggml_threadpool * tp) { (void) tp; } // one thread

void ggml_abort(const char * file, int line, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, fmt, args);
    abort();
}

const char * ggml_type_name(enum ggml_type type) { (void) type; return "?"; }

size_t ggml_type_size(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_F16: case GGML_TYPE_BF16: return 2;
        case GGML_TYPE_I64:                      return 8;
        default:                                 return 4;
    }
}

// with one thread; work: a buffer of ggml_sparse_attn_work_size(node, 1) bytes
void isa_compute(struct ggml_tensor * node, void * work, size_t size);
void isa_compute(struct ggml_tensor * node, void * work, size_t size) {
    const struct ggml_compute_params params = { 0, 1, size, work, NULL, false };
    ggml_compute_forward_sparse_attn(&params, node);
}

int main(int argc, char ** argv) {
    struct stat st;
    const int fd = argc == 3 ? open(argv[1], O_RDWR) : -1;
    if (fd < 0 || fstat(fd, &st) != 0 || mmap(ARENA, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != ARENA) {
        perror("isa_main");
        return 2;
    }
    struct ggml_tensor * node = (struct ggml_tensor *) (uintptr_t) strtoull(argv[2], NULL, 16);
    const size_t size = ggml_sparse_attn_work_size(node, 1);
    void * work = malloc(size + 1);
    isa_compute(node, work, size);
    free(work);
    return 0;
}
