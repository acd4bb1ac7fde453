// Runs one node of our CPU op without ggml's threads, for tests/ops/isa.py: in this process, or as a program for an emulated CPU.
//
//   isa_main FILE NODE     FILE: raw bytes to be mapped at ARENA, tensors, buffers and all; NODE: address of the ggml_tensor
//
// Also holds the few functions of ggml that the op calls, so that nothing of ggml has to be compiled. Threads and their barrier are
// those of POSIX, which a thread sanitizer understands; it does not understand OpenMP.

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
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

struct ggml_threadpool {
    pthread_mutex_t lock;
    pthread_cond_t  all_here;
    int n, n_here, round;
    int chunk;
};

void ggml_barrier(struct ggml_threadpool * tp);
void ggml_barrier(struct ggml_threadpool * tp) {
    pthread_mutex_lock(&tp->lock);
    const int round = tp->round;
    if (++tp->n_here == tp->n) {
        tp->n_here = 0;
        tp->round++;
        pthread_cond_broadcast(&tp->all_here);
    }
    while (tp->round == round) {
        pthread_cond_wait(&tp->all_here, &tp->lock);
    }
    pthread_mutex_unlock(&tp->lock);
}

void ggml_threadpool_chunk_set(struct ggml_threadpool * tp, int value);
void ggml_threadpool_chunk_set(struct ggml_threadpool * tp, int value) {
    pthread_mutex_lock(&tp->lock);
    tp->chunk = value;
    pthread_mutex_unlock(&tp->lock);
}

int ggml_threadpool_chunk_add(struct ggml_threadpool * tp, int value);
int ggml_threadpool_chunk_add(struct ggml_threadpool * tp, int value) {
    pthread_mutex_lock(&tp->lock);
    const int res = tp->chunk;
    tp->chunk += value;
    pthread_mutex_unlock(&tp->lock);
    return res;
}

bool isa_numa; // as if memory had NUMA nodes
bool ggml_is_numa(void) { return isa_numa; }

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

// of the types that hold K and V
size_t ggml_row_size(enum ggml_type type, int64_t ne) {
    switch (type) {
        case GGML_TYPE_Q8_0: return ne/32*34;
        case GGML_TYPE_Q4_0: return ne/32*18;
        default:             return ne*ggml_type_size(type);
    }
}

bool ggml_is_quantized(enum ggml_type type) { return type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0; }

_Thread_local int isa_thread; // for count_reads.c

struct task {
    struct ggml_compute_params params;
    struct ggml_tensor * node;
};

static void * run_task(void * task) {
    isa_thread = ((struct task *) task)->params.ith;
    ggml_compute_forward_sparse_attn(&((struct task *) task)->params, ((struct task *) task)->node);
    return NULL;
}

// work: a buffer of ggml_sparse_attn_work_size(node, n_threads) bytes; n_threads: 1 to 128
void isa_compute(struct ggml_tensor * node, void * work, size_t size, int n_threads);
void isa_compute(struct ggml_tensor * node, void * work, size_t size, int n_threads) {
    struct ggml_threadpool tp = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, n_threads, 0, 0, 0 };
    struct task tasks[128];
    pthread_t threads[128];
    for (int i = 0; i < n_threads; ++i) {
        tasks[i] = (struct task) { { i, n_threads, size, work, &tp, false }, node };
        if (i > 0 && pthread_create(&threads[i], NULL, run_task, &tasks[i]) != 0) {
            perror("isa_main");
            abort();
        }
    }
    run_task(&tasks[0]);
    for (int i = 1; i < n_threads; ++i) {
        pthread_join(threads[i], NULL);
    }
}

int main(int argc, char ** argv) {
    struct stat st;
    const int fd = argc == 3 ? open(argv[1], O_RDWR) : -1;
    if (fd < 0 || fstat(fd, &st) != 0 || mmap(ARENA, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != ARENA) {
        perror("isa_main");
        return 2;
    }
    struct ggml_tensor * node = (struct ggml_tensor *) (uintptr_t) strtoull(argv[2], NULL, 16);
    const int n_threads = 2;
    const size_t size = ggml_sparse_attn_work_size(node, n_threads);
    void * work = malloc(size + 1);
    isa_compute(node, work, size, n_threads);
    free(work);
    return 0;
}
