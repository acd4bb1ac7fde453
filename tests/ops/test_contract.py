"""What the constructors refuse: a wrong graph stops with an assertion instead of computing.

Each case runs in its own process, because GGML_ASSERT ends it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyorch.ggml import MAX_SRC
from pyorch.native import slots
from pyorch.native.slots import SLOTS, STEPS

PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
import cases, graphs
import numpy as np
from ggml_ctypes import Ggml, SealParams, ScoreParams, SelectParams, AttendParams, PrefillParams
from graphs import Sources

ggml = Ggml(Path({lib!r}))
data = cases.make(cases.Case(n_kv=130, heads=(8, 2), extra="mean_v"))
with ggml.graph() as g:
    s = Sources(data, g)
    def score(rank=16, **changed):
        return s.node("score", ScoreParams(rank, 1, 0, 0, 16), **changed)
    def select(*sizes):
        return s.node("select", SelectParams(*sizes), logits=score())
    def attend(mean_v=0, **changed):
        return s.node("attend", AttendParams(1, 0, 0, mean_v), **changed)
    def prefill(**changed):
        return s.node("prefill", PrefillParams(1, 0, 0, 0), **changed)
    def seal(**changed):
        groups = g.tensor(np.zeros((1, 1)), "i32")
        return s.node("seal", SealParams(16), list=groups, **changed)
    print("before", flush=True)
    {line}
    print("after", flush=True)
"""

ACCEPTED = [
    "score()",
    "score(k_t=None, sealed=None, rank=0)",
    "select(8, 2, 1, 0)",
    "seal()",
    "score(k_t=data.k_t[:, :, :128])",  # without the last group, of 2 positions
    "attend()",
    "attend(mean_v=1, sel=select(8, 2, 1, 1))",
    "prefill()",
]
REFUSED = [
    "score(rank=0)",
    "score(rank=65)",
    "score(sealed=None)",
    "score(q=g.tensor(data.q[:, :, :7], 'f32'))",  # 7 query heads for 2 KV heads
    "score(q=g.tensor(data.q, 'f16'))",
    "score(k=g.tensor(data.k[:, :129], 'f16'))",  # fewer positions than the mask
    "score(mask=g.tensor(data.mask, 'f32'))",  # the mask without flash attention
    "score(k_t=g.tensor(data.k_t[:, :, :64], 'f16'))",  # shorter by more than a group
    "score(k_t=g.tensor(data.k_t[:, :, :127], 'f16'))",  # ends inside a group that SEAL writes
    "seal(k_t=data.k_t[:, :, :127])",
    "score(k_t=g.tensor(data.k_t, 'f32'))",
    "score(k=g.tensor(data.k, 'i32'))",  # not a type of K
    "attend(mean_v=1)",  # nothing to take rest from
    "attend(v=g.tensor(data.v[:, :, :1], 'f16'))",
    "attend(sinks=g.tensor(np.zeros(7), 'f32'))",
    "attend(sinks=g.tensor(np.zeros((2, 8)), 'f32', order=(1, 0)))",  # of 8 bytes each
    "prefill(v=g.tensor(data.v[:, :, :1], 'f16'))",
    "prefill(mask=g.tensor(data.mask, 'f32'))",
    "prefill(sinks=g.tensor(np.zeros(7), 'f32'))",
    "prefill(stats=g.tensor(np.zeros(3), 'i64'))",
    "attend(mean_v=1, sel=select(8, 2, 1, 1), sealed=None)",
    "select(0, 2, 1, 0)",
    "select(8, 3, 1, 0)",
    "select(8, 2, 99, 0)",
    "seal(v=g.tensor(data.v[:, :129], 'f16'))",
    "seal(k_t=g.tensor(data.k_t[:, :64], 'f16'), v_sum=None)",
]


def run(line: str, lib: Path) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    program = PROGRAM.format(paths=[str(here), str(here.parent)], lib=str(lib), line=line)
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
    )


@pytest.fixture(scope="module")
def lib(ggml) -> Path:
    return ggml.folder


def test_contract_accepts(lib: Path) -> None:
    done = run("; ".join(ACCEPTED), lib)
    assert (done.returncode, done.stdout) == (0, "before\nafter\n"), done.stderr


@pytest.mark.parametrize("line", REFUSED)
def test_contract_refuses(line: str, lib: Path) -> None:
    done = run(line, lib)
    assert done.stdout == "before\n", done.stderr
    assert "GGML_ASSERT" in done.stderr


def test_slots_are_those_of_the_header() -> None:
    """pyorch/native/slots.py and ggml_ops/ggml-sparse-nodes.h say the same."""
    text = (Path(__file__).parents[2] / "ggml_ops" / "ggml-sparse-nodes.h").read_text("utf-8")
    found = {
        step: {name: int(n) for name, n in re.findall(r"X\((\w+), (\d+)\)", line)}
        for step, line in re.findall(r"^#define GGML_SPARSE_SRC_(\w+)\(X\)(.*)$", text, re.M)
    }
    assert found == {STEPS[step]: slots for step, slots in SLOTS.items()}
    for of_step in found.values():
        assert len(set(of_step.values())) == len(of_step), "two sources in one slot"
        assert max(of_step.values()) < MAX_SRC


def test_names_of_sources_are_in_the_order_of_the_header() -> None:
    text = (Path(__file__).parents[2] / "ggml_ops" / "ggml-sparse.h").read_text("utf-8")
    body = re.findall(r"struct ggml_sparse_src \{(.*?)\};", text, re.S)[0]
    assert tuple(re.findall(r"\* (\w+)", body)) == slots.Sources.NAMES


def test_steps_are_those_of_the_header() -> None:
    """What stands first in the op_params of a node, by number."""
    names = step_names()
    assert names == list(STEPS)
    assert [getattr(slots, name) for name in names] == list(range(len(names)))


def step_names() -> list[str]:
    """The steps, by number."""
    text = (Path(__file__).parents[2] / "ggml_ops" / "sparse-params.h").read_text("utf-8")
    listed = re.findall(r"^#define GGML_SPARSE_STEPS\(X\) (.*)$", text, re.M)[0]
    return re.findall(r"X\((\w+)\)", listed)
