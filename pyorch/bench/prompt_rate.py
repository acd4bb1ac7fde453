"""How fast this machine reads prompts: products of weights, and attention, of a small model.

The model has random weights of the wanted type and the wanted heads, and few layers, so that
seconds suffice. What it finds are operations per second, which other sizes share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from pyorch import engine
from pyorch.attention.spec import PROMPTS, AttentionSpec
from pyorch.bench import state
from pyorch.errors import SparqError
from pyorch.models import synth
from pyorch.models.geometry import Geometry
from pyorch.progress import Progress, silent

CHUNK = 512  # tokens, those of a micro-batch
DEPTH = 8192  # positions before them, where attention is timed
TIMES = 3
N_LAYER, WIDTH = 2, 2048  # of the model
SUPER = 256  # weights of a K-quant that share scales
QUANTS = {"q4_K": "q4_k_m", "q4_0": "q4_0", "q8_0": "q8_0", "f16": "f16"}  # by ggml's name
# Against prompt=fast, after 4,096 to 32,000 positions of a book on Qwen2.5-Coder-1.5B it was 1.4 to
# 1.7 (docs/measurements.md, Time of a prompt). Random K and V would say nothing: it reads all.
SPARSE_GAIN = 1.7


@dataclass(frozen=True)
class PromptRate:
    """Operations per second: of weights, by whether llama.cpp may rearrange them, and of attention,
    by `prompt=`. `measured`: on a model, or guessed from one product of matrices."""

    weights: dict[bool, float]
    attention: dict[str, float]
    measured: bool

    @classmethod
    def guessed(cls, rate: float) -> PromptRate:
        """Everything at the rate of a product of f32 matrices."""
        return cls({True: rate, False: rate}, dict.fromkeys(PROMPTS, rate), False)

    def weights_s(self, geo: Geometry, n: int, repack: bool = True) -> float:
        """The seconds that the weights take for `n` tokens."""
        return weights_operations(geo, n) / self.weights[repack]

    def attention_s(self, geo: Geometry, n: int, before: int, prompt: str) -> float:
        """The seconds that attention takes for `n` tokens after `before` positions."""
        return attention_operations(geo, n, before) / self.attention[prompt]


def weights_operations(geo: Geometry, n: int) -> float:
    """Two for each weight that a token of a prompt uses: neither embeddings nor the output's."""
    used = geo.n_params * geo.weight_bytes_per_token / max(geo.weight_bytes, 1)
    return 2.0 * max(used - geo.n_output, 0) * n


def attention_operations(geo: Geometry, n: int, before: int) -> float:
    """Two for each element of K and of V that a query head of `n` tokens sees."""
    total = 0.0
    for il in geo.kv_layers:
        seen = _seen(before + n, geo.windows.of(il)) - _seen(before, geo.windows.of(il))
        total += 2.0 * geo.n_head[il] * sum(geo.head_dims(il)) * seen
    return total


def _seen(n: int, window: int) -> float:
    """The positions that the first `n` tokens see, summed."""
    return n * n / 2 if not 0 < window < n else window * (n - window / 2)


def measure(geo: Geometry, quant: str, n_threads: int, progress: Progress = silent) -> PromptRate:
    """Time a model with weights of `quant`, a value of `QUANTS`, and the heads of `geo`.

    Raises:
        SparqError: the model cannot be written, does not fit into memory, our attention did not
            read the prompts, or other programs take so much time that nothing can be said.
    """
    n_head_kv = max(geo.n_head_kv)
    n_head = max(geo.n_head)
    while n_head * geo.head_dim_k % SUPER:  # weights are quantised in such blocks
        n_head += n_head_kv
    shape = synth.Shape(
        n_layer=N_LAYER,
        n_embd=WIDTH,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=geo.head_dim_k,
        n_ff=4 * WIDTH,
        n_vocab=512,
        tokenizer="bytes",
    )
    sizes = f"{n_head}-{n_head_kv}-{geo.head_dim_k}"
    path = synth.folder() / f"prompt-{sizes}-{quant}-v{synth.VERSION}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        synth.write(path, shape, quant)
    n_attention = 4.0 * N_LAYER * n_head * geo.head_dim_k
    # llama.cpp carries one token only through what follows the last layer's attention
    last = shape.n_embd * (n_head + 2 * n_head_kv) * shape.head_dim
    n_weights = 2.0 * ((N_LAYER - 1) * shape.layer_params + last) * CHUNK
    begin: dict[bool, float] = {}
    attention: dict[str, float] = {}
    for repack in (False, True):
        with engine.load(
            path,
            repack=repack,
            n_ctx=-(-(DEPTH + CHUNK) // 256) * 256,
            n_threads=n_threads,
            n_gpu_layers=0,
            attention="dense,prompt=f32",
        ) as session:
            begin[repack] = _time(session)
            if not engine.info(session).counter("calls_prefill"):
                raise SparqError("our attention did not read the prompt, so nothing was measured")
            progress(1 + repack, 4)
            if repack:
                state.fill(session, DEPTH)
                for i, prompt in enumerate(("f32", "fast")):
                    engine.set_attention(session, AttentionSpec("dense", prompt=prompt))
                    attention[prompt] = _rate(
                        n_attention * CHUNK * DEPTH, _time(session) - begin[True]
                    )
                    progress(3 + i, 4)
    attention["sparse"] = attention["fast"] * SPARSE_GAIN
    first = n_attention * CHUNK * CHUNK / 2 / attention["f32"]
    weights = {k: _rate(n_weights, s - first) for k, s in begin.items()}
    return PromptRate(weights, attention, True)


def _rate(operations: float, seconds: float) -> float:
    if seconds <= 0:
        raise SparqError("the times of prompts make no sense", "is this machine busy? try again")
    return operations / seconds


def _time(session: engine.Session) -> float:
    """The seconds of `CHUNK` tokens after what the cache holds, which are taken back."""
    at, tokens = len(session.tokens), [3 + i % 256 for i in range(CHUNK)]
    samples = []
    for turn in range(TIMES + 1):
        started = time.perf_counter()
        engine.prefill(session, tokens[: CHUNK if turn else 64])
        samples.append(time.perf_counter() - started)
        engine.rewind(session, at)
    return median(samples[1:])
