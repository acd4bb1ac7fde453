"""quantize: the result is a model, near the original, and there only when it is finished."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from tiny import finish

from pyorch import engine
from pyorch.errors import SparqError
from pyorch.models import new_file
from pyorch.models.gguf_file import read_gguf
from pyorch.models.imatrix import read_imatrix
from pyorch.models.new_file import check_space
from pyorch.models.quantize import quantize, types

pytestmark = pytest.mark.usefixtures("native_lib_dir")

SPARSE = "sparq,rank=16,topk=64,min_ctx=0"
TEXT = "It was the best of times, it was the worst of times, " * 8


def command(*args: object, **kwargs: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "pyorch", "quantize", *map(str, args)]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, **kwargs)


def weights(path: Path) -> dict[str, np.ndarray]:
    """All tensors as f32, by gguf's own numpy code."""
    found = gguf.GGUFReader(path).tensors
    return {t.name: dequantize(t.data, t.tensor_type) for t in found}


def logits(path: Path, spec: str = "off") -> np.ndarray:
    with engine.load(path, n_ctx=512, n_threads=1, attention=spec) as s:
        engine.prefill(s, engine.tokenize(s, TEXT))
        for token in engine.tokenize(s, " it was the age"):
            engine.decode(s, token)
        info = engine.info(s)
        assert (info.counter("calls_sparse") > 0) == (spec != "off")
        return engine.logits(s)


def test_types_are_those_of_the_library(llama_cpp: object) -> None:
    module = llama_cpp.llama_cpp  # type: ignore[attr-defined]
    found = {k: v for k, v in vars(module).items() if k.startswith("LLAMA_FTYPE_")}
    del found["LLAMA_FTYPE_GUESSED"]
    assert {f"{n}": v for n, v in types().items()} == {
        k.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_"): v
        for k, v in found.items()
    }
    assert types()["Q4_K_M"] == 15


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_a_quantised_model_is_near_and_runs_sparse(
    demo_model: Path, tmp_path: Path, kind: str
) -> None:
    steps: list[tuple[int, int]] = []
    out = tmp_path / "q.gguf"
    result = quantize(demo_model, out, kind.lower(), progress=lambda *a: steps.append(a))
    n = len(read_gguf(out).tensors)
    assert steps == [(i, n) for i in range(n + 1)]
    assert result.bytes_after == out.stat().st_size < 0.6 * result.bytes_before
    assert not (tmp_path / "q.gguf.partial").exists()
    assert weights(demo_model).keys() == weights(out).keys()
    want, got = logits(demo_model), logits(out)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0 < error < (0.05 if kind == "Q8_0" else 0.3)
    assert np.isfinite(logits(out, SPARSE)).all()


def _write_imatrix(path: Path, values: dict[str, np.ndarray]) -> Path:
    w = gguf.GGUFWriter(path, "x")
    for name, v in values.items():
        w.add_tensor(name + ".in_sum2", (v * 10).astype(np.float32).reshape(1, -1))
        w.add_tensor(name + ".counts", np.full((1, 1), 10, np.float32))
    finish(w)
    return path


def _old_imatrix(values: dict[str, np.ndarray], n_calls: int = 4) -> bytes:
    out = struct.pack("<i", len(values))
    for name, v in values.items():
        raw = (v * n_calls).astype("<f4").tobytes()
        out += struct.pack("<i", len(name)) + name.encode()
        out += struct.pack("<ii", n_calls, len(v)) + raw
    return out


def test_importance_matrix(demo_model: Path, tmp_path: Path) -> None:
    """Columns that matter more come out better; both formats of the file mean the same."""
    matrices = {n: w for n, w in weights(demo_model).items() if w.ndim == 2}
    values = {}
    for name, w in matrices.items():
        values[name] = np.ones(w.shape[1], np.float32)
        values[name][::8] = 1e4
    new = _write_imatrix(tmp_path / "new.gguf", values)
    (tmp_path / "old.dat").write_bytes(_old_imatrix(values))
    for path in (new, tmp_path / "old.dat"):
        read = read_imatrix(path)
        assert read.keys() == values.keys()
        assert all(np.array_equal(read[n], values[n]) for n in matrices)
    plain, aided = tmp_path / "plain.gguf", tmp_path / "aided.gguf"
    quantize(demo_model, plain, "Q4_0")
    quantize(demo_model, aided, "Q4_0", imatrix=new)
    name = "blk.0.attn_q.weight"
    error = [np.abs(weights(p)[name] - matrices[name]) for p in (plain, aided)]
    assert error[1][:, ::8].mean() < 0.9 * error[0][:, ::8].mean()
    assert error[1].mean() > error[0].mean()
    with pytest.raises(SparqError, match="importance matrix") as e:
        quantize(demo_model, tmp_path / "low.gguf", "IQ2_XXS")
    assert "--imatrix" in e.value.hint
    assert quantize(demo_model, tmp_path / "low.gguf", "IQ2_XXS", imatrix=new).bytes_after > 0


