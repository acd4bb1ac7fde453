"""How long a context this machine holds with a model, and what it costs there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyorch.attention import bytes as cost
from pyorch.attention.spec import AttentionSpec
from pyorch.ggml import TensorType
from pyorch.models.geometry import Geometry
from pyorch.text import human_bytes, human_time

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
    rate: float,
    free: int,
) -> Iterator[Length]:
    """What contexts of `LENGTHS` need.

    Args:
        bandwidth: bytes per second that are read.
        rate: floating-point operations per second of a prompt.
        free: bytes of memory that are available.
    """
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
            prompt_operations(geo, n) / rate,
            (read + geo.weight_bytes_per_token) / bandwidth,
            (dense + geo.weight_bytes_per_token) / bandwidth,
        )


def prompt_operations(geo: Geometry, n: int) -> float:
    """Two for each weight that a token of a prompt uses, which are neither embeddings nor the
    output's, and two for each element of K and V that a query head sees."""
    used = geo.n_params * geo.weight_bytes_per_token / max(geo.weight_bytes, 1)
    total = 2.0 * max(used - geo.n_output, 0) * n
    for il in geo.kv_layers:
        window = geo.windows.of(il)
        seen = n * n / 2 if not 0 < window < n else window * (n - window / 2)
        total += 2.0 * geo.n_head[il] * sum(geo.head_dims(il)) * seen
    return total


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


def show(found: Sequence[Length], free: int) -> None:
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
    print("  (limits: the bytes of a token, and the products of a text)")
