"""`python -m bench NAME`: measure, or draw what was measured."""

from __future__ import annotations

from pkgutil import resolve_name

import click

from pyorch.cli import run
from pyorch.cli.bench import measurement

# imported when they run: a machine with a GPU may lack what others need
MEASUREMENTS = {
    "prompt_time": "bench.users.prompt_time:MEASUREMENT",
    "serving": "bench.users.serving:MEASUREMENT",
    "gpu_attention": "bench.gpu.kernels:MEASUREMENT",
    "gpu_tokens": "bench.gpu.tokens:MEASUREMENT",
}
OTHERS = {
    "ablations": "bench.papers.ablations:command",
    "gpu_nodes": "bench.gpu.nodes:command",
    "draw": "bench.draw:command",
    "numbers": "bench.numbers:command",
}


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*MEASUREMENTS, *OTHERS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in MEASUREMENTS:
            return measurement.command(resolve_name(MEASUREMENTS[name]))
        return resolve_name(OTHERS[name]) if name in OTHERS else None


@click.group(cls=_Group, context_settings=measurement.SETTINGS)
def command() -> None:
    """Measure, or draw what was measured.

    Tokens, attention by itself and quality are measured by `sparq-cpp bench` and `sparq-cpp eval`.
    """


if __name__ == "__main__":
    run(command, "python -m bench")
