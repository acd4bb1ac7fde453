"""Write a GGUF model of random weights, of any size, in constant memory.

Its text is noise, but a decoded token costs what it costs in a real model of that shape, so speed
is measured without a download. All tensors are cut from small pools of random blocks. A token is a
byte, the rest of the vocabulary is unused, and the output head is never the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyorch import paths
from pyorch.errors import SparqError, nearest
from pyorch.ggml import BY_NAME
from pyorch.models import cards
from pyorch.models.new_file import check_space, check_target, new_file
from pyorch.text import printable

if TYPE_CHECKING:
    import gguf

QUANTS = ("q8_0", "q4_k_m", "q4_0", "mxfp4", "f16")
_NORMS = {"attn_q_norm": "head_dim", "attn_k_norm": "head_dim"}
# those that it can write: the vectors of a layer that a Llama does not have, and their lengths
ARCHITECTURES: dict[str, dict[str, str]] = {
    "llama": {},
    "qwen3": _NORMS,
    "qwen3moe": _NORMS,
    "gemma3": _NORMS | {"post_attention_norm": "n_embd", "post_ffw_norm": "n_embd"},
    "gpt-oss": {"attn_sinks": "n_head"},
}
VERSION = 5  # raised whenever the same arguments give a different file

_BLOCK = BY_NAME["q8_0"].per_block
_SUPER = BY_NAME["q4_K"].per_block  # as q6_K has
_SPECIAL = ("<unk>", "<s>", "</s>")
_LEAST_VOCAB = len(_SPECIAL) + 256 + 1  # the bytes and the space
_SPACE = "\u2581"  # how SentencePiece writes a space
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6  # llama.cpp's types of tokens


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, as on its card. n_embd, n_ff and n_vocab do not touch attention."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    rope_base: float = 10_000.0
    n_ctx: int = 131_072
    architecture: str = "llama"
    n_swa: int = 0
    n_expert: int = 1
    n_expert_used: int = 1


def shape_like(name: str, **changes: int | None) -> Shape:
    """The shape of a model that has a card, with some sizes replaced; None leaves a size as it is.

    Raises:
        SparqError: the model or its architecture is unknown, or the sizes do not fit together.
    """
    card = cards.load(name)
    if card.architecture not in ARCHITECTURES:
        raise SparqError(
            f"{name} is a {card.architecture}, which --like cannot write",
            f"it writes {', '.join(ARCHITECTURES)}; sparq-cpp models lists the architectures",
            exit_code=2,
        )
    known: dict[str, Any] = {f.name: getattr(card, f.name) for f in fields(Shape)}
    shape = Shape(
        **known | {"n_ctx": Shape.n_ctx} | {k: v for k, v in changes.items() if v is not None}
    )
    _check(shape)
    return shape


def fewer_layers(name: str, n_layer: int) -> Shape:
    """The shape of a known model with fewer layers and the vocabulary in proportion.

    What a token costs is then in proportion too, the output head included.
    """
    full = shape_like(name)
    least = -(-_LEAST_VOCAB // _BLOCK)
    n_vocab = max(full.n_vocab * n_layer // full.n_layer // _BLOCK, least) * _BLOCK
    return shape_like(name, n_layer=n_layer, n_vocab=min(n_vocab, full.n_vocab))


def folder() -> Path:
    """The folder in the cache where `bench` keeps the models that it writes."""
    return paths.cache() / "bench"


def written() -> list[Path]:
    """The models that `bench` has written and that still exist."""
    return sorted(folder().glob("*.gguf"))


def file_bytes(shape: Shape, quant: str) -> int:
    """The bytes of all tensors."""
    return sum(t.n_bytes(quant) for t in _tensors(shape))


def _check(shape: Shape, block: int = _BLOCK) -> None:
    """Refuse sizes that do not fit together, or that blocks of that many weights do not fill."""
    s = shape
    sizes = {k: v for k, v in asdict(s).items() if k not in ("architecture", "n_swa")}
    wrong = [f"{name} {n} is below 1" for name, n in sizes.items() if n < 1]
    if not wrong and s.n_head % s.n_head_kv:
        wrong.append(f"{s.n_head} heads cannot share {s.n_head_kv} KV heads evenly")
    rows = {"n_embd": s.n_embd, "n_ff": s.n_ff, "n_head*head_dim": s.n_head * s.head_dim}
    wrong += [f"{name} {n} is not a multiple of {block}" for name, n in rows.items() if n % block]
    if s.head_dim % _BLOCK:
        wrong.append(f"head_dim {s.head_dim} is not a multiple of {_BLOCK}")
    if s.n_vocab < _LEAST_VOCAB:
        wrong.append(f"a vocabulary of {s.n_vocab} tokens is below {_LEAST_VOCAB}")
    if wrong:
        raise SparqError(wrong[0], f"weights are quantised in blocks of {block}", exit_code=2)


def write(path: Path, shape: Shape, quant: str = "q8_0", seed: int = 0, name: str = "") -> int:
    """Write the model, in the place of any that is there. The file appears only when it is
    complete. Returns its size in bytes.

    Raises:
        SparqError: the sizes do not fit together, or it cannot be written.
    """
    if quant not in QUANTS:
        raise nearest("type of weights", quant, QUANTS)
    _check(shape, _SUPER if quant == "q4_k_m" else _BLOCK)
    check_target(path, force=True)
    check_space(path.absolute().parent, file_bytes(shape, quant), str(path))
    with new_file(path, force=True) as (partial, _):
        _write(partial, shape, quant, seed, name or f"synthetic {printable(path.stem)}")
    return path.stat().st_size


@dataclass(frozen=True)
class _Tensor:
    """A tensor. `shape` is in numpy's order, outermost first. One axis means ones, f32."""

    name: str
    shape: tuple[int, ...]
    more_bits: bool = False  # q6_K instead of q4_K

    def type(self, quant: str) -> str:
        """ggml's name of its type in a model of this quantisation."""
        if len(self.shape) == 1 or self.name.endswith((".bias", "ffn_gate_inp.weight")):
            return "f32"
        if quant == "q4_k_m":
            return "q6_K" if self.more_bits else "q4_K"
        return "q8_0" if quant == "mxfp4" and ".ffn_" not in self.name else quant

    def n_bytes(self, quant: str) -> int:
        return BY_NAME[self.type(quant)].n_bytes(math.prod(self.shape))


