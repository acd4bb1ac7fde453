"""A million positions: every index is wide enough, and attention is that of short contexts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny as tiny_models
from test_engine import n_wrong

from pyorch import engine
from pyorch.measure import state
from pyorch.models.memory import available_memory

N = 1 << 20
GiB = 1 << 30
# a layer of this K is 2 GiB: its bytes do not fit 31 bits, nor do those of V
WIDE = {"n_layer": 1, "n_head": 8, "n_head_kv": 8, "head_dim": 128}


@pytest.mark.parametrize(
    "sizes", [{}, pytest.param(WIDE, marks=pytest.mark.slow)], ids=["narrow", "wide"]
)
def test_attention_at_the_end(tmp_path: Path, sizes: dict[str, int]) -> None:
    """Three kernels that share nothing agree: llama.cpp's, ours over all, and ours over a selection
    which is all but a little; and the transposed K equals K to its end."""
    if available_memory() < (14 if sizes else 2) * GiB:
        pytest.skip("too little memory")
    model = tiny_models.write(tmp_path / "m.gguf", "llama", n_ctx=N, **sizes)
    d = sizes.get("head_dim", 32)
    found = {}
    with engine.load(model, n_ctx=N, attention="dense") as s:
        assert 2 * s.n_batch * N <= 128 << 20, "the mask stays small"
        state.fill(s, N - 8)
        few = "topk,topk=1024"
        all_of_them = f"sparq,rank={d},topk={N},mean_v=off"
        for spec in ("dense", "off", all_of_them, f"topk,topk={N // 2}", few):
            engine.set_attention(s, spec)
            engine.reset_counters(s)
            engine.decode(s, 70)
            found[spec] = engine.logits(s)
            if spec.startswith(("sparq", "topk")):
                assert engine.info(s).counter("positions_read") > 0
            engine.rewind(s, N - 8)
            if spec.startswith("sparq"):
                assert n_wrong(s) == 0
    wanted = found.pop("off")
    error = {spec: np.abs(x - wanted).max() / np.abs(wanted).max() for spec, x in found.items()}
    assert error.pop(few) > 0.05, "the comparison can fail"
    assert max(error.values()) < 0.004, error
