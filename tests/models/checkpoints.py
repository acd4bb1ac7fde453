"""A small random Llama in the format of transformers, with a vocabulary of sentencepiece.

Other architectures and tokenizers are for llama.cpp to test, and so is what a model computes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Weights = dict[str, np.ndarray]
_SPACE = "\u2581"


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 260,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}


def make_weights() -> Weights:
    """Random weights by their names in the checkpoint, float32."""
    rng, c, w = np.random.default_rng(0), CONFIG, {}
    n, n_ff, n_vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    n_kv = n * c["num_key_value_heads"] // c["num_attention_heads"]

    def random(name: str, *shape: int) -> None:
        w[f"{name}.weight"] = rng.standard_normal(shape).astype(np.float32) / 8

    random("model.embed_tokens", n_vocab, n)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        random(p + "input_layernorm", n)
        random(p + "post_attention_layernorm", n)
        for name, size in (("q", n), ("k", n_kv), ("v", n_kv), ("o", n)):
            random(p + f"self_attn.{name}_proj", size, n)
        for name, n_out, n_in in (("gate", n_ff, n), ("up", n_ff, n), ("down", n, n_ff)):
            random(p + f"mlp.{name}_proj", n_out, n_in)
    random("model.norm", n)
    random("lm_head", n_vocab, n)
    return w


# ---- files ----


def write_checkpoint(folder: Path) -> Path:
    """A folder as transformers saves it, in two shards."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = make_weights()
    names = list(weights)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    index = {}
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05d}-of-00002.safetensors"
        save_file({n: weights[n] for n in part}, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    _write_sentencepiece(folder)
    return folder


_BYTES = [f"<0x{b:02X}>" for b in range(256)]


def _write_sentencepiece(folder: Path) -> None:
    """tokenizer.model: a ModelProto of sentencepiece, of single bytes, encoded by hand."""

    def number(key: int, value: int) -> bytes:
        return _varint(key << 3) + _varint(value)

    def block(key: int, data: bytes) -> bytes:
        return _varint(key << 3 | 2) + _varint(len(data)) + data

    special = ["<unk>", "<s>", "</s>"]
    pieces = [(t, 2 if t == "<unk>" else 3) for t in special] + [(t, 6) for t in _BYTES]
    pieces.append((_SPACE, 1))
    out = b""
    for text, kind in pieces:
        score = _varint(2 << 3 | 5) + struct.pack("<f", 0.0)
        out += block(1, block(1, text.encode()) + score + number(3, kind))
    ids = {t: i for i, (t, _) in enumerate(pieces)}
    trainer = number(3, 2) + number(4, len(pieces)) + number(35, 1)  # BPE, size, byte fallback
    for key, name in zip((40, 41, 42), special, strict=True):
        trainer += number(key, ids[name])
    out += block(2, trainer) + block(3, block(1, b"identity") + number(3, 0))
    (folder / "tokenizer.model").write_bytes(out)


def _varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])
