"""The settings of attention, and their one-line form.

The native library parses the same line (`llama_set_sparse_attn`, variable `SPARQ_ATTN`):

    off                            stock llama.cpp, bit for bit
    dense                          our exact attention (the same as ratio 1)
    sparq,ratio=1/8                SparQ at an eighth of the bytes of dense attention
    sparq,rank=32,topk=128         SparQ with the paper's own parameters
    topk,k=512,ramp                exact top-k, k growing from the first layer to the last
    sparq,ratio=1/8,calibrated     k and rank per layer as `sparq-cpp calibrate` found them

A budget `calibrated` or `top-p` belongs to a model: `attention.saved.resolve` replaces it by the
results of a calibration. The library knows only the replaced settings.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import NamedTuple

from pyorch.attention import line
from pyorch.attention.line import DEFAULT_RATIO, join_layers, parse_ratio, ratio_text
from pyorch.errors import SparqError, nearest

__all__ = ["DEFAULT_RATIO", "AttentionSpec", "LayerK", "check_against_model", "parse_spec"]
__all__ += ["join_layers", "parse_ratio", "ratio_text"]

METHODS = ("sparq", "topk", "dense", "off")
MEAN_V = ("auto", "on", "off")
CALIBRATED = ("calibrated", "top-p")  # they belong to a model: see `attention.saved`
# what the budget `flat` stands for: a token reads next to the same at any length
FLAT = {"rank": 32, "topk": 512}
BUDGETS = ("uniform", "ramp", "ramp-down", "flat", *CALIBRATED)
SHADOWS = ("q4", "q8", "f16")
PROMPTS = ("f32", "fast", "sparse")
VERIFY = ("sparse", "exact")
OF_PROMPT = ("prompt", "prompt_p")  # settings that `dense` takes too
EXACT = {"min_ctx": 0, "min_k": 1}  # the bounds with which a ratio is exact at any length
BOUNDS = ",".join(f"{name}={value}" for name, value in EXACT.items())

_NAMES = {"method": METHODS, "mean_v": MEAN_V, "budget": BUDGETS}
_NAMES |= {"shadow": SHADOWS, "prompt": PROMPTS, "verify": VERIFY}
_LEAST = {"rank": 1, "topk": 1, "local": 0, "sinks": 0, "min_k": 1, "min_ctx": 0, "gpu_min_mb": 0}
_MOST = 10**9  # of whole numbers, as in the library
_CHOSEN = ("rank", "topk", "k_layers", "rank_layers", "top_p")
_ALIASES = {"k": "topk"}  # the library has the same


class LayerK(NamedTuple):
    """k of a layer: positions or, with `is_share`, a share of all of them; all means dense."""

    k: float
    is_share: bool = False

    def __str__(self) -> str:
        if not self.is_share:
            return str(int(self.k))
        return "dense" if self.k == 1 else f"{100 * self.k:.12g}%"


@dataclass(frozen=True)
class AttentionSpec:
    """The settings of a decoded token's attention. None = `ratio` and the length decide.

    ratio    bytes read over dense attention's; for topk, the share of the positions
    rank     r, the number of components of q that score the positions
    topk     k, the number of positions read, including sinks, local window and the current token
    local    how many of the newest positions are always included; None = k/4
    sinks    how many of the first positions are always included
    min_ctx  up to this many positions, rounded up to 256, attention is exact dense
    gpu_min_mb  on a GPU, a layer stays dense if dense attention would read fewer MB than this
    mean_v   whether the mean of V stands for what is not read: on, off, or auto, which is on
             unless a calibration found otherwise
    budget   how k varies over the layers: uniform, ramp or ramp-down; calibrated and top-p stand
             for the results of a calibration, and flat for rank 32 and topk 512, with which a token
             of a long context takes next to as long as one of a short context
    shadow   the type of the transposed copy of K; at the same ratio fewer bits find more
    min_k    the least k that a ratio gives
    top_p    reads only as many positions as carry this share of the approximate scores
    cap      with top_p, a head may read up to this many times topk
    k_layers  one k per layer, instead of topk
    rank_layers  one rank per layer
    prompt   how a prompt is read, also with dense: f32; fast, with products of few bits where the
             CPU has VNNI or NEON's dot product; or sparse, which also reads only some positions
    prompt_p  with prompt=sparse, the share of the attention that these positions carry
    verify   how tokens that verify a draft are read: sparse, each as a decoded token, or exact, all
             of them as those of a prompt

    Equal settings have only one form: a sparse method with neither a ratio nor both its parameters
    has ratio 1/8, ratio 1 is `dense`, a `top_p` of 1 is none, a given one needs no budget `top-p`,
    and a setting that another one makes idle is refused, unless it is the default. The exception is
    a ratio beside `k_layers` and `rank_layers`, which says at what ratio they were measured.

    Raises:
        SparqError: an unknown name, a value out of range, or two that exclude each other.
    """

    method: str = "off"
    ratio: float | None = None
    rank: int | None = None
    topk: int | None = None
    local: int | None = None
    sinks: int = 4
    min_ctx: int = 1024
    gpu_min_mb: int = 320
    mean_v: str = "auto"
    budget: str = "uniform"
    shadow: str = "q4"
    min_k: int = 128
    top_p: float | None = None
    cap: float = 1
    k_layers: tuple[LayerK, ...] | None = None
    rank_layers: tuple[int, ...] | None = None
    prompt: str = "fast"
    prompt_p: float = 0.99
    verify: str = "sparse"

    def __post_init__(self) -> None:
        for name, known in _NAMES.items():
            if getattr(self, name) not in known:
                raise nearest(name, str(getattr(self, name)), known)
        if not self.sparse:
            beside = [f.name for f in fields(self)[1:] if getattr(self, f.name) != f.default]
            idle = [name for name in beside if name not in OF_PROMPT or self.method == "off"]
            if idle:
                raise _reads_everything(self.method, idle[0])
        _check_prompt(self)
        if not self.sparse:
            return
        _check_numbers(self)
        _check_layers(self)
        if self.budget == "top-p" and self.top_p is not None:
            self._set(budget="uniform")
        if self.budget == "flat":
            _check_flat(self)
            self._set(budget="uniform", **FLAT)
        _check_together(self)
        if self.ratio == 1:
            kept = {"method": "dense", **{name: getattr(self, name) for name in OF_PROMPT}}
            self._set(**{f.name: f.default for f in fields(self)} | kept)
        elif self.ratio is None and self.takes_ratio:
            self._set(ratio=DEFAULT_RATIO)
        if self.top_p == 1:
            self._set(top_p=None)

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen otherwise

    @property
    def sparse(self) -> bool:
        return self.method in ("sparq", "topk")

    @property
    def takes_ratio(self) -> bool:
        """Whether k or rank is left to a ratio."""
        k, rank = self.topk or self.k_layers, self.rank or self.rank_layers
        return self.sparse and not (k and (rank or self.method == "topk"))

    @property
    def of_prompt(self) -> AttentionSpec:
        """What reads a prompt with these settings, and decodes exactly."""
        return AttentionSpec("dense", prompt=self.prompt, prompt_p=self.prompt_p)

    def at_ratio(self, ratio: float) -> AttentionSpec:
        """The same settings at another ratio. Given k and rank, which leave nothing to a ratio, are
        left out; one of them alone stays.

        Raises:
            SparqError: the ratio is not above 0 and at most 1.
        """
        if ratio == 1:
            return self.of_prompt
        if self.takes_ratio:
            return replace(self, ratio=ratio)
        return replace(self, ratio=ratio, rank=None, topk=None, k_layers=None, rank_layers=None)

    def line(self, without: Collection[str] = ()) -> str:
        """The canonical line: the method, then the settings that differ from the defaults."""
        return line.write(self.method, self, without)

    def __str__(self) -> str:
        return self.line()


def parse_spec(text: str) -> AttentionSpec:
    """Parse a line, which the top of this module describes.

    Raises:
        SparqError: an unknown name, a value out of range, or two that exclude each other.
    """
    method, parts = line.split(text)
    parts = [f"budget={p}" if p in BUDGETS else p for p in parts]  # may stand without its key
    layers = {"k_layers": parse_k_layers, "rank_layers": parse_rank_layers}
    values = line.read(AttentionSpec, parts, "attention setting", aliases=_ALIASES, readers=layers)
    idle = [key for key in values if key not in OF_PROMPT or method == "off"]
    if idle and method in ("dense", "off"):
        raise _reads_everything(method, idle[0])
    return AttentionSpec(method, **values)


def parse_k_layers(text: str) -> tuple[LayerK, ...]:
    """Parse `64:12.5%:dense` to one entry per layer.

    Raises:
        SparqError: not such a list.
    """
    return tuple(_parse_layer_k(entry.strip()) for entry in text.split(":"))


def _parse_layer_k(text: str) -> LayerK:
    is_share = text == "dense" or text.endswith("%")
    try:
        if text == "dense":
            entry = LayerK(1.0, True)
        else:
            k = line.number(text[:-1].strip()) / 100 if is_share else line.whole_number(text)
            entry = LayerK(k, is_share)
    except ValueError:
        entry = LayerK(0.0)
    if not _is_layer_k(entry):
        raise SparqError(f"k_layers: {text!r} is not a k", "64:12.5%:dense", exit_code=2)
    return entry


def _is_layer_k(entry: LayerK) -> bool:
    return 0 < entry.k <= (1 if entry.is_share else 1e9)


def parse_rank_layers(text: str) -> tuple[int, ...]:
    """Parse `8:8:16` to one rank per layer.

    Raises:
        SparqError: not such a list.
    """
    try:
        ranks = tuple(line.whole_number(entry.strip()) for entry in text.split(":"))
    except ValueError:
        ranks = (0,)
    if not _are_ranks(ranks):
        raise SparqError(f"rank_layers {text!r} is not a list of ranks", "8:8:16", exit_code=2)
    return ranks


def _are_ranks(ranks: Collection[object]) -> bool:
    return all(isinstance(r, Integral) and 1 <= int(r) <= _MOST for r in ranks)


def _reads_everything(method: str, name: str) -> SparqError:
    return SparqError(
        f"{method} reads everything, so {name} would change nothing",
        "settings belong to sparq and topk",
        exit_code=2,
    )


def _check_numbers(spec: AttentionSpec) -> None:
    for key, low in _LEAST.items():
        value = getattr(spec, key)
        if value is not None and not isinstance(value, Integral):
            raise SparqError(f"{key} {value!r} is not a whole number", exit_code=2)
        if value is not None and not low <= int(value) <= _MOST:
            bound = f"below {low}" if int(value) < low else f"above {_MOST:,}"
            raise SparqError(f"{key} {value} is {bound}", exit_code=2)
    for key in ("ratio", "top_p", "cap"):
        value = getattr(spec, key)
        if value is not None and not isinstance(value, Real):
            raise SparqError(f"{key} {value!r} is not a number", exit_code=2)
    if spec.ratio is not None:
        line.check_ratio(spec.ratio)
    if spec.top_p is not None and not 0 < spec.top_p <= 1:
        raise SparqError(
            f"top_p {spec.top_p} is not above 0 and at most 1", "top_p=0.95", exit_code=2
        )
    if not (1 <= spec.cap <= 1e6 and (spec.cap == 1 or (spec.top_p or 1) < 1)):
        raise SparqError("cap is 1 or more, and belongs to top_p", "top_p=0.95,cap=4", exit_code=2)


def _check_prompt(spec: AttentionSpec) -> None:
    p = spec.prompt_p
    if not isinstance(p, Real) or not 0 < p <= 1:
        raise SparqError(
            f"prompt_p {p} is not above 0 and at most 1", "prompt=sparse,prompt_p=0.99", exit_code=2
        )
    if p != AttentionSpec.prompt_p and spec.prompt != "sparse":
        raise SparqError(
            "prompt_p belongs to prompt=sparse", "prompt=sparse,prompt_p=0.99", exit_code=2
        )


def _check_layers(spec: AttentionSpec) -> None:
    for entry in spec.k_layers or ():
        if not (isinstance(entry, LayerK) and _is_layer_k(entry)):
            raise SparqError(f"k_layers: {entry} is not a k", "64:12.5%:dense", exit_code=2)
    for rank in spec.rank_layers or ():
        if not _are_ranks([rank]):
            raise SparqError(f"rank_layers: {rank!r} is not a rank", "8:8:16", exit_code=2)


def _check_flat(s: AttentionSpec) -> None:
    given = [n for n in ("ratio", *_CHOSEN) if getattr(s, n) is not None]
    if s.method != "sparq" or given:
        what = given[0] if given else s.method
        line = ",".join(f"{k}={v}" for k, v in FLAT.items())
        message = f"budget flat is sparq,{line}, and cannot be combined with {what}"
        raise SparqError(message, "-a sparq,flat", 2)


def _check_together(spec: AttentionSpec) -> None:
    chosen = [name for name in _CHOSEN if getattr(spec, name)]
    if spec.ratio == 1 and chosen:
        raise SparqError(
            f"ratio 1 is dense attention, so {chosen[0]} would change nothing",
            "leave out one of the two",
            exit_code=2,
        )
    if spec.budget in CALIBRATED and chosen:
        raise SparqError(
            f"budget {spec.budget} chooses k and rank, so {chosen[0]} would change nothing",
            "give a ratio",
            exit_code=2,
        )
    if spec.method == "topk" and (spec.rank or spec.rank_layers or spec.mean_v == "on"):
        what = "mean_v" if spec.mean_v == "on" else "rank"
        raise SparqError(
            f"{what} belongs to sparq, not to topk", "topk scores with all of K", exit_code=2
        )
    if idle := _idle(spec):
        setting, why = idle
        raise SparqError(f"{why}, so {setting} would change nothing", f"leave out {setting}", 2)
    if spec.topk is not None and spec.topk < spec.sinks + (spec.local or 0) + 1:
        raise SparqError(
            f"topk {spec.topk} leaves no room beside sinks {spec.sinks}"
            f" and local {spec.local or 0}",
            "topk counts both; raise topk, or lower sinks or local",
            exit_code=2,
        )


def _idle(spec: AttentionSpec) -> tuple[str, str] | None:
    """A setting that would change nothing, and why."""
    for name in ("k_layers", "rank_layers"):
        one = "topk" if name == "k_layers" else "rank"
        if getattr(spec, name) and getattr(spec, one):
            return one, f"{name} has the {one} of every layer"
    if spec.budget in ("ramp", "ramp-down") and (spec.k_layers or spec.ratio == 1):
        why = "k_layers has the topk of every layer"
        return f"budget {spec.budget}", why if spec.k_layers else "ratio 1 is dense attention"
    if spec.method == "topk" and spec.shadow != AttentionSpec.shadow:
        return "shadow", "topk scores with all of K, not with a transposed copy"
    if spec.ratio is not None and spec.topk and (spec.rank or spec.method == "topk"):
        return "ratio", "topk and rank are given" if spec.rank else "topk is given"
    return None


def check_against_model(spec: AttentionSpec, head_dim: int, n_layer: int | None = None) -> None:
    """Refuse ranks above the model's head size, and lists that do not match its layers.

    Args:
        n_layer: None leaves the lists to the library.

    Raises:
        SparqError: a rank is above `head_dim`, or a list does not have `n_layer` entries.
    """
    for name in ("k_layers", "rank_layers"):
        entries = getattr(spec, name)
        if n_layer is not None and entries and len(entries) != n_layer:
            raise SparqError(
                f"{name} has {len(entries)} entries for {n_layer} layers",
                "give one for each layer, separated by ':'",
                exit_code=2,
            )
    most = max(spec.rank_layers or (spec.rank or 0,))
    if head_dim and most > head_dim:
        raise SparqError(
            f"rank {most} is above the model's head size {head_dim}",
            f"a rank is 1 to {head_dim}; {max(head_dim // 2, 1)} is a usual choice",
            exit_code=2,
        )
