"""Write a Llama-shaped GGUF model with random weights, of any size, in constant memory.

Its text is noise, but a decoded token costs what it costs in a real model of that shape, so speed
is measured without a download. All tensors are cut from a small pool of random blocks. The
vocabulary is the 256 bytes, the space and three special tokens, filled up with unused ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from pyorch.attention.spec import nearest
from pyorch.errors import SparqError

QUANTS = ("q8_0", "f16")
VERSION = 1  # raised when the same arguments give another file

_BLOCK = 32  # elements of a q8_0 block, all of one scale
_POOL_BLOCKS = 32_771  # a prime: rows of a power of two never begin at the same block
_CHUNK = 4 << 20  # bytes written at once
_SPECIAL = ("<unk>", "<s>", "</s>")
_SPACE = "\u2581"  # how SentencePiece writes a space
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6  # llama.cpp's types of tokens


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like model. `n_embd`, `n_ff` and `n_vocab` do not touch attention."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    rope_base: float = 10_000.0
    n_ctx: int = 131_072

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one position in all layers, as f16."""
        return 2 * 2 * self.n_layer * self.n_head_kv * self.head_dim


LIKE = {
    "llama2-7b": Shape(32, 4096, 32, 32, 128, 11008, 32_000),
    "llama2-13b": Shape(40, 5120, 40, 40, 128, 13824, 32_000),
    "llama3-8b": Shape(32, 4096, 32, 8, 128, 14336, 128_256, 500_000.0),
    "llama3.2-1b": Shape(16, 2048, 32, 8, 64, 8192, 128_256, 500_000.0),
    "mistral-7b": Shape(32, 4096, 32, 8, 128, 14336, 32_000, 1_000_000.0),
    "tinyllama-1.1b": Shape(22, 2048, 32, 4, 64, 5632, 32_000),
}


def shape_like(name: str, **changes: int | None) -> Shape:
    """The shape of a known model, with some sizes replaced; None leaves a size as it is.

    Raises:
        SparqError: an unknown model, or sizes that do not go together.
    """
    if name not in LIKE:
        raise nearest("model shape", name, tuple(LIKE))
    shape = replace(LIKE[name], **{k: v for k, v in changes.items() if v is not None})
    _check(shape)
    return shape


