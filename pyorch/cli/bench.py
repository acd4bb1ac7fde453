"""`sparq-cpp bench`: measurements, each one command that writes records and prints a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pyorch.cli import options as opt


class Numbers(click.ParamType):
    """4096,16384 -> [4096, 16384]."""

    name = "list"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        if isinstance(value, list):
            return value
        number = opt.Number(int, 1)
        return [number.convert(part.strip(), param, ctx) for part in str(value).split(",")]


out_option = click.option(
    "--out",
    metavar="DIR",
    help="Where the records are.  [default: bench/results/<kind of machine>]",
)
force_option = click.option("--force", is_flag=True, help="Measure again what is there already.")


@click.group()
def command() -> None:
    """Measure. Records are JSON lines; a run leaves out what is recorded already."""


@command.command("attn")
@click.option("--like", multiple=True, metavar="NAME", help="[default: llama2-7b and llama3-8b]")
@click.option("--positions", "-S", type=Numbers(), default="4096,16384,32768", show_default=True)
@click.option("--threads", "-t", type=Numbers(), help="One or several.  [default: all cores]")
@click.option("--spec", multiple=True, help="What of ours.  [default: dense, SparQ and top-k]")
@click.option("--samples", type=opt.Number(int, 1), default=30, show_default=True)
@click.option("--layers", type=opt.Number(int, 1), help="Layers of the model.")
@out_option
@force_option
@opt.json_option
def attn(**options: Any) -> None:
    """Attention time per token, stock beside ours in turns, and the roofline of their bytes.

    Fails when our dense attention differs from stock's, or when a sparse row did not run sparse.
    """
    from pyorch.bench import attention
    from pyorch.engine import usable_cores

    plan = attention.Plan(
        like=options["like"] or attention.LIKE,
        positions=options["positions"],
        threads=options["threads"] or [usable_cores()],
        specs=options["spec"] or attention.SPECS,
        n_samples=options["samples"],
        n_layer=options["layers"],
    )
    file = _file(options, "attention.jsonl")
    with opt.progress_bar("attention") as progress:
        found = attention.run(plan, file, progress, force=options["force"])
    _print(found, attention.markdown(found), file, options)


@command.command("prefill")
@click.option("--like", metavar="NAME", default="llama3-8b", show_default=True)
@click.option("--tokens", "-n", type=opt.Number(int, 1024), default=2048, show_default=True)
@click.option("--threads", "-t", type=opt.Number(int, 1), help="[default: all cores]")
@click.option("--spec", default="sparq,ratio=1/8", show_default=True)
@click.option("--samples", type=opt.Number(int, 1), default=7, show_default=True)
@out_option
@force_option
@opt.json_option
def prefill(**options: Any) -> None:
    """Prefill time with sparse attention off and on: one layer of a model's own shape, in turns."""
    from pyorch.bench import prefill as bench
    from pyorch.engine import usable_cores

    file = _file(options, "prefill.jsonl")
    with opt.progress_bar("prefill") as progress:
        found = bench.run(
            options["like"],
            options["tokens"],
            options["threads"] or usable_cores(),
            options["spec"],
            options["samples"],
            file,
            progress,
            force=options["force"],
        )
    _print(found, bench.markdown(found), file, options)


def _file(options: dict[str, Any], name: str) -> Path:
    from pyorch.bench import records

    return (Path(options["out"]) if options["out"] else records.default_folder()) / name


def _print(found: list[Any], table: str, file: Path, options: dict[str, Any]) -> None:
    if options["as_json"]:
        opt.print_json({"records": found, "file": str(file)})
    else:
        print(table)
        opt.note(f"records: {file}", "dim")
