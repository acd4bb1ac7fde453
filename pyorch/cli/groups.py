"""Groups of options as objects: a frozen dataclass whose fields are click's options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, field, fields
from functools import wraps
from typing import Any, TypeVar, cast

import click

from pyorch.cli.types import Files, Numbers, Several

F = TypeVar("F", bound=Callable[..., Any])


class Option(click.Option):
    """An option with `aliases`, by which llama.cpp has it: they work, and help leaves them out."""

    def __init__(self, *args: Any, aliases: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.aliases = aliases

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *self.aliases]
        super().add_to_parser(parser, ctx)
        self.opts = shown


def option(*names: str, **attributes: Any) -> Any:
    """A field of a group: an option as in `click.option`, named and typed by the field. The
    field's default is the option's after conversion, so that a group made by hand has the same."""
    otherwise = False if attributes.get("is_flag") else () if attributes.get("multiple") else None
    default, kind = attributes.get("default", otherwise), attributes.get("type")
    if kind is not None and default is not otherwise:
        default = kind.convert(default, None, None)
    return field(default=default, metadata={"option": (names, attributes)})


def takes(**groups: type[Any]) -> Callable[[F], F]:
    """Add the options of each group; the function gets them as one object of that name.

    A field of a group that is not an option is a group itself, named by its default_factory.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def collected(**values: object) -> object:
            for name, kind in groups.items():
                values[name] = _taken(kind, values)
            return function(**values)

        for f in reversed([f for kind in groups.values() for f in _options(kind)]):
            names, attributes = f.metadata["option"]
            click.option(*names, f.name, **{"cls": Option, **attributes})(collected)
        return cast(F, collected)

    return decorate


def _options(kind: Any) -> Iterator[Field[object]]:
    for f in fields(kind):
        yield from [f] if "option" in f.metadata else _options(f.default_factory)


def _taken(kind: Any, values: dict[str, object]) -> object:
    """Make an object from its values, which are removed from `values`."""
    of_field = {
        f.name: values.pop(f.name) if "option" in f.metadata else _taken(f.default_factory, values)
        for f in fields(kind)
    }
    return kind(**of_field)


def given_on_command_line(names: Iterable[str]) -> set[str]:
    """The options among `names` that the command line itself gives. A variable's value is a
    default, which gives way. Outside of a command all are given."""
    ctx = click.get_current_context(silent=True)
    line = click.core.ParameterSource.COMMANDLINE
    return {name for name in names if ctx is None or ctx.get_parameter_source(name) is line}


def several(*names: str, of: click.ParamType, default: str = "", text: str = "") -> Any:
    """A field that is a list: an option that takes commas and may be repeated."""
    kind = of if isinstance(of, (Numbers, Files)) else Several(of)
    attributes = {
        "type": kind,
        "multiple": True,
        "default": (default,) if default else (),
        "callback": lambda ctx, param, values: [x for value in values for x in value],
        "help": f"{text}  [default: {default}]" if default else text,
    }

    def converted() -> list[Any]:
        return list(kind.convert(default, None, None)) if default else []

    return field(default_factory=converted, metadata={"option": (names, attributes)})
