"""Write a Llama-shaped GGUF model with random weights, of any size, in constant memory.

Its text is noise, but a decoded token costs what it costs in a real model of that shape, so speed
is measured without a download. All tensors are cut from small pools of random blocks. The tokenizer
is a real one that comes with the pinned source, cut to the size of the vocabulary.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pyorch import paths
from pyorch.errors import SparqError, nearest
from pyorch.models import cards
from pyorch.models.new_file import check_space, check_target, new_file
from pyorch.native import source
from pyorch.progress import say

QUANTS = ("q8_0", "q4_k_m", "f16")
TOKENIZERS = ("llama-spm", "llama-bpe", "bytes")
VERSION = 3  # raised when the same arguments give another file

_VOCAB = "ggml-vocab-"  # how llama.cpp names files that hold a vocabulary alone
_BLOCK = 32  # elements of a q8_0 block, all of one scale
_SUPER = 256  # elements of a block of q4_K or q6_K
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
    tokenizer: str = "llama-spm"  # bytes: one token per byte, which needs no source

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one position in all layers, as f16."""
        return 2 * 2 * self.n_layer * self.n_head_kv * self.head_dim


_TOKENIZER = {"llama": "llama-spm", "gpt2": "llama-bpe"}  # of a card's kind of vocabulary


def shape_like(name: str, **changes: int | str | None) -> Shape:
    """The shape of a model that has a card, with some sizes replaced; None leaves a size as it is.

    Raises:
        SparqError: an unknown model or one that is no Llama, or sizes that do not go together.
    """
    card = cards.load(name)
    if card.architecture != "llama":
        raise SparqError(
            f"{name} is no Llama but a {card.architecture}, which is not written",
            "sparq-cpp models lists the architectures",
            exit_code=2,
        )
    known: dict[str, Any] = {f.name: getattr(card, f.name) for f in fields(Shape)}
    known |= {"n_ctx": Shape.n_ctx, "tokenizer": _TOKENIZER[card.tokenizer]}
    shape = Shape(**known | {k: v for k, v in changes.items() if v is not None})
    _check(shape)
    return shape


def fewer_layers(name: str, n_layer: int) -> Shape:
    """The shape of a known model with fewer layers and the vocabulary in proportion.

    What a token costs is then in proportion too, the output head included.
    """
    full = shape_like(name)
    least = len(_SPECIAL) + 256 + 1
    n_vocab = max(full.n_vocab * n_layer // full.n_layer // _BLOCK, -(-least // _BLOCK)) * _BLOCK
    return shape_like(name, n_layer=n_layer, n_vocab=min(n_vocab, full.n_vocab))


def folder() -> Path:
    """Where `bench` keeps the models that it writes, a part of the cache."""
    return paths.cache() / "bench"


def written() -> list[Path]:
    """The models that `bench` has written and that are still there."""
    return [p for p in sorted(folder().glob("*.gguf")) if not p.name.startswith(_VOCAB)]


def file_bytes(shape: Shape, quant: str) -> int:
    """Bytes of all tensors."""
    return sum(t.n_bytes(quant) for t in _tensors(shape))


def _check(shape: Shape, block: int = _BLOCK) -> None:
    if shape.tokenizer not in TOKENIZERS:
        raise nearest("tokenizer", shape.tokenizer, TOKENIZERS)
    for f in fields(shape):
        if f.type != "str" and getattr(shape, f.name) < 1:
            raise SparqError(f"{f.name} {getattr(shape, f.name)} is below 1", exit_code=2)
    if shape.n_head % shape.n_head_kv:
        raise SparqError(
            f"{shape.n_head} heads cannot share {shape.n_head_kv} KV heads evenly",
            "the number of heads is a multiple of the number of KV heads",
            exit_code=2,
        )
    for name in ("n_embd", "n_ff", "head_dim"):
        # head_dim is no row of a tensor, n_head*head_dim is
        least = block if name != "head_dim" else _BLOCK
        if getattr(shape, name) % least or shape.n_head * shape.head_dim % block:
            raise SparqError(
                f"{name} {getattr(shape, name)} is no multiple of {block}",
                f"weights are quantised in blocks of {block}",
                exit_code=2,
            )
    least = len(_SPECIAL) + 256 + 1
    if shape.n_vocab < least:
        raise SparqError(
            f"a vocabulary of {shape.n_vocab} tokens is too small",
            f"at least {least}: the bytes, the space and {len(_SPECIAL)} special tokens",
            exit_code=2,
        )


def write(
    path: Path,
    shape: Shape,
    quant: str = "q8_0",
    seed: int = 0,
    name: str = "",
    force: bool = True,
) -> int:
    """Write the model; the file appears when it is complete. Returns its size in bytes.

    Raises:
        SparqError: sizes that do not go together, the file is there and `force` is not given, or it
            cannot be written.
    """
    if quant not in QUANTS:
        raise nearest("type of weights", quant, QUANTS)
    _check(shape, _SUPER if quant == "q4_k_m" else _BLOCK)
    check_target(path, force)
    check_space(path.absolute().parent, file_bytes(shape, quant), str(path))
    with new_file(path, force) as (partial, _):
        _write(partial, shape, quant, seed, name or f"synthetic {path.stem}")
    return path.stat().st_size


@dataclass(frozen=True)
class _Tensor:
    """`shape` as numpy has it, outermost first. One axis = a norm: ones, f32."""

    name: str
    shape: tuple[int, ...]
    more_bits: bool = False  # q6_K instead of q4_K

    def type(self, quant: str) -> str:
        """Its type in a model of this kind, by gguf's name."""
        if len(self.shape) == 1:
            return "F32"
        if quant == "q4_k_m":
            return "Q6_K" if self.more_bits else "Q4_K"
        return quant.upper()

    def n_bytes(self, quant: str) -> int:
        import gguf

        per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type(quant)]]
        return math.prod(self.shape) // per_block * size


