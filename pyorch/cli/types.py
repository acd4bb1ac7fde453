"""Types of values on the command line: numbers, names, ratios, and lists of them.

A wrong value is refused in one line that names the option, with a hint in a second line.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import click

from pyorch import paths
from pyorch.attention.spec import parse_ratio
from pyorch.errors import SparqError
from pyorch.ggml import MAX_THREADS
from pyorch.models.geometry import MAX_LAYERS
from pyorch.text_file import decoded

MOST = 1000  # the most values of a range

# the option or the context of a value; None if it is converted by hand
Param = click.Parameter | None
Context = click.Context | None


def _name_of(param: Param, otherwise: str = "value") -> str:
    return max(param.opts, key=len) if param else otherwise


class Whole(click.ParamType):
    """A value with blanks in it, which a variable's value is not cut at."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


class File(Whole):
    """The name of a file or folder, with the home folder in place of `~`: the shell leaves it as it
    is in `--model=~/x`, and in a variable's quoted value. It stays a string, because some options
    take other words as well, such as - or hf:org/repo."""

    name = "file"

    def convert(self, value: object, param: Param, ctx: Context) -> str:
        name = str(value)
        return str(paths.expanded(name)) if name.startswith("~") else name


class Files(Whole):
    """Names of files, with commas between them unless a file has that very name."""

    name = "files"

    def convert(self, value: object, param: Param, ctx: Context) -> list[str]:
        whole = File().convert(value, param, ctx)
        if os.path.exists(whole):  # Path's own raises for a line that is too long for a name
            return [whole]
        return [File().convert(part, param, ctx) for part in whole.split(",")]


class Text(Whole):
    """A text of the line itself, which goes through the same decoder as one in a file."""

    name = "text"

    def convert(self, value: object, param: Param, ctx: Context) -> str:
        raw = str(value).encode("utf-8", errors="surrogateescape")
        return decoded(raw, _name_of(param, "the text"))


class Ratio(click.ParamType):
    """1/8, 0.125 or 12.5%."""

    name = "ratio"

    def convert(self, value: object, param: Param, ctx: Context) -> float:
        return value if isinstance(value, float) else parse_ratio(str(value))


class Number(click.FloatRange):
    """click's, which would take NaN, and infinity where nothing bounds it."""

    def convert(self, value: Any, param: Param, ctx: Context) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class NumberOr(click.IntRange):
    """A whole number, or one word in its place."""

    def __init__(self, word: str, low: int) -> None:
        super().__init__(low)
        self.word = word

    def convert(self, value: Any, param: Param, ctx: Context) -> Any:
        return value if value == self.word else super().convert(value, param, ctx)


THREADS = click.IntRange(1, MAX_THREADS)
LAYERS = click.IntRange(1, MAX_LAYERS)
POSITIONS = click.IntRange(0, 10**9)  # the library's limit
SOME_POSITIONS = click.IntRange(1, 10**9)
POSITIVE = Number(1e-9, 1e9)


class Several(click.ParamType):
    """A comma-separated list; repeating the option adds to it."""

    name = "list"

    def __init__(self, one: click.ParamType) -> None:
        self.one = one

    def convert(self, value: object, param: Param, ctx: Context) -> list[object]:
        if isinstance(value, list):
            return value
        return [self.one.convert(part.strip(), param, ctx) for part in str(value).split(",")]


class Endpoint(click.ParamType):
    """HOST:PORT of a worker."""

    name = "endpoint"

    def convert(self, value: object, param: Param, ctx: Context) -> str:
        from pyorch.engine.machines import parse_endpoint

        return parse_endpoint(str(value))


class Numbers(click.ParamType):
    """Whole numbers as llama-bench takes them, each of them once: 0,512  1-4  1024-4096+1024
    4096-131072*2."""

    name = "list"
    _part = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")

    def __init__(self, low: int = 0, high: int | None = None) -> None:
        self.number: click.ParamType = click.IntRange(low, high)

    def convert(self, value: object, param: Param, ctx: Context) -> list[int]:
        if isinstance(value, list):
            return value
        parts = (self._numbers(part.strip(), param) for part in str(value).split(","))
        return list(dict.fromkeys(n for part in parts for n in part))

    def _numbers(self, part: str, param: Param) -> list[int]:
        option = _name_of(param)
        match = self._part.fullmatch(part)
        if match is None:
            hint = "512, first-last, first-last+step or first-last*mult"
            raise SparqError(f"{option} {part!r} is not a number or range", hint, exit_code=2)
        first = self.number.convert(match[1], param, None)
        last = self.number.convert(match[2] or match[1], param, None)
        if last < first:
            raise SparqError(f"{option} {part!r} ends before it begins", exit_code=2)
        step, out = int(match[4] or 1), [first]
        while (following := out[-1] * step if match[3] == "*" else out[-1] + step) <= last:
            if following <= out[-1]:
                raise SparqError(f"{option} {part!r}: the range has no end", exit_code=2)
            if len(out) == MOST:
                hint = "a larger step: first-last+step or first-last*mult"
                raise SparqError(f"{option} {part!r} is more than {MOST} values", hint, exit_code=2)
            out.append(following)
        return out
