"""Tiny random models of the architectures whose attention differs, as GGUF files.

    path = tiny.write(folder / "m.gguf", "gemma2", n_layer=4)

The weights make attention uneven (logits of a few units), so that reading fewer positions changes
the output. The vocabulary is the 256 bytes.

    path = tiny.write_tiny_gguf(folder / "m.gguf")  # a Llama for text
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SPECIAL = (("<unk>", 2), ("<s>", 3), ("</s>", 3))  # (text, token type: 2 unknown, 3 control)
N_SPECIAL = len(SPECIAL)
N_VOCAB = N_SPECIAL + 256 + 1
CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TURNS = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@dataclass
class Model:
    """What one architecture adds to the file: metadata, and tensors under their GGUF names."""

    arch: str
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_ff: int = 96
    n_ctx: int = 4096
    n_embd: int = 0  # 0: as long as the heads together
    seed: int = 0
    weights: str = "F32"  # the type of matrices whose rows it can hold
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.n_embd = self.n_embd or self.n_head * self.head_dim

    def matrix(self, name: str, n_in: int, n_out: int, *stack: int, gain: float = 1.0) -> None:
        """(*stack, n_out, n_in) normal; `gain` is what it does to the size of a vector."""
        values = self.rng.standard_normal((*stack, n_out, n_in)) * gain / np.sqrt(n_in)
        self.tensors[name] = values.astype(np.float32)

    def vector(self, name: str, *shape: int, mean: float = 1.0, spread: float = 0.1) -> None:
        values = mean + spread * self.rng.standard_normal(shape)
        self.tensors[name] = values.astype(np.float32)

    def norm(self, name: str, n: int | None = None, bias: bool = False) -> None:
        self.vector(f"{name}.weight", n or self.n_embd)
        if bias:
            self.vector(f"{name}.bias", n or self.n_embd, mean=0.0)

    def ends(self, output: bool = True, bias: bool = False, norm: str = "output_norm") -> None:
        """Embedding, last norm, and the output matrix unless it is the embedding."""
        self.matrix("token_embd.weight", self.n_embd, N_VOCAB, gain=np.sqrt(self.n_embd))
        self.norm(norm, bias=bias)
        if output:
            self.matrix("output.weight", self.n_embd, N_VOCAB, gain=2.0)

    def qkv(self, i: int, bias: bool = False, n_head_kv: int | None = None) -> None:
        n_kv = (self.n_head_kv if n_head_kv is None else n_head_kv) * self.head_dim
        n_q = self.n_head * self.head_dim
        for name, n_out, gain in (("q", n_q, 1.6), ("k", n_kv, 1.6), ("v", n_kv, 1.0)):
            self.matrix(f"blk.{i}.attn_{name}.weight", self.n_embd, n_out, gain=gain)
            if bias:
                self.vector(f"blk.{i}.attn_{name}.bias", n_out, mean=0.0, spread=0.5)
        self.matrix(f"blk.{i}.attn_output.weight", n_q, self.n_embd, gain=2.0)

    def fused_qkv(self, i: int, bias: bool = False) -> None:
        n_out = self.n_embd + 2 * self.n_head_kv * self.head_dim
        self.matrix(f"blk.{i}.attn_qkv.weight", self.n_embd, n_out, gain=1.4)
        self.matrix(f"blk.{i}.attn_output.weight", self.n_embd, self.n_embd, gain=2.0)
        if bias:
            self.vector(f"blk.{i}.attn_qkv.bias", n_out, mean=0.0)
            self.vector(f"blk.{i}.attn_output.bias", self.n_embd, mean=0.0)

    def mlp(self, i: int, gate: bool = True, bias: bool = False) -> None:
        for name in ("gate", "up") if gate else ("up",):
            self.matrix(f"blk.{i}.ffn_{name}.weight", self.n_embd, self.n_ff)
        self.matrix(f"blk.{i}.ffn_down.weight", self.n_ff, self.n_embd)
        if bias:
            self.vector(f"blk.{i}.ffn_up.bias", self.n_ff, mean=0.0)
            self.vector(f"blk.{i}.ffn_down.bias", self.n_embd, mean=0.0)

    def qk_norm(self, i: int) -> None:
        for name in "qk":
            self.norm(f"blk.{i}.attn_{name}_norm", self.head_dim)

    def experts(self, i: int, bias: bool = False, shared: bool = False) -> None:
        """Two, of which a token uses one; with `shared` one more, which all use."""
        n_expert, b = 2, f"blk.{i}.ffn_"
        self.keys |= {"expert_count": n_expert, "expert_used_count": 1}
        self.keys["expert_feed_forward_length"] = self.n_ff
        self.matrix(b + "gate_inp.weight", self.n_embd, n_expert)
        if bias:
            self.vector(b + "gate_inp.bias", n_expert, mean=0.0)
        sizes = self.n_embd, self.n_ff
        for name, (n_in, n_out) in (("gate", sizes), ("up", sizes), ("down", sizes[::-1])):
            self.matrix(b + f"{name}_exps.weight", n_in, n_out, n_expert)
            if bias:
                self.vector(b + f"{name}_exps.bias", n_expert, n_out, mean=0.0)
            if shared:
                self.matrix(b + f"{name}_shexp.weight", n_in, n_out)


def _llama(m: Model, bias: bool = False, qk_norm: bool = False) -> None:
    m.ends()
    for i in range(m.n_layer):
        m.norm(f"blk.{i}.attn_norm")
        m.qkv(i, bias)
        if qk_norm:
            m.qk_norm(i)
        m.norm(f"blk.{i}.ffn_norm")
        m.mlp(i)


def _qwen2vl(m: Model) -> None:
    """M-RoPE: a position is a time, a row and a column, and an image has one time."""
    m.keys["rope.dimension_sections"] = [m.head_dim // 4, m.head_dim // 8, m.head_dim // 8, 0]
    _llama(m, bias=True)


def _gemma2(m: Model) -> None:
    """Soft-capped logits; every second layer has a sliding window."""
    m.keys |= {
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 30.0,
        "attention.sliding_window": 64,
    }
    _gemma(m, qk_norm=False)


def _gemma3(m: Model) -> None:
    """Five of six layers have a sliding window, unless the file has another pattern."""
    m.keys |= {"attention.sliding_window": 64}
    _gemma(m, qk_norm=True)


def _gemma(m: Model, qk_norm: bool) -> None:
    m.ends(output=False)
    m.tensors["token_embd.weight"] /= np.sqrt(m.n_embd)  # the model scales embeddings itself
    for i in range(m.n_layer):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            m.norm(f"blk.{i}.{name}")
        m.qkv(i)
        if qk_norm:
            m.qk_norm(i)
        m.mlp(i)


def _gpt_oss(m: Model) -> None:
    """Learned sinks in every layer; every second layer has a sliding window; experts."""
    m.keys["attention.sliding_window"] = 64
    m.ends()
    for i in range(m.n_layer):
        b = f"blk.{i}."
        m.norm(b + "attn_norm")
        m.norm(b + "post_attention_norm")
        m.qkv(i, bias=True)
        m.vector(b + "attn_output.bias", m.n_embd, mean=0.0)
        m.vector(b + "attn_sinks.weight", m.n_head, mean=3.0, spread=1.0)
        m.experts(i, bias=True)


def _glm4moe(m: Model) -> None:
    """Behind its layers, which have no experts, one with experts that guesses the token after next
    (MTP)."""
    last = m.n_layer
    m.keys |= {
        "block_count": last + 1,
        "nextn_predict_layers": 1,
        "leading_dense_block_count": last,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
    }
    m.ends()
    for i in range(last + 1):
        m.norm(f"blk.{i}.attn_norm")
        m.qkv(i)
        m.norm(f"blk.{i}.post_attention_norm")
        if i < last:
            m.mlp(i)
    b = f"blk.{last}."
    m.experts(last, shared=True)
    m.vector(b + "exp_probs_b.bias", m.keys["expert_count"], mean=0.0)
    m.matrix(b + "nextn.eh_proj.weight", 2 * m.n_embd, m.n_embd)
    m.norm(b + "nextn.enorm")
    m.norm(b + "nextn.hnorm")


def _mpt(m: Model) -> None:
    """No positions but ALiBi."""
    m.keys["attention.max_alibi_bias"] = 8.0
    m.ends()
    for i in range(m.n_layer):
        m.norm(f"blk.{i}.attn_norm")
        m.fused_qkv(i)
        m.norm(f"blk.{i}.ffn_norm")
        m.mlp(i, gate=False)


def _gptneox(m: Model) -> None:
    """Attention and MLP side by side; RoPE on a part of the head."""
    m.keys |= {"use_parallel_residual": True, "rope.dimension_count": m.head_dim // 4}
    m.ends(bias=True)
    for i in range(m.n_layer):
        m.norm(f"blk.{i}.attn_norm", bias=True)
        m.fused_qkv(i, bias=True)
        m.norm(f"blk.{i}.ffn_norm", bias=True)
        m.mlp(i, gate=False, bias=True)


def _lfm2(m: Model) -> None:
    """Hybrid: layers of convolution with a recurrent state between the layers of attention."""
    kv = [m.n_head_kv if i % 2 else 0 for i in range(m.n_layer)]
    m.keys |= {"attention.head_count_kv": kv, "shortconv.l_cache": 3}
    m.ends(output=False, norm="token_embd_norm")
    for i in range(m.n_layer):
        m.norm(f"blk.{i}.attn_norm")
        m.norm(f"blk.{i}.ffn_norm")
        m.mlp(i)
        if kv[i]:
            m.qkv(i)
            m.qk_norm(i)
        else:
            m.matrix(f"blk.{i}.shortconv.conv.weight", 3, m.n_embd)
            m.matrix(f"blk.{i}.shortconv.in_proj.weight", m.n_embd, 3 * m.n_embd)
            m.matrix(f"blk.{i}.shortconv.out_proj.weight", m.n_embd, m.n_embd)


def _deepseek2(m: Model, latent: bool = True) -> None:
    """Multi-head latent attention: K and V are one compressed vector.

    Without `latent` they are unpacked into MHA before they are stored, keys longer than values.
    """
    nope, rope, lora, q_lora = m.head_dim, m.head_dim // 2, 2 * m.head_dim, m.n_embd
    m.arch = "deepseek2"
    m.n_head_kv = 1 if latent else m.n_head
    m.keys |= {
        "attention.q_lora_rank": q_lora,
        "attention.kv_lora_rank": lora,
        "attention.key_length": lora + rope if latent else nope + rope,
        "attention.value_length": lora if latent else m.head_dim,
        "rope.dimension_count": rope,
        "leading_dense_block_count": m.n_layer,
        "expert_feed_forward_length": m.n_ff,
        "expert_shared_count": 0,
        "expert_weights_scale": 1.0,
    }
    if latent:
        m.keys |= {
            "attention.key_length_mla": nope + rope,
            "attention.value_length_mla": m.head_dim,
        }
    m.ends()
    for i in range(m.n_layer):
        b = f"blk.{i}."
        m.norm(b + "attn_norm")
        m.norm(b + "ffn_norm")
        m.matrix(b + "attn_q_a.weight", m.n_embd, q_lora)
        m.norm(b + "attn_q_a_norm", q_lora)
        m.matrix(b + "attn_q_b.weight", q_lora, m.n_head * (nope + rope), gain=1.6)
        m.matrix(b + "attn_kv_a_mqa.weight", m.n_embd, lora + rope, gain=1.6)
        m.norm(b + "attn_kv_a_norm", lora)
        if latent:
            m.matrix(b + "attn_k_b.weight", nope, lora, m.n_head)
            m.matrix(b + "attn_v_b.weight", lora, m.head_dim, m.n_head)
        else:
            m.matrix(b + "attn_kv_b.weight", lora, m.n_head * (nope + m.head_dim), gain=1.6)
        m.matrix(b + "attn_output.weight", m.n_head * m.head_dim, m.n_embd)
        m.mlp(i)


def _mamba(m: Model) -> None:
    """Recurrent: no attention at all."""
    inner, state, conv, dt = 2 * m.n_embd, 8, 4, 4
    m.keys |= {
        "ssm.conv_kernel": conv,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": dt,
        "attention.head_count": 0,
        "attention.head_count_kv": 0,
    }
    m.ends()
    for i in range(m.n_layer):
        b = f"blk.{i}."
        m.norm(b + "attn_norm")
        m.matrix(b + "ssm_in.weight", m.n_embd, 2 * inner)
        m.matrix(b + "ssm_conv1d.weight", conv, inner)
        m.vector(b + "ssm_conv1d.bias", inner, mean=0.0)
        m.matrix(b + "ssm_x.weight", inner, dt + 2 * state)
        m.matrix(b + "ssm_dt.weight", dt, inner)
        m.vector(b + "ssm_dt.bias", inner, mean=0.0)
        m.vector(b + "ssm_a", inner, state, mean=-1.0)
        m.vector(b + "ssm_d", inner)
        m.matrix(b + "ssm_out.weight", inner, m.n_embd)


ARCHITECTURES: dict[str, Callable[[Model], None]] = {
    "llama": _llama,
    "qwen2": lambda m: _llama(m, bias=True),
    "qwen2vl": _qwen2vl,
    "qwen3": lambda m: _llama(m, qk_norm=True),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma-embedding": _gemma3,  # which has no cache
    "gpt-oss": _gpt_oss,
    "glm4moe": _glm4moe,
    "mpt": _mpt,
    "gptneox": _gptneox,
    "lfm2": _lfm2,
    "deepseek2": _deepseek2,
    "deepseek2-unpacked": lambda m: _deepseek2(m, latent=False),
    "mamba": _mamba,
}


def make(arch: str, **sizes: Any) -> Model:
    """The model in memory; the same arguments give the same weights."""
    m = Model(arch, **sizes)
    ARCHITECTURES[arch](m)
    return m


def write(path: Path, arch: str = "llama", **sizes: Any) -> Path:
    """Make the model, write it, and return the path. `sizes`: the fields of Model, up to `seed`."""
    return save(make(arch, **sizes), path)


def text_of(n: int, seed: int = 1) -> str:
    """`n` letters, and so many tokens."""
    letters = np.random.default_rng(seed).integers(97, 123, n)
    return bytes(letters.astype(np.uint8)).decode()


def write_tiny_gguf(path: Path, *, arch: str = "llama", n_ff: int = 64, **more: Any) -> Path:
    """Write a Llama for text, with a token per byte, and return the path; any output is possible.

    more: other sizes of Model, and what `save` takes.
    """
    sizes = {f.name: more.pop(f.name) for f in fields(Model) if f.name in more.keys() - {"keys"}}
    m = make("llama", n_ff=n_ff, **sizes)
    m.arch = arch
    for name, values in m.tensors.items():
        if name.endswith("output.weight"):  # what was read matters, and some tokens stand out
            values *= 2
    # logit 0, far below the largest: greedy text never ends by itself
    m.tensors["output.weight"][:N_SPECIAL] = 0
    return save(m, path, **more)


def save(
    m: Model,
    path: Path,
    keys: dict[str, int] | None = None,
    part_tensors: int = 0,
    **vocabulary: Any,
) -> Path:
    """Write the file and return its path.

    Args:
        keys: more metadata, `split.count=2`.
        part_tensors: split the model into files of so many tensors, named as llama.cpp's gguf-split
            names them; the path of the first is returned.
        vocabulary: as `_add_vocabulary` has it.
    """
    sizes = {
        "context_length": m.n_ctx,
        "embedding_length": m.n_embd,
        "block_count": m.n_layer,
        "feed_forward_length": m.n_ff,
        "attention.head_count": m.n_head,
        "attention.head_count_kv": m.n_head_kv,
        "attention.key_length": m.head_dim,
        "attention.value_length": m.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": m.head_dim,
        **m.keys,
    }
    w = gguf.GGUFWriter(path, m.arch, split_max_tensors=part_tensors)
    w.add_name("tiny")
    w.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, value in ({f"{m.arch}.{k}": v for k, v in sizes.items()} | (keys or {})).items():
        kind = gguf.GGUFValueType.get_type(value)
        signed = kind is gguf.GGUFValueType.INT32  # llama.cpp wants no signs
        w.add_key_value(name, value, gguf.GGUFValueType.UINT32 if signed else kind)
    _add_vocabulary(w, **vocabulary)
    kind = gguf.GGMLQuantizationType[m.weights]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for name, values in m.tensors.items():
        if m.weights != "F32" and values.ndim > 1 and values.shape[-1] % block == 0:
            w.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            w.add_tensor(name, values)
    finish(w)
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if part_tensors else path


def _add_vocabulary(
    w: gguf.GGUFWriter,
    chat_template: str | None = None,
    space_prefix: bool = False,
    word: str = "",
    pre: str = "",
) -> None:
    """space_prefix: the tokeniser puts a blank before texts, as in Llama 2. word: a user-defined
    token, in place of the blank. pre: a tokeniser that cuts texts into words first, by this rule.
    """
    tokens = [text for text, _ in SPECIAL] + [f"<0x{i:02X}>" for i in range(256)] + ["\u2581"]
    types = [kind for _, kind in SPECIAL] + [1 if pre else 6] * 256 + [1]  # 6 byte, 1 normal
    if word:
        tokens[-1], types[-1] = word, 4
    if pre:
        visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = (b for b in range(256) if b not in visible)
        tokens[N_SPECIAL:-1] = map(
            chr, [*sorted(visible), *(256 + i for i, _ in enumerate(others))]
        )
        w.add_tokenizer_pre(pre)
        w.add_token_merges(["z z"])
    w.add_tokenizer_model("gpt2" if pre else "llama")
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


def finish(w: gguf.GGUFWriter) -> None:
    """Write what was added."""
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
