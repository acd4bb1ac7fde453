"""`python -m bench draw`, and so `make figures`: every figure that has records."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import click

from bench import plot
from pyorch.cli.bench import measurement
from pyorch.errors import SparqError, nearest

FIGURES = {
    "geometries": "bench.users.geometries:FIGURE",
    "end_to_end": "bench.papers.end_to_end:FIGURE",
    "gpu_end_to_end": "bench.gpu.tokens:FIGURE",
    "gpu_attention": "bench.gpu.kernels:FIGURE",
    "time_in_attention": "bench.papers.time_in_attention:FIGURE",
    "topk_tasks": "bench.papers.topk:SCORES",
    "topk_needle": "bench.papers.topk:NEEDLES",
}


def figure(name: str) -> plot.Figure:
    made: plot.Figure = resolve_name(FIGURES[name])
    return made


@click.command("draw", context_settings=measurement.SETTINGS)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--results", metavar="DIR", help="Folder of the records.  [default: bench/results/<machine>]"
)
@click.option(
    "--out",
    metavar="DIR",
    default=str(plot.FIGURES),
    help="Folder of the pictures.  [default: bench/figures]",
)
def command(names: tuple[str, ...], results: str | None, out: str) -> None:
    """Draw from records: NAME.svg and NAME.csv.

    Without NAME all figures that have records are drawn, and the others are named with the command
    that measures what they lack.
    """
    for name in names:
        if name not in FIGURES:
            raise nearest("figure", name, tuple(FIGURES))
    chosen = names or tuple(FIGURES)
    folder = Path(results) if results else plot.default_folder()
    failed = drawn = 0
    for name in chosen:
        try:
            plot.make(figure(name), folder, Path(out))
            print(Path(out) / f"{name}.svg")
            drawn += 1
        except SparqError as e:
            failed += bool(names) or not isinstance(e, plot.NoRecords)
            click.echo(f"{name}: not drawn: {e.message} ({e.hint})", err=True)
    if failed:
        raise SparqError(f"{failed} of {len(chosen)} figures not drawn", str(folder))
    if not drawn:
        raise SparqError(f"no figure has records in {folder}", "--results has them elsewhere")
