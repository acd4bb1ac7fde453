"""Options of measurements, as their commands parse them."""

from __future__ import annotations

from typing import Any

from pyorch.cli.bench import measurement


def given(of: measurement.Measurement, *args: str, **more: Any) -> measurement.Given:
    """The options of a measurement, parsed from a command line, with others in their place."""
    params = measurement.command(of).make_context("x", list(args)).params
    return measurement.Given(**params | more)
