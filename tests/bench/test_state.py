"""Synthetic states of the cache: llama.cpp takes them, gives them back, and attends to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny

from pyorch import engine
from pyorch.errors import SparqError
from pyorch.measure import state

pytestmark = pytest.mark.usefixtures("native_lib_dir")


@pytest.mark.parametrize(
    ("kind", "flash_attn"),
    [("f16", True), ("f16", False), *((x, True) for x in ("f32", "bf16", "q8_0", "q4_0"))],
)
def test_state_comes_back_as_it_was_written(model: Path, kind: str, flash_attn: bool) -> None:
    """Every cell is in use, at its position: llama.cpp writes only such cells."""
    types = {"type_k": kind, "type_v": kind}
    with engine.load(model, n_ctx=1024, n_threads=1, flash_attn=flash_attn, **types) as s:
        engine.decode(s, 3)
        expected = state.blob(state.layout(s), 1000, seed=5)
        state.fill(s, 1000, seed=5)
        assert state._get(s) == expected.tobytes()
        assert len(s.tokens) == 1000
        engine.decode(s, 65)
        assert np.isfinite(engine.logits(s)).all()


@pytest.mark.parametrize("flash_attn", [True, False])
def test_state_of_layers_with_a_window(tmp_path: Path, flash_attn: bool) -> None:
    """They keep the last positions alone. After a test the same positions are there again."""
    model = tiny.write(tmp_path / "m.gguf", "gpt-oss", n_layer=4)
    with engine.load(model, n_ctx=1024, n_threads=1, flash_attn=flash_attn, n_batch=8) as s:
        state.fill(s, 1000, seed=5)
        expected = state._get(s)
        for _ in range(20):
            for token in range(20):
                engine.decode(s, 65 + token)
            engine.rewind(s, 1000)
            assert len(s.tokens) == 1000
        assert np.isfinite(engine.logits(s)).all() and state._get(s) == expected


def test_state_is_the_same_with_v_transposed(model: Path) -> None:
    logits = []
    for flash_attn in (True, False):
        with engine.load(model, n_ctx=1024, n_threads=1, flash_attn=flash_attn) as s:
            state.fill(s, 1023, seed=2)
            engine.decode(s, 70)
            logits.append(engine.logits(s))
            state.fill(s, 1023, seed=3)
            engine.decode(s, 70)
            logits.append(engine.logits(s))
    one, other_seed, transposed, _ = logits
    scale = np.abs(one).max()
    assert np.abs(one - transposed).max() < 0.05 * scale
    assert np.abs(one - other_seed).max() > 0.1 * scale  # so the cache does matter


def test_state_refuses_what_does_not_fit(model: Path) -> None:
    with engine.load(model, n_ctx=256, n_threads=1) as s, pytest.raises(SparqError, match="fit"):
        state.fill(s, 5000)
