"""`sparq-cpp synth`: a model of any shape with random weights, to measure speed with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from pyorch.cli.groups import option, renamed, takes
from pyorch.cli.options import json_option
from pyorch.cli.terminal import print_json
from pyorch.cli.types import LAYERS, File, Name, Number
from pyorch.models.synth import QUANTS
from pyorch.text import human_bytes

_COUNT = Number(int, 1)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model; those not given are the known model's."""

    n_layer: int | None = option("--layers", type=LAYERS, help="Number of layers.")
    n_embd: int | None = option("--embd", type=_COUNT, help="Width of the model.")
    n_head: int | None = option("--heads", type=_COUNT, help="Number of query heads.")
    n_head_kv: int | None = option("--kv-heads", type=_COUNT, help="Number of KV heads.")
    head_dim: int | None = option("--head-dim", type=_COUNT, help="Size of a head.")
    n_ff: int | None = option(
        "--ffn",
        type=_COUNT,
        help="Width of the feed-forward part; a small one lets attention dominate.",
    )
    n_vocab: int | None = option("--vocab", type=_COUNT, help="Size of the vocabulary.")
    n_ctx: int | None = option(
        "--ctx",
        type=_COUNT,
        help="Positions that the model claims to be trained on.  [default: 131072]",
    )


@click.command()
@click.option(
    "--like",
    metavar="NAME",
    default="llama2-7b",
    show_default=True,
    help="Known model with this shape.",
)
@takes(sizes=Sizes)
@click.option(
    "--quant",
    type=Name(*QUANTS),
    default="q8_0",
    show_default=True,
    help="Type of the weights.",
)
@click.option(
    "--seed",
    type=Number(int, 0),
    default=0,
    show_default=True,
    help="Seed of the weights.",
)
@renamed("-o", "--out FILE")
@renamed("--output", "--out FILE")
@click.option("--out", type=File(), required=True, metavar="FILE", help="The GGUF file to write.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option
def command(
    like: str, sizes: Sizes, quant: str, seed: int, out: str, force: bool, as_json: bool
) -> None:
    """Write a GGUF model with random weights.

    The model produces noise at the speed of a real model of its shape, and has a real tokenizer.
    NAME is a model that `sparq-cpp models` lists with the architecture llama. Sizes that are given
    replace those of NAME.
    """
    from pyorch.models import synth

    shape, path = synth.shape_like(like, **asdict(sizes)), Path(out)
    n_bytes = synth.write(path, shape, quant, seed, force=force)
    if as_json:
        print_json({"path": str(path), "bytes": n_bytes, **asdict(shape)})
    else:
        print(f"{path}: {human_bytes(n_bytes)}, {shape.n_layer} layers like {like}")
