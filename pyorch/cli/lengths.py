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
COMMON = LENGTHS[:3]  # of which `expectation` speaks
LITTLE = 1.2  # times as fast: less is called little
KINDS = {
    "full": "read every position",
    "latent": "have latent attention and stay dense",
    "window": "have a window",
    "recurrent": "are recurrent",
    "other": "are feed-forward only",  # or only predict further tokens
}
_SIDE = 1536  # of the matrices that are multiplied
_TIMES = 5


@dataclass(frozen=True)
class Length:
    """A context: its memory, and the times that it takes.

    memory is that of weights, K, V and the transposed K in bytes; read_s the time to read a text
    of that length; token_s that of a decoded token after it, token_s_dense with all of K and V, of
    whose bytes attention_share are K and V and the others weights; speedup is their quotient.
    attention_read is the share of K and V that is read, and why_dense says why layers that see
    every position are dense.
    """

    positions: int
    memory: int
    fits: bool
    beyond_training: bool
    read_s: float
    token_s: float
    token_s_dense: float
    attention_share: float
    attention_read: float
    speedup: float
    why_dense: str


def layer_kinds(geo: Geometry) -> dict[str, int]:
    """The number of layers of each kind, by the names of `KINDS`."""
    window = sum(geo.windows.of(il) > 0 for il in geo.kv_layers)
    rest = len(geo.kv_layers) - window
    full, latent = (0, rest) if geo.is_mla else (rest, 0)
    other = geo.n_layer - len(geo.kv_layers) - geo.n_recurrent
    counts = (full, latent, window, geo.n_recurrent, other)
    return dict(zip(KINDS, counts, strict=True))


def kinds_text(geo: Geometry) -> str:
    """What kinds of layers there are, for people."""
    counts = {kind: n for kind, n in layer_kinds(geo).items() if n}
    if len(counts) == 1:
        return f"all {KINDS[next(iter(counts))]}"
    return ", ".join(f"{n} {KINDS[kind]}" for kind, n in counts.items())


def token_bytes(
    geo: Geometry, spec: AttentionSpec, n_pos: int, k_bytes: float = 2, v_bytes: float = 2
) -> tuple[int, int, int]:
    """The bytes that a decoded token reads: of weights, of all K and V, and of those with `spec`.

    Args:
        k_bytes, v_bytes: those of an element.
    """
    layers = cost.layer_costs(geo, spec, n_pos, k_bytes, v_bytes)
    dense, read = sum(c.bytes_dense for c in layers), sum(c.bytes_read for c in layers)
    return geo.weight_bytes_per_token, dense, read


def lengths(
    geo: Geometry,
    spec: AttentionSpec,
    types: tuple[TensorType, TensorType],
    bandwidth: float,
    rate: float,
    free: int,
) -> Iterator[Length]:
    """What contexts of `LENGTHS` need, and first that of the training if all of these are longer.

    Args:
        bandwidth: bytes per second that are read.
        rate: floating-point operations per second of a prompt.
        free: bytes of memory that are available.
    """
    trained = geo.n_ctx_train
    weights = geo.weight_bytes_per_token
    for n in (trained, *LENGTHS) if 0 < trained < LENGTHS[0] else LENGTHS:
        layers = cost.layer_costs(geo, spec, n, *(t.bytes_per_element for t in types))
        dense, read = sum(c.bytes_dense for c in layers), sum(c.bytes_read for c in layers)
        why = (c.split.reason for c in layers if c.split.dense and not geo.windows.of(c.il))
        memory = geo.weight_bytes + cost.cache_bytes(geo, n, *types, cost.N_BATCH)
        memory += cost.shadow_bytes(geo, n, spec)
        yield Length(
            n,
            memory,
            memory <= free,
            0 < trained < n,
            prompt_operations(geo, n) / rate,
            (weights + read) / bandwidth,
            (weights + dense) / bandwidth,
            dense / (weights + dense),
            read / dense,
            (weights + dense) / (weights + read),
            ", ".join(dict.fromkeys(why)),
        )


def expectation(geo: Geometry, found: Sequence[Length]) -> str:
    """The speed-up to expect of a token, in plain words, at the `COMMON` lengths that the model was
    trained for, or else at the first one."""
    short = [x for x in found if x.positions in COMMON and not x.beyond_training] or found[:1]
    n_full, n_layer = layer_kinds(geo)["full"], geo.n_layer
    if all(x.speedup == 1 for x in short):
        last = short[-1]
        where = "" if all(x.speedup == 1 for x in found) else f" up to {last.positions:,} positions"
        why = last.why_dense or "all have a window"
        return f"No speed-up{where}: no layer is sparse ({why})."
    first, *more = short
    said = f"Tokens are at most {first.speedup:.2f} times as fast at {first.positions:,} positions"
    said += "".join(f", {x.speedup:.2f} times at {x.positions:,}" for x in more) + "."
    if little := [x for x in short if x.speedup < LITTLE]:
        most = 100 * max(x.attention_share for x in little)
        read = 100 * max(x.attention_read for x in little)
        where = "" if len(little) == len(short) else f" up to {little[-1].positions:,}"
        said += f" That is little{where}: K and V are at most {most:.0f} % of what a token reads"
        if n_full < n_layer:
            said += f", as only {n_full} of {n_layer} layers read every position"
        said += f"; {read:.0f} % of K and V are read."
    return said


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
    print(
        f"  {'positions':>9}{'memory':>10}{'reading':>19}{'dense':>12}{'K and V':>9}{'token':>12}"
        f"{'speed-up':>10}"
    )
    for x in found:
        token, dense = (f"{1000 * s:.1f} ms" for s in (x.token_s, x.token_s_dense))
        row = f"  {x.positions:>9}{human_bytes(x.memory):>10}{'about ' + human_time(x.read_s):>19}"
        row += f"{dense:>12}{100 * x.attention_share:>7.0f} %{token:>12}{x.speedup:>9.2f}x"
        why = [] if x.fits else ["does not fit"]
        why += ["beyond the training"] * x.beyond_training
        print(f"{row}  {', '.join(why)}".rstrip())
    print(
        "  (limits, by a roofline of bytes: a token takes what it reads of weights, K and V over\n"
        "  the bandwidth, and K and V are that share of a dense one; a text takes its products)"
    )
