"""Synthetic models: the asked shape, loadable, refusals in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pyorch import engine
from pyorch.cli.synth import command
from pyorch.errors import SparqError
from pyorch.models import synth
from pyorch.models.gguf_file import geometry, read_gguf


@pytest.mark.parametrize("quant", synth.QUANTS)
def test_synth_has_the_asked_shape_and_decodes(tmp_path: Path, quant: str) -> None:
    path = tmp_path / "m.gguf"
    shape = synth.shape_like(
        "llama3-8b", n_layer=3, n_embd=128, n_head=8, n_head_kv=2, head_dim=64, n_ff=96, n_vocab=300
    )
    n_bytes = synth.write(path, shape, quant)
    geo = geometry(read_gguf(path))
    assert n_bytes == path.stat().st_size
    assert (geo.n_layer, geo.n_embd, geo.head_dim_k, geo.n_ctx_train) == (3, 128, 64, 131_072)
    assert geo.n_head == (8,) * 3 and geo.n_head_kv == (2,) * 3
    with engine.load(path, n_ctx=64, n_threads=1) as s:
        tokens = engine.tokenize(s, "Any text: ä, 漢.")
        assert engine.detokenize(s, tokens) == "Any text: ä, 漢."
        engine.prefill(s, tokens)
        engine.decode(s, 65)
        logits = engine.logits(s)
    assert logits.shape == (300,)
    assert np.isfinite(logits).all() and 0.01 < logits.std() < 100


def test_synth_tensors_differ_and_seeds_matter(tmp_path: Path) -> None:
    shape = synth.shape_like("tinyllama-1.1b", n_layer=1, n_ff=32, n_embd=64, n_vocab=288)
    files = [tmp_path / f"{i}.gguf" for i in range(3)]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        synth.write(file, shape, seed=seed, name="same")
    first, again, other = (f.read_bytes() for f in files)
    assert first == again and first != other
    assert not list(tmp_path.glob("*.partial"))


def test_synth_file_size_is_that_of_the_model() -> None:
    shape = synth.LIKE["llama2-7b"]
    n = sum(synth._n_bytes(t, "f16") for t in synth._tensors(shape))
    assert n == pytest.approx(2 * 6.738e9, rel=0.001)  # 6.74 B parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 6, "n_head_kv": 4}, "share"),
        ({"n_embd": 100}, "multiple of 32"),
        ({"n_vocab": 100}, "vocabulary"),
        ({"n_layer": 0}, "n_layer"),
    ],
)
def test_synth_refuses_sizes_that_do_not_fit(changes: dict[str, int], message: str) -> None:
    with pytest.raises(SparqError, match=message) as e:
        synth.shape_like("llama2-7b", **changes)
    assert e.value.exit_code == 2


def test_synth_command(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    args = ["--like", "llama2-7b", "--layers", "1", "--embd", "64", "--ffn", "32", "--vocab", "288"]
    result = CliRunner().invoke(command, [*args, "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert str(path) in result.stdout
    assert geometry(read_gguf(path)).n_head_kv == (32,)
    result = CliRunner().invoke(command, ["--like", "llama2", "-o", str(path)])
    assert isinstance(result.exception, SparqError) and "llama2-7b" in result.exception.hint
