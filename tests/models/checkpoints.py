"""Small random checkpoints in the format of transformers.

Llama has a vocabulary of sentencepiece, Qwen2 one of the tokenizers of transformers, biases, and a
tied head: what differs beyond that is for llama.cpp to test, and so is what a converted model
computes.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf_mutations import parse

Weights = dict[str, np.ndarray]
_SPACE = "\u2581"


@dataclass(frozen=True)
class Arch:
    """One architecture: its config.json, and what differs in its weights."""

    config: dict[str, Any]
    tokenizer: str  # of `write_checkpoint`
    qkv_bias: bool = False


def _config(arch: str, model_type: str, **more: Any) -> dict[str, Any]:
    base = {
        "architectures": [arch],
        "model_type": model_type,
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
    return base | more


ARCHS = {
    "llama": Arch(_config("LlamaForCausalLM", "llama"), "sentencepiece"),
    "qwen2": Arch(
        _config(
            "Qwen2ForCausalLM", "qwen2", vocab_size=151936, tie_word_embeddings=True,
            rope_theta=1e6, rms_norm_eps=1e-6, bos_token_id=151643, eos_token_id=151643,
        ),
        "qwen2",
        qkv_bias=True,
    ),
}  # fmt: skip


def make_weights(arch: Arch, seed: int = 0) -> Weights:
    """Random weights by their names in the checkpoint, float32."""
    rng, c, w = np.random.default_rng(seed), arch.config, {}
    n, n_ff, n_vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    hd = n // c["num_attention_heads"]
    n_q, n_kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd

    def matrix(name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        w[name] = (rng.standard_normal((n_out, n_in)) * gain / math.sqrt(n_in)).astype(np.float32)

    def vector(name: str, size: int, mean: float = 0.0, spread: float = 0.2) -> None:
        w[name] = (mean + spread * rng.standard_normal(size)).astype(np.float32)

    def norm(name: str, size: int) -> None:
        vector(name + ".weight", size, 1.0)

    matrix("model.embed_tokens.weight", n_vocab, n, math.sqrt(n))
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        norm(p + "input_layernorm", n)
        norm(p + "post_attention_layernorm", n)
        for name, size in (("q", n_q), ("k", n_kv), ("v", n_kv)):
            matrix(p + f"self_attn.{name}_proj.weight", size, n, 1.5)
            if arch.qkv_bias:
                vector(p + f"self_attn.{name}_proj.bias", size)
        matrix(p + "self_attn.o_proj.weight", n, n_q, 1.5)
        for name, n_out, n_in in (("gate", n_ff, n), ("up", n_ff, n), ("down", n, n_ff)):
            matrix(p + f"mlp.{name}_proj.weight", n_out, n_in)
    norm("model.norm", n)
    if not c["tie_word_embeddings"]:
        matrix("lm_head.weight", n_vocab, n, 2.0)
    return w


# ---- files ----


def write_safetensors(path: Path, tensors: Weights) -> Path:
    """The format by its definition: length of the header, header as JSON, bytes."""
    header, at = {}, 0
    kinds = {"float32": "F32", "float16": "F16"}
    for name, t in tensors.items():
        place = [at, at + t.nbytes]
        header[name] = {"dtype": kinds[t.dtype.name], "shape": t.shape, "data_offsets": place}
        at += t.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            f.write(t.tobytes())
    return path


def write_checkpoint(folder: Path, arch: Arch, weights: Weights, vocab: Path | None = None) -> Path:
    """A folder as transformers saves it, in two shards. `vocab`: GGUF vocabularies of llama.cpp."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(arch.config))
    names = list(weights)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    index = {}
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05d}-of-00002.safetensors"
        write_safetensors(folder / name, {n: weights[n] for n in part})
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    if arch.tokenizer == "sentencepiece":
        _write_sentencepiece(folder)
    else:
        assert vocab is not None
        _write_byte_level(folder, vocab / "ggml-vocab-qwen2.gguf")
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


# how Qwen2 cuts text before BPE
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _write_byte_level(folder: Path, vocab: Path) -> None:
    """tokenizer.json of a real vocabulary, which llama.cpp recognises by what it does."""
    keys = {k.name.decode(): k.value for k in parse(vocab).keys}
    tokens, merges, types = (
        keys[f"tokenizer.ggml.{k}"][1] for k in ("tokens", "merges", "token_type")
    )
    tokens, merges = [t.decode() for t in tokens], [t.decode() for t in merges]
    special = [
        {"id": i, "content": t, "special": types[i] == 3, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i, t in enumerate(tokens) if types[i] in (3, 4)
    ]  # fmt: skip
    added = {s["id"] for s in special}
    plain = {t: i for i, t in enumerate(tokens) if i not in added and types[i] == 1}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
        "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
        "vocab": plain, "merges": merges,
    }  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    split = {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False}
    cut = {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]}
    parts = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "NFC"}, "pre_tokenizer": cut, "post_processor": None,
        "decoder": byte_level | {"use_regex": False}, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(parts, ensure_ascii=False), "utf-8")
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|endoftext|>",
        "bos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
