"""Refuses model files on which llama.cpp would end the process.

These are the assertions of llama.cpp and ggml that a model file can reach. They were found by
reading and by fuzzing (tests/models/test_gguf_fuzz.py). Faults that llama.cpp reports as errors are
left to it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pyorch.errors import SparqError
from pyorch.models.gguf_file import ALIGNMENT, GGUFFile, SkippedArray

if TYPE_CHECKING:
    from pyorch.models.geometry import Geometry

_NO_WEIGHTS = ("i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K")  # no op multiplies by these


def check_loadable(file: GGUFFile, geo: Geometry, n_expert: int) -> None:
    """Refuse a model that would end the process, at once or at some later text.

    Raises:
        SparqError: the message names the key or the tensor.
    """
    _check_numbers(file, geo.n_layer, n_expert)
    _check_vocabulary(file)
    _check_tensors(file)
    _check_heads(file, geo)


def _check_numbers(file: GGUFFile, n_layer: int, n_expert: int) -> None:
    """The assertions of `load_hparams` in llama-model.cpp, and of the ops that read such values."""
    arch, m = file.arch, file.metadata

    def need(key: str, good: bool) -> None:
        if not good:
            value = m.get(f"{arch}.{key}")
            raise SparqError(f"{file.path}: metadata key {arch}.{key} cannot be {value!r:.80}")

    used = m.get(f"{arch}.expert_used_count", 0)
    most = (
        max((u for u in used if isinstance(u, int)), default=0) if isinstance(used, list) else used
    )
    groups = m.get(f"{arch}.expert_group_count", 0)
    group_used = m.get(f"{arch}.expert_group_used_count", 0)
    if arch.startswith("hunyuan") and n_expert <= 1:  # a dense model is written with one expert
        n_expert, most = 0, 0
    need("block_count", n_layer > 0)
    need("nextn_predict_layers", _is_number(m.get(f"{arch}.nextn_predict_layers", 0), 0, n_layer))
    need("expert_used_count", _is_number(most, min(n_expert, 1), n_expert))
    need("expert_group_count", _is_number(groups, 0, max(n_expert - 1, 0)))
    if groups > 1:
        need("expert_group_count", n_expert % groups == 0)
        need("expert_group_used_count", _is_number(group_used, 1, groups - 1))
    scaling = m.get(f"{arch}.rope.scaling.type", "none")
    need("rope.scaling.type", scaling in ("none", "linear", "yarn", "longrope"))
    for key, value in m.items():
        if key.startswith(arch + ".") and key.endswith("epsilon"):
            need(key.removeprefix(arch + "."), isinstance(value, float) and 0 <= value < math.inf)


def _check_heads(file: GGUFFile, geo: Geometry) -> None:
    """The assertions of attention: RoPE fits the head, and K, V and the weights fit together."""
    if not geo.kv_layers:
        return
    m = {k.removeprefix(geo.arch + "."): v for k, v in file.metadata.items()}

    def need(what: str, number: object, good: bool) -> None:
        if not good:
            raise SparqError(
                f"{file.path}: {what} is {number!r:.80}, where heads have {geo.head_dim_k} "
                f"elements of K and {geo.head_dim_v} of V"
            )

    lengths = [v for k, v in m.items() if k.startswith("attention.key_length")]
    longest = max((n for n in lengths if isinstance(n, int)), default=geo.head_dim_k)
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        n_rot = m.get(key, 0)
        need(key, n_rot, _is_number(n_rot, 0, longest) and n_rot % 2 == 0)
    if geo.is_mla:  # the cache holds the latent vector
        rank, n_rot = m.get("attention.kv_lora_rank"), m.get("rope.dimension_count", 0)
        need("attention.kv_lora_rank", rank, rank == geo.head_dim_v == geo.head_dim_k - n_rot)
    if geo.is_mla or any(k.endswith("_length_swa") for k in m):
        return
    same = geo.head_dim_k == geo.head_dim_v
    shapes = {t.name: t.shape for t in file.tensors if len(t.shape) == 2}
    for i, (n_head, n_head_kv) in enumerate(zip(geo.n_head, geo.n_head_kv, strict=True)):
        fused = f"blk.{i}.attn_qkv.weight"
        need(f"the shape of {fused}", shapes.get(fused), fused not in shapes or same)
        for name, axis, want in (
            (f"blk.{i}.attn_k.weight", 1, n_head_kv * geo.head_dim_k),
            (f"blk.{i}.attn_output.weight", 0, n_head * geo.head_dim_v),
        ):
            if name in shapes and n_head_kv:
                need(f"the shape of {name}", shapes[name], shapes[name][axis] == want)


def _check_vocabulary(file: GGUFFile) -> None:
    """The assertions of llama-vocab.cpp. Duplicate tokens are found when the file is read."""
    kind, tokens = (file.metadata.get(f"tokenizer.ggml.{k}") for k in ("model", "tokens"))
    lacks = tokens.lacks if isinstance(tokens, SkippedArray) else ""
    if lacks and kind == "llama":  # SentencePiece writes text without a token as bytes
        raise SparqError(f"{file.path}: no token of its vocabulary stands for the byte {lacks}")
    if kind == "bert":
        raise SparqError(f"{file.path}: a vocabulary of BERT, which writes no text")


def _check_tensors(file: GGUFFile) -> None:
    """Refuse types that no op accepts where such a tensor is used."""
    if file.metadata.get("general.alignment", ALIGNMENT) < ALIGNMENT:
        raise SparqError(f"{file.path}: its tensors are aligned to less than {ALIGNMENT} bytes")
    for t in file.tensors:
        vector = len(t.shape) < 2  # norms and biases: ops add and multiply them as f32
        number = t.type in _NO_WEIGHTS and "tid2eid" not in t.name  # tid2eid is looked up
        if (vector and t.type != "f32") or number:
            raise SparqError(f"{file.path}: tensor {t.name!r} of {t.shape} cannot be {t.type}")


def _is_number(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and least <= value <= most
