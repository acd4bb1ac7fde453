"""Options of measurements, as their commands parse them."""

from __future__ import annotations

from typing import Any

import click

from pyorch.cli.bench import measurement


def given(of: measurement.Measurement, *args: str, **more: Any) -> measurement.Given:
    """The options of a measurement, parsed from a command line, with others in their place."""

    @click.command()
    @measurement.with_options(of)
    def parse(**options: Any) -> measurement.Given:
        return measurement.Given(**options | more)

    options: measurement.Given = parse.main(list(args), standalone_mode=False)
    return options
