"""What the emulator notices: without these its green would mean little."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cuda_lib
import pytest

SOURCE = r"""
#include "ggml-impl.h"
#include "cuda_emu.h"
#include <vector>

static int shared[64];

// each thread takes the number of its left neighbour
static void kernel(int * out, int kind) {
    const int t = threadIdx.x;
    shared[t] = t;
    if (kind != 1) {
        __syncthreads();
    }
    out[t] = shared[(t + 63) % 64];
    if (kind == 2 && t < 32) {
        __syncthreads(); // the other warp never comes
    }
    if (kind == 3) { // the lanes are at different operations
        t % 2 ? (void) __shfl_xor_sync(0xFFFFFFFFu, t, 1) : (void) __ballot_sync(0xFFFFFFFFu, 1);
    }
    if (kind == 4) { // the sum over the warp, and what lane 5 has
        int sum = t;
        for (int i = 16; i > 0; i /= 2) { sum += __shfl_xor_sync(0xFFFFFFFFu, sum, i); }
        out[t] = sum*100 + __shfl_sync(0xFFFFFFFFu, t, 5);
    }
}

// each block of a cluster takes the number of the one after it
static void neighbour(int * out, int kind) {
    struct memory { int number; };
    SPARQ_DYNAMIC_SHARED(memory, m);
    if (threadIdx.x == 0) {
        m.number = 100 + blockIdx.x;
    }
    if (kind == 6) {
        __syncthreads();
    } else if (kind != 7 || blockIdx.x > 0) {
        cluster_arrive();
        cluster_wait();
    }
    out[blockIdx.x*64 + threadIdx.x] = *cluster_at(&m.number, kind == 8 ? 4 : (blockIdx.x + 1) % 4);
    if (kind == 9) { // all of the cluster have read
        cluster_arrive();
        cluster_wait();
    }
    __syncthreads();
    if (threadIdx.x == 32 && kind >= 9) { // not the last one at the barrier, in either order
        m.number = 7;
    }
}

int main(int, char ** argv) {
    const int kind = atoi(argv[1]), n_block = kind < 5 ? 1 : 4;
    std::vector<int> out[2];
    for (int back = 0; back < 2; ++back) {
        out[back].resize(64*n_block);
        memset(shared, 0, sizeof(shared));
        int * p = out[back].data();
        emu::m().backwards = back;
        const auto run = [=] { kind < 5 ? kernel(p, kind) : neighbour(p, kind); };
        emu::launch(dim3(n_block), dim3(64), run, n_block, sizeof(int));
    }
    printf("%d %d %d\n", out[0] == out[1], out[0][3], out[0][kind < 5 ? 40 : 255]);
}
"""


@pytest.fixture(scope="module")
def program(ggml_headers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := cuda_lib.why_no_host():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("emulator")
    (folder / "x.cpp").write_text(SOURCE)
    argv = [*cuda_lib.host_compiler(), *cuda_lib.include_flags(ggml_headers)]
    subprocess.run([*argv, str(folder / "x.cpp"), "-o", str(folder / "x")], check=True)
    return folder / "x"


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        (0, "1 2 39"),
        (1, "0 2 39"),  # without the barrier: the two orders differ
        (2, "threads wait for others"),
        (3, "different operations"),
        (4, "1 49605 152037"),
        (5, "1 101 100"),
        (6, "0 "),  # the barrier of a block is none of the cluster
        (7, "threads wait for others"),
        (8, "not in the shared memory of a cluster"),
        (9, "1 101 100"),
        (10, "0 "),  # a block runs ahead of the cluster, from one barrier of its own to the next
    ],
)
def test_emulator_notices(program: Path, kind: int, want: str) -> None:
    done = subprocess.run([program, str(kind)], capture_output=True, text=True)
    assert want in done.stdout + done.stderr
    assert (done.returncode == 0) == want[0].isdigit()
