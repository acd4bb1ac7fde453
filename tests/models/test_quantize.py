"""quantize: the result is a model, near the original, and there only when it is finished."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from tiny import finish

from pyorch import engine
from pyorch.errors import SparqError
from pyorch.models.gguf_file import read_gguf
from pyorch.models.quantize import quantize

pytestmark = pytest.mark.usefixtures("server_dir")

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
    assert weights(demo_model).keys() == weights(out).keys()
    want, got = logits(demo_model), logits(out)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0 < error < (0.05 if kind == "Q8_0" else 0.3)
    assert np.isfinite(logits(out, SPARSE)).all()
    assert [file.name for file in tmp_path.iterdir()] == ["q.gguf"]


def _imatrix(path: Path, values: dict[str, np.ndarray]) -> Path:
    """An importance matrix as llama-imatrix writes it."""
    w = gguf.GGUFWriter(path, "x")
    w.add_array("imatrix.datasets", ["x"])
    w.add_uint32("imatrix.chunk_count", 1)
    w.add_uint32("imatrix.chunk_size", 512)
    for name, v in values.items():
        w.add_tensor(name + ".in_sum2", (v * 10).astype(np.float32).reshape(1, -1))
        w.add_tensor(name + ".counts", np.full((1, 1), 10, np.float32))
    finish(w)
    return path


def test_columns_that_matter_more_come_out_better(demo_model: Path, tmp_path: Path) -> None:
    matrices = {n: w for n, w in weights(demo_model).items() if w.ndim == 2}
    values = {name: np.ones(w.shape[1], np.float32) for name, w in matrices.items()}
    for row in values.values():
        row[::8] = 1e4
    imatrix = _imatrix(tmp_path / "imatrix", values)
    plain, aided, low = (tmp_path / f"{name}.gguf" for name in ("plain", "aided", "low"))
    quantize(demo_model, plain, "Q4_0")
    quantize(demo_model, aided, "Q4_0", imatrix=imatrix)
    name = "blk.0.attn_q.weight"
    error = [np.abs(weights(p)[name] - matrices[name]) for p in (plain, aided)]
    assert error[1][:, ::8].mean() < 0.9 * error[0][:, ::8].mean()
    assert error[1].mean() > error[0].mean()
    assert quantize(demo_model, low, "IQ2_XXS", imatrix=imatrix).unweighted == ()
    few = {name: v for name, v in values.items() if not name.startswith("blk.1")}
    imatrix = _imatrix(tmp_path / "few", few)
    lacking = quantize(demo_model, tmp_path / "q.gguf", "Q4_0", imatrix=imatrix).unweighted
    assert lacking and {name.split(".")[1] for name in lacking} <= {"1", "10", "11"}
    other = {name.replace("blk", "layers"): v for name, v in values.items()}
    imatrix = _imatrix(tmp_path / "other", other)
    with pytest.raises(SparqError, match="other: ") as e:
        quantize(demo_model, tmp_path / "r.gguf", "Q4_0", imatrix=imatrix)
    assert e.value.hint and not list(tmp_path.glob("r.gguf*"))


def test_what_is_wrong_is_named_and_leaves_what_is_there(demo_model: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "q.gguf", tmp_path / "r.gguf"
    out.write_text("mine")
    for more, fault, hint in (
        ({"type_name": "Q8_0"}, "q.gguf", "--force"),
        ({"type_name": "Q9", "force": True}, "Q9", "Q"),
        ({"type_name": "IQ2_XXS", "force": True}, demo_model.name, "--imatrix"),
        ({"type_name": "Q4_0", "force": True, "imatrix": out}, demo_model.name, "llama-imatrix"),
    ):
        with pytest.raises(SparqError, match=fault) as e:
            quantize(demo_model, out, **more)  # type: ignore[arg-type]
        assert hint in e.value.hint and out.read_text() == "mine"
    quantize(demo_model, out, "Q8_0", force=True)
    with pytest.raises(SparqError, match="q.gguf"):
        quantize(out, out, "Q4_0", force=True)
    with pytest.raises(SparqError, match="q.gguf") as e:
        quantize(out, other, "Q4_0")
    assert "--allow-requantize" in e.value.hint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q.gguf"]
    quantize(out, other, "Q4_0", allow_requantize=True)
    assert read_gguf(other).n_bytes < out.stat().st_size


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


def test_a_run_that_cannot_write_leaves_nothing(demo_model: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    child = command(demo_model, tmp_path / "q.gguf", "--type", "Q8_0", preexec_fn=limit)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 1 and "hint: " in said
    assert not list(tmp_path.iterdir())
