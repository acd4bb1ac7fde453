"""The settings of attention, and their one-line form.

The native library has the grammar (`llama_set_sparse_attn`, variable `SPARQ_ATTN`); its table of
keys, `spec.json`, is all that stands here of it. A test compares the two.

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

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from pyorch.attention import line
from pyorch.attention.line import parse_ratio, ratio_text
from pyorch.errors import SparqError, nearest

__all__ = ["DEFAULT_RATIO", "AttentionSpec", "LayerK", "check_against_model", "parse_spec"]
__all__ += ["parse_ratio", "ratio_text"]

# what the library writes: `make spec-table`
TABLE = json.loads(Path(__file__).with_name("spec.json").read_text("utf-8"))
KEYS: dict[str, dict[str, Any]] = TABLE["keys"]
METHODS = tuple(TABLE["methods"])
CALIBRATED = ("calibrated", "top-p")  # they belong to a model: see `attention.saved`
BUDGETS, SHADOWS = (*KEYS["budget"]["words"], *CALIBRATED), tuple(KEYS["shadow"]["words"])
MEAN_V, PROMPTS = (tuple(KEYS[name]["words"]) for name in ("mean_v", "prompt"))
# what the budget `flat` stands for: a token reads about the same at any length
FLAT = {name: int(value) for name, value in (part.split("=") for part in TABLE["flat"])}
EXACT = {"min_ctx": 0, "min_k": 1}  # the bounds with which a ratio is exact at any length
BOUNDS = ",".join(f"{name}={value}" for name, value in EXACT.items())

_TYPES = {"whole": int, "number": float}
_DEFAULTS: dict[str, Any] = {
    name: _TYPES.get(key["type"], str)(key["default"]) if key["default"] else None
    for name, key in KEYS.items()
}
DEFAULT_RATIO: float = _DEFAULTS["ratio"]
# of commands that were told nothing, where no card has one: at 1/8 chains of thought (GSM8K) have
# not yet shown that they stay within 2 points of exact attention
AUTO_RATIO = 1 / 4


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

    ggml_ops/llama/llama-sparse.h describes them. `ratio` is the bytes read over dense attention's;
    for topk, the share of the positions. Of the budgets, calibrated and top-p stand for the results
    of a calibration, and flat for rank 32 and topk 512.

    Equal settings have only one form: a sparse method with neither a ratio nor both its parameters
    has ratio 1/8, and ratio 1 is `dense`. A setting that changes nothing is refused, unless it is
    the default, or a ratio with `k_layers` and `rank_layers`, at which these were measured.

    Raises:
        SparqError: an unknown name, a value out of range, or two that exclude each other.
    """

    method: str = "off"
    ratio: float | None = None
    rank: int | None = None
    topk: int | None = None
    local: int | None = None
    sinks: int = _DEFAULTS["sinks"]
    min_ctx: int = _DEFAULTS["min_ctx"]
    gpu_min_mb: int | None = None
    mean_v: str = _DEFAULTS["mean_v"]
    budget: str = _DEFAULTS["budget"]
    shadow: str = _DEFAULTS["shadow"]
    min_k: int = _DEFAULTS["min_k"]
    top_p: float = _DEFAULTS["top_p"]
    cap: float = _DEFAULTS["cap"]
    k_layers: tuple[LayerK, ...] | None = None
    rank_layers: tuple[int, ...] | None = None
    prompt: str = _DEFAULTS["prompt"]
    verify: str = _DEFAULTS["verify"]

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise nearest("method", str(self.method), METHODS)
        for name in self._named:
            _check(name, getattr(self, name))
        if self.budget == "flat":
            if twice := FLAT.keys() & self._named:
                raise _idle(min(twice), "with budget=flat")
            self._set(budget="uniform", **FLAT)
        for name in self._named:
            if why := self._why_idle(name):
                raise _idle(name, why)
        if self.ratio == 1:
            self._set(**vars(self.of_prompt))
        elif self.ratio is None and self.takes_ratio:
            self._set(ratio=DEFAULT_RATIO)

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen otherwise

    @property
    def _named(self) -> list[str]:
        """The settings that are not the defaults."""
        return [f.name for f in fields(self)[1:] if getattr(self, f.name) != f.default]

    def _why_idle(self, name: str) -> str:
        """With or without what a setting changes nothing; "": it changes something."""
        key, named = KEYS[name], self._named
        if self.method not in key["methods"]:
            return f"with {self.method}"
        if key["excludes"] in named:
            return f"with {key['excludes']}"
        if key["needs"] and key["needs"] not in named:
            return f"without {key['needs']}"
        if name == "ratio" and self.topk and (self.rank or self.method == "topk"):
            return "with rank and topk" if self.rank else "with topk"
        if name == "topk" and (self.topk or 0) <= self.sinks + (self.local or 0):
            return "with as many sinks and local"
        if key["chooses"] and self.ratio == 1:
            return "with ratio=1"
        if key["chooses"] and name != "budget" and self.budget in CALIBRATED:
            return f"with budget={self.budget}"
        return ""

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
        return AttentionSpec("dense", prompt=self.prompt)

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
    return AttentionSpec(method, **read_settings(parts, "attention setting"))


