"""What the emulator notices: without these its green would mean little."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cuda_lib
import pytest

SOURCE = r"""
#include "ggml-impl.h"
#include "cuda_emu.h"

// each block of a cluster takes a number of the one after it
static void kernel(int * out, int kind) {
    struct memory { int number, of[64]; };
    SPARQ_DYNAMIC_SHARED(memory, m);
    const int t = threadIdx.x, b = blockIdx.x;
    if (kind == 1) {
        out[b*64 + t] = 1; // the kernel in front may be at work
    }
    ggml_cuda_pdl_sync();
    m.of[t] = t;
    if (kind != 2) {
        __syncthreads();
    }
    int sum = m.of[(t + 63) % 64];
    if (kind == 3 && t < 32) {
        __syncthreads(); // the other warp never comes
    }
    if (kind == 4) {
        t % 2 ? (void) __shfl_xor_sync(0xFFFFFFFFu, t, 1) : (void) __ballot_sync(0xFFFFFFFFu, 1);
    }
    for (int i = 16; i > 0; i /= 2) { sum += __shfl_xor_sync(0xFFFFFFFFu, sum, i); }
    sum = 100*sum + __shfl_sync(0xFFFFFFFFu, t, 5);
    if (t == 0) {
        m.number = 10*sum + b;
    }
    if (kind == 5) {
        __syncthreads(); // is none of the cluster
    } else if (kind == 13) {
        out[b*64 + t] = 1;
        cluster_arrive<true>(); // is none for global memory
        cluster_wait();
        sum += __ldcg(&out[(b + 3) % 4*64 + t]);
    } else if (kind != 6 || b > 0) {
        cluster_arrive();
        cluster_wait();
    }
    out[b*64 + t] = *cluster_at(&m.number, kind == 7 ? 4 : (b + 1) % 4);
    if (kind != 8) {
        cluster_arrive();
        cluster_wait();
    }
    if (t == 32) {
        m.number = 7; // all of the cluster have read it
    }
    const int * p = &out[(b + 3) % 4*64 + t], x = kind == 9 ? *p : __ldcg(p);
    if (kind == 10 || x < 0) {
        atomicAdd(&m.of[0], x);
        m.of[0] = 1;
    }
    if (kind == 11) {
        out[256] = 7;
    }
    if (kind == 12) {
        out[b*64 + t] += *(const int *) ((const char *) &m.of[t] + 1);
    }
}

int main(int, char ** argv) {
    const int kind = atoi(argv[1]);
    int * out = new int[256];
    emu::m().memory = { { out, 256*sizeof(int) } };
    emu::launch(dim3(4), dim3(64), [=] { kernel(out, kind); }, 4, 65*sizeof(int));
    printf("%d %d\n", out[3], out[255]);
}
"""


@pytest.fixture(scope="module")
def program(ggml_headers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := cuda_lib.why_no_host():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("emulator")
    (folder / "x.cpp").write_text(SOURCE)
    cuda_lib.compile_host(folder / "x.cpp", folder / "x.o", cuda_lib.include_flags(ggml_headers))
    cuda_lib.link_host(ggml_headers, [folder / "x.o"], folder / "x")
    return folder / "x"


NOTICED = (
    *("528051 528050", "before begin_kernel", "a race", "threads wait"),
    *("different operations", "a race", "a race", "not in the shared memory of a cluster"),
    *("a race", "through the L1 cache", "a race", "outside of all tensors", "misaligned"),
    "a race in global memory",
)


@pytest.mark.parametrize(("kind", "want"), [*enumerate(NOTICED)])
def test_emulator_notices(program: Path, kind: int, want: str) -> None:
    done = subprocess.run([program, str(kind)], capture_output=True, text=True)
    assert want in done.stdout + done.stderr, done.stderr
    assert (done.returncode == 0) == (kind == 0)
