"""A tiny Llama with random weights for text, as a GGUF file that is real enough for llama.cpp.

Every text has a token per byte, and any output is possible. The same arguments give the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tiny import N_SPECIAL, N_VOCAB, Model, save

CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
OF_FILE = ("keys", "part_tensors", "chat_template", "space_prefix", "word", "pre")


def text_of(n: int, seed: int = 1) -> str:
    """`n` letters, and so many tokens."""
    letters = np.random.default_rng(seed).integers(97, 123, n)
    return bytes(letters.astype(np.uint8)).decode()


def write_tiny_gguf(path: Path, *, arch: str = "llama", n_ff: int = 64, **more: Any) -> Path:
    """Write the file and return its path. `more`: other sizes of Model, and what `save` takes."""
    of_file = {k: more.pop(k) for k in OF_FILE if k in more}
    m = Model(arch, n_ff=n_ff, **more)
    n, n_kv = m.n_embd, m.n_head_kv * m.head_dim

    def ones(name: str) -> None:
        m.tensors[name] = np.ones(n, np.float32)

    m.matrix("token_embd.weight", n, N_VOCAB, gain=8.0)
    m.matrix("output.weight", n, N_VOCAB, gain=4.0)
    # logit 0, far below the largest: greedy text never ends by itself
    m.tensors["output.weight"][:N_SPECIAL] = 0
    ones("output_norm.weight")
    for il in range(m.n_layer):
        ones(f"blk.{il}.attn_norm.weight")
        for name, n_out, gain in (("q", n, 1.5), ("k", n_kv, 1.5), ("v", n_kv, 1.0)):
            m.matrix(f"blk.{il}.attn_{name}.weight", n, n_out, gain=gain)
        m.matrix(f"blk.{il}.attn_output.weight", n, n, gain=4.0)
        ones(f"blk.{il}.ffn_norm.weight")
        m.mlp(il)
    return save(m, path, **of_file)
