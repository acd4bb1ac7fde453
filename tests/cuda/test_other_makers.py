"""ggml-hip and ggml-musa compile the hooked file too: it builds there, and supports nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cuda_lib
import pytest

from pyorch.native.cmake import tool

# as the hook in ggml-cuda.cu uses the header; exit code 0: not supported
HOOKED = r"""
#include "sparse-attn.cuh"
extern "C" void ggml_abort(const char *, int, const char *, ...) { __builtin_trap(); }
int main(int n, char **) {
    ggml_backend_cuda_context ctx;
    ggml_tensor t = {};
    if (n > 1) { ggml_cuda_op_sparse_attn(ctx, &t); }
    return ggml_cuda_sparse_attn_supported(&t, 900);
}
"""
# what attach.cmake finds in llama.cpp: ggml-hip or ggml-musa, and no ggml-cuda
TOP = """
cmake_minimum_required(VERSION 3.19)
project("llama.cpp" C CXX)
add_subdirectory(ggml/src)
add_library(llama OBJECT)
"""
GGML = """
add_library(ggml-base OBJECT)
add_executable(TARGET hooked.cpp)
target_compile_definitions(TARGET PRIVATE DEFINE)
target_include_directories(TARGET PRIVATE FOLDERS)
"""


@pytest.mark.parametrize("maker", ["hip", "musa"])
def test_builds_without_kernels(maker: str, ggml_headers: Path, tmp_path: Path) -> None:
    source = tmp_path / "src" / "ggml" / "src"
    source.mkdir(parents=True)
    (source.parents[1] / "CMakeLists.txt").write_text(TOP)
    folders = f"{cuda_lib.HERE / 'host'} {ggml_headers / 'include'} {ggml_headers / 'src'}"
    text = GGML.replace("TARGET", f"ggml-{maker}").replace("FOLDERS", folders)
    (source / "CMakeLists.txt").write_text(text.replace("DEFINE", f"GGML_USE_{maker.upper()}"))
    (source / "hooked.cpp").write_text(HOOKED)
    out, cmake, ninja = tmp_path / "out", tool("cmake"), tool("ninja")
    attach = f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={cuda_lib.OPS / 'attach.cmake'}"
    argv = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", attach]
    for step in ([*argv, "-S", source.parents[1], "-B", out], [ninja, "-C", out, f"ggml-{maker}"]):
        done = subprocess.run(step, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert subprocess.run([out / "ggml" / "src" / f"ggml-{maker}"]).returncode == 0