def read_settings(parts: Iterable[str], what: str) -> dict[str, Any]:
    """The values of `NAME=VALUE`, by field of `AttentionSpec`, which checks them itself.

    Raises:
        SparqError: an unknown name, or no value of its type.
    """
    lists = {"k_layers": _layer_k, "rank_layers": line.whole_number}
    return line.read(AttentionSpec, parts, what, aliases={"k": "topk"}, lists=lists)


def _layer_k(text: str) -> LayerK:
    """64, 12.5% or dense. Raises ValueError: it is none."""
    if text == "dense":
        return LayerK(1.0, True)
    return LayerK(line.number(text) if text.endswith("%") else line.whole_number(text), "%" in text)


def _idle(name: str, why: str) -> SparqError:
    return SparqError(f"{name} changes nothing {why}", f"leave out {name}", exit_code=2)


def _check(name: str, value: Any) -> None:
    """Raise SparqError unless a value is one of the words, or a number within the bounds."""
    key, kind = KEYS[name], KEYS[name]["type"]
    if kind == "word":
        words = BUDGETS if name == "budget" else key["words"]
        if value not in words:
            raise nearest(name, str(value), words)
        return
    for entry in value if kind == "list" else [value]:
        x, is_share = entry if isinstance(entry, LayerK) else (entry, False)
        low, high = (1e-8, 1) if is_share else (key["low"], key["high"])
        is_number = isinstance(x, int | float) and low <= x <= high
        if not is_number or not (is_share or kind == "number" or x == int(x)):
            what = "number" if kind == "number" else "whole number"
            message = f"{name} {entry} is not a {what} from {key['low']:g} to {key['high']:g}"
            raise SparqError(message, "leave it out for the default", exit_code=2)


def check_against_model(spec: AttentionSpec, head_dim: int, n_layer: int | None = None) -> None:
    """Refuse what the library would refuse only when the model is loaded.

    Args:
        n_layer: None leaves the lists to the library.

    Raises:
        SparqError: a rank is above `head_dim`, or a list does not have `n_layer` entries.
    """
    for name in ("k_layers", "rank_layers"):
        entries = getattr(spec, name)
        if entries and n_layer not in (None, len(entries)):
            message = f"{name} has {len(entries)} entries for {n_layer} layers"
            raise SparqError(message, "give one for each layer, separated by ':'", exit_code=2)
    most = max(spec.rank_layers or (spec.rank or 0,))
    if head_dim and most > head_dim:
        message = f"rank {most} is above the model's head size {head_dim}"
        raise SparqError(message, f"a rank is 1 to {head_dim}", exit_code=2)
