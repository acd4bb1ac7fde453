"""The one-line form of settings, `METHOD[,key=value]...`, read and written here and nowhere else.

The settings themselves are frozen dataclasses: `AttentionSpec`, which the library knows, and those
of the methods in Python (`pyorch.policies`). A line is parsed at once when it arrives, on the
command line or from a file, and written only for display and for files; in between there are only
objects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from pyorch.errors import SparqError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DEFAULT_RATIO = 1 / 8
# what the library takes too: Python's own numbers may have underscores and digits of any script
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_RATIO_HINT = "a ratio is a share of dense attention's bytes: 1/8, 0.125 or 12.5%"


def split(text: str) -> tuple[str, list[str]]:
    """The method and its settings: `sparq, rank=8` gives (`sparq`, [`rank=8`])."""
    head, *parts = [part.strip() for part in text.split(",")]
    return head, parts


def has_setting(text: str, key: str) -> bool:
    """Whether the line itself has a setting of this name, even with the default value."""
    return any(part.partition("=")[0].strip() == key for part in split(text)[1])


def read(
    kind: type,
    parts: Iterable[str],
    what: str,
    *,
    aliases: Mapping[str, str] | None = None,
    readers: Mapping[str, Callable[[str], object]] | None = None,
) -> dict[str, Any]:
    """Returns values for the fields of the dataclass `kind`, which checks their ranges itself.

    Args:
        what: the name of a setting in errors.
        aliases: other names of fields.
        readers: for fields that are neither numbers nor names; each raises SparqError.

    Raises:
        SparqError: there is no such field or no value, or it has the wrong type.
    """
    types = {f.name: str(f.type).removesuffix(" | None") for f in fields(kind)}
    types.pop("method", None)  # the method is the head of the line
    out: dict[str, Any] = {}
    for part in parts:
        key, eq, text = (s.strip() for s in part.partition("="))
        key = (aliases or {}).get(key, key)
        if key not in types:
            raise nearest(what, key, types)
        if not eq:
            raise SparqError(f"{what} {part!r} has no value", f"{key}=...", exit_code=2)
        if key in out:
            raise SparqError(f"{key} is given twice", "leave out one of the two", exit_code=2)
        if key == "ratio":
            out[key] = parse_ratio(text)
        elif readers and key in readers:
            out[key] = readers[key](text)
        else:
            out[key] = _number_or_name(key, types[key], text)
    return out


def whole_number(text: str) -> int:
    """Raises ValueError: it is none."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(text)
    return int(text)


def number(text: str) -> float:
    """Raises ValueError: it is none."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    return float(text)


def _number_or_name(key: str, kind: str, text: str) -> float | int | str:
    try:
        return number(text) if kind == "float" else whole_number(text) if kind == "int" else text
    except ValueError:
        wanted = "number" if kind == "float" else "whole number"
        raise SparqError(f"{key} {text!r} is not a {wanted}", exit_code=2) from None


def write(method: str, settings: DataclassInstance, without: Collection[str] = ()) -> str:
    """The canonical line: the method, then the fields of `settings` that differ from their
    defaults, except those in `without`. `read` returns exactly these values."""
    parts = [method]
    for f in fields(settings):
        value = getattr(settings, f.name)
        if value != f.default and f.name not in ("method", *without):
            parts.append(f"{f.name}={ratio_text(value) if f.name == 'ratio' else _text(value)}")
    return ",".join(parts)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return join_layers(value)
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def join_layers(entries: Iterable[object]) -> str:
    """The text of a list with one entry per layer: `8:8:16`."""
    return ":".join(map(str, entries))


def parse_ratio(text: str) -> float:
    """`1/8`, `0.125` and `12.5%` -> 0.125.

    Raises:
        SparqError: it is not a number, or not above 0 and at most 1.
    """
    raw = text.strip()
    above, slash, below = (part.strip() for part in raw.partition("/"))
    try:
        if slash:
            value = number(above) / number(below)
        else:
            value = number(raw[:-1].strip()) / 100 if raw.endswith("%") else number(raw)
    except (ValueError, ZeroDivisionError):
        raise SparqError(f"ratio {text!r} is not a number", _RATIO_HINT, exit_code=2) from None
    check_ratio(value, text)
    return value


def check_ratio(ratio: float, text: str = "") -> None:
    """Raise SparqError unless it is above 0 and at most 1."""
    if not 0 < ratio <= 1:
        what = text or ratio_text(ratio)
        raise SparqError(f"ratio {what} is not above 0 and at most 1", _RATIO_HINT, exit_code=2)


def ratio_text(ratio: float) -> str:
    """0.125 -> `1/8`; a ratio that is not a short fraction keeps its decimals."""
    if not math.isfinite(ratio):
        return repr(ratio)
    f = Fraction(ratio).limit_denominator(1000)
    return str(f) if math.isclose(float(f), ratio, rel_tol=1e-12) else repr(float(ratio))
