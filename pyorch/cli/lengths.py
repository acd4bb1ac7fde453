"""How long a context this machine holds with a model, and what it costs there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyorch.attention import bytes as cost
from pyorch.attention.spec import AttentionSpec
from pyorch.ggml import TensorType
from pyorch.models.geometry import Geometry
from pyorch.text import human_bytes, human_time

if TYPE_CHECKING:
    from pyorch.bench.prompt_rate import PromptRate

LENGTHS = (8192, 32768, 131072, 524288, 1048576)
_SIDE = 1536  # of the matrices that are multiplied
_TIMES = 5


@dataclass(frozen=True)
class Length:
    """A context: its memory, and the times that it takes.

    memory is that of weights, K, V and the transposed K in bytes; read_s the time to read a text
    of that length; token_s that of a decoded token after it, token_s_dense with all of K and V.
    """

    positions: int
    memory: int
    fits: bool
    beyond_training: bool
    read_s: float
    token_s: float
    token_s_dense: float


def lengths(
    geo: Geometry,
    spec: AttentionSpec,
    types: tuple[TensorType, TensorType],
    bandwidth: float,
    rate: PromptRate,
    free: int,
) -> Iterator[Length]:
    """What contexts of `LENGTHS` need.

    Args:
        bandwidth: bytes per second that are read.
        free: bytes of memory that are available.
    """
    prompt = spec.prompt if spec.method != "off" else "f32"  # llama.cpp's own
    for n in LENGTHS:
        layers = cost.layer_costs(geo, spec, n, *(t.bytes_per_element for t in types))
        memory = geo.weight_bytes + cost.cache_bytes(geo, n, *types)
        memory += cost.shadow_bytes(geo, n, spec)
        read, dense = (sum(getattr(c, f"bytes_{x}") for c in layers) for x in ("read", "dense"))
        yield Length(
            n,
            memory,
            memory <= free,
            0 < geo.n_ctx_train < n,
            rate.weights_s(geo, n) + rate.attention_s(geo, n, 0, prompt),
            (read + geo.weight_bytes_per_token) / bandwidth,
            (dense + geo.weight_bytes_per_token) / bandwidth,
        )


def product_rate() -> float:
    """The floating-point operations per second of a product of f32 matrices on all cores.

    A prompt takes longer: SmolLM2's 16,384 tokens took one and a half times what this rate says on
    two cores of an AMD EPYC.
    """
    import numpy as np

    a = np.ones((_SIDE, _SIDE), np.float32)
    a @ a
    samples = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        a @ a
        samples.append(time.perf_counter() - started)
    return 2.0 * _SIDE**3 / sorted(samples)[_TIMES // 2]


def show(found: Sequence[Length], free: int, rate: PromptRate) -> None:
    """Print them as a table."""
    print(f"\n  lengths, with {human_bytes(free)} of memory free")
    print(f"  {'positions':>11}{'memory':>11}{'reading':>18}{'token':>12}{'dense':>12}")
    for x in found:
        token, dense = (f"{1000 * s:.1f} ms" for s in (x.token_s, x.token_s_dense))
        row = f"  {x.positions:>11}{human_bytes(x.memory):>11}"
        row += f"{'about ' + human_time(x.read_s):>18}{token:>12}{dense:>12}"
        why = [] if x.fits else ["does not fit"]
        why += ["beyond the training"] * x.beyond_training
        print(f"{row}  {', '.join(why)}".rstrip())
    if rate.measured:
        print("  (reading as measured on a small model; tokens at the limit of their bytes)")
    else:
        print(
            "  (limits: the bytes of a token, and the products of a text; --prompts measures these)"
        )
