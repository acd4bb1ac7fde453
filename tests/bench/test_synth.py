"""Synthetic models: the asked shape, loadable, refusals in one line."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from pyorch import engine
from pyorch.models import random_weights, synth
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf

pytestmark = pytest.mark.usefixtures("native_lib_dir")


OTHERS = ("qwen3-8b", "qwen3-30b-a3b", "gemma-3-4b-it", "gpt-oss-20b")


@pytest.mark.parametrize(
    ("like", "quant"),
    [*(("llama2-7b", q) for q in synth.QUANTS), *((name, "mxfp4") for name in OTHERS)],
)
def test_synth_has_the_asked_shape_and_decodes(tmp_path: Path, like: str, quant: str) -> None:
    path = tmp_path / "m.gguf"
    shape = synth.shape_like(
        like,
        n_layer=6,
        n_embd=256,
        n_head=8,
        n_head_kv=2,
        head_dim=64,
        n_ff=512,
        n_vocab=300,
        rope_base=5e5,
    )
    n_bytes = synth.write(path, shape, quant)
    geo = geometry(read_gguf(path))
    assert n_bytes == path.stat().st_size
    assert (geo.n_layer, geo.n_embd, geo.head_dim_k, geo.n_ctx_train) == (6, 256, 64, 131_072)
    assert geo.n_head == (8,) * 6 and geo.n_head_kv == (2,) * 6
    assert len(geo.full_layers) == {"gemma-3-4b-it": 1, "gpt-oss-20b": 3}.get(like, 6)
    with engine.load(path, n_ctx=64, n_threads=1) as s:
        tokens = engine.tokenize(s, "Any text: ä, 漢.")
        assert engine.detokenize(s, tokens) == "Any text: ä, 漢."
        engine.prefill(s, tokens)
        engine.decode(s, 65)
        logits = engine.logits(s)
    assert logits.shape == (300,)
    assert np.isfinite(logits).all() and 0.01 < logits.std() < 100


@pytest.mark.parametrize("kind", sorted(random_weights.BLOCKS))
def test_synth_blocks_are_valid(kind: str) -> None:
    """Read by gguf's own code they are finite, of mean 0, and as wide as asked."""
    blocks = random_weights.BLOCKS[kind](np.random.default_rng(1), 0.02)
    raw = blocks.view(np.uint8).reshape(len(blocks), -1)
    values = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 1e-4 and values.std() == pytest.approx(0.02, rel=0.02)


def test_synth_fewer_layers_cost_in_proportion() -> None:
    full = synth.shape_like("llama2-7b")
    for quant in synth.QUANTS:
        whole, part = (
            synth.file_bytes(s, quant) for s in (full, synth.fewer_layers("llama2-7b", 8))
        )
        assert part / whole == pytest.approx(1 / 4, rel=0.01)
    assert synth.fewer_layers("llama2-7b", 32) == full
    assert synth.file_bytes(full, "q4_k_m") == pytest.approx(4.08e9, rel=0.01)  # as published


def test_synth_tensors_differ_and_seeds_matter(tmp_path: Path) -> None:
    shape = synth.shape_like("tinyllama-1.1b", n_layer=1, n_ff=32, n_embd=64, n_vocab=288)
    files = [tmp_path / f"{i}.gguf" for i in range(3)]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        synth.write(file, shape, seed=seed, name="same")
    first, again, other = (f.read_bytes() for f in files)
    assert first == again and first != other
    assert not list(tmp_path.glob("*.partial"))