def _tensors(s: Shape) -> Iterator[_Tensor]:
    n_q, n_kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    yield _Tensor("token_embd.weight", (s.n_vocab, s.n_embd))
    for i in range(s.n_layer):
        more = _more_bits(i, s.n_layer)
        yield _Tensor(f"blk.{i}.attn_norm.weight", (s.n_embd,))
        yield _Tensor(f"blk.{i}.attn_q.weight", (n_q, s.n_embd))
        yield _Tensor(f"blk.{i}.attn_k.weight", (n_kv, s.n_embd))
        yield _Tensor(f"blk.{i}.attn_v.weight", (n_kv, s.n_embd), more)
        yield _Tensor(f"blk.{i}.attn_output.weight", (s.n_embd, n_q))
        yield _Tensor(f"blk.{i}.ffn_norm.weight", (s.n_embd,))
        yield _Tensor(f"blk.{i}.ffn_gate.weight", (s.n_ff, s.n_embd))
        yield _Tensor(f"blk.{i}.ffn_up.weight", (s.n_ff, s.n_embd))
        yield _Tensor(f"blk.{i}.ffn_down.weight", (s.n_embd, s.n_ff), more)
    yield _Tensor("output_norm.weight", (s.n_embd,))
    yield _Tensor("output.weight", (s.n_vocab, s.n_embd), more_bits=True)


def _more_bits(i: int, n: int) -> bool:
    """llama.cpp's rule for Q4_K_M: half of the layers have V and FFN-down in q6_K."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _write(path: Path, shape: Shape, quant: str, seed: int, name: str) -> None:
    import gguf

    w = gguf.GGUFWriter(path, "llama")
    _add_metadata(w, shape, quant, name)
    _add_tokenizer(w, shape)
    for t in _tensors(shape):
        kind = gguf.GGMLQuantizationType[t.type(quant)]
        raw = kind if len(t.shape) > 1 else None
        w.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes(quant), raw)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    assert w.fout is not None  # since the header is written
    out = w.fout[0]
    try:
        w.write_padding(out, out.tell())
        pools = _Pools(np.random.default_rng(seed))
        for t in _tensors(shape):
            for chunk in pools.data(t, quant):
                out.write(chunk)
            w.write_padding(out, t.n_bytes(quant))
    finally:
        w.close()


class _Pools:
    """Random weights: for each type and input width one pool of blocks, which tensors repeat."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.made: dict[tuple[str, int], bytes] = {}

    def data(self, t: _Tensor, quant: str) -> Iterator[bytes | memoryview]:
        """The bytes of one tensor, in pieces. It begins at a block of its own in the pool."""
        if len(t.shape) == 1:
            yield np.ones(t.shape, np.float32).tobytes()
            return
        kind = t.type(quant), t.shape[1]
        if kind not in self.made:
            # variance 1/width, so that activations keep their size through a layer
            self.made[kind] = _BLOCKS[kind[0]](self.rng, 1 / math.sqrt(kind[1])).tobytes()
        pool = self.made[kind]
        unit = len(pool) // _POOL_BLOCKS
        at = int(self.rng.integers(_POOL_BLOCKS)) * unit
        left = t.n_bytes(quant)
        view = memoryview(pool)
        while left:
            piece = view[at : at + min(left, len(pool) - at, _CHUNK)]
            yield piece
            left -= len(piece)
            at = (at + len(piece)) % len(pool)


# Blocks of random codes and valid scales: mean 0, standard deviation `std`.


def _f16(rng: np.random.Generator, std: float) -> np.ndarray:
    return (rng.standard_normal((_POOL_BLOCKS, _BLOCK), np.float32) * std).astype(np.float16)


