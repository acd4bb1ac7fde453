"""Refuses model files on which llama.cpp would end the process.

These are the assertions of llama.cpp and ggml that a model file can reach. They were found by
reading and by fuzzing (tests/models/test_gguf_fuzz.py). Faults that llama.cpp reports as errors are
left to it.
"""

from __future__ import annotations

import math

from pyorch.errors import SparqError
from pyorch.models.gguf_file import ALIGNMENT, GGUFFile, SkippedArray

_NO_WEIGHTS = ("i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K")  # no op multiplies by these

# architectures whose RoPE turns whole heads, or llama.cpp ends the process; a test compares it with
# the source
_WHOLE_ROPE = """
apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx
deci deepseek dots1 dream ernie4_5 exaone exaone-moe exaone4 falcon granite
granite_swa graniteswitch grok grovemoe hunyuan-moe hunyuan_vl hy_v3
internlm2 jais2 llada llada-moe llama llama4 maincoder mellum mistral3 olmo
olmo2 olmoe orion pangu-embedded plamo pockettts qwen2 qwen2moe qwen2vl
qwen3 qwen3moe qwen3vl qwen3vlmoe rnd1 seed_oss smallthinker smollm3
starcoder2 talkie xverse
"""
WHOLE_ROPE = frozenset(_WHOLE_ROPE.split())

# architectures that turn text into vectors or sound; the same test compares them
_TEXTLESS = """
bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert
nomic-bert nomic-bert-moe t5encoder wavtokenizer-dec
"""
TEXTLESS = frozenset(_TEXTLESS.split())


def check_loadable(file: GGUFFile, n_layer: int, n_expert: int) -> None:
    """Refuse a model that would end the process, at once or at some later text. Its heads are
    checked where they are known, in `geometry`.

    Raises:
        SparqError: the message names the key or the tensor.
    """
    _check_numbers(file, n_layer, n_expert)
    # the assertions of llama-vocab.cpp; duplicate tokens are found when the file is read
    kind, tokens = (file.metadata.get(f"tokenizer.ggml.{k}") for k in ("model", "tokens"))
    lacks = tokens.lacks if isinstance(tokens, SkippedArray) else ""
    if lacks and kind == "llama":  # SentencePiece writes text without a token as bytes
        raise SparqError(f"{file.path}: no token of its vocabulary stands for the byte {lacks}")
    if kind == "bert":
        raise SparqError(f"{file.path}: a vocabulary of BERT, which writes no text")
    if file.metadata.get("general.alignment", ALIGNMENT) < ALIGNMENT:
        raise SparqError(f"{file.path}: its tensors are aligned to less than {ALIGNMENT} bytes")
    for t in file.tensors:  # no op accepts other types where such a tensor is used
        vector = len(t.shape) < 2  # norms and biases: ops add and multiply them as f32
        number = t.type in _NO_WEIGHTS and "tid2eid" not in t.name  # tid2eid is looked up
        if (vector and t.type != "f32") or number:
            raise SparqError(f"{file.path}: tensor {t.name!r} of {t.shape} cannot be {t.type}")


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
    need("nextn_predict_layers", is_number(m.get(f"{arch}.nextn_predict_layers", 0), 0, n_layer))
    need("expert_used_count", is_number(most, min(n_expert, 1), n_expert))
    need("expert_group_count", is_number(groups, 0, max(n_expert - 1, 0)))
    if groups > 1:
        need("expert_group_count", n_expert % groups == 0)
        need("expert_group_used_count", is_number(group_used, 1, groups - 1))
    scaling = m.get(f"{arch}.rope.scaling.type", "none")
    need("rope.scaling.type", scaling in ("none", "linear", "yarn", "longrope"))
    for key, value in m.items():
        if key.startswith(arch + ".") and key.endswith("epsilon"):
            need(key.removeprefix(arch + "."), isinstance(value, float) and 0 <= value < math.inf)


def is_number(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and least <= value <= most
