"""`make figures`: draw every figure that has records again; with NAMEs, these."""

from __future__ import annotations

from pathlib import Path

import ablations
import click
import commands
import end_to_end
import gpu_tokens
import microbenchmark
import plot
import prompt_time
import repetition
import roofline
import serving
import time_in_attention
import token_rate
import topk_figures

from pyorch.cli import run as run_command
from pyorch.errors import SparqError, nearest

FIGURES = (
    token_rate.FIGURE,
    prompt_time.FIGURE,
    serving.FIGURE,
    end_to_end.FIGURE,
    gpu_tokens.FIGURE,
    microbenchmark.FIGURE,
    microbenchmark.ON_GPU,
    time_in_attention.FIGURE,
    roofline.FIGURE,
    ablations.FIGURE,
    repetition.FIGURE,
    topk_figures.SCORES,
    topk_figures.NEEDLES,
)


@click.command(context_settings=commands.SETTINGS)
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
@click.option("--png", is_flag=True, help="Write PNG as well as SVG.")
def command(names: tuple[str, ...], results: str | None, out: str, png: bool) -> None:
    """Draw from records: NAME.svg and NAME.csv.

    Without NAME all figures that have records are drawn, and the others are named with the command
    that measures what they lack.
    """
    known = {figure.name: figure for figure in FIGURES}
    for name in names:
        if name not in known:
            raise nearest("figure", name, tuple(known))
    chosen = [known[name] for name in names or known]
    folder = Path(results) if results else plot.default_folder()
    failed = drawn = 0
    for figure in chosen:
        try:
            plot.make(figure, folder, Path(out), png)
            print(Path(out) / f"{figure.name}.svg")
            drawn += bool(figure.file)
        except SparqError as e:
            failed += bool(names) or not isinstance(e, plot.NoRecords)
            click.echo(f"{figure.name}: not drawn: {e.message} ({e.hint})", err=True)
    if failed:
        raise SparqError(f"{failed} of {len(chosen)} figures not drawn", str(folder))
    if not names and not drawn:
        raise SparqError(f"no figure has records in {folder}", "--results has them elsewhere")


if __name__ == "__main__":
    run_command(command)
