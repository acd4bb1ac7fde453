"""The settings of attention, and their one-line form.

The native library parses the same line (`llama_set_sparse_attn`, variable `SPARQ_ATTN`):

    off                            stock llama.cpp, bit for bit
    dense                          our exact attention (the same as ratio 1)
    sparq,ratio=1/8                SparQ at an eighth of the bytes of dense attention
    sparq,rank=32,topk=128         SparQ with the paper's own parameters
    topk,k=512,ramp                exact top-k, k growing from the first layer to the last
    sparq,ratio=1/8,calibrated     k and rank per layer as `sparq-cpp calibrate` found them

A budget `calibrated` or `top-p` belongs to a model: `attention.calibrate.resolve` puts what was
found in its place. The library knows only what stands in the result.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from pyorch.errors import SparqError

METHODS = ("sparq", "topk", "dense", "off")
MEAN_V = ("auto", "on", "off")
CALIBRATED = ("calibrated", "top-p")  # of a model: see `attention.calibrate`
BUDGETS = ("uniform", "ramp", "ramp-down", *CALIBRATED)
SHADOWS = ("q4", "q8", "f16")
DEFAULT_RATIO = 1 / 8
_SHORT = re.compile(r"[^eE]{0,50}([eE][+-]?\d{1,3})?%?")  # 1e999999999 is a fraction of that size

_CHOSEN = ("rank", "topk", "k_layers", "rank_layers", "top_p")  # what a ratio alone leaves open
_ALIASES = {"k": "topk", "r": "rank", "l": "local", "mean-v": "mean_v", "min-ctx": "min_ctx"}


@dataclass(frozen=True)
class AttentionSpec:
    """How a decoded token attends. None = decided from `ratio` and the number of positions.

    rank     r, components of q that score the positions
    topk     k, positions read exactly; counts the sinks, the local window and the current token
    local    positions of the recent window that are always in; None = k/4
    sinks    first positions that are always in
    min_ctx  up to this many cells in use, rounded up to 256, attention is exact dense
    gpu_min_mb  on a GPU, a layer stays dense if dense attention would read less than so many MB
    shadow   type of the transposed copy of K; at the same ratio fewer bits find more
    min_k    the least k that a ratio gives
    top_p    of the topk positions only as many as carry this share of the approximate scores
    cap      with top_p: up to so many times topk
    k_layers one k per layer, `64:12.5%:dense`, in place of topk; a share counts all positions
    rank_layers one rank per layer
    """

    method: str = "off"
    ratio: float | None = None
    rank: int | None = None
    topk: int | None = None
    local: int | None = None
    sinks: int = 4
    min_ctx: int = 1024
    gpu_min_mb: int = 256
    mean_v: str = "auto"
    budget: str = "uniform"
    shadow: str = "q4"
    min_k: int = 128
    top_p: float | None = None
    cap: float = 1
    k_layers: str | None = None
    rank_layers: str | None = None

    @property
    def sparse(self) -> bool:
        return self.method in ("sparq", "topk")

    def __str__(self) -> str:
        """The canonical line: the method, then what differs from the defaults."""
        if not self.sparse:
            return self.method
        parts = [self.method]
        for f in fields(self)[1:]:
            value = getattr(self, f.name)
            if value != f.default:
                text = ratio_text(value) if f.name == "ratio" else _text(value)
                parts.append(f"{f.name}={text}")
        return ",".join(parts)


def parse_ratio(text: str) -> float:
    """`1/8`, `0.125` and `12.5%` -> 0.125.

    Raises:
        SparqError: not a number, or not above 0 and at most 1.
    """
    hint = "a ratio is a share of dense attention's bytes: 1/8, 0.125 or 12.5%"
    raw = text.strip()
    try:
        if not _SHORT.fullmatch(raw):
            raise ValueError
        value = float(Fraction(raw[:-1]) / 100 if raw.endswith("%") else Fraction(raw))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise SparqError(f"ratio {text!r} is not a number", hint, exit_code=2) from None
    if not 0 < value <= 1:
        raise SparqError(f"ratio {text} is not above 0 and at most 1", hint, exit_code=2)
    return value


def ratio_text(ratio: float) -> str:
    """0.125 -> `1/8`; a ratio that is no short fraction keeps its decimals."""
    f = Fraction(ratio).limit_denominator(1000)
    return str(f) if math.isclose(float(f), ratio, rel_tol=1e-12) else repr(ratio)


def _text(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def nearest(what: str, value: str, allowed: tuple[str, ...]) -> SparqError:
    """The error for a name that is not in `allowed`."""
    match = difflib.get_close_matches(value.lower(), allowed, n=1, cutoff=0.5)
    hint = f"did you mean {match[0]}?" if match else f"one of: {', '.join(allowed)}"
    return SparqError(f"unknown {what} {value!r}", hint, exit_code=2)


def parse_spec(line: str) -> AttentionSpec:
    """One line, as described at the top of this module, to settings.

    Raises:
        SparqError: an unknown name or a value out of range.
    """
    head, *rest = [part.strip() for part in line.split(",")]
    allowed = tuple(f.name for f in fields(AttentionSpec))[1:]
    values: dict[str, object] = {}
    for part in rest:
        part = f"budget={part}" if part in BUDGETS else part  # may stand alone
        key, eq, text = part.partition("=")
        key = _ALIASES.get(key.strip(), key.strip())
        if key not in allowed:
            raise nearest("attention setting", key, allowed)
        if not eq:
            raise SparqError(f"attention setting {part!r} has no value", f"{key}=...", exit_code=2)
        values[key] = _parse_value(key, text.strip())
    if values and head in ("off", "dense"):
        raise SparqError(
            f"{head} reads everything: {next(iter(values))} has no place beside it",
            "settings belong to sparq and topk",
            exit_code=2,
        )
    return make_spec(head, **values)


def _parse_value(key: str, text: str) -> object:
    if key == "ratio":
        return parse_ratio(text)
    if key in ("mean_v", "budget", "shadow", "k_layers", "rank_layers"):
        return text
    if key in ("top_p", "cap"):
        try:
            return float(text)
        except ValueError:
            raise SparqError(f"{key} {text!r} is not a number", exit_code=2) from None
    try:
        return int(text)
    except ValueError:
        raise SparqError(f"{key} {text!r} is not a whole number", exit_code=2) from None


def make_spec(method: str | None = None, **values: object) -> AttentionSpec:
    """Settings from keywords, None meaning "not given".

    Without a method: `sparq` when anything else is given, else `off`. A sparse method with
    neither a ratio nor both its parameters gets ratio 1/8. Ratio 1 is `dense`.

    Raises:
        SparqError: an unknown name or a value out of range.
    """
    given = {k: v for k, v in values.items() if v is not None}
    if given.get("budget") == "top-p" and "top_p" in given:
        del given["budget"]  # p is given: nothing to look up
    if method is None:
        method = "sparq" if given else "off"
    if method not in METHODS:
        raise nearest("method", method, METHODS)
    if method in ("off", "dense"):
        return AttentionSpec(method)
    spec = AttentionSpec(method, **given)  # type: ignore[arg-type]
    _check_ranges(spec)
    if spec.ratio == 1:
        beside = [n for n in _CHOSEN if getattr(spec, n)]
        if beside:
            raise SparqError(
                f"ratio 1 is dense attention: {beside[0]} has no place beside it",
                "leave out one of the two",
                exit_code=2,
            )
        return AttentionSpec("dense")
    k = spec.topk or spec.k_layers
    needed = (spec.rank or spec.rank_layers, k) if method == "sparq" else (k,)
    if spec.ratio is None and None in needed:
        spec = replace(spec, ratio=DEFAULT_RATIO)
    return spec


def _check_ranges(spec: AttentionSpec) -> None:
    least = {"rank": 1, "topk": 1, "local": 0, "sinks": 0, "min_k": 1}
    least |= {"min_ctx": 0, "gpu_min_mb": 0}
    for key, low in least.items():
        value = getattr(spec, key)
        if value is not None and value < low:
            raise SparqError(f"{key} {value} is below {low}", exit_code=2)
    for key, names in (("mean_v", MEAN_V), ("budget", BUDGETS), ("shadow", SHADOWS)):
        if getattr(spec, key) not in names:
            raise nearest(key, getattr(spec, key), names)
    chosen = [n for n in _CHOSEN if getattr(spec, n)]
    if spec.budget in CALIBRATED and chosen:
        raise SparqError(
            f"budget {spec.budget} chooses k and rank: {chosen[0]} has no place beside it",
            "give a ratio",
            exit_code=2,
        )
    if spec.top_p is not None and not 0 < spec.top_p <= 1:
        raise SparqError(
            f"top_p {spec.top_p} is not above 0 and at most 1", "top_p=0.95", exit_code=2
        )
    if not (1 <= spec.cap <= 1e6 and (spec.cap == 1 or spec.top_p is not None)):
        raise SparqError("cap is 1 or more, and belongs to top_p", "top_p=0.95,cap=4", exit_code=2)
    for k in (spec.k_layers or "1").split(":"):
        _parse_layer_k(k)
    if spec.rank_layers is not None and not all(
        r.isdecimal() and int(r) for r in spec.rank_layers.split(":")
    ):
        raise SparqError(
            f"rank_layers {spec.rank_layers!r} is no list of ranks", "8:8:16", exit_code=2
        )
    if spec.method == "topk" and (spec.rank or spec.rank_layers or spec.mean_v == "on"):
        what = "mean_v" if spec.mean_v == "on" else "rank"
        raise SparqError(
            f"{what} belongs to sparq, not to topk", "topk scores with all of K", exit_code=2
        )
    if spec.topk is not None and spec.topk < spec.sinks + (spec.local or 0) + 1:
        raise SparqError(
            f"topk {spec.topk} leaves no room beside sinks {spec.sinks}"
            f" and local {spec.local or 0}",
            "topk counts both; raise topk, or lower sinks or local",
            exit_code=2,
        )


def _parse_layer_k(text: str) -> tuple[float, bool]:
    """An entry of k_layers: (positions, False), or (share of all positions, True)."""
    if text == "dense":
        return 1.0, True
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(int(text))
    except ValueError:
        value = 0.0
    share = text.endswith("%")
    if not 0 < value <= (1 if share else 1e9):
        raise SparqError(f"k_layers: {text!r} is no k", "64:12.5%:dense", exit_code=2)
    return value, share


def layer_k(spec: AttentionSpec, il: int) -> tuple[float, bool]:
    """k of a layer as `k_layers` has it: (positions, False), or (share of them, True)."""
    return _parse_layer_k(str(spec.k_layers).split(":")[il])


def check_against_model(spec: AttentionSpec, head_dim: int, n_layer: int | None = None) -> None:
    """Refuse a rank that the model's heads do not have, and lists that are not of its layers.

    Args:
        n_layer: None leaves the lists to the library.

    Raises:
        SparqError: rank above `head_dim`, or a list of another length than `n_layer`.
    """
    for name in ("k_layers", "rank_layers"):
        text = getattr(spec, name)
        n = text.count(":") + 1 if text else n_layer
        if n_layer is not None and n != n_layer:
            raise SparqError(
                f"{name} has {n} entries for {n_layer} layers",
                "give one for each layer, separated by ':'",
                exit_code=2,
            )
    ranks = spec.rank_layers.split(":") if spec.rank_layers else [spec.rank or 0]
    most = max(map(int, ranks))
    if head_dim and most > head_dim:
        raise SparqError(
            f"rank {most} is above the model's head size {head_dim}",
            f"--rank takes 1 to {head_dim}; {max(head_dim // 4, 1)} is a usual choice",
            exit_code=2,
        )