def _tensors(s: Shape) -> Iterator[_Tensor]:
    yield _Tensor("token_embd.weight", (s.n_vocab, s.n_embd))
    for i in range(s.n_layer):
        for t in _layer(s, _more_bits(i, s.n_layer)):
            yield replace(t, name=f"blk.{i}.{t.name}")
    yield _Tensor("output_norm.weight", (s.n_embd,))
    yield _Tensor("output.weight", (s.n_vocab, s.n_embd), more_bits=True)


def _layer(s: Shape, more_bits: bool) -> Iterator[_Tensor]:
    n_q, n_kv, arch = s.n_head * s.head_dim, s.n_head_kv * s.head_dim, s.architecture
    stack, kind = ((s.n_expert,), "_exps") if s.n_expert > 1 else ((), "")
    rows: list[tuple[str, tuple[int, ...]]] = [
        ("attn_norm", (s.n_embd,)),
        ("attn_q", (n_q, s.n_embd)),
        ("attn_k", (n_kv, s.n_embd)),
        ("attn_v", (n_kv, s.n_embd)),
        ("attn_output", (s.n_embd, n_q)),
        ("post_attention_norm" if arch == "gpt-oss" else "ffn_norm", (s.n_embd,)),
        (f"ffn_gate{kind}", (*stack, s.n_ff, s.n_embd)),
        (f"ffn_up{kind}", (*stack, s.n_ff, s.n_embd)),
        (f"ffn_down{kind}", (*stack, s.n_embd, s.n_ff)),
    ]
    if stack:
        rows.append(("ffn_gate_inp", (s.n_expert, s.n_embd)))
    rows += [(name, (getattr(s, size),)) for name, size in ARCHITECTURES[arch].items()]
    for name, shape in rows:
        more = more_bits and name.startswith(("attn_v", "ffn_down"))
        yield _Tensor(f"{name}.weight", shape, more)
        if len(shape) > 1 and arch == "gpt-oss":
            yield _Tensor(f"{name}.bias", shape[:-1])


def _more_bits(i: int, n: int) -> bool:
    """llama.cpp's rule for Q4_K_M: half of the layers have V and FFN-down in q6_K."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _write(path: Path, shape: Shape, quant: str, seed: int, name: str) -> None:
    import gguf
    import numpy as np

    from pyorch.models.random_weights import Pools

    w = gguf.GGUFWriter(path, shape.architecture)
    _add_metadata(w, shape, quant, name)
    _add_tokenizer(w, shape)
    for t in _tensors(shape):
        kind = gguf.GGMLQuantizationType(BY_NAME[t.type(quant)].number)
        raw = kind if len(t.shape) > 1 else None
        w.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes(quant), raw)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    assert w.fout is not None  # set when the header was written
    out = w.fout[0]
    try:
        w.write_padding(out, out.tell())
        pools = Pools(np.random.default_rng(seed))
        for t in _tensors(shape):
            for chunk in pools.data(t.shape, t.type(quant)):
                out.write(chunk)
            w.write_padding(out, t.n_bytes(quant))
    finally:
        w.close()


def _add_metadata(w: gguf.GGUFWriter, s: Shape, quant: str, name: str) -> None:
    import gguf

    w.add_name(name)
    kind = {"mxfp4": "MXFP4_MOE"}.get(quant, quant.upper())
    w.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
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
    if s.n_swa:
        w.add_sliding_window(s.n_swa)
    if s.n_expert > 1:
        w.add_expert_count(s.n_expert)
        w.add_expert_used_count(s.n_expert_used)
        w.add_expert_feed_forward_length(s.n_ff)


def _add_tokenizer(w: gguf.GGUFWriter, s: Shape) -> None:
    """A vocabulary of SentencePiece's kind. A byte that no token spells is its own token there, so
    any text can be read."""
    tokens = [*_SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), _SPACE]
    types = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL]
    n_unused = s.n_vocab - len(tokens)
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(tokens + [f"<unused{i}>" for i in range(n_unused)])
    w.add_token_types(types + [_UNUSED] * n_unused)
    w.add_token_scores([0.0] * s.n_vocab)
    w.add_add_space_prefix(False)
    w.add_unk_token_id(0)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
