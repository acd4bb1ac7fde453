"""Write a checkpoint of train.py as a GGUF file that stock llama.cpp loads.

    python models/demo/export.py RUN models/demo/demo.gguf

RUN holds last.pt and tokenizer.json. Matrices become f16, norms stay f32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import torch
from train import D_FF, D_HEAD, D_MODEL, EOT, N_CTX, N_HEAD, N_KV, N_LAYER, RMS_EPS, ROPE_BASE

LAYER_TENSORS = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
# A text model, not a chat model: a message is passed on as it stands.
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def add_vocabulary(w: gguf.GGUFWriter, path: Path) -> None:
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    end = model["vocab"][EOT]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types[end] = gguf.TokenType.CONTROL
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_bos_token_id(end)
    w.add_eos_token_id(end)
    w.add_add_bos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)


def export(run: Path, target: Path) -> None:
    weights = torch.load(run / "last.pt", weights_only=True)["model"]
    part = target.with_suffix(".part")
    w = gguf.GGUFWriter(part, "llama")
    w.add_name("sparq-demo")
    w.add_description("A small Llama that copies from its context, for demonstrations")
    w.add_license("mit")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    w.add_context_length(N_CTX)
    w.add_embedding_length(D_MODEL)
    w.add_block_count(N_LAYER)
    w.add_feed_forward_length(D_FF)
    w.add_head_count(N_HEAD)
    w.add_head_count_kv(N_KV)
    w.add_key_length(D_HEAD)
    w.add_value_length(D_HEAD)
    w.add_rope_dimension_count(D_HEAD)
    w.add_rope_freq_base(ROPE_BASE)
    w.add_layer_norm_rms_eps(RMS_EPS)
    w.add_vocab_size(weights["embed.weight"].shape[0])
    add_vocabulary(w, run / "tokenizer.json")
    # the output layer is the embedding: llama.cpp ties them when there is no output.weight
    w.add_tensor("token_embd.weight", weights["embed.weight"].half().numpy())
    w.add_tensor("output_norm.weight", weights["norm.weight"].float().numpy())
    for i in range(N_LAYER):
        for ours, theirs in LAYER_TENSORS.items():
            t = weights[f"blocks.{i}.{ours}.weight"]
            t = t.half() if t.ndim == 2 else t.float()
            w.add_tensor(f"blk.{i}.{theirs}.weight", t.numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    part.replace(target)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run", type=Path, help="checkpoint folder of train.py")
    p.add_argument("target", type=Path, help="GGUF file to write")
    args = p.parse_args()
    export(args.run, args.target)


if __name__ == "__main__":
    main()
