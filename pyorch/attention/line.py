"""The one-line form of settings, `METHOD[,key=value]...`, read and written here and nowhere else.

The settings themselves are frozen dataclasses: `AttentionSpec`, which the library knows, and those
of the methods in Python (`pyorch.policies`). A line is parsed at once when it arrives, on the
command line or from a file, and written only for display, for files and for the library.
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

# what the library takes too: Python's own numbers may have underscores and digits of any script
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


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
    lists: Mapping[str, Callable[[str], object]] | None = None,
) -> dict[str, Any]:
    """Returns values for the fields of the dataclass `kind`, which checks their ranges itself.

    Args:
        what: the name of a setting in errors.
        aliases: other names of fields.
        lists: for fields of several values with ':' between them, what reads one of these; each
            raises ValueError.

    Raises:
        SparqError: there is no such field or no value, or it has the wrong type.
    """
    types = {f.name: str(f.type).removesuffix(" | None") for f in fields(kind)}
    types.pop("method", None)  # the method is the head of the line
    readers: dict[str, Callable[[str], object]] = {"float": number, "int": whole_number}
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
        try:
            if lists and key in lists:
                out[key] = tuple(lists[key](entry.strip()) for entry in text.split(":"))
            else:
                out[key] = readers.get(types[key], str)(text)
        except ValueError:
            kinds = {"int": ("whole number", "64"), "float": ("number", "1/8, 0.125 or 12.5%")}
            kind_name, hint = kinds.get(types[key], ("list", "64:12.5%:dense, or 8:8:16"))
            message = f"{key} {text!r} is not a {kind_name}"
            raise SparqError(message, f"{key}={hint}", exit_code=2) from None
    return out


def whole_number(text: str) -> int:
    """Raises ValueError: it is none."""
    return int(_matching(_WHOLE, text))


def number(text: str) -> float:
    """0.125, 1/8 or 12.5%. Raises ValueError: it is none."""
    above, slash, below = text.partition("/")
    if slash and not float(_matching(_NUMBER, below)):
        raise ValueError(text)
    if slash:
        return float(_matching(_NUMBER, above)) / float(below)
    if text.endswith("%"):
        return float(_matching(_NUMBER, text[:-1])) / 100
    return float(_matching(_NUMBER, text))


def _matching(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text.strip()):
        raise ValueError(text)
    return text.strip()


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
        return ":".join(map(str, value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def parse_ratio(text: str) -> float:
    """`1/8`, `0.125` and `12.5%` -> 0.125.

    Raises:
        SparqError: it is not a number, or not above 0 and at most 1.
    """
    try:
        value = number(text.strip())
    except ValueError:
        value = math.nan
    check_ratio(value, text)
    return value


def check_ratio(ratio: float, text: str = "") -> None:
    """Raise SparqError unless it is above 0 and at most 1."""
    if not 0 < ratio <= 1:
        hint = "a ratio is a share of dense attention's bytes: 1/8, 0.125 or 12.5%"
        raise SparqError(f"ratio {text or ratio} is not above 0 and at most 1", hint, exit_code=2)


def ratio_text(ratio: float) -> str:
    """0.125 -> `1/8`; a ratio that is not a short fraction keeps its decimals."""
    f = Fraction(ratio).limit_denominator(1000)
    return str(f) if math.isclose(float(f), ratio, rel_tol=1e-12) else repr(float(ratio))
