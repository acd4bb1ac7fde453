"""One number says what two builds must agree on: ggml_ops/sparse-layout.h."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pyorch import engine, paths
from pyorch.engine import document, machines
from pyorch.native import probe

PROBE = """
#include "sparse-layout.h"
#include <stdio.h>
extern "C" void ggml_abort(const char *, int, const char *, ...) {}
int main() { return printf("%u", ggml_sparse_layout()) < 0; }
"""
_STEPS = "STEPS(X) X(SEAL) X(VISIBLE)"
# of ggml_ops: a file, what is in it, what takes its place. Each has another meaning for a machine
# that shares a model, or for the bytes of a document
CHANGES = {
    "slots": ("ggml-sparse-nodes.h", "X(sel, 8)    X(visible, 9)", "X(sel, 9) X(visible, 8)"),
    "a slot": ("ggml-sparse-nodes.h", "X(list, 0)   X(k, 1)  ", "X(list, 0)   X(k, 2)  "),
    "steps": ("sparse-params.h", _STEPS, "STEPS(X) X(VISIBLE) X(SEAL)"),
    "parameters": ("sparse-params.h", "F(int32_t, topk_max)", "F(float, topk_max)"),
    "one more": ("sparse-params.h", "F(float,   top_p)", "F(int32_t, one) F(float, top_p)"),
    "counters": ("sparse-params.h", "X(PREFILL)   ", "X(NEW) X(PREFILL)   "),
    "order of codes": ("sparse-codes.h", "t/16*4 + t%4;", "t/16*4 + 3 - t%4;"),
    "halves of a byte": ("sparse-codes.h", "/GGML_SPARSE_LINE*n_bit; }", "%2*n_bit; }"),
    "group": ("sparse-params.h", "SPARSE_GROUP 128 ", "SPARSE_GROUP 256 "),
    "scales": ("sparse-codes.h", "? 4 : 0; }", "? 8 : 0; }"),
    "sum block": ("sparse-params.h", "SPARSE_SUM   8", "SPARSE_SUM   16"),
    "rows of sums": ("sparse-params.h", "(GGML_SPARSE_SUM + 1) + GGML_SPARSE_SUM; }", "9 + 7; }"),
}


@pytest.fixture(scope="module")
def layout(ggml_headers: Path, tmp_path_factory: pytest.TempPathFactory):
    """layout((file, text, other)...): the number of that source; None if it does not compile, and
    what the compiler says."""

    def go(*changes: tuple[str, str, str]) -> tuple[int | None, str]:
        folder = tmp_path_factory.mktemp("ops")
        ops = Path(shutil.copytree(paths.data("ggml_ops"), folder / "ggml_ops"))
        for file, text, other in changes:
            source = (ops / file).read_text("utf-8")
            assert text in source
            (ops / file).write_text(source.replace(text, other, 1), "utf-8")
        (folder / "probe.cpp").write_text(PROBE)
        argv = [*shlex.split(probe.need_compiler().cxx), "-std=c++17", "-w", f"-I{ops}"]
        argv += [f"-I{ggml_headers / 'include'}", folder / "probe.cpp", "-o", folder / "probe"]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            return None, done.stderr
        return int(subprocess.run([folder / "probe"], capture_output=True, check=True).stdout), ""

    return go


@pytest.fixture(scope="module")
def ours(layout) -> int:
    return layout()[0]


def byte(layout: int) -> int:
    """What a worker greets with."""
    return 1 + layout % 255


@pytest.mark.usefixtures("native_lib_dir")
def test_workers_and_documents_go_by_it(ours: int, tiny: Path) -> None:
    assert machines.sparse_version(engine.library()) == byte(ours)
    with engine.load(tiny, attention="sparq,rank=8,topk=64") as s:
        assert document._call(s, "kind")[1].endswith(f",layout={ours}")


@pytest.mark.parametrize("what", CHANGES)
def test_another_layout_is_another_number(what: str, layout, ours: int) -> None:
    number, errors = layout(CHANGES[what])
    assert number, errors
    assert number != ours and byte(number) != byte(ours)


def test_the_parameters_of_every_step_count(layout, ours: int) -> None:
    """A step that says nothing of its parameters does not compile; one that has none is told apart
    all the same."""
    step = (
        ("sparse-params.h", _STEPS, "STEPS(X) X(NEW) X(SEAL) X(VISIBLE)"),
        ("ggml-sparse-nodes.h", "static inline", "#define GGML_SPARSE_SRC_NEW(X)\nstatic inline"),
    )
    number, errors = layout(*step)
    assert number is None and "GGML_SPARSE_PARAMS_NEW" in errors
    line = "#define GGML_SPARSE_PARAMS_NEW(F)"
    number, errors = layout(*step, ("sparse-layout.h", "#pragma once", f"#pragma once\n{line}"))
    assert number and number != ours, errors