@pytest.mark.parametrize(
    "data",
    [b"", b"x", struct.pack("<ii", 1, 2**31 - 1), struct.pack("<ii", 9, 0)]
    + [_old_imatrix({"a": np.array([np.nan])}), _old_imatrix({"a": np.ones(9)})[:-4]],
)
def test_what_is_no_importance_matrix(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(SparqError, match="not an importance matrix"):
        read_imatrix(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        read_imatrix(tmp_path / "y")


def test_a_file_that_is_there_stays(demo_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.gguf"
    out.write_text("mine")
    with pytest.raises(SparqError, match="exists already") as e:
        quantize(demo_model, out, "Q8_0")
    assert "--force" in e.value.hint
    with pytest.raises(SparqError, match="unknown --type 'Q9'"):
        quantize(demo_model, out, "Q9", force=True)
    with pytest.raises(SparqError, match="cannot quantise to this type"):
        quantize(demo_model, out, "NVFP4", force=True)
    assert out.read_text() == "mine"
    quantize(demo_model, out, "Q8_0", force=True)
    with pytest.raises(SparqError, match="is the model itself"):
        quantize(out, out, "Q4_0", force=True)
    with pytest.raises(SparqError, match="requantizing") as e:
        quantize(out, tmp_path / "r.gguf", "Q4_0")
    assert "--allow-requantize" in e.value.hint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q.gguf"]
    quantize(out, tmp_path / "r.gguf", "Q4_0", allow_requantize=True)
    assert read_gguf(tmp_path / "r.gguf").n_bytes < out.stat().st_size


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_leaves_nothing_finished(
    demo_model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    out, partial = tmp_path / "q.gguf", tmp_path / "q.gguf.partial"
    child = command(demo_model, out, "--type", "Q4_K_M", "-t", 1, start_new_session=True)
    while not (partial.exists() and partial.stat().st_size):
        assert child.poll() is None
        time.sleep(0.002)
    if how is signal.SIGINT:
        os.killpg(child.pid, how)  # as a terminal does
    else:
        child.kill()
    _, said = child.communicate(timeout=60)
    assert not out.exists()
    if how is signal.SIGINT:
        assert child.returncode == 130 and said.strip() == "interrupted"
        assert not partial.exists()
    again = command(demo_model, out, "--type", "Q4_K_M", "-t", 1)
    assert (again.communicate(timeout=60), again.returncode) == ((None, ""), 0)
    assert read_gguf(out).n_bytes > 1 << 20 and not partial.exists()


def test_a_full_disk(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    child = command(demo_model, tmp_path / "q.gguf", "--type", "Q8_0", preexec_fn=limit)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 1 and "the disk is full" in said, said
    assert not list(tmp_path.iterdir())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 3 << 20))
    with pytest.raises(SparqError, match="only 3.00 MiB are free|only 3 MiB are free"):
        quantize(demo_model, tmp_path / "q.gguf", "Q8_0")
    assert not list(tmp_path.iterdir())
    check_space(tmp_path / "not" / "there", 3 << 20, "it")


def test_the_quantiser_dies(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'GGML_ASSERT(x) failed' >&2\nkill -ABRT $$\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(SparqError, match=r"quantiser ended: GGML_ASSERT\(x\) failed"):
        quantize(demo_model, tmp_path / "q.gguf", "Q8_0")
    fake.write_text("#!/bin/sh\nkill -KILL $$\n")
    with pytest.raises(SparqError, match="out of memory"):
        quantize(demo_model, tmp_path / "q.gguf", "Q8_0")


def test_new_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with new_file.new_file(path) as (partial, _):
        partial.write_text("a")
        assert not path.exists()
        with pytest.raises(SparqError, match="another process"), new_file.new_file(path):
            pass
        assert partial.read_text() == "a"
    assert path.read_text() == "a" and not partial.exists()
    with pytest.raises(ZeroDivisionError), new_file.new_file(path, force=True) as (partial, _):
        partial.write_text("b")
        _ = 1 / 0
    assert path.read_text() == "a" and not partial.exists()
    (tmp_path / "link").symlink_to(path)
    with new_file.new_file(tmp_path / "link", force=True) as (partial, _):
        partial.write_text("c")
    assert (tmp_path / "link").is_symlink() and path.read_text() == "c"
    for bad, why in ((tmp_path, "not a plain file"), (tmp_path / "x" / "y", "no folder")):
        with pytest.raises(SparqError, match=why), new_file.new_file(bad, force=True):
            pass
    with (
        pytest.raises(SparqError, match="exists already"),
        new_file.new_file(tmp_path / "g") as (p, _),
    ):
        p.write_text("mine")
        (tmp_path / "g").write_text("another's")  # came meanwhile
    assert (tmp_path / "g").read_text() == "another's"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "g", "link"]
