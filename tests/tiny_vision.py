"""A tiny random vision encoder as a GGUF file, which llama.cpp loads with `--mmproj`.

It makes embeddings for the models of `tiny`. What an image says is noise, but other images give
other noise.
"""

from __future__ import annotations

import base64
from pathlib import Path

import gguf
import numpy as np
from tiny import finish

N_EMBD = 128  # of the tiny text models
SIDE = 32  # pixels of an image
PATCH = 4
WIDTH = 32  # of the encoder
N_LAYER = 2  # the "mlp" projector leaves out the last one
N_FF = 48

# projector -> the tokens of an image. Those of "mlp", which is LLaVA's, see what comes before them;
# those of "gemma3" see each other, and stand between two markers, in which each letter is a token
MARKERS = "<start_of_image><end_of_image>"
N_TOKENS = {
    "mlp": (SIDE // PATCH) ** 2,
    "gemma3": (SIDE // PATCH // 2) ** 2 + len(MARKERS),
}


def write(path: Path, projector: str, seed: int = 0) -> Path:
    """Write the file and return its path; the same arguments give the same weights."""
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, "clip")
    w.add_bool("clip.has_vision_encoder", True)
    w.add_string("clip.projector_type", projector)
    w.add_bool("clip.use_gelu", True)
    sizes = {
        "embedding_length": WIDTH,
        "attention.head_count": 2,
        "feed_forward_length": N_FF,
        "block_count": N_LAYER,
        "projection_dim": N_EMBD,
        "image_size": SIDE,
        "patch_size": PATCH,
        "projector.scale_factor": 2,
    }
    for key, value in sizes.items():
        w.add_uint32(f"clip.vision.{key}", value)
    w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    w.add_array("clip.vision.image_mean", [0.5] * 3)
    w.add_array("clip.vision.image_std", [0.5] * 3)

    def matrix(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        w.add_tensor(f"{name}.weight", values.astype(np.float32))

    def vector(name: str, n: int, mean: float) -> None:
        w.add_tensor(name, (mean + 0.1 * rng.standard_normal(n)).astype(np.float32))

    def norm(name: str) -> None:
        vector(f"{name}.weight", WIDTH, 1.0)
        vector(f"{name}.bias", WIDTH, 0.0)

    matrix("v.patch_embd", WIDTH, 3, PATCH, PATCH)
    matrix("v.position_embd", (SIDE // PATCH) ** 2, WIDTH)
    for i in range(N_LAYER):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            matrix(f"v.blk.{i}.{name}", WIDTH, WIDTH)
        norm(f"v.blk.{i}.ln1")
        norm(f"v.blk.{i}.ln2")
        matrix(f"v.blk.{i}.ffn_up", N_FF, WIDTH)
        matrix(f"v.blk.{i}.ffn_down", WIDTH, N_FF)
    norm("v.post_ln")
    if projector == "gemma3":
        vector("mm.soft_emb_norm.weight", WIDTH, 1.0)
        matrix("mm.input_projection", WIDTH, N_EMBD)
    else:
        for name, n in (("mm.0", WIDTH), ("mm.2", N_EMBD)):
            matrix(name, N_EMBD, n)
            vector(f"{name}.bias", N_EMBD, 0.0)
    finish(w)
    return path


def image(seed: int = 0) -> str:
    """A picture of noise in base64, as a PPM file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    return base64.b64encode(b"P6\n%d %d\n255\n" % (SIDE, SIDE) + pixels.tobytes()).decode()
