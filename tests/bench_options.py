"""Options of measurements, as their commands parse them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from pyorch.cli.bench.measurement import Measurement
from pyorch.cli.groups import takes


def options(of: Measurement, *args: str, **more: Any) -> Any:
    """The options of a measurement, parsed from a command line, with others in their place."""

    @click.command()
    @takes(options=of.options)
    def parse(options: Any) -> Any:
        return replace(options, **more)

    return parse.main(list(args), standalone_mode=False)
