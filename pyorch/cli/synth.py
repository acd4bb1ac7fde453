"""`sparq-cpp synth`: a model of any shape with random weights, to measure speed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pyorch.cli import options as opt


def _size(name: str, key: str, text: str, kind: click.ParamType | None = None) -> Any:
    return click.option(name, key, type=kind or opt.Number(int, 1), help=text)


@click.command()
@click.option(
    "--like",
    metavar="NAME",
    default="llama2-7b",
    show_default=True,
    help="Known model with this shape.",
)
@_size("--layers", "n_layer", "Number of layers.", opt.LAYERS)
@_size("--embd", "n_embd", "Width of the model.")
@_size("--heads", "n_head", "Number of query heads.")
@_size("--kv-heads", "n_head_kv", "Number of KV heads.")
@_size("--head-dim", "head_dim", "Size of a head.")
@_size("--ffn", "n_ff", "Width of the feed-forward part; a small one lets attention dominate.")
@_size("--vocab", "n_vocab", "Size of the vocabulary.")
@_size("--ctx", "n_ctx", "Positions that the model claims to be trained on.  [default: 131072]")
@click.option(
    "--quant",
    type=opt.Name("q8_0", "q4_k_m", "f16"),
    default="q8_0",
    show_default=True,
    help="Type of the weights.",
)
@click.option(
    "--seed",
    type=opt.Number(int, 0),
    default=0,
    show_default=True,
    help="Seed of the weights.",
)
@opt.renamed("-o", "--out FILE")
@opt.renamed("--output", "--out FILE")
@click.option("--out", required=True, metavar="FILE", help="The GGUF file to write.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@opt.json_option
def command(**options: Any) -> None:
    """Write a GGUF model with random weights.

    The model produces noise at the speed of a real model of its shape, and has a real tokenizer.
    NAME is a model that `sparq-cpp models` lists with the architecture llama. Sizes that are given
    replace those of NAME.
    """
    from dataclasses import asdict

    from pyorch.models import synth
    from pyorch.text import human_bytes

    sizes = ("n_layer", "n_embd", "n_head", "n_head_kv", "head_dim", "n_ff", "n_vocab", "n_ctx")
    shape = synth.shape_like(options["like"], **{k: options[k] for k in sizes})
    path = Path(options["out"])
    quant, seed, force = (options[name] for name in ("quant", "seed", "force"))
    n_bytes = synth.write(path, shape, quant, seed, force=force)
    if options["as_json"]:
        opt.print_json({"path": str(path), "bytes": n_bytes, **asdict(shape)})
    else:
        print(f"{path}: {human_bytes(n_bytes)}, {shape.n_layer} layers like {options['like']}")
