"""One number says what two builds must agree on: ggml_ops/sparse-layout.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from pyorch import engine, paths
from pyorch.engine import document, machines
from pyorch.native import probe

PROBE = """
#include "sparse-layout.h"
extern "C" unsigned layout() { return ggml_sparse_layout(); }
"""
_ENUM = "enum ggml_sparse_attn_op {"
_BITS = "int32_t n_bit;      // of k_t, see sparse-codes.h"
_ROT = "int32_t n_rot;      // > 0: K is rotated, k_t is not"
# of ggml_ops: a file, what is in it, what takes its place. Each has another meaning for a machine
# that shares a model, or for the bytes of a document
CHANGES = {
    "slots": ("ggml-sparse-nodes.h", "X(sel, 8)    X(visible, 9)", "X(sel, 9) X(visible, 8)"),
    "a slot": ("ggml-sparse-nodes.h", "X(list, 0)   X(k, 1)  ", "X(list, 0)   X(k, 2)  "),
    "steps": ("ggml-sparse.h", _ENUM, f"{_ENUM}GGML_SPARSE_ATTN_NEW,"),
    "parameters": ("ggml-sparse.h", "int32_t topk_max;   // cap", "float topk_max; // cap"),
    "their order": ("ggml-sparse.h", f"{_BITS}\n    {_ROT}", f"{_ROT}\n    {_BITS}"),
    "counters": ("ggml-sparse.h", "X(PREFILL)   ", "X(NEW) X(PREFILL)   "),
    "order of codes": ("sparse-codes.h", "t/16*4 + t%4;", "t/16*4 + 3 - t%4;"),
    "halves of a byte": ("sparse-codes.h", "/GGML_SPARSE_LINE*n_bit; }", "%2*n_bit; }"),
    "group": ("ggml-sparse.h", "SPARSE_GROUP 64 ", "SPARSE_GROUP 32 "),
    "run": ("ggml-sparse.h", "SPARSE_RUN   512", "SPARSE_RUN   1024"),
    "sum block": ("ggml-sparse.h", "SPARSE_SUM   16", "SPARSE_SUM   8"),
    "rows of sums": ("ggml-sparse.h", "(GGML_SPARSE_SUM + 1) + GGML_SPARSE_SUM; }", "17 + 15; }"),
}
COMMENTS = {
    "comment": ("sparse-codes.h", "// the order of codes", "// the order of codes, in other words"),
    "new line": ("ggml-sparse-nodes.h", "struct ggml_sparse_src {", "\n\nstruct ggml_sparse_src {"),
    "other code": ("ggml-sparse.c", "#include", "// words\n#include"),
}


@pytest.fixture(scope="module")
def layout(ggml_headers: Path, tmp_path_factory: pytest.TempPathFactory):
    """layout(file, text, other): what workers and documents of that source are known by."""

    def go(file: str = "ggml-sparse.h", text: str = "", other: str = "") -> tuple[int, int]:
        folder = tmp_path_factory.mktemp("ops")
        ops = Path(shutil.copytree(paths.data("ggml_ops"), folder / "ggml_ops"))
        source = (ops / file).read_text("utf-8")
        assert not text or source.count(text), text
        (ops / file).write_text(source.replace(text, other, 1) if text else source, "utf-8")
        (folder / "probe.cpp").write_text(PROBE)
        argv = [probe.need_compiler().cxx, "-std=c++17", "-shared", "-fPIC", "-w"]
        argv += [f"-I{ops}", f"-I{ops / 'rpc'}", f"-I{ggml_headers / 'include'}"]
        argv += [folder / "probe.cpp", ops / "rpc/sparse-rpc.cpp", "-o", folder / "layout.so"]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lib = ctypes.CDLL(str(folder / "layout.so"))
        lib.layout.restype = ctypes.c_uint32
        lib.ggml_sparse_rpc_own_version.restype = ctypes.c_uint8
        return lib.layout(), lib.ggml_sparse_rpc_own_version()

    return go


@pytest.fixture(scope="module")
def ours(layout) -> tuple[int, int]:
    return layout()


def test_workers_and_documents_go_by_it(ours: tuple[int, int], tiny: Path) -> None:
    number, byte = ours
    assert byte == machines.sparse_version(engine.library()) > 0
    with engine.load(tiny, attention="sparq,rank=8,topk=64") as s:
        assert document._call(s, "kind")[1].endswith(f",layout={number}")


@pytest.mark.parametrize("what", CHANGES)
def test_another_layout_is_another_number(what: str, layout, ours: tuple[int, int]) -> None:
    file, text, other = CHANGES[what]
    found = layout(file, text, other)
    assert found[0] != ours[0] and found[1] != ours[1]


@pytest.mark.parametrize("what", COMMENTS)
def test_a_comment_is_none(what: str, layout, ours: tuple[int, int]) -> None:
    assert layout(*COMMENTS[what]) == ours
