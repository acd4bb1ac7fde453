"""`sparq-cpp bench growth`: how token time grows with the positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyorch.attention.spec import parse_spec
from pyorch.cli import bench_shared as shared
from pyorch.cli import options as opt
from pyorch.cli.groups import group, on_the_line, option, several, takes
from pyorch.cli.loading import model_path
from pyorch.cli.terminal import note, note_if_busy, print_json
from pyorch.cli.types import LAYERS, THREADS, File, Number, Numbers
from pyorch.progress import progress_bar

if TYPE_CHECKING:
    from pyorch.bench.records import Record


@dataclass(frozen=True)
class Grown:
    """The measurements at every depth."""

    model: str | None = option(
        "--model", "-m", type=File(), metavar="FILE|SPEC", help="Time this model instead of --like."
    )
    yes: bool = opt.yes_option()
    like: str = option(
        "--like",
        metavar="NAME",
        default="llama2-7b",
        show_default=True,
        help="Time a synthetic model of this shape.",
    )
    layers: int = option(
        "--layers",
        type=LAYERS,
        default=2,
        show_default=True,
        help="Layers of the synthetic model.",
    )
    quant: str = shared.quant_option()
    n_depth: list[int] = several(
        "-d", "--n-depth", of=Numbers(), default="4096-65536*2", text="Positions to measure at."
    )
    threads: int | None = option(
        "--threads", "-t", type=THREADS, help="Number of threads.  [default: all cores]"
    )
    attn: tuple[str, ...] = option(
        *opt.SPEC_OPTION,
        multiple=True,
        metavar="SPEC",
        default=("sparq,ratio=1/8",),
        show_default=True,
        help="All settings of attention as one line.",
    )
    n_gen: int = option(
        "-n",
        "--n-gen",
        type=Number(int, 1),
        default=20,
        show_default=True,
        help="Time this many decoded tokens at each depth.",
    )
    repetitions: int = shared.repetitions_option("Measure all depths this many times.")
    numa: str | None = opt.numa_option()


@click.command("growth")
@takes(wanted=Grown)
@group(*shared.RENAMED_SPEC)
@takes(writing=shared.Writing)
@opt.json_option
@click.pass_context
def command(ctx: click.Context, wanted: Grown, writing: shared.Writing, as_json: bool) -> None:
    """Measure how token time grows with the positions.

    The command also times tokens below min_ctx and after a restored state.
    """
    given = on_the_line(ctx.params)
    if given & shared.SYNTHETIC and "model" not in given:
        wanted = replace(wanted, model=None)
    shared.refuse_two_models(ctx, given, wanted.model)
    from pyorch import native
    from pyorch.bench import growth as bench
    from pyorch.bench.plan import SpeedPlan
    from pyorch.engine import usable_cores

    note_if_busy()
    file = writing.file("growth.jsonl")
    models = [wanted.model] if wanted.model else []
    plan = SpeedPlan(
        models=[model_path(m, wanted.yes, native.check_compiler) for m in models],
        like=[wanted.like],
        n_layer=wanted.layers,
        quant=wanted.quant,
        n_gen=[wanted.n_gen],
        n_depth=wanted.n_depth,
        threads=[wanted.threads or usable_cores()],
        specs=[parse_spec(line) for line in wanted.attn],
        repetitions=wanted.repetitions,
        numa=wanted.numa or "",
    )
    shared.agree_to_write(plan, wanted.yes)
    with progress_bar("growth") as progress:
        found, sealing = bench.run(plan, file, progress, force=writing.force)
    table = bench.markdown(found, sealing)
    _keep_if_all(file, found, table)
    if as_json:
        print_json({"records": found + sealing, "file": str(file)})
    else:
        print(table)
    writing.told(file, table)


def _keep_if_all(file: Path, found: Sequence[Record], table: str) -> None:
    """Keep a table beside those of other models, and in the place of the same model's only if its
    lines go through all recorded depths: those of fewer say less."""
    from pyorch.bench import growth as bench
    from pyorch.bench import records

    md = file.with_suffix(".md")
    kept, new = bench.by_model(md.read_text("utf-8") if md.exists() else ""), bench.by_model(table)
    deeper = bench.deeper(records.load_all(file), found)
    if deeper and kept.keys() & new.keys():
        note(f"note: {md} stays as it is: there are records of -d {max(deeper)}, too", "yellow")
    else:
        shared.keep(file, "\n\n".join((kept | new).values()))
