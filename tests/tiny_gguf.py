"""A tiny Llama with random weights as a GGUF file, real enough for llama.cpp.

Its vocabulary is the 256 bytes, so every text has a token per byte and any output is possible. The
same arguments give the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SPECIAL = (("<unk>", 2), ("<s>", 3), ("</s>", 3))  # (text, token type: 2 unknown, 3 control)
N_SPECIAL = len(SPECIAL)
N_VOCAB = N_SPECIAL + 256 + 1


def write_tiny_gguf(
    path: Path,
    *,
    arch: str = "llama",
    n_layer: int = 2,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_ff: int = 64,
    n_ctx: int = 4096,
    chat_template: str | None = None,
    space_prefix: bool = False,
    word: str = "",
    seed: int = 0,
    part_tensors: int = 0,
    **keys: Any,
) -> Path:
    """Write the file and return its path.

    Args:
        space_prefix: the tokeniser puts a blank before texts, as in Llama 2.
        word: a user-defined token, in place of the blank.
        part_tensors: split the model into files of so many tensors, named as llama.cpp's gguf-split
            names them; the path of the first is returned.
        keys: more metadata, `llama.key=value`.
    """
    w = gguf.GGUFWriter(path, arch, split_max_tensors=part_tensors)
    n_embd = n_head * head_dim
    w.add_name("tiny")
    w.add_context_length(n_ctx)
    w.add_embedding_length(n_embd)
    w.add_block_count(n_layer)
    w.add_feed_forward_length(n_ff)
    w.add_head_count(n_head)
    w.add_head_count_kv(n_head_kv)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(head_dim)
    w.add_file_type(gguf.LlamaFileType.ALL_F32)
    for key, value in keys.items():
        w.add_uint32(key, value)
    _add_vocabulary(w, chat_template, space_prefix, word)
    _add_weights(w, n_layer, n_embd, n_head_kv * head_dim, n_ff, np.random.default_rng(seed))
    finish(w)
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if part_tensors else path


def finish(w: gguf.GGUFWriter) -> None:
    """Write what was added."""
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _add_vocabulary(
    w: gguf.GGUFWriter, chat_template: str | None, space_prefix: bool = False, word: str = ""
) -> None:
    tokens = [text for text, _ in SPECIAL] + [f"<0x{i:02X}>" for i in range(256)] + ["\u2581"]
    types = [kind for _, kind in SPECIAL] + [6] * 256 + [1]  # 6 byte, 1 normal
    if word:
        tokens[-1], types[-1] = word, 4
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([0.0] * len(tokens))
    w.add_token_types(types)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_space_prefix(space_prefix)
    if chat_template is not None:
        w.add_chat_template(chat_template)


def _add_weights(
    w: gguf.GGUFWriter, n_layer: int, n_embd: int, n_kv: int, n_ff: int, rng: np.random.Generator
) -> None:
    def matrix(name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        values = rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)
        w.add_tensor(name, values.astype(np.float32))

    def ones(name: str) -> None:
        w.add_tensor(name, np.ones(n_embd, dtype=np.float32))

    matrix("token_embd.weight", N_VOCAB, n_embd, gain=8.0)
    output = rng.standard_normal((N_VOCAB, n_embd)) * 4 / np.sqrt(n_embd)
    output[:N_SPECIAL] = 0  # logit 0, far below the largest: greedy text never ends by itself
    w.add_tensor("output.weight", output.astype(np.float32))
    ones("output_norm.weight")
    for il in range(n_layer):
        ones(f"blk.{il}.attn_norm.weight")
        matrix(f"blk.{il}.attn_q.weight", n_embd, n_embd, gain=1.5)
        matrix(f"blk.{il}.attn_k.weight", n_kv, n_embd, gain=1.5)
        matrix(f"blk.{il}.attn_v.weight", n_kv, n_embd)
        matrix(f"blk.{il}.attn_output.weight", n_embd, n_embd, gain=4.0)
        ones(f"blk.{il}.ffn_norm.weight")
        matrix(f"blk.{il}.ffn_gate.weight", n_ff, n_embd)
        matrix(f"blk.{il}.ffn_up.weight", n_ff, n_embd)
        matrix(f"blk.{il}.ffn_down.weight", n_embd, n_ff)