def _q8_0(rng: np.random.Generator, std: float) -> np.ndarray:
    block = np.zeros(_POOL_BLOCKS, np.dtype([("d", "<f2"), ("qs", "i1", _BLOCK)]))
    block["qs"] = rng.integers(-127, 128, (_POOL_BLOCKS, _BLOCK), dtype=np.int8)
    # of -127..127, evenly drawn
    block["d"] = rng.uniform(0.8, 1.2, _POOL_BLOCKS) * std / math.sqrt(127 * 128 / 3)
    return block


def _q4_k(rng: np.random.Generator, std: float) -> np.ndarray:
    """d*sc*q - dmin*m with m = sc and dmin = 7.5*d: d*sc*(q - 7.5). 8 sc and 8 m of 6 bits."""
    form = [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", _SUPER // 2)]
    block = np.zeros(_POOL_BLOCKS, np.dtype(form))
    sc = rng.integers(40, 64, (_POOL_BLOCKS, 8), dtype=np.uint8)
    low, high = sc[:, :4], sc[:, 4:]
    first = low | (high >> 4 << 6)
    block["scales"] = np.concatenate([first, first, (high & 15) | (high & 15) << 4], axis=1)
    block["qs"] = rng.integers(0, 256, (_POOL_BLOCKS, _SUPER // 2), dtype=np.uint8)
    block["d"] = std / math.sqrt((16**2 - 1) / 12) / 51.5  # the mean of sc
    block["dmin"] = 7.5 * block["d"].astype(np.float32)
    return block


def _q6_k(rng: np.random.Generator, std: float) -> np.ndarray:
    """d*sc*(q - 32), sc of either sign."""
    form = [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]
    block = np.zeros(_POOL_BLOCKS, np.dtype(form))
    for part in ("ql", "qh"):
        block[part] = rng.integers(0, 256, block[part].shape, dtype=np.uint8)
    sc = rng.integers(80, 127, (_POOL_BLOCKS, 16), dtype=np.int8)
    block["scales"] = sc * rng.choice(np.array([-1, 1], np.int8), sc.shape)
    block["d"] = std / math.sqrt((64**2 - 1) / 12) / 103  # the mean of |sc|
    return block


_BLOCKS = {"F16": _f16, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}


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


def _add_tokenizer(w: Any, s: Shape) -> None:
    w.add_add_space_prefix(False)
    if s.tokenizer == "bytes":
        # SentencePiece kind: a byte that no token spells is its own token, so any text can be read
        tokens = [*_SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), _SPACE]
        types = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL]
        _add_tokens(w, s, tokens, types, [0.0] * len(tokens))
        return
    found = _read_tokenizer(s.tokenizer)
    tokens, types = found["tokens"], found["token_type"]
    n = min(s.n_vocab, len(tokens))
    if s.tokenizer == "llama-spm":
        # the space, which any text needs, is far behind
        keep = [*range(n - 1), max(n - 1, tokens.index(_SPACE))] if n < len(tokens) else range(n)
        scores = [found["scores"][i] for i in keep]
        _add_tokens(w, s, [tokens[i] for i in keep], [types[i] for i in keep], scores)
        return
    bos, eos = found["bos_token_id"], found["eos_token_id"]
    keep = [*range(n - 2), bos, eos] if n < len(tokens) else [*range(n)]
    _add_tokens(w, s, [tokens[i] for i in keep], [types[i] for i in keep], None, found["pre"])
    known = {tokens[i] for i in keep}
    w.add_token_merges([m for m in found["merges"] if {*m.split(" "), m.replace(" ", "")} <= known])
    w.add_bos_token_id(keep.index(bos))
    w.add_eos_token_id(keep.index(eos))


def _add_tokens(
    w: Any,
    s: Shape,
    tokens: list[str],
    types: list[int],
    scores: list[float] | None,
    pre: str = "default",
) -> None:
    n_unused = s.n_vocab - len(tokens)
    w.add_tokenizer_model("llama" if scores else "gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens + [f"<unused{i}>" for i in range(n_unused)])
    w.add_token_types(types + [_UNUSED] * n_unused)
    if scores:
        w.add_token_scores(scores + [0.0] * n_unused)
        w.add_unk_token_id(0)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)


def _read_tokenizer(name: str) -> dict[str, Any]:
    """The keys `tokenizer.ggml.*` of a vocabulary of the pinned source."""
    import gguf

    path = folder() / f"{_VOCAB}{name}.gguf"
    if not path.exists():
        pin = source.read_pin()
        where = source.locate(pin)
        source.fetch(pin, where, say)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as temp:
            source.unpack(where, f"{pin.folder}/models", Path(temp))
            os.replace(Path(temp) / path.name, path)
    prefix = "tokenizer.ggml."
    known = gguf.GGUFReader(path).fields
    return {k.removeprefix(prefix): f.contents() for k, f in known.items() if k.startswith(prefix)}
