"""`sparq-cpp synth`: a model of any shape with random weights, to measure speed with."""

from __future__ import annotations

from pathlib import Path

import click

from pyorch.cli.types import LAYERS, File, Name
from pyorch.models.synth import QUANTS
from pyorch.text import human_bytes


@click.command()
@click.option(
    "--like",
    metavar="NAME",
    default="llama2-7b",
    show_default=True,
    help="Known model with this shape.",
)
@click.option("--layers", type=LAYERS, help="Number of layers.  [default: those of NAME]")
@click.option(
    "--quant",
    type=Name(*QUANTS),
    default="q8_0",
    show_default=True,
    help="Type of the weights.",
)
@click.option("--out", type=File(), required=True, metavar="FILE", help="The GGUF file to write.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def command(like: str, layers: int | None, quant: str, out: str, force: bool) -> None:
    """Write a GGUF model with random weights.

    The model produces noise at the speed of a real model of its shape, and has a real tokenizer.
    NAME is a model that `sparq-cpp models` lists with the architecture llama.
    """
    from pyorch.models import synth

    shape, path = synth.shape_like(like, n_layer=layers), Path(out)
    n_bytes = synth.write(path, shape, quant, force=force)
    print(f"{path}: {human_bytes(n_bytes)}, {shape.n_layer} layers like {like}")