def fewer_layers(name: str, n_layer: int) -> Shape:
    """The shape of a known model with fewer layers and the vocabulary in proportion: what a token
    costs is then in proportion too, the output head included."""
    full = shape_like(name)
    least = len(_SPECIAL) + 256 + 1
    n_vocab = max(full.n_vocab * n_layer // full.n_layer // _BLOCK, -(-least // _BLOCK)) * _BLOCK
    return shape_like(name, n_layer=n_layer, n_vocab=min(n_vocab, full.n_vocab))


def file_bytes(shape: Shape, quant: str) -> int:
    """Bytes of all tensors."""
    return sum(_n_bytes(t, quant) for t in _tensors(shape))


def _check(shape: Shape) -> None:
    for f in fields(shape):
        if getattr(shape, f.name) < 1:
            raise SparqError(f"{f.name} {getattr(shape, f.name)} is below 1", exit_code=2)
    if shape.n_head % shape.n_head_kv:
        raise SparqError(
            f"{shape.n_head} heads cannot share {shape.n_head_kv} KV heads evenly",
            "the number of heads is a multiple of the number of KV heads",
            exit_code=2,
        )
    for name in ("n_embd", "n_ff", "head_dim"):
        if getattr(shape, name) % _BLOCK:
            raise SparqError(
                f"{name} {getattr(shape, name)} is no multiple of {_BLOCK}",
                "weights are quantised in blocks of 32",
                exit_code=2,
            )
    least = len(_SPECIAL) + 256 + 1
    if shape.n_vocab < least:
        raise SparqError(
            f"a vocabulary of {shape.n_vocab} tokens is too small",
            f"at least {least}: the bytes, the space and {len(_SPECIAL)} special tokens",
            exit_code=2,
        )


def write(path: Path, shape: Shape, quant: str = "q8_0", seed: int = 0, name: str = "") -> int:
    """Write the model; the file appears when it is complete. Returns its size in bytes.

    Raises:
        SparqError: sizes that do not go together, or the file cannot be written.
    """
    if quant not in QUANTS:
        raise nearest("type of weights", quant, QUANTS)
    _check(shape)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(partial, shape, quant, seed, name or f"synthetic {path.stem}")
        os.replace(partial, path)
        return path.stat().st_size
    except OSError as e:
        raise SparqError(
            f"{path}: cannot be written: {e.strerror or e}",
            f"it takes {file_bytes(shape, quant) / 1e9:.1f} GB",
        ) from None
    finally:
        partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Tensor:
    """`shape` as numpy has it, outermost first. One axis = a norm: ones, f32."""

    name: str
    shape: tuple[int, ...]


def _tensors(s: Shape) -> Iterator[_Tensor]:
    n_q, n_kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    yield _Tensor("token_embd.weight", (s.n_vocab, s.n_embd))
    for i in range(s.n_layer):
        yield _Tensor(f"blk.{i}.attn_norm.weight", (s.n_embd,))
        yield _Tensor(f"blk.{i}.attn_q.weight", (n_q, s.n_embd))
        yield _Tensor(f"blk.{i}.attn_k.weight", (n_kv, s.n_embd))
        yield _Tensor(f"blk.{i}.attn_v.weight", (n_kv, s.n_embd))
        yield _Tensor(f"blk.{i}.attn_output.weight", (s.n_embd, n_q))
        yield _Tensor(f"blk.{i}.ffn_norm.weight", (s.n_embd,))
        yield _Tensor(f"blk.{i}.ffn_gate.weight", (s.n_ff, s.n_embd))
        yield _Tensor(f"blk.{i}.ffn_up.weight", (s.n_ff, s.n_embd))
        yield _Tensor(f"blk.{i}.ffn_down.weight", (s.n_embd, s.n_ff))
    yield _Tensor("output_norm.weight", (s.n_embd,))
    yield _Tensor("output.weight", (s.n_vocab, s.n_embd))


def _n_bytes(t: _Tensor, quant: str) -> int:
    n = math.prod(t.shape)
    if len(t.shape) == 1:
        return n * 4
    return n // _BLOCK * (_BLOCK + 2) if quant == "q8_0" else n * 2


def _write(path: Path, shape: Shape, quant: str, seed: int, name: str) -> None:
    import gguf

    w = gguf.GGUFWriter(path, "llama")
    _add_metadata(w, shape, quant, name)
    kind = gguf.GGMLQuantizationType[quant.upper()]
    for t in _tensors(shape):
        raw = kind if len(t.shape) > 1 else None
        w.add_tensor_info(t.name, t.shape, np.dtype(np.float32), _n_bytes(t, quant), raw)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    out = w.fout[0]
    try:
        w.write_padding(out, out.tell())
        pools = _Pools(quant, np.random.default_rng(seed))
        for t in _tensors(shape):
            for chunk in pools.data(t):
                out.write(chunk)
            w.write_padding(out, _n_bytes(t, quant))
    finally:
        w.close()


class _Pools:
    """Random weights: for each input width one pool of blocks, which its tensors repeat."""

    def __init__(self, quant: str, rng: np.random.Generator) -> None:
        self.quant, self.rng = quant, rng
        self.made: dict[int, bytes] = {}

    def data(self, t: _Tensor) -> Iterator[bytes | memoryview]:
        """The bytes of one tensor, in pieces. It begins at a block of its own in the pool."""
        if len(t.shape) == 1:
            yield np.ones(t.shape, np.float32).tobytes()
            return
        width = t.shape[1]
        if width not in self.made:
            self.made[width] = self._make(width)
        pool = self.made[width]
        unit = len(pool) // _POOL_BLOCKS
        at = int(self.rng.integers(_POOL_BLOCKS)) * unit
        left = _n_bytes(t, self.quant)
        view = memoryview(pool)
        while left:
            piece = view[at : at + min(left, len(pool) - at, _CHUNK)]
            yield piece
            left -= len(piece)
            at = (at + len(piece)) % len(pool)

    def _make(self, width: int) -> bytes:
        """Weights of variance 1/width, so that activations keep their size through a layer."""
        std = 1 / math.sqrt(width)
        if self.quant == "f16":
            values = self.rng.standard_normal((_POOL_BLOCKS, _BLOCK), np.float32) * std
            return values.astype(np.float16).tobytes()
        block = np.zeros(_POOL_BLOCKS, np.dtype([("d", "<f2"), ("qs", "i1", _BLOCK)]))
        block["qs"] = self.rng.integers(-127, 128, (_POOL_BLOCKS, _BLOCK), dtype=np.int8)
        spread = self.rng.uniform(0.8, 1.2, _POOL_BLOCKS)
        block["d"] = spread * std / math.sqrt(127 * 128 / 3)  # std of -127..127, evenly drawn
        return block.tobytes()


def _add_metadata(w: Any, s: Shape, quant: str, name: str) -> None:
    import gguf

    w.add_name(name)
    w.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quant.upper()}"])
    w.add_block_count(s.n_layer)
    w.add_context_length(s.n_ctx)
    w.add_embedding_length(s.n_embd)
    w.add_feed_forward_length(s.n_ff)
    w.add_head_count(s.n_head)
    w.add_head_count_kv(s.n_head_kv)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_rope_dimension_count(s.head_dim)
    w.add_rope_freq_base(s.rope_base)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(s.n_vocab)

    # SentencePiece kind: a byte that no token spells is its own token, so any text can be read
    tokens = [*_SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), _SPACE]
    types = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL]
    n_unused = s.n_vocab - len(tokens)
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens + [f"<unused{i}>" for i in range(n_unused)])
    w.add_token_scores([0.0] * s.n_vocab)
    w.add_token_types(types + [_UNUSED] * n_unused)
    w.add_unk_token_id(0)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_add_space_prefix(False)
